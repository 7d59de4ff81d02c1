"""Train variants of a recipe with the same budget and several seeds, and compare their scores.

The budget is a number of steps, or CPU minutes (`budget`).

Every run has a folder `OUT/VARIANT/seed_K`, which contains `evaluation.json` once it is scored.
Finished runs are not repeated; interrupted ones are resumed.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch

from gigamask import config_files, files, parser
from gigamask.data import index as indexes
from gigamask.data import worker_pool
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_table import COARSE_ABOVE, FINE_BELOW
from gigamask.errors import (
    GigamaskError,
    TrainingInterruptedError,
    check_processes,
    check_range,
    counted,
)
from gigamask.evaluation import clicks
from gigamask.plugins.ablate.budget import MEASUREMENTS, Budget, cpu_time_s, step_cpu_seconds
from gigamask.plugins.ablate.tables import load_table
from gigamask.serialization import read_json
from gigamask.training.checkpoint import load_model
from gigamask.training.config import SAME_SAMPLES, TrainConfig
from gigamask.training.train_data import read_data_record
from gigamask.training.trainer import train

COMMON_FLAGS = ("data", "out", "steps", "seed")
"""Flags that variants must not change, so that all are trained alike."""
KEPT = ("run", "config", "epochs", "keep_warmup")
"""Flags beside those of recipes that have an effect, or an error of their own."""
IGNORED_CHANGES = (
    *("recipe", "out", "data", "save-every", "keep", "log-every", "wandb"),
    *SAME_SAMPLES,
)
"""Flags that may differ from those of the run in the folder; data are compared by digest."""
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
"""Columns of the printed table, with their keys in `evaluation.json`."""
COUNTS = dict.fromkeys(("masks", "steps"), ",.0f")
"""Columns without a deviation, and their format."""
BUDGET_COLUMNS = {"steps": ("steps",), "CPU minutes": ("cpu_minutes",)}
"""Further columns of an ablation in CPU minutes."""
EVALUATION, LOG, RESULTS = "evaluation.json", "log.txt", "ablation.json"


@dataclass(frozen=True)
class AblationRun:
    """Training run of one variant with one seed.

    Attributes:
        variant: Name of the variant.
        seed: Random seed.
        arguments: Arguments of `gigamask train`.
        out: Run folder.
        threads: CPU threads if runs are parallel; None leaves the number unchanged.
    """

    variant: str
    seed: int
    arguments: tuple[str, ...]
    out: str
    threads: int | None = None


@dataclass(frozen=True)
class TestSet:
    """Data that the variants are scored on.

    Attributes:
        paths: Tars, folders of tars, globs, or an index.
        max_images: Number of images to use, from the start; None means all.
        min_predicted_iou: Only masks with at least this predicted_iou in their annotation.
    """

    paths: tuple[str, ...]
    max_images: int | None = None
    min_predicted_iou: float | None = None


def run(
    table: str,
    recipe: str,
    data: Sequence[str],
    test: TestSet,
    out: str,
    budget: Budget,
    seeds: int,
    parallel_runs: int,
) -> dict[str, Any]:
    """Train and score every variant with every seed, and print the table of scores.

    Args:
        table: As for `tables.load_table`.
        recipe: Recipe that the variants change.
        data: Training data: tars, folders of tars, globs, or an index.
        test: Data to score on.
        out: Output folder; `ablation.md` and `ablation.json` are written to it.
        budget: How long each run trains.
        seeds: Runs per variant, with seeds 0, 1, ...
        parallel_runs: Number of runs to train in parallel.

    Returns:
        The contents of `ablation.json`; failed runs are listed under "faults" and summarized in one
        line under "fault".

    Raises:
        GigamaskError: An argument is invalid, or a folder contains a different run.
    """
    parser.TYPED.set(False)  # variants repeat the flags of all
    check_range("--seeds", seeds, 1)
    check_range("--parallel-runs", parallel_runs, 1)
    check_range("--max-images", test.max_images, 1)
    check_range("--min-predicted-iou", test.min_predicted_iou, 0, 1)
    variants, own = load_table(table), (RESULTS, MEASUREMENTS)
    files.check_out(
        out, "a folder of an ablation", lambda one: config_files.may_stay(one) or one.name in own
    )
    arguments = [recipe, "--data", *data, *budget.flags]
    threads = max(1, torch.get_num_threads() // parallel_runs) if parallel_runs > 1 else None
    steps = _steps_by_variant(variants, recipe, data, out, budget, threads)
    trainings = plan_runs(variants, arguments, out, seeds, threads, steps)
    check_processes("--parallel-runs", min(parallel_runs, len(trainings)))
    train_index, test_index = (
        indexes.open_or_build(list(paths), Path(out) / "indexes") for paths in (data, test.paths)
    )
    for training in trainings:
        _check_data(config_of(training), train_index)
    score = partial(
        train_and_score,
        data=str(train_index.folder.absolute()),
        test=replace(test, paths=(str(test_index.folder.absolute()),)),
    )
    scores = worker_pool.parallel_map(score, trainings, parallel_runs)
    # All runs that did not fail were evaluated on the same images and masks.
    scored = next((each for each in scores if "fault" not in each), {})
    result: dict[str, Any] = {
        "table": table,
        "recipe": recipe,
        "steps": steps or config_of(trainings[0]).steps,
        "cpu_minutes": budget.cpu_minutes,
        "seeds": seeds,
        "data": _describe_data(data, train_index)
        | {"images": len(train_index), "masks": train_index.manifest.masks},
        "test": _describe_data(test.paths, test_index)
        | {name: scored.get(name, 0) for name in ("images", "masks")},
        **_protocol(test),
        **{name: metadata.version(name) for name in ("gigamask", "torch", "numpy")},
        "git": config_files.git_revision(),
        "variants": {
            name: _summarize(name, flags, trainings, scores) for name, flags in variants.items()
        },
    }
    _report(result, out)
    faults = [fault for variant in result["variants"].values() for fault in variant["faults"]]
    if not faults:
        return result
    fault = f"{len(faults)} of {len(trainings)} runs failed; run the same command again"
    return result | {"fault": f"{fault} to retry them (the first: {faults[0]})"}


def _report(result: dict[str, Any], out: str) -> None:
    """Write and print the result."""
    text = markdown(result)
    files.write_text(Path(out) / "ablation.md", text + "\n")
    files.write_text(Path(out) / RESULTS, json.dumps(result, indent=1) + "\n")
    print(f"{text}\n\nwritten to {out}/ablation.md, with all scores in {out}/{RESULTS}")
    print(f"next: gigamask report {quote(out)}")


def _steps_by_variant(
    variants: Mapping[str, Sequence[str]],
    recipe: str,
    data: Sequence[str],
    out: str,
    budget: Budget,
    threads: int | None,
) -> dict[str, int]:
    """Return the steps of each variant for a budget in CPU minutes; empty for another."""
    if budget.cpu_minutes is None:
        return {}
    check_variants(variants, [recipe, "--data", *data], out)
    if threads is not None:
        torch.set_num_threads(threads)
    index = indexes.open_or_build(list(data), Path(out) / "indexes")
    arguments = [recipe, "--data", str(index.folder.absolute())]
    seconds = step_cpu_seconds(variants, arguments, out, index.digest)
    return {variant: budget.steps_of(value) for variant, value in seconds.items()}


def plan_runs(
    table: Mapping[str, Sequence[str]],
    arguments: Sequence[str],
    out: str,
    seeds: int,
    threads: int | None = None,
    steps: Mapping[str, int] | None = None,
) -> list[AblationRun]:
    """Return the runs of a table, ordered by seed.

    Args:
        table: Flags by variant.
        arguments: Arguments of `gigamask train` shared by all runs: recipe, data, steps.
        out: Output folder.
        seeds: Runs per variant.
        threads: CPU threads of each run; None leaves the number unchanged.
        steps: Steps by variant, if variants differ.

    Raises:
        GigamaskError: A variant's flags are invalid or change a shared setting, or its folder
            contains a different run.
    """
    check_variants(table, arguments, out)
    trainings = []
    for seed in range(seeds):
        for variant, flags in table.items():
            folder = str(Path(out) / variant / f"seed_{seed}")
            own = (*arguments, "--out", folder, "--seed", str(seed), *flags)
            if steps:
                own = (*own, "--steps", str(steps[variant]))
            trainings.append(AblationRun(variant, seed, own, folder, threads))
            _check_folder(trainings[-1])
    return trainings


def check_variants(table: Mapping[str, Sequence[str]], arguments: Sequence[str], out: str) -> None:
    """Check the names and flags of all variants.

    Args:
        table: Flags by variant.
        arguments: Arguments of `gigamask train` shared by all runs: recipe, data, steps.
        out: Output folder.

    Raises:
        GigamaskError: A variant's flags are invalid or change a shared setting.
    """
    for variant, flags in table.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_+-]*", variant):
            raise GigamaskError(
                f"variant {variant!r}: the name becomes a folder; use letters, digits, '_', '+' "
                "and '-'"
            )
        try:
            common, changed = (
                config_files.parse_train([*arguments, "--out", out, *own]) for own in ([], flags)
            )
            if changed.epochs is not None:
                raise GigamaskError("--epochs cannot be used here; pass --steps to the ablation")
            _check_kept(changed)
            changed.run.check()
        except GigamaskError as error:
            raise GigamaskError(f"variant {variant}: {error}") from None
        for name in COMMON_FLAGS:
            if getattr(changed.run, name) != getattr(common.run, name):
                raise GigamaskError(
                    f"variant {variant}: --{name} must be the same for all variants; remove it"
                )


def _check_kept(flags: config_files.TrainFlags) -> None:
    """Raise `GigamaskError` if a flag has no effect on a run of an ablation."""
    config_files.check_used(flags.run)
    changed = [
        each.name
        for each in fields(flags)
        if each.name not in KEPT and getattr(flags, each.name) != each.default
    ]
    changed += [name for name in ("images", "masks") if getattr(flags.run, name, None)]
    changed += ["classes auto"] if flags.run.is_finding_classes else []
    if changed:
        raise GigamaskError(f"--{changed[0].replace('_', '-')} cannot be used here; leave it out")


def config_of(training: AblationRun) -> TrainConfig:
    """Return the configuration of a run."""
    return config_files.parse_train(training.arguments).limited


def _check_folder(training: AblationRun) -> None:
    """Raise `GigamaskError` if the folder contains a checkpoint of a different run."""
    config = config_of(training)
    if not config.has_checkpoint:
        return
    wanted = config_files.config_as_text(config)
    for name, before in (config_files.read_saved(config.out) or {}).items():
        now = wanted.get(name)
        if before != now and name not in IGNORED_CHANGES:
            raise GigamaskError(
                f"{training.out}: was trained with --{name} {before}, not {now}; "
                "choose another --out, or remove that folder"
            )


def _check_data(config: TrainConfig, index: Index) -> None:
    """Raise `GigamaskError` if the folder contains a run on different data."""
    before = read_data_record(config) if config.has_checkpoint else None
    if before and before["digest"] != index.digest:
        raise GigamaskError(
            f"{config.out}: was trained on other data than these {len(index)} images; "
            "choose another --out, or remove that folder"
        )


def _saved_scores(path: Path) -> dict[str, Any]:
    """Return the scores of an earlier command; none if the file is damaged."""
    with contextlib.suppress(GigamaskError):
        return read_json(path, dict)
    return {}


def train_and_score(training: AblationRun, data: str, test: TestSet) -> dict[str, Any]:
    """Train and score one variant with one seed, skipping what is already done.

    Args:
        training: The run.
        data: Index of the training data.
        test: Data to score on; its path is an index.

    Returns:
        The scores, or `{"fault": line}` if the run failed.

    Raises:
        TrainingInterruptedError: The run was interrupted and saved.
    """
    if training.threads is not None:
        torch.set_num_threads(training.threads)
    config = config_of(replace(training, arguments=(*training.arguments, "--data", data)))
    index = Index.open(*test.paths)
    path = Path(config.out) / EVALUATION
    measured = json.loads(json.dumps({"test": index.digest, **_protocol(test)}))
    if config.has_checkpoint and path.exists():
        before = _saved_scores(path)
        if {name: before.get(name) for name in measured} == measured:
            return before
    name = f"{training.variant}, seed {training.seed}"
    print(f"{name}: {counted(config.steps, 'step')}", flush=True)
    start_s, start_cpu_s = time.perf_counter(), cpu_time_s()
    is_new = not config.has_checkpoint
    try:
        # Parallel runs write their progress to one file each.
        parallel = training.threads is not None
        with _stderr_to(Path(config.out) / LOG) if parallel else contextlib.nullcontext():
            state = train(config, on_start=lambda: config_files.save_config(config))
    except GigamaskError as error:
        print(f"{name}: failed: {error}", flush=True)
        return {"fault": f"{name}: {error}"}
    if state.step < config.steps:
        raise TrainingInterruptedError(
            f"{config.out}: interrupted and saved at step {state.step} of {config.steps}; "
            "run the same command again to continue"
        )
    trained_s, cpu_s = time.perf_counter() - start_s, cpu_time_s() - start_cpu_s
    filters = MaskFilters(max_area=None, min_predicted_iou=test.min_predicted_iou)
    model = load_model(config.out, config.device, lambda path: config)
    rows = range(len(index))[: test.max_images]
    result = clicks.evaluate_clicks(model, index, filters, rows=rows)
    scores: dict[str, Any] = {
        **result.summary(),
        **measured,
        "skipped": result.skipped,
        "seed": training.seed,
        "steps": config.steps,
        "seconds": round(trained_s, 1) if is_new else None,
        "cpu_minutes": round(cpu_s / 60, 2) if is_new else None,
    }
    files.write_text(path, json.dumps(scores, indent=1) + "\n")
    of = f"{counted(scores['masks'], 'mask')} on {counted(scores['images'], 'image')}"
    for reason in result.skipped:
        print(f"  skipped {reason}")
    print(
        f"{name}: IoU {scores['clicks']['1']:.3f} after one click of {of}, {trained_s:.0f} s",
        flush=True,
    )
    return scores


def _protocol(test: TestSet) -> dict[str, Any]:
    """Return the settings, besides weights and data, that scores depend on."""
    return {
        "protocol": asdict(clicks.ClickProtocol()),
        "of": {"max_images": test.max_images, "min_predicted_iou": test.min_predicted_iou},
    }


@contextlib.contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """Append standard error to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file, contextlib.redirect_stderr(file):
        yield


