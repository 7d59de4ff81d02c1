"""Ablations: a table of variants enters, each is trained under one budget with several seeds and scored, and the table of their scores leaves.

Every training has a folder `out/VARIANT/seed_K` of its own with `evaluation.json` in it once it is scored; what is done is not done again, and what
was stopped goes on. A seed names all chance of a training, the order of the samples included.

Not here: training (`train.loop`), scores (`evaluate.interactive`), the command (`verbs.ablate`).
"""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from gigamask import config_files, recipes, registry
from gigamask.data import index as indexes
from gigamask.data import storage, worker_pool
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import COARSE_ABOVE, FINE_BELOW
from gigamask.errors import GigamaskError, TrainingInterruptedError
from gigamask.evaluation import clicks
from gigamask.training.checkpoint import load_model
from gigamask.training.config import DATA, SAME_SAMPLES, TrainConfig, check_at_least, differences
from gigamask.training.trainer import train

# A box's noise is at most 2.5 px, as in the recipe `tiny`, whose images are an eighth of SAM's.
MIXED = ["--prompts", "mixed", "--prompts.box-noise-limit-px", "2.5"]
TABLES: dict[str, dict[str, list[str]]] = {
    "samplers": {
        "random": [],
        "stratified_granularity": ["--sampler", "stratified_granularity"],
        "multi_level": ["--sampler", "multi_level"],
        "curriculum": ["--sampler", "curriculum", "--sampler.epochs", "2"],
        "adaptive_curriculum": [
            "--sampler",
            "adaptive_curriculum",
            "--sampler.per-epoch",
            "200",
            "--sampler.growth",
            "0.1",
            "--sampler.threshold",
            "0.8",
        ],
        "loss_weighted": [
            "--sampler",
            "loss_weighted",
            "--sampler.per-epoch",
            "200",
            "--sampler.ema",
            "0.5",
            "--sampler.temperature",
            "0.5",
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
            *MIXED,
            "--prompts.point-prob",
            "1",
            "--prompts.box-prob",
            "0",
            "--prompts.mask-prob",
            "0",
        ],
        "boxes": [
            *MIXED,
            "--prompts.point-prob",
            "0",
            "--prompts.box-prob",
            "1",
            "--prompts.mask-prob",
            "0",
        ],
        "mixed": MIXED,
        "rounds": [],
    },
    "mining": {
        "none": [],
        "hardest": ["--mining", "hardest"],
        "hardest_in_strata": ["--mining", "hardest", "--mining.within", "granularity"],
        "pixels": ["--loss.ohem-pixel-ratio", "0.25", "--loss.ohem-min-pixels", "500"],
    },
}
"""Of each table, its variants: a name, and the flags of `gigamask train` that make it; a variant without flags is the recipe.

`losses`, `masks` and `prompts` ask what tables in the field ask: which terms of the loss, which of three answers, which prompts. `rounds` is the
recipe's own schedule, the other prompts are one round. Numbers suit small models and a few thousand samples: the shares of curricula and what losses
change would move next to nothing in so short a training by default.
"""
OWN = ("data", "out", "steps", "seed")
"""What the table gives every training, so that variants differ in nothing else than their flags say."""
NO_MATTER = ("recipe", "out", "data", "save-every", "keep", "log-every", "wandb", *SAME_SAMPLES)
"""What may differ between the training that is there and the one asked for; whether the data are the same is seen in their digest."""
COLUMNS = {
    "1 click": ("clicks", "1"),
    "3 clicks": ("clicks", "3"),
    "oracle": ("oracle",),
    "box": ("box",),
    "fine": ("granularity", "fine", "clicks", "1"),
    "medium": ("granularity", "medium", "clicks", "1"),
    "coarse": ("granularity", "coarse", "clicks", "1"),
    "masks": ("masks",),
    "seconds": ("seconds",),
}
"""Of the printed table, each column's place in a training's `evaluation.json`."""
EVALUATION, LOG = "evaluation.json", "log.txt"


@dataclass(frozen=True)
class AblationRun:
    """One variant with one seed: the words of `gigamask train`, its folder, and the threads it has where several go on side by side."""

    variant: str
    seed: int
    words: tuple[str, ...]
    out: str
    threads: int | None = None


