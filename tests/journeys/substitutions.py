"""How a page's command is made small enough for a test: the one table of what is written otherwise, and why."""

import re
import shlex

SMALL, SMALL_MAE, SMALL_GROUND = "small.yaml", "small_mae.yaml", "small_ground.yaml"
FEW = "--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"
SEGMENTING = r"(tiny|photos|sam_vit_\w|mixed_prompts|one_gpu|finetune\w*|\w+\.py:\w+)"

REPLACED = [
    (
        r"(?<=[\s'\"=])/(data|sa1b)\b",
        r"disk/\1",
        "what lies at the root of a user's disk lies below the test's folder",
    ),
    (r"disk/data/", "disk/", "so that one folder holds both"),
    (r"\bMAE_WEIGHTS\b", "mae_pretrain_vit_base.pth", "a placeholder for MAE's own file"),
    (r"--language FOLDER", "--language language", "a placeholder for a language model's folder"),
    (
        r"--segmenter photos\b",
        "--segmenter runs/photos",
        "the page calls the hour's model by its recipe",
    ),
    (r"--images (\d{2,})", "--images 6", "as few scenes as still make tars"),
    (r"--workers \d+", "--workers 1", "one core"),
    (r"--loader.workers \d+", "--loader.workers 0", "in this process"),
    (r"--at-once \d", "--at-once 1", "one core"),
    (
        r"--model.image-size 512",
        "--model.image-size 128",
        "twice the small model's side, as 512 is half of SAM's",
    ),
    (
        r"(?<=--out disk/masks) --grid 256",
        " --grid 32 --side 64",
        "the small model's grid and side",
    ),
    (r"--size 1024", "--size 64", "scenes are smaller than 1024 px"),
    (r"--evaluation.interval \d+", "--evaluation.interval 1", "trainings have two updates"),
    (
        r"^ablate (samplers|losses)",
        "ablate two.yaml",
        "two variants; tests/journeys/test_ablate.py takes the tables apart",
    ),
    (r"^serve .*", "serve --help", "it serves until it is stopped"),
]
"""Pattern, what stands instead, and the reason; in this order."""

ADDED = [
    (
        rf"^train {SEGMENTING}(?!.*--print-config)",
        f"--config {SMALL}",
        "--steps 2",
        "a small model and two updates; the recipe is the page's",
    ),
    (r"^train .*--stages \S*mae", "", "--mae-steps 2 --decoder-steps 2", "two updates a stage"),
    (
        r"^train .*--stages (mae,)?decoder(?!.*--decoder-steps)",
        "",
        "--decoder-steps 2",
        "two updates a stage",
    ),
    (r"^(train|pretrain) --resume", "", "--steps 4", "two updates more"),
    (r"^pretrain mae_", f"--config {SMALL_MAE}", "--steps 2", "a small model and two updates"),
    (
        r"^plan (?!mae_)",
        f"--config {SMALL}",
        "",
        "SAM's sizes take ten seconds each; tests/journeys/test_plan.py plans one",
    ),
    (
        r"^plan (?!mae_)",
        "",
        "--batch-size 1 --prompts.clicks 1 --prompts.no-mask-only-rounds",
        "one image and two rounds to rehearse",
    ),
    (r"^plan .*--gpu", "", "--device auto", "the small model is a CPU's, the plan is of a GPU"),
    (r"^plan mae_", f"--config {SMALL_MAE}", "", "as SAM's"),
    (
        r"^ground train",
        f"--config {SMALL_GROUND}",
        "--steps 2",
        "the small segmenter's width, and two updates",
    ),
    (
        r"^ablate",
        "",
        "--recipe small.py:small --steps 1 --seeds 1 --images 1",
        "one update of a small model, one seed, one image",
    ),
    (
        r"^(segment|ask) (?!.*--points-per-side)(?!.*\.tar:)",
        "",
        FEW,
        "16 points, and thresholds that an untrained model passes",
    ),
    (r"^segment .*--points-per-side", "", FEW, "as above"),
    (r"^evaluate .*--(automatic|edges)", "", "--points-per-side 4", "16 points"),
    (r"^memory sample", "", "--height 150 --width 225 --masks 10", "a tenth of the side"),
    (
        r"^memory loader",
        "",
        "--batches 9 --workers 1 --recipe small.py:small",
        "nine batches, the fewest that show growth, of one loader process",
    ),
    (
        r"^memory grounding",
        "",
        "--language language --vision none",
        "Llama's shapes take twenty seconds; tests/unit/memory has them",
    ),
    (r"^demo", "", "--train-images 4 --test-images 1 --steps 2", "two updates on four scenes"),
    (r"^follow .*", "", "--recipe small.py:small", "a small model"),
]
"""Pattern, what is put behind the recipe (or the verb), what is put last, and the reason; all that fit."""


def small(words: str) -> list[str]:
    """Returns the words behind `gigamask` of a command as a test types them."""
    for pattern, instead, _ in REPLACED:
        words = re.sub(pattern, instead, words)
    given = shlex.split(words)
    places = 3 if given[0] == "ground" else 2
    for pattern, early, late, _ in ADDED if "--help" not in given else []:
        if re.search(pattern, words):
            given = [*given[:places], *early.split(), *given[places:], *late.split()]
    return given
