"""Evaluation of a grounding model on queries: metrics by kind, baselines and calibration."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from gigamask.data import annotation
from gigamask.data.index import Index
from gigamask.data.shards import ShardReader
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World, check_stop
from gigamask.errors import GigamaskError, counted, score_text
from gigamask.interfaces import EvaluationResult
from gigamask.models.promptable import evaluated
from gigamask.plugins.grounding.calibration import (
    Confidence,
    ScoredQueries,
    Summaries,
    calibrate,
    calibrate_refusal,
    summarize,
)
from gigamask.plugins.grounding.data import QueryDataset, QueryLoader, open_queries
from gigamask.plugins.grounding.metrics import (
    METRICS,
    ImageMasks,
    PositionPrior,
    chance_metrics,
    mean_metrics,
    query_metrics,
)
from gigamask.plugins.grounding.model import GroundingModel, score_batch
from gigamask.plugins.grounding.vocabulary import NONSENSE, distinct_words, nonsense_queries
from gigamask.records import DataCursor, SampleRef

BATCH_SIZE = 32
"""Queries per forward pass; memory grows with the square of an image's masks."""
DISPLAYED = {
    "top 1": "top_1",
    "top 3": "top_3",
    "IoU": "iou",
    "absent": "absent",
    "answered": "answered",
}
"""Names of the scores during training, and their metrics."""


@dataclass(frozen=True)
class Protocol:
    """Settings, besides weights and data, that metrics depend on; written with every result."""

    candidates: str = "all masks of the image's json"
    none: str = '"no mask fits" is one more candidate with a learned score'
    confidence: str = (
        'sigmoid of a mask\'s score minus that of "no mask fits", scaled and shifted as fitted on '
        "the queries of every other image"
    )
    iou: str = "best-scoring mask with the target mask of the greatest IoU"
    mean: str = "over queries"


@dataclass(frozen=True, eq=False)
class QueryScores:
    """Scores of one query.

    Attributes:
        number: Number of the query in its dataset.
        scores: Scores of the image's masks, then that of "no mask fits".
    """

    number: int
    scores: Float64[np.ndarray, "m1"]

    @property
    def logits(self) -> Float64[np.ndarray, "m"]:
        """Score of each mask minus that of "no mask fits"."""
        return self.scores[:-1] - self.scores[-1]