@dataclass(frozen=True)
class HeldOut:
    """What variants are scored on: of tars or an index the first so many images, and masks of at least such a predicted_iou, all unless said."""

    paths: tuple[str, ...]
    images: int | None = None
    min_predicted_iou: float | None = None


def find(name: str, recipe: str) -> dict[str, list[str]]:
    """Returns the table of that name, or the one in a file of `name: [flags]` or `name: {flag: value}` lines, YAML or JSON."""
    if name in TABLES:
        return TABLES[name]
    path = Path(name)
    if not path.is_file():
        raise GigamaskError(
            f"no table is called {name!r}, and no such file is there; known are {', '.join(TABLES)}, or give a YAML file of your own"
        )
    try:
        # Numbers stay the text they are, as in every file of flags.
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GigamaskError(
            f"{path}: is no YAML ({' '.join(str(error).split())}); write 'variant: [--flag, value]' lines"
        ) from None
    if not isinstance(content, dict) or not content:
        raise GigamaskError(
            f"{path}: holds no variants; write 'variant: [--flag, value]' or 'variant: {{flag: value}}' lines"
        )
    return {
        variant: _flags(told, f"{path}: {variant}", recipe) for variant, told in content.items()
    }


def _flags(told: Any, where: str, recipe: str) -> list[str]:
    """Returns what a file says of a variant as flags."""
    if not told:
        return []
    if isinstance(told, list) and all(isinstance(word, str) for word in told):
        return told
    if not isinstance(told, dict) or any(isinstance(value, dict) for value in told.values()):
        raise GigamaskError(
            f"{where}: is neither a list of flags nor 'flag: value' lines; write [--sampler, random] or {{sampler: random}}"
        )
    content = {flag.removeprefix("--").replace("_", "-"): value for flag, value in told.items()}
    parts = {part: name for part, name in content.items() if part in registry.COMPONENTS}
    run = registry.select_components(recipes.make(recipe), parts)
    return [
        word for part, name in parts.items() for word in (f"--{part}", name)
    ] + config_files.flags_of(content, run)


def run(
    table: str,
    recipe: str,
    data: Sequence[str],
    test: HeldOut,
    out: str,
    steps: int | None,
    seeds: int,
    at_once: int,
) -> dict[str, Any]:
    """Trains and scores every variant with every seed, so many at once; writes `ablation.md` and `ablation.json` into `out`, prints the first, and
    returns the second. A training that fails leaves its line under "faults" and does not keep the others."""
    check_at_least(
        1, seeds=seeds, at_once=at_once, **({} if test.images is None else {"images": test.images})
    )
    for flag, paths in (("data", data), ("test", test.paths)):
        if not paths:
            raise GigamaskError(f"--{flag} is empty; name a tar, a folder of tars or an index")
        indexes.find_tars(list(paths))
    variants = find(table, recipe)
    words = [recipe, "--data", *data, *([] if steps is None else ["--steps", str(steps)])]
    trainings = plan(
        variants,
        words,
        out,
        seeds,
        max(1, torch.get_num_threads() // at_once) if at_once > 1 else None,
    )
    train_on, test_on = (
        indexes.open_or_build(list(paths), Path(out) / "indexes") for paths in (data, test.paths)
    )
    for training in trainings:
        _check_data(run_of(training), train_on)
    work = partial(
        score,
        data=str(train_on.folder.absolute()),
        test=replace(test, paths=(str(test_on.folder.absolute()),)),
    )
    scored = worker_pool.parallel_map(work, trainings, at_once)
    found: dict[str, Any] = {
        "table": table,
        "recipe": recipe,
        "steps": run_of(trainings[0]).steps,
        "seeds": seeds,
        "data": _described(data, train_on),
        "test": _described(test.paths, test_on),
        **_protocol(test),
        **{name: metadata.version(name) for name in ("gigamask", "torch", "numpy")},
        "git": config_files.git_revision(),
        "variants": {
            name: _gathered(name, flags, trainings, scored) for name, flags in variants.items()
        },
    }
    told = report(found)
    (Path(out) / "ablation.md").write_text(told + "\n")
    (Path(out) / "ablation.json").write_text(json.dumps(found, indent=1) + "\n")
    print(told)
    faults = [fault for each in found["variants"].values() for fault in each["faults"]]
    told = (
        f"{len(faults)} of {len(trainings)} trainings failed, the same command tries them again: {faults[0]}"
        if faults
        else ""
    )
    return found | ({"fault": told} if faults else {})


def plan(
    table: Mapping[str, Sequence[str]],
    words: Sequence[str],
    out: str,
    seeds: int,
    threads: int | None = None,
) -> list[AblationRun]:
    """Returns the trainings of a table, seed by seed; `words` are what all have in common: the recipe, its data, its steps.

    Raises Fault where a variant's flags are no training's or change what all must have in common, or where its folder holds another training.
    """
    trainings = []
    for variant, flags in table.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_+-]*", variant):
            raise GigamaskError(
                f"variant {variant!r}: its name becomes a folder's; write it with letters, digits, '_', '+' and '-'"
            )
        try:
            parsed = [
                config_files.parse_train([*words, "--out", out, *each]) for each in ([], flags)
            ]
            if parsed[1].epochs is not None:
                raise GigamaskError(
                    "its flags hold --epochs; give the length as --steps of 'gigamask ablate'"
                )
            common, wanted = (each.run for each in parsed)
            wanted.check()
        except GigamaskError as fault:
            raise GigamaskError(f"variant {variant}: {fault}") from None
        for name in OWN:
            if getattr(wanted, name) != getattr(common, name):
                raise GigamaskError(
                    f"variant {variant}: its flags hold --{name}, which all variants have in common; leave it out there"
                )
    for seed in range(seeds):
        for variant, flags in table.items():
            folder = str(Path(out) / variant / f"seed_{seed}")
            trainings.append(
                AblationRun(
                    variant,
                    seed,
                    (*words, "--out", folder, "--seed", str(seed), *flags),
                    folder,
                    threads,
                )
            )
            _check_folder(trainings[-1])
    return trainings


