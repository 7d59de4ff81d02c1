"""How the commands of the docs are made small enough for a test, and why.

What commands on the pages of a plugin need is in `tests/plugins/NAME/substitutions.py`.
"""

import re
import shlex
from functools import cache
from importlib import import_module

from tests.journeys.pages import ROOT

SMALL, SMALL_COMPACT, SMALL_MAE = "small.yaml", "small_compact.yaml", "small_mae.yaml"
OTHER_ENCODER = r"--model\.encoder (?!vit\b)|^\w+ (edge_sam|mobile_sam|efficient_sam)"
SMALL_OTHER = "small_other.yaml"
"""In place of `SMALL`, without the sizes of a ViT, for encoders that have their own."""
FEW = "--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"
SEGMENTING = (
    r"(tiny|sbd_vit_b|sam_vit_\w|efficient_sam|mixed_prompts|one_gpu|finetune\w*|\w+\.py:\w+)"
)

REPLACED = [
    (
        r"(?<=[\s'\"=])/(data|sa1b|shared)\b",
        r"disk/\1",
        "paths at the root of a user's disk are below the test's folder",
    ),
    (r"disk/data/", "disk/", "one folder for both"),
    (r"\bMAE_WEIGHTS\b", "mae_pretrain_vit_base.pth", "a placeholder for MAE's own file"),
    (r"--images (\d{2,})", "--images 6", "the fewest scenes that make tars"),
    (r"--max-images \d+", "--max-images 1", "one image"),
    (r"--workers \d+", "--workers 1", "one core"),
    (r"--loader.workers \d+", "--loader.workers 0", "in this process"),
    (
        r"--model.image-size 512",
        "--model.image-size 128",
        "twice the small model's image size, as 512 is half of SAM's",
    ),
    (
        r"(?<=--out disk/masks) --mask-size 256",
        " --mask-size 32 --image-size 64",
        "the small model's mask size and image size",
    ),
    (r"--loader.max-masks \d+", "--loader.max-masks 2", "two masks of an image"),
    (r"--evaluation.interval \d+", "--evaluation.interval 1", "trainings have two steps"),
    (r" --compile\b", "", "minutes on a CPU; tests/laws/test_compilation.py trains with it"),
    (r" --push \S+", "", "no network; tests/journeys/test_export.py plays the Hub"),
    (r"^demo\b.*", "demo --help", "tests/journeys/test_commands.py runs it"),
]
"""Pattern, replacement, reason; applied in this order."""

ADDED = [
    (
        rf"^train {SEGMENTING}(?!.*--print-config)",
        f"--config {SMALL}",
        "--steps 2",
        "a small model and two steps; the recipe is the page's",
    ),
    (r"^train .*--stages \S*mae", "", "--mae-steps 2 --decoder-steps 2", "two steps per stage"),
    (
        r"^train .*--stages (mae,)?decoder(?!.*--decoder-steps)",
        "",
        "--decoder-steps 2",
        "two steps per stage",
    ),
    (
        r"^train (compact|photos)(?!.*--print-config)",
        f"--config {SMALL_COMPACT}",
        "--steps 2",
        "small images and two steps",
    ),
    (r"^(train|pretrain|distill) --resume", "", "--steps 4", "two more steps"),
    (r"^pretrain (mae|sami)_", f"--config {SMALL_MAE}", "--steps 2", "a small model and two steps"),
    (
        r"^plan (?!mae_|sam2_)",
        f"--config {SMALL}",
        "",
        "SAM's sizes take ten seconds each; tests/journeys/test_plan.py plans one",
    ),
    (
        r"^plan (?!mae_)",
        "",
        "--batch-size 1 --prompts.clicks 0 --prompts.no-mask-only-rounds",
        "one image and one round",
    ),
    (r"^plan .*--gpu", "", "--device auto", "the small config is for a CPU, the plan for a GPU"),
    (r"^plan mae_", f"--config {SMALL_MAE}", "", "as for SAM"),
    (
        r"^(segment|ask) (?!.*--points-per-side)(?!.*\.tar:)",
        "",
        FEW,
        "16 points, and thresholds that an untrained model passes",
    ),
    (r"^segment .*--points-per-side", "", FEW, "as above"),
    (r"^evaluate (?!.*--max-images)", "", "--max-images 1", "one image"),
    (r"^evaluate .*--automatic", "", "--points-per-side 4", "16 points"),
    (r"^follow .*", "", "--recipe small.py:small", "a small model"),
]
"""Pattern, flags after the recipe (or the command), flags at the end, reason; all that match."""

PYTHON = [
    (r"\bsteps=\d+", "steps=2", "two steps"),
    (
        r"\bfeatures__steps=2\b",
        "features__steps=2, features__batch_size=2, batch_size=2",
        "two images each",
    ),
    (
        r"\bplan\(recipes\.sam_vit_b\(\)",
        "plan(recipes.tiny().with_(micro_batch_size=1, prompts__clicks=0)",
        "SAM's sizes take ten seconds",
    ),
    (r'(?<="segmented/", )', "points_per_side=4, ", "16 points"),
]
"""Pattern, replacement and reason for Python code."""


@cache
def everywhere(name: str) -> list[tuple[str, ...]]:
    """Return `REPLACED` or `ADDED`, those of plugins last."""
    found = list(globals()[name])
    for path in sorted((ROOT / "tests/plugins").glob("*/substitutions.py")):
        module = import_module(f"tests.plugins.{path.parent.name}.substitutions")
        found += getattr(module, name, [])
    return found


def small(words: str) -> list[str]:
    """Return the arguments of a small form of the command `gigamask WORDS`."""
    for pattern, replacement, _ in everywhere("REPLACED"):
        words = re.sub(pattern, replacement, words)
    arguments = shlex.split(words)
    if "--help" in arguments:
        return arguments
    after = 3 if arguments[0] == "ground" else 2
    for pattern, early, late, _ in everywhere("ADDED"):
        if re.search(pattern, words):
            arguments[after:after] = early.split()
            arguments += late.split()
    if re.search(OTHER_ENCODER, words):
        arguments = [SMALL_OTHER if each == SMALL else each for each in arguments]
    return arguments


def small_python(code: str) -> str:
    """Return a small form of some Python code."""
    for pattern, replacement, _ in PYTHON:
        code = re.sub(pattern, replacement, code)
    return code