def _describe_data(paths: Sequence[str], index: Index) -> dict[str, Any]:
    return {"paths": list(paths), "digest": index.digest}


def _summarize(
    variant: str,
    flags: Sequence[str],
    trainings: Sequence[AblationRun],
    results: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return a variant's scores, with means and standard deviations over the seeds or None."""
    own = [
        result
        for training, result in zip(trainings, results, strict=True)
        if training.variant == variant
    ]
    scores = [result for result in own if "fault" not in result]
    means, deviations = {}, {}
    for column, keys in (BUDGET_COLUMNS | COLUMNS).items():
        values = [value for score in scores if (value := _value(score, keys)) is not None]
        means[column] = float(np.mean(values)) if values else None
        deviations[column] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {
        "flags": list(flags),
        "mean": means,
        "spread": deviations,
        "trainings": scores,
        "faults": [result["fault"] for result in own if "fault" in result],
    }


def _value(scores: dict[str, Any], keys: Sequence[str]) -> Any:
    value: Any = scores
    for key in keys:
        value = value.get(key)
    return value


def markdown(result: dict[str, Any]) -> str:
    """Format the result of `run` as Markdown, with aligned columns."""
    seeds = "one seed"
    if result["seeds"] > 1:
        seeds = f"{result['seeds']} seeds, mean ± standard deviation"
        if any(variant["faults"] for variant in result["variants"].values()):
            seeds += " of those that did not fail"
    minutes = result.get("cpu_minutes")
    columns = COLUMNS if minutes is None else BUDGET_COLUMNS | COLUMNS
    budget = counted(result["steps"], "step") if minutes is None else f"{minutes:g} CPU minutes"
    lines = [
        f"# Ablation `{result['table']}`",
        "",
        f"Recipe `{result['recipe']}`, {budget}, {seeds}.",
        f"Training data: {_count(result['data'])}.",
        f"Evaluated on {_count(result['test'])}.",
        f"Mean IoU; fine (< {FINE_BELOW:.0%} of the image), medium and coarse",
        f"(> {COARSE_ABOVE:.0%}) masks after one click; seconds of training.",
        "",
    ]
    variants = result["variants"]
    rows = [["variant", *columns]]
    for name, variant in variants.items():
        mean, spread = variant["mean"], variant["spread"]
        rows.append([name, *(_cell(column, mean[column], spread[column]) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in rows
    ]
    dashes = ["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]
    lines += [table[0], f"|{'|'.join(dashes)}|", *table[1:]]
    faults = [f"- failed: {fault}" for variant in variants.values() for fault in variant["faults"]]
    return "\n".join([*lines, *([""] if faults else []), *faults])


def _count(data: dict[str, Any]) -> str:
    images, masks = counted(data["images"], "image"), counted(data["masks"], "mask")
    return f"{images} with {masks} ({', '.join(data['paths'])})"


def _cell(column: str, mean: float | None, deviation: float | None) -> str:
    """Format a mean and its standard deviation: scores as fractions, counts and seconds rounded."""
    if mean is None:
        return "-"
    digits = {"CPU minutes": ".2f", "seconds": ",.0f", **COUNTS}.get(column, ".3f")
    is_alone = deviation is None or column in COUNTS
    return f"{mean:{digits}}" + ("" if is_alone else f" ± {deviation:{digits}}")
