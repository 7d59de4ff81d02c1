"""Run a benchmark of the literature on one's own weights, beside the published scores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from gigamask.data.storage import Paths, path_list
from gigamask.errors import GigamaskError, abridged, check_range, counted
from gigamask.evaluation.score_names import by_prompt
from gigamask.workflows.open_data import open_or_build_temporary

if TYPE_CHECKING:
    from gigamask.data.index import Index
    from gigamask.evaluation.clicks import ClickProtocol, ClickResult
    from gigamask.evaluation.embedded_images import ImageSource
    from gigamask.models.promptable import PromptableModel
    from gigamask.pixels import PixelConfig
    from gigamask.plugins.benchmarks.coco_data import CocoData
    from gigamask.plugins.benchmarks.detected_boxes import BoxMasks

METRICS = (
    *("AP", "AP small", "AP medium", "AP large", "AP rare", "AP common", "AP frequent"),
    *("NoC@85", "NoC@90", "NoC@95", "failures@90"),
    *("1 click", "2 clicks", "3 clicks", "5 clicks", "9 clicks", "20 clicks", "oracle", "box"),
    *("box small", "box medium", "box large"),
)
"""Columns of the table: mask AP, clicks, number of masks, and mean IoU."""


@dataclass(frozen=True)
class Benchmark:
    """What is measured on which data."""

    title: str
    archive: bool = True
    """whether --data is the archive of `published`, otherwise shards in SA-1B's format"""
    instances: bool = False
    """whether --data is a folder of COCO's files, whose instances are segmented"""
    clicks: int = 20
    min_predicted_iou: float | None = None
    max_masks: int | None = None
    """most masks of an image"""


BENCHMARKS = {
    **{
        name: Benchmark(title)
        for name, title in {
            "grabcut": "GrabCut",
            "berkeley": "Berkeley",
            "sbd": "SBD",
            "davis": "DAVIS",
            "pascalvoc": "Pascal VOC",
            "coco_mval": "COCO_MVal",
        }.items()
    },
    "coco": Benchmark("COCO val2017", archive=False, instances=True, clicks=5),
    "lvis": Benchmark("LVIS v1 val", archive=False, instances=True, clicks=5),
    "sa1k": Benchmark("SA-1K", archive=False, clicks=3, max_masks=64),
    "bsds": Benchmark("BSDS500 val", archive=False, min_predicted_iou=0.75),
}


