"""Suggest a command or flag for an unknown one: a name from another project, or a typo.

Imports only the standard library, so that the command line stays fast.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

COMMANDS = {
    "segment": "predict inference infer automatic amg generate-masks",
    "evaluate": "val validation test score",
    "benchmark": "noc clicks leaderboard compare-models",
    "train": "yolo fit finetune fine-tune tune run resume",
    "distill": "student",
    "pretrain": "mae",
    "serve": "annotate viz visualize gui ui web app gradio browse label",
    "synth": "generate simulate fake toy",
    "stats": "info describe summary inspect explore count",
    "ask": "query search find text",
    "report": "plots curves tensorboard logs history",
    "download": "fetch get wget pull",
    "extract": "unpack untar to-coco coco-export",
    "convert": "import coco prepare preprocess",
    "verify": "check validate-data checksum lint doctor",
    "repack": "resize shrink reshard shard",
    "plan": "estimate budget dry-run vram flops",
    "follow": "trace debug tour step",
    "ablate": "sweep compare search-hyperparameters",
    "demo": "quickstart example tutorial try",
    "export": "onnx save deploy to-onnx huggingface",
}
"""Commands, each with other names that users try, but for those that are found by likeness."""
OF_PLUGINS = {
    "ablate": "ablate",
    "ask": "grounding",
    "benchmark": "benchmarks",
    "distill": "distill",
    "download": "download",
    "extract": "formats",
    "ground": "grounding",
    "memory": "memory",
    "repack": "repack",
    "serve": "serve",
}
"""Commands of gigamask's plugins, which may have been deleted, and the plugin of each."""

FLAGS = {
    "--lr": "learning-rate base-lr max-lr peak-lr",
    "--batch-size": "batch bs global-batch-size",
    "--micro-batch-size": (
        "micro per-device-batch-size per-device-train-batch-size batch-size-per-gpu "
        "images-per-gpu accumulate grad-accum accum-iter gradient-accumulation "
        "gradient-accumulation-steps"
    ),
    "--masks-per-chunk": "masks-at-once mask-chunk-size chunk-size",
    "--steps": (
        "max-steps num-steps total-steps train-steps updates iterations iters max-iter max-iters "
        "num-iters total-iters"
    ),
    "--epochs": "num-train-epochs",
    "--num-workers": "workers loader-workers dataloader-num-workers loader.num-workers",
    "--workers": "processes jobs threads num-processes j n-jobs",
    "--data": (
        "datasets data-dir data-path data-root dataset-path dataset-dir train-data train-path "
        "train-dir root source tars"
    ),
    "--evaluation.data": "val-data val val-path eval-data test-data val-dataset",
    "--evaluation.interval": "eval-every eval-interval eval-steps val-interval eval-period",
    "--out": (
        "output outputs output-dir output-path out-dir outdir save-dir dir work-dir workdir "
        "log-dir logdir run-dir name exp-name run-name experiment project save-path o"
    ),
    "--init": (
        "weights pretrained checkpoint ckpt ckpt-path checkpoint-path init-from finetune "
        "model-path pretrained-model start-from load-from"
    ),
    "--weights": "checkpoint ckpt pretrained sam-checkpoint model-path model",
    "--precision": "dtype amp-dtype mixed-precision",
    "--precision auto": "amp use-amp",
    "--precision fp16": "fp16 half float16",
    "--precision bf16": "bf16 bfloat16",
    "--gpu": "gpus gpu-type",
    "--device cuda": "gpu cuda use-gpu use-cuda",
    "--device cpu": "cpu no-cuda",
    "--save-every": "save-interval save-steps save-freq checkpoint-every save-period",
    "--keep": "save-total-limit keep-checkpoints max-checkpoints keep-last",
    "--ema": "ema-decay model-ema model-ema-decay use-ema weight-average swa",
    "--log-every": "log-interval logging-steps log-freq print-freq log-every-n-steps",
    "--optimizer": "opt optim",
    "--schedule": "lr-scheduler-type",
    "--schedule.warmup-steps": "warmup warmup-steps warmup-iters num-warmup-steps",
    "--optimizer.grad-clip": (
        "clip-grad max-grad-norm gradient-clip-val clip-grad-norm gradient-clipping max-norm"
    ),
    "--activation-checkpointing": (
        "gradient-checkpointing grad-checkpointing recompute use-checkpoint"
    ),
    "--parallel": "strategy distributed fsdp ddp zero-stage",
    "--model.image-size": "imgsz img-size input-size resolution",
    "--loader.augment": "augmentation augmentations aug transform transforms",
    "--loader.max-masks": "masks-per-image num-masks max-num-masks",
    "--prompts": "prompt-schedule prompt-sampler policy",
    "--prompts.clicks": "num-clicks rounds num-points-per-mask",
    "--loss": "criterion objective",
    "--mining": "hard-mining hard-example-mining ohem",
    "--wandb": "wandb-project use-wandb report-to",
    "--evaluation.best-by": "metric-for-best-model best-metric monitor",
    "--folder": "out output output-dir out-dir",
    "--config": "cfg config-file yaml",
    "--points-per-side": "points grid-points grid",
    "--paths": "data dataset data-dir input input-dir images tars",
    "--images": "image input input-dir source data pictures",
    "--pred-iou-thresh": "conf confidence conf-thres score-thresh threshold",
    "--box-nms-thresh": "iou iou-thres nms nms-thresh",
    "--to": "format formats export-format",
    "--json": "project name out output output-dir save-dir save-json",
    "--html": "report",
    "no flag (images are resized to the input size of the model)": "imgsz img-size input-size",
    "--epochs of 'gigamask train'": "epochs num-train-epochs",
    "'--progress none'": "quiet silent q no-progress disable-tqdm",
    "RECIPE, the first argument": "model arch model-type backbone model-name",
    "torchrun --nproc-per-node N --no-python gigamask ...": (
        "gpus num-gpus n-gpus ngpus devices nproc-per-node world-size"
    ),
    "'gigamask train --resume RUN', before other flags": (
        "resume resume-from resume-from-checkpoint auto-resume continue"
    ),
}
"""Flags, each with other names that users try, but for those that are found by likeness. The first
match that the command has is suggested; keys without dashes are advice and come last."""