def run_of(training: AblationRun) -> TrainConfig:
    """Returns the training's whole configuration."""
    return config_files.parse_train(training.words).run


def _check_folder(training: AblationRun) -> None:
    """Raises Fault where its folder holds another training that has begun."""
    run = run_of(training)
    if not run.has_checkpoint:
        return
    for name, (before, now) in differences(config_files.load_config(training.out), run).items():
        if name not in NO_MATTER:
            raise GigamaskError(
                f"{training.out}: was trained with --{name} {before}, now it is {now}; give another --out, or remove that folder"
            )


def _check_data(run: TrainConfig, index: Index) -> None:
    """Raises Fault where its folder holds a training on other data."""
    path = Path(run.out) / DATA
    if (
        run.has_checkpoint
        and path.exists()
        and json.loads(path.read_text())["digest"] != index.digest
    ):
        raise GigamaskError(
            f"{run.out}: was trained on other data than these {len(index)} images; give another --out, or remove that folder"
        )


def score(training: AblationRun, data: str, test: HeldOut) -> dict[str, Any]:
    """Trains on the index `data` and scores on that of `test` what is not yet; returns the scores, or `{"fault": line}` where the training failed.

    Raises Stopped when told to stop.
    """
    if training.threads is not None:
        torch.set_num_threads(training.threads)
    run, index = (
        run_of(replace(training, words=(*training.words, "--data", data))),
        Index.open(*test.paths),
    )
    path, measured = (
        Path(run.out) / EVALUATION,
        json.loads(json.dumps({"test": index.digest, **_protocol(test)})),
    )
    if run.has_checkpoint and path.exists():
        before = json.loads(path.read_text())
        if {name: before.get(name) for name in measured} == measured:
            return before
    name = f"{training.variant}, seed {training.seed}"
    print(f"{name}: {run.steps} steps", flush=True)
    began_s, whole = time.perf_counter(), not run.has_checkpoint
    try:
        # Of trainings side by side, what they show while they go on is kept in a file of each.
        with contextlib.nullcontext() if training.threads is None else _into(Path(run.out) / LOG):
            state = train(run, on_start=lambda: config_files.save_config(run))
    except GigamaskError as fault:
        print(f"{name}: failed: {fault}", flush=True)
        return {"fault": f"{name}: {fault}"}
    if state.step < run.steps:
        raise TrainingInterruptedError(
            f"{run.out}: stopped and saved at step {state.step} of {run.steps}; the same command goes on from there"
        )
    trained_s = time.perf_counter() - began_s
    filters = MaskFilters(max_area=None, min_predicted_iou=test.min_predicted_iou)
    summary = clicks.evaluate_clicks(
        load_model(run.out, run.device, config_files.config_of_weights),
        index,
        filters,
        rows=range(len(index))[: test.images],
    ).summary()
    found: dict[str, Any] = {
        **summary,
        **measured,
        "seed": training.seed,
        "seconds": round(trained_s, 1) if whole else None,
    }
    storage.write(path, (json.dumps(found, indent=1) + "\n").encode())
    print(
        f"{name}: {100 * found['clicks']['1']:.1f} % after one click, {trained_s:.0f} s", flush=True
    )
    return found