def score_queries(
    model: GroundingModel,
    loader: QueryLoader,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[list[QueryScores], list[str]]:
    """Score all masks of each query's image, in evaluation mode.

    Args:
        model: The grounding model.
        loader: The queries.
        progress: Called as `progress(done, total)` after each batch.

    Returns:
        Scores in the dataset's order, and why images could not be read.
    """
    device, results, reasons = next(model.parameters()).device, [], []
    dataset = loader.dataset
    numbers = np.argsort(dataset.rows, kind="stable").tolist()  # grouped by image
    shards_of = closing(ShardReader(loader.index.shard_paths))
    with evaluated(model), torch.inference_mode(), shards_of as shards:
        for start in range(0, len(numbers), BATCH_SIZE):
            chunk = numbers[start : start + BATCH_SIZE]
            sample_refs = [SampleRef(0, number, number, batch_index=number) for number in chunk]
            batch = loader.batch(sample_refs, shards, DataCursor())
            reasons += [sample.reason for sample in batch.skipped]
            if batch.texts:
                output = score_batch(model, batch.to(device), "fp32").cpu().double().numpy()
                counts = batch.mask_valid.sum(1).tolist()
                for number, row, count in zip(
                    batch.batch_index.tolist(), output, counts, strict=True
                ):
                    results.append(QueryScores(number, np.append(row[:count], row[-1])))
            if progress:
                progress(start + len(chunk), len(numbers))
    return sorted(results, key=lambda result: result.number), list(dict.fromkeys(reasons))


@dataclass(frozen=True)
class EvaluationReport:
    """Metrics of queries.

    Attributes:
        images: Number of images.
        kinds: Kind of each query.
        metrics: Metrics of each query by model: `network`, then the baselines.
        confidence: Fitted confidence, or the saved one.
        calibration: Calibration of the confidences, see `calibration.calibrate`.
        refusals: Shares of refused queries, see `ScoredQueries.shares`, and of nonsense.
        skipped: Why images could not be read.
    """

    images: int
    kinds: list[str]
    metrics: dict[str, list[dict[str, float]]]
    confidence: Confidence
    calibration: Summaries
    refusals: dict[str, dict[str, float]]
    skipped: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return mean metrics, as written by `gigamask ground evaluate --json`."""
        network = self.metrics["network"]
        by_kind: dict[str, list[dict[str, float]]] = {kind: [] for kind in sorted(set(self.kinds))}
        for kind, metrics in zip(self.kinds, network, strict=True):
            by_kind[kind].append(metrics)
        means = {name: mean_metrics(metrics) for name, metrics in self.metrics.items()}
        return {
            "images": self.images,
            **means.pop("network"),
            "kinds": {kind: mean_metrics(metrics) for kind, metrics in by_kind.items()},
            "rules": means,
            "confidence": asdict(self.confidence),
            "calibration": self.calibration,
            "refusals": self.refusals,
            "protocol": asdict(Protocol()),
            "skipped": self.skipped,
        }


def evaluate(
    results: Sequence[QueryScores],
    dataset: QueryDataset,
    index: Index,
    prior: PositionPrior | None = None,
    skipped: Sequence[str] = (),
    nonsense: Sequence[QueryScores] = (),
    saved: Confidence | None = None,
) -> EvaluationReport:
    """Compute the metrics of scored queries and of the baselines.

    Args:
        results: Scores of queries.
        dataset: The queries.
        index: Index of their images.
        prior: Baseline fitted to the training queries.
        skipped: Why images could not be read.
        nonsense: Scores of `nonsense_dataset`.
        saved: The confidence in the run folder, whose threshold is scored; None fits one.

    Returns:
        The metrics.

    Raises:
        GigamaskError: There are no results.
    """
    if not results:
        reason = skipped[0] if skipped else "no query is about an image of these data"
        raise GigamaskError(f"no query could be scored: {reason}")
    names = ("network", "chance", "largest", *(["prior"] if prior else []))
    metrics: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    queries, logits, is_target, rows = [], [], [], []
    threshold = saved.threshold if saved else 0.0
    for result, image in with_image_masks(results, dataset, index):
        query, row = dataset.queries[result.number], int(dataset.rows[result.number])
        areas = image.masks.areas().astype(np.float64)
        scores = np.append(result.scores[:-1], result.scores[-1] + threshold)
        metrics["network"].append(query_metrics(scores, query.mask_indices, image))
        metrics["chance"].append(chance_metrics(query.mask_indices, image))
        metrics["largest"].append(
            query_metrics(np.append(areas, -np.inf), query.mask_indices, image)
        )
        if prior:
            scores = prior.scores(query.text, index, row)
            metrics["prior"].append(query_metrics(scores, query.mask_indices, image))
        queries.append(query)
        logits.append(result.logits)
        is_target.append(np.isin(np.arange(len(result.logits)), query.mask_indices))
        rows.append(row)
    scored = ScoredQueries(logits, is_target, np.array(rows))
    if saved:
        confidence = saved
        calibration = {
            "uncalibrated": summarize(scored, Confidence()),
            "saved": summarize(scored, saved),
        }
        refusals = {"uncalibrated": scored.shares(0.0), "saved": scored.shares(threshold)}
    else:
        confidence, calibration = calibrate(scored)
        fitted, refusals = calibrate_refusal(scored)
        confidence = replace(confidence, threshold=fitted)
    best = np.array([result.logits.max(initial=-1e4) for result in nonsense])
    for name, shares in refusals.items() if nonsense else ():
        limit = 0.0 if name == "uncalibrated" else confidence.threshold
        shares[NONSENSE] = float((best <= limit).mean())
    return EvaluationReport(
        images=len(set(rows)),
        kinds=[query.kind for query in queries],
        metrics=metrics,
        confidence=confidence,
        calibration=calibration,
        refusals=refusals,
        skipped=list(skipped),
    )


def nonsense_dataset(dataset: QueryDataset, index: Index, seed: int) -> QueryDataset:
    """Return a dataset with one nonsense query for each image of a dataset.

    Args:
        dataset: The queries, which give the images.
        index: Index of the images.
        seed: Random seed.
    """
    one_per_image = dict(zip(dataset.rows.tolist(), dataset.queries, strict=True)).values()
    known = distinct_words(query.text for query in dataset.queries)
    queries = nonsense_queries(list(one_per_image), known, seed, "nonsense in evaluation")
    return open_queries(index, queries, seed)


def with_image_masks(
    results: Sequence[QueryScores], dataset: QueryDataset, index: Index
) -> Iterator[tuple[QueryScores, ImageMasks]]:
    """Yield results, ordered by image, with the image's masks.

    Args:
        results: Scores of queries.
        dataset: The queries.
        index: Index of their images.

    Yields:
        Each result and its image's masks.
    """
    last_row, image = -1, None
    by_image = sorted(results, key=lambda result: (int(dataset.rows[result.number]), result.number))
    with closing(ShardReader(index.shard_paths)) as shards:
        for result in by_image:
            row = int(dataset.rows[result.number])
            if row != last_row or image is None:
                _, json = shards.read_entry(index, row)
                assert json is not None, "a scored image has masks"
                image = ImageMasks.from_masks(annotation.parse(json, index.entry_name(row)).masks)
                last_row = row
            yield result, image


def format_table(summary: dict[str, Any]) -> str:
    """Format a summary as a table of fractions, with rows for all queries, kinds and baselines."""
    baselines = [(f"({name})", means) for name, means in summary["rules"].items()]
    rows = [("all", summary), *summary["kinds"].items(), *baselines]
    width = max(len(name) for name, _ in rows) + 2
    lines = [
        f"shares of {counted(summary['queries'], 'query', 'queries')} about "
        f"{counted(summary['images'], 'image')}",
        " " * width + "".join(f"{name:>10}" for name in (*METRICS, "queries")),
    ]
    for name, means in rows:
        cells = "".join(f"{score_text(means[m]) or '-':>10}" for m in METRICS)
        lines.append(f"{name:{width}}{cells}{means['queries']:10,}")
    errors = [
        f"{values['expected_error']:.3f} {name}"
        for name, values in summary["calibration"].items()
        if values["expected_error"] is not None
    ]
    lines.append(f"expected calibration error of ten bins: {', '.join(errors)}")
    for name, shares in summary["refusals"].items():
        labels = (
            ("absent", "without targets"),
            ("refused", "with targets"),
            (NONSENSE, "nonsense"),
        )
        cells = [f"{shares[key]:.3f} {label}" for key, label in labels if key in shares]
        right = f"; answered by a target: {shares['right']:.3f}" if "right" in shares else ""
        lines.append(f"refused queries, {name}: {', '.join(cells)}{right}")
    return "\n".join(lines)


@dataclass(frozen=True)
class GroundingEvaluator:
    """Evaluates a model during training, on the main process."""

    loader: QueryLoader
    best_by: str
    world: World

    @profile_range("evaluation")
    def run(self, model: GroundingModel) -> EvaluationResult:
        """Return the scores in [0, 1], with a warning if images cannot be read.

        Raises:
            EvaluationStoppedError: A stop signal has arrived.
        """
        verdict = self.world.run_on_all(lambda: self._evaluate(model))
        return next(part for part in self.world.gather(verdict) if part is not None)

    def _evaluate(self, model: GroundingModel) -> EvaluationResult | None:
        dataset, index = self.loader.dataset, self.loader.index
        if not self.world.is_main:
            for _ in range(0, len(dataset.rows), BATCH_SIZE):
                check_stop(self.world)
            return None
        results, reasons = score_queries(
            model, self.loader, lambda *done_and_total: check_stop(self.world)
        )
        summary = evaluate(results, dataset, index, skipped=reasons).summary()
        scores = {name: summary[key] for name, key in DISPLAYED.items() if summary[key] is not None}
        best_by = self.best_by if self.best_by in scores else "answered"
        warnings = (f"{len(reasons)} images cannot be read: {reasons[0]}",) if reasons else ()
        digest = blake2b(repr(dataset.queries).encode(), digest_size=8).hexdigest()
        subject = f"{self.best_by} of {len(dataset.queries)} queries {digest} on {index.digest}"
        of = (
            f"{counted(len(results), 'query', 'queries')} about "
            f"{counted(summary['images'], 'image')}"
        )
        return EvaluationResult(scores, best_by, warnings, subject, of=of)