def suggest_command(word: str, commands: Collection[str]) -> str | None:
    """Return the command that a word most likely means, or None.

    Args:
        word: The word typed in place of a command.
        commands: The existing commands.
    """
    name = _normalize(word)
    for command, others in COMMANDS.items():
        if name in others.split() and command in commands:
            return command
    return next(iter(difflib.get_close_matches(name, commands, 1)), None)


def suggest_flag(flag: str, known: Collection[str], positional: Collection[str] = ()) -> str | None:
    """Return what a wrong flag most likely means, such as "--precision fp16", or None.

    Args:
        flag: The flag as typed, with its dashes.
        known: The command's flags, with their dashes.
        positional: The names of the command's positional arguments, such as "weights".
    """
    name = _normalize(flag)
    if f"--{name}" in known:
        return f"--{name}"
    arguments = {
        f"--{other}": f"{other.upper()}, an argument without a flag" for other in positional
    }
    hints = [hint for hint, others in FLAGS.items() if name in others.split()]
    candidates = [
        *difflib.get_close_matches(f"--{name}", known, 1, cutoff=0.94),
        *(hint for hint in hints if hint.split()[0] in known),
        *(arguments[hint] for hint in (f"--{name}", *hints) if hint in arguments),
        *sorted((other for other in known if other.endswith(f".{name}")), key=len),
        *(hint for hint in hints if not hint.startswith("--") or " of " in hint),
        *difflib.get_close_matches(f"--{name}", known, 1, cutoff=0.8),
    ]
    return next(iter(candidates), None)


def _normalize(word: str) -> str:
    return word.lower().lstrip("-").replace("_", "-").partition("=")[0]