NO_BOXES = (
    "--boxes, coco_vitdet.json and lvis_vitdet.json are not there; they are in source_json_file of "
    "mit-han-lab/efficientvit-sam on the Hugging Face Hub"
)
"""What to do for mask AP of coco and lvis."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """Options of a benchmark; each field is a flag of `gigamask benchmark`."""

    images: tuple[str, ...] = ()
    """the photographs, as shards or a folder of images, if --data is a folder of masks alone"""
    answers: tuple[Literal["confident", "first_token", "best_of_three", "refined"], ...] = (
        "confident",
        "first_token",
    )
    """which mask counts after one click or a box: the most confident of three, as with SAM's
    predictor; the single-mask output, as RITM and EdgeSAM; the best of three by its IoU; or, for
    detected boxes, the most confident one refined with the box, as in SAM's paper"""
    boxes: str | None = None
    """boxes of a detector in COCO's results format, for the mask AP of coco and lvis; default:
    coco_vitdet.json or lvis_vitdet.json in --data or its source_json_file"""
    max_images: int | None = None
    """number of images to use, the first in the order of their paths; default: all"""
    min_predicted_iou: float | None = None
    """of shards, use only masks with at least this predicted_iou; default: 0.75 for bsds"""
    batch_size: int = 4
    """images per forward pass of the encoder; changes speed and memory only"""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto uses cuda if available"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """number format of the model; auto: bf16 on a GPU, fp32 on a CPU"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""

    def check(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        check_range("--min-predicted-iou", self.min_predicted_iou, 0, 1)
        check_range("--max-images", self.max_images, 1)
        check_range("--batch-size", self.batch_size, 1)
        if not self.answers or len(set(self.answers)) < len(self.answers):
            raise GigamaskError(
                "--answers must name confident, first_token, best_of_three or refined, each once "
                f"(got {' '.join(self.answers) or 'none'})"
            )


@dataclass(frozen=True, eq=False)
class Benchmarked:
    """A model, the images of a benchmark, the scores by answer, and their summary."""

    model: PromptableModel
    images: ImageSource
    results: Mapping[str, ClickResult]
    summary: dict[str, Any]


def benchmark(
    name: str, weights: str | Path | PromptableModel, data: Paths, **options: Any
) -> dict[str, Any]:
    """Score weights on a benchmark of the literature.

    Args:
        name: One of `BENCHMARKS`, such as "grabcut" or "bsds".
        weights: As for `evaluate`.
        data: The folder that the benchmark's archive was unpacked in; or for sa1k and bsds, shards.
        **options: Fields of `BenchmarkOptions`, such as `max_images=10` or `device="cpu"`.

    Returns:
        The scores as `gigamask benchmark --json` writes them: "answers" holds for each answer the
        "NoC@85", "NoC@90" and "NoC@95", the "failures" and "mIoU" by clicks; "literature" the
        published rows.

    Raises:
        GigamaskError: The benchmark, the weights or the data cannot be used.
    """
    from gigamask.training.config import with_fields

    with ExitStack() as stack:
        return run(name, weights, data, with_fields(BenchmarkOptions(), options), stack).summary


def run(
    name: str,
    weights: str | Path | PromptableModel,
    data: Paths,
    options: BenchmarkOptions,
    stack: ExitStack,
) -> Benchmarked:
    """Score weights on a benchmark, and keep the model and the images.

    Args:
        name: As for `benchmark`.
        weights: As for `benchmark`.
        data: As for `benchmark`.
        options: Options of the benchmark.
        stack: Exit stack that keeps the images open.
    """
    options.check()
    chosen = find(name)
    images = _open(name, data, options, stack)
    from gigamask.data.mask_sampling import MaskFilters
    from gigamask.distributed.precision import autocast, choose_precision
    from gigamask.evaluation import noc
    from gigamask.evaluation.clicks import evaluate_protocols
    from gigamask.progress import track
    from gigamask.workflows.evaluate import load_model

    model = load_model(weights, options.device, options.trust)
    _check_channels(name, images, model.config.pixels)
    precision = choose_precision(options.precision, model.device)
    least = options.min_predicted_iou
    least = chosen.min_predicted_iou if least is None else least
    protocols, box_masks = _protocols(chosen, options, images)
    rows = range(min(len(images), options.max_images or len(images)))
    with autocast(precision, model.device):
        found = evaluate_protocols(
            model,
            images,
            MaskFilters(max_area=None, min_predicted_iou=least),
            list(protocols.values()),
            track(rows, name),
            options.batch_size,
            [each.update for each in box_masks.values()],
            max_masks=chosen.max_masks,
        )
    if not found[0].scores:
        raise GigamaskError(
            f"benchmark {name}: no image of {abridged(path_list(data))} has a mask to score; "
            f"the first problem: {(found[0].skipped or ['all masks are filtered out'])[0]}"
        )
    of_masks = noc.instance_summary if chosen.instances else noc.iou_summary
    summarize = noc.noc_summary if chosen.clicks == noc.MOST_CLICKS else of_masks
    results: dict[str, ClickResult] = dict(zip(protocols, found, strict=True))
    answers = {answer: summarize(result) for answer, result in results.items()}
    for answer, masks in box_masks.items():
        answers[answer] = answers.get(answer, {}) | _box_scores(masks)
    summary = {
        "benchmark": name,
        "weights": str(weights) if isinstance(weights, str | Path) else type(weights).__name__,
        "data": [*path_list(data), *options.images],
        "images": found[0].images,
        "masks": len(found[0].scores),
        "published_masks": _published_masks(name),
        "min_predicted_iou": least,
        "precision": precision,
        "skipped": [*found[0].skipped, *getattr(images, "left_out", ())],
        "answers": answers,
        "literature": literature_of(name),
    }
    return Benchmarked(model, images, results, summary)


def _protocols(
    chosen: Benchmark, options: BenchmarkOptions, images: ImageSource
) -> tuple[dict[str, ClickProtocol], dict[str, BoxMasks]]:
    """Return how clicks are scored, and the masks of detected boxes, by answer."""
    from gigamask.evaluation import clicks, noc
    from gigamask.plugins.benchmarks.detected_boxes import ANSWERS, BoxMasks, BoxProtocol

    known = ANSWERS if chosen.instances else noc.ANSWERS
    if unknown := [answer for answer in options.answers if answer not in known]:
        raise GigamaskError(
            f"--answers {unknown[0]} is not for {chosen.title}; choose from {', '.join(known)}"
        )
    if not chosen.instances:
        counts = tuple(range(1, chosen.clicks + 1))
        of_answer = {answer: noc.ANSWERS[answer] for answer in options.answers}
        return {name: replace(each, clicks=counts) for name, each in of_answer.items()}, {}
    protocols = {"confident": clicks.EFFICIENTVIT_SAM, "random clicks": clicks.EFFICIENT_SAM}
    coco = cast("CocoData", images)
    answers = options.answers if coco.detections else ()
    return protocols, {answer: BoxMasks(coco, BoxProtocol(answer)) for answer in answers}


def _box_scores(masks: BoxMasks) -> dict[str, Any]:
    """Return the AP of the masks of detected boxes by the names of `METRICS`, and all of it."""
    scores = masks.summary()
    kept = {metric: scores[metric] for metric in METRICS if metric in scores}
    return {**kept, "detected_boxes": scores}


def find(name: str) -> Benchmark:
    """Return a benchmark by name.

    Raises:
        GigamaskError: There is none.
    """
    if name not in BENCHMARKS:
        raise GigamaskError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def literature_of(name: str) -> list[dict[str, Any]]:
    """Return the published scores on a benchmark as records."""
    from gigamask.plugins.benchmarks import literature

    return [
        {"model": row.model, "trained_on": row.trained_on, "source": row.source, **row.scores}
        for row in literature.rows(name)
    ]


def own_scores(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of one answer by the names of `METRICS`."""
    scores = {name: answer[name] for name in METRICS if answer.get(name) is not None}
    if "failures" in answer:
        scores["failures@90"] = answer["failures"]["90"]
    clicks = by_prompt({"clicks": answer.get("mIoU", {})}).items()
    return scores | {name: iou for name, iou in clicks if name in METRICS}


def table(summary: Mapping[str, Any]) -> str:
    """Format the scores as a table, the literature's rows below one's own."""
    of = summary["published_masks"]
    masks = counted(summary["masks"], "mask") + (f" of {of:,}" if of else "")
    least = summary["min_predicted_iou"]
    filtered = f", predicted_iou from {least}" if least is not None else ""
    lines = [
        f"{find(summary['benchmark']).title}: {counted(summary['images'], 'image')}, "
        f"{masks}{filtered}"
    ]
    own = [
        (f"{summary['weights']}, {name}", own_scores(answer), "")
        for name, answer in summary["answers"].items()
    ]
    sources = list(dict.fromkeys(row["source"] for row in summary["literature"]))
    published = [
        (f"{row['model']} ({row['trained_on']})", row, f" [{sources.index(row['source']) + 1}]")
        for row in summary["literature"]
    ]
    rows = [*own, *published]
    columns = [name for name in METRICS if any(name in scores for _, scores, _ in rows)]
    width = max(len(label) for label, *_ in rows)
    lines.append(" " * width + "".join(f"  {name:>6}" for name in columns))
    for label, scores, mark in rows:
        cells = [f"{format_score(name, scores.get(name)):>{max(len(name), 6)}}" for name in columns]
        lines.append("  ".join([f"{label:{width}}", *cells]) + mark)
    lines += [f"[{number + 1}] {source}" for number, source in enumerate(sources)]
    return "\n".join(lines)


def reproduction_text(recipe: str, summary: Mapping[str, Any] | None = None) -> str:
    """Format what a recipe's paper published beside the scores of one's own weights.

    Args:
        recipe: One of `reproductions.REPRODUCTIONS`.
        summary: Scores of one's own weights, as `benchmark` returns them; None: there are none.
    """
    from gigamask.plugins.benchmarks import reproductions

    known, published = reproductions.describe(recipe), reproductions.published(recipe)
    names = [name for name in published if summary is None or name == summary["benchmark"]]
    columns = {"published": published}
    if summary is not None:
        for answer, scores in summary["answers"].items():
            columns[f"yours, {answer}"] = {summary["benchmark"]: own_scores(scores)}
        names = names or [summary["benchmark"]]
    lines = [f"{recipe}: {known['expected']}"]
    lines.append(" " * 24 + "".join(f"{name:>20}" for name in columns))
    for name in names:
        for metric in METRICS:
            values = [scores.get(name, {}).get(metric) for scores in columns.values()]
            if any(value is not None for value in values):
                cells = "".join(f"{format_score(metric, value):>20}" for value in values)
                lines.append(f"{name + ' ' + metric:24}{cells}")
    lines += [f"published: {known['source']}"] if published else []
    lines += [
        f"planned hours: {known['hours']}",
        f"another result: {known['deviation']}",
        "commands:",
    ]
    return "\n".join([*lines, *(f"  gigamask {command}" for command in known["commands"])])


def format_score(metric: str, value: float | None) -> str:
    """Format a score: clicks with two decimals, failures as a number, mean IoU as a fraction.

    Args:
        metric: One of `METRICS`.
        value: The score; None is not known.
    """
    if value is None:
        return "-"
    if metric.startswith("failures"):
        return f"{value:.0f}"
    return f"{value:.2f}" if metric.startswith("NoC") else f"{value:.3f}"


def _open(name: str, data: Paths, options: BenchmarkOptions, stack: ExitStack) -> ImageSource:
    """Open the images of a benchmark."""
    from gigamask.plugins.benchmarks import published

    chosen, paths = find(name), path_list(data)
    if not chosen.archive and options.images:
        raise GigamaskError(
            f"--images is for benchmarks whose --data is a folder of masks, not for {name}"
        )
    if options.boxes is not None and not chosen.instances:
        raise GigamaskError(f"--boxes is for coco and lvis, not for {name}; leave it out")
    if not (chosen.archive or chosen.instances):
        return stack.enter_context(open_or_build_temporary(paths))
    if len(paths) != 1:
        raise GigamaskError(
            f"--data must be one folder, the one that {name} was unpacked in (got {len(paths)})"
        )
    folder = Path(paths[0])
    if chosen.instances:
        from gigamask.plugins.benchmarks import coco_data

        boxes = None if options.boxes is None else Path(options.boxes)
        return coco_data.open_folder(name, folder, boxes)
    if options.images:
        if not folder.is_dir():
            raise GigamaskError(f"--data {folder}: is not a folder of masks")
        photographs = stack.enter_context(open_or_build_temporary(options.images))
        return published.open_masks(name, folder, photographs)
    return published.open_archive(name, folder)


def _check_channels(name: str, images: ImageSource, pixels: PixelConfig) -> None:
    """Raise `GigamaskError` if a model cannot read the images of a benchmark."""
    from gigamask.data.dataset import check_pixels

    if not find(name).archive and not find(name).instances:
        check_pixels(cast("Index", images), pixels)
    elif pixels.channels != 3:
        raise GigamaskError(
            f"benchmark {name}: its photographs are RGB, but the weights read {pixels.channels} "
            "channels; give weights of three channels"
        )


def _published_masks(name: str) -> int | None:
    from gigamask.plugins.benchmarks import published

    return published.ARCHIVES[name].num_masks if find(name).archive else None