def _protocol(test: HeldOut) -> dict[str, Any]:
    """Returns what scores depend on besides weights and data."""
    return {
        "protocol": asdict(clicks.ClickProtocol()),
        "of": {"images": test.images, "min_predicted_iou": test.min_predicted_iou},
    }


@contextlib.contextmanager
def _into(log: Path) -> Iterator[None]:
    """Sends what is written on standard error to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file, contextlib.redirect_stderr(file):
        yield


def _described(paths: Sequence[str], index: Index) -> dict[str, Any]:
    return {
        "paths": list(paths),
        "images": len(index),
        "masks": index.manifest.masks,
        "digest": index.digest,
    }


def _gathered(
    variant: str,
    flags: Sequence[str],
    trainings: Sequence[AblationRun],
    scored: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Returns a variant's scores, and their means and standard deviations over the seeds, None of what there is nothing of."""
    own = [
        found
        for training, found in zip(trainings, scored, strict=True)
        if training.variant == variant
    ]
    scores = [found for found in own if "fault" not in found]
    means, spreads = {}, {}
    for column, place in COLUMNS.items():
        values = [value for found in scores if (value := _at(found, place)) is not None]
        means[column] = float(np.mean(values)) if values else None
        spreads[column] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    faults = [found["fault"] for found in own if "fault" in found]
    return {
        "flags": list(flags),
        "mean": means,
        "spread": spreads,
        "trainings": scores,
        "faults": faults,
    }


def _at(found: dict[str, Any], place: Sequence[str]) -> Any:
    for name in place:
        found = found[name]
    return found


def report(found: dict[str, Any]) -> str:
    """Returns what `run` found as Markdown that reads well as plain text, too."""
    seeds = (
        f"{found['seeds']} seeds, mean ± standard deviation" if found["seeds"] > 1 else "one seed"
    )
    head = [
        f"# Ablation `{found['table']}`",
        "",
        f"Recipe `{found['recipe']}`, {found['steps']} steps, {seeds}. Trained on {_counted(found['data'])},",
        f"tested on {_counted(found['test'])}. Mean IoU in %; fine (< {FINE_BELOW:.0%} of the image), medium and coarse (> {COARSE_ABOVE:.0%})",
        "masks after one click; seconds of training.",
        "",
    ]
    rows = [["variant", *COLUMNS]]
    for name, each in found["variants"].items():
        rows.append(
            [
                name,
                *(
                    _cell(column, each["mean"][column], each["spread"][column])
                    for column in COLUMNS
                ),
            ]
        )
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]) + " |"
        for row in rows
    ]
    rule = (
        "|" + "|".join(["-" * (wide[0] + 2), *("-" * (each + 1) + ":" for each in wide[1:])]) + "|"
    )
    faults = [
        f"- failed: {fault}" for each in found["variants"].values() for fault in each["faults"]
    ]
    return "\n".join([*head, lines[0], rule, *lines[1:], *([""] if faults else []), *faults])


def _counted(data: dict[str, Any]) -> str:
    return f"{data['images']:,} images with {data['masks']:,} masks ({', '.join(data['paths'])})"


def _cell(column: str, mean: float | None, spread: float | None) -> str:
    """Returns a mean and its spread: scores in per cent, counts and seconds whole."""
    if mean is None:
        return "-"
    if column == "masks":
        return f"{mean:,.0f}"
    if column == "seconds":
        return f"{mean:,.0f}" + (f" ± {spread:,.0f}" if spread is not None else "")
    return f"{100 * mean:.1f}" + (f" ± {100 * spread:.1f}" if spread is not None else "")
