"""Tables of `gigamask ablate`, built-in ones and files. Imports no torch."""

from pathlib import Path
from typing import Any

from gigamask.errors import GigamaskError
from gigamask.serialization import read_yaml

# Box noise is at most 2.5 px, as in the recipe `tiny`, whose image side is an eighth of SAM's.
MIXED = ["--prompts", "mixed", "--prompts.box-noise-limit-px", "2.5"]


TABLES: dict[str, dict[str, list[str]]] = {
    "samplers": {
        "random": [],
        "stratified_granularity": ["--sampler", "stratified_granularity"],
        "multi_level": ["--sampler", "multi_level"],
        "curriculum": ["--sampler", "curriculum", "--sampler.epochs", "2"],
        "adaptive_curriculum": [
            *("--sampler", "adaptive_curriculum", "--sampler.per-epoch", "200"),
            *("--sampler.growth", "0.1", "--sampler.threshold", "0.8"),
        ],
        "loss_weighted": [
            *("--sampler", "loss_weighted", "--sampler.per-epoch", "200"),
            *("--sampler.ema", "0.5", "--sampler.temperature", "0.5"),
        ],
        "replay": ["--sampler", "replay", "--sampler.per-epoch", "200"],
        "balanced_tar": ["--sampler", "balanced_tar"],
        "multi_attribute": ["--sampler", "multi_attribute"],
    },
    "losses": {
        "focal": ["--loss.dice-weight", "0", "--loss.iou-weight", "0"],
        "dice": ["--loss.focal-weight", "0", "--loss.iou-weight", "0"],
        "focal+dice": ["--loss.iou-weight", "0"],
        "focal+dice+iou": [],
    },
    "masks": {
        "single": ["--loss.mask-supervision", "single", "--loss.iou-supervision", "all"],
        "all": ["--loss.mask-supervision", "all"],
        "best": ["--loss.mask-supervision", "best"],
    },
    "prompts": {
        "points": [
            *(*MIXED, "--prompts.point-prob", "1", "--prompts.box-prob", "0"),
            *("--prompts.mask-prob", "0"),
        ],
        "boxes": [
            *(*MIXED, "--prompts.point-prob", "0", "--prompts.box-prob", "1"),
            *("--prompts.mask-prob", "0"),
        ],
        "mixed": MIXED,
        "rounds": [],
    },
    "mining": {
        "none": [],
        "ohem": ["--mining", "ohem"],
        "ohem_in_strata": ["--mining", "ohem", "--mining.group-by", "granularity"],
        "pixels": ["--loss.ohem-pixel-ratio", "0.25", "--loss.ohem-min-pixels", "500"],
    },
}
"""Built-in tables: variants with their flags of `gigamask train`; without flags, the recipe itself.

`losses`, `masks` and `prompts` follow published ablations: the terms of the loss, which of the
three predicted masks it supervises, and the prompts. `rounds` is the recipe's own schedule; the
other prompts have one round. The numbers suit small models and a few thousand
samples; the defaults of curricula and loss-driven samplers would hardly affect such short runs.
"""


def load_table(name: str) -> dict[str, list[str]]:
    """Return a table of variants.

    Args:
        name: Name of a built-in table, or a YAML or JSON file of `variant: [--flag, value]` or
            `variant: {flag: value}`.

    Returns:
        Flags of `gigamask train` by variant.

    Raises:
        GigamaskError: There is no such table or file, or the file is invalid.
    """
    if name in TABLES:
        return TABLES[name]
    path = Path(name)
    if not path.is_file():
        raise GigamaskError(
            f"no table or file {name!r}; choose one of {', '.join(TABLES)}, or a YAML file of your "
            "own"
        )
    example = "write 'variant: [--flag, value]' or 'variant: {flag: value}' lines"
    try:
        content = read_yaml(path)
    except GigamaskError as error:
        raise GigamaskError(f"{error}; {example}") from None
    if not content:
        raise GigamaskError(f"{path}: has no variants; {example}")
    return {variant: _flags(flags, f"{path}: {variant}") for variant, flags in content.items()}


def _flags(content: Any, name: str) -> list[str]:
    """Return the flags of one variant of a file."""
    if not content:
        return []
    if isinstance(content, list) and all(isinstance(word, str) for word in content):
        return content
    if not isinstance(content, dict) or any(isinstance(value, dict) for value in content.values()):
        raise GigamaskError(
            f"{name}: must be a list of flags or 'flag: value' lines; "
            "write [--sampler, random] or {sampler: random}"
        )
    words = []
    for flag, value in content.items():
        values = value or ["[]"] if isinstance(value, list) else [value or "null"]
        words += [f"--{flag.removeprefix('--')}", *values]
    return words
