"""How well texts find their masks: answers to queries enter, accuracies by kind leave, beside those of rules that do not look.

Of queries with right masks: `top_1`, the mask that scores best is right (whatever none scores); `top_3`, one of the best three is; `iou`, that of
the best one with the right mask it meets most; `pointing`, its deepest pixel lies in a right mask; `refused`, none scored best after all; `set_f1`,
of the masks that score above none. Of others: `absent`, none scores best. Of all: `answered`, what scores best, mask or none, is right.

Rules: `chance` draws a mask (its expectation, exactly); `largest` takes the largest; `prior` knows where and how large the right masks of the same
words were in training, of all words where these are new, and how often they were absent, and sees no pixel.

Not here: batches of queries (`grounding.questions`), curves and calibration of IoU (`evaluate`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import comb
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64

from gigamask.contracts import Cursor, Visit
from gigamask.data import annotation
from gigamask.data.index import Index
from gigamask.data.shards import Shards
from gigamask.evaluate import calibration
from gigamask.faults import Fault
from gigamask.geometry.boundary import farthest_point
from gigamask.geometry.runs import Runs
from gigamask.grounding.fit import score
from gigamask.grounding.items import Catalogue
from gigamask.grounding.questions import Questioner
from gigamask.model.relevance import Relevance

MEASURES = ("top_1", "top_3", "iou", "pointing", "refused", "set_f1", "absent", "answered")
TOP = 3
AT_ONCE = 32
"""Queries that are scored together: each of two masks among a hundred has its say about the other."""
FEWEST = 20
"""Queries that a calibration is fitted to, at least."""


@dataclass(frozen=True)
class Protocol:
    """What scores depend on besides weights and data; written beside every result."""

    candidates: str = "all masks of the image's json"
    none: str = "one more candidate, whose score is the network's own"
    confidence: str = "sigmoid of a mask's score less none's, scaled and shifted as fitted on the queries of every other image"
    iou: str = "of the best-scoring mask with the right mask that it meets most"
    mean: str = "over queries"


@dataclass(frozen=True, eq=False)
class Answer:
    """A query's number in its catalogue, and the scores of its image's masks, none's last."""

    number: int
    scores: Float64[np.ndarray, "m1"]

    @property
    def logits(self) -> Float64[np.ndarray, "m"]:
        """How far each mask scores above none."""
        return self.scores[:-1] - self.scores[-1]


@dataclass(frozen=True)
class Confidence:
    """Turns logits into how sure one may be that a mask is right: `sigmoid(scale * logit + shift)` (Platt 1999). A mask fits above `least`."""

    scale: float = 1.0
    shift: float = 0.0
    least: float = 0.0

    def __call__(self, logits: Float[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        return 0.5 * (1 + np.tanh(0.5 * (self.scale * logits.astype(np.float64) + self.shift)))

    @classmethod
    def fit(cls, logits: Float[np.ndarray, "n"], right: Bool[np.ndarray, "n"], steps: int = 50) -> "Confidence":
        """Returns scale and shift of the greatest likelihood, by Newton's method from 1 and 0; those where there is nothing to tell apart."""
        if not right.any() or right.all():
            return cls()
        x, y, theta = np.stack([logits.astype(np.float64), np.ones(len(logits))], 1), right.astype(np.float64), np.array([1.0, 0.0])
        for _ in range(steps):
            p = cls(*theta.tolist())(x[:, 0])
            # A whisper of a pull towards the start, where perfectly sorted answers would have an endless scale.
            gradient = x.T @ (p - y) + 1e-2 * (theta - (1.0, 0.0))
            hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-2 * np.eye(2)
            move = np.linalg.solve(hessian, gradient)
            theta = theta - move / max(1.0, float(np.abs(move).max()))
        if theta[0] < 0:  # right masks score lower: logits tell nothing, and all are as sure as masks are right at all
            return cls(0.0, float(np.log(y.mean() / (1 - y.mean()))))
        return cls(float(theta[0]), float(theta[1]))


def ask(model: Relevance, questioner: Questioner, progress: Callable[[int, int], object] | None = None) -> tuple[list[Answer], list[str]]:
    """Asks every query about all masks of its image; returns the answers, and why images could not be read. `progress` is told how many are done."""
    device, found, bad = next(model.parameters()).device, [], []
    catalogue, was_training = questioner.catalogue, model.training
    model.eval()
    numbers = np.argsort(catalogue.rows, kind="stable").tolist()  # an image's queries together
    with torch.inference_mode(), closing(Shards(questioner.index.shard_paths)) as shards:
        for start in range(0, len(numbers), AT_ONCE):
            visits = [Visit(0, number, number, place=number) for number in numbers[start : start + AT_ONCE]]
            batch = questioner.batch(visits, shards, Cursor())
            bad += [each.reason for each in batch.rejected]
            if len(batch.texts):
                scores = score(model, batch.to(device), "fp32").double().cpu().numpy()
                counts = batch.there.sum(1).tolist()
                found += [
                    Answer(number, np.append(row[:count], row[-1])) for number, row, count in zip(batch.places.tolist(), scores, counts, strict=True)
                ]
            if progress:
                progress(min(start + AT_ONCE, len(numbers)), len(numbers))
    model.train(was_training)
    return sorted(found, key=lambda answer: answer.number), list(dict.fromkeys(bad))


@dataclass(frozen=True, eq=False)
class Scene:
    """What an answer about an image is held against: its masks, how they overlap, and each one's deepest pixel."""

    masks: Runs
    overlaps: Float64[np.ndarray, "m m"]
    hit: Bool[np.ndarray, "m m"]
    """whether mask i's deepest pixel lies in mask j"""

    @classmethod
    def of(cls, masks: Runs) -> "Scene":
        """Works it out."""
        dense = masks.to_dense()
        points = [farthest_point(mask)[:2] for mask in dense]
        return cls(masks, masks.iou(masks), np.array([[mask[y, x] for mask in dense] for x, y in points], dtype=bool).reshape(len(dense), len(dense)))


def measure(scores: Float64[np.ndarray, "m1"], right: Sequence[int], scene: Scene) -> dict[str, float]:
    """Returns what one query's answer scores of `MEASURES`, those that it has; of equal scores the first mask counts as best."""
    order, wanted = np.argsort(-scores[:-1], kind="stable"), np.isin(np.arange(len(scores) - 1), right)
    refused = not len(order) or scores[-1] >= scores[order[0]]
    if not len(right):
        return {"absent": float(refused), "answered": float(refused)}
    best = order[0]
    chosen = scores[:-1] > scores[-1]
    return {
        "top_1": float(wanted[best]),
        "top_3": float(wanted[order[:TOP]].any()),
        "iou": float(scene.overlaps[best][wanted].max()),
        "pointing": float(scene.hit[best][wanted].any()),
        "refused": float(refused),
        "set_f1": 2 * float((chosen & wanted).sum()) / float(chosen.sum() + wanted.sum()),
        "answered": float(wanted[best] and not refused),
    }


def by_chance(right: Sequence[int], scene: Scene) -> dict[str, float]:
    """Returns what drawing masks without looking scores in expectation; it refuses where there is none to draw."""
    masks, count = len(scene.masks), len(right)
    if not count:
        return {"absent": float(not masks), "answered": float(not masks)}
    best = scene.overlaps[:, list(right)].max(1)
    missed = comb(masks - count, min(TOP, masks)) / comb(masks, min(TOP, masks))
    hits = scene.hit[:, list(right)].any(1)
    return {"top_1": count / masks, "top_3": 1 - missed, "iou": best.mean(), "pointing": hits.mean(), "refused": 0.0, "answered": count / masks}


@dataclass(frozen=True, eq=False)
class Prior:
    """Where the right masks of each text lay in training, and how large they were; and how often it was absent."""

    means: dict[str, Float64[np.ndarray, "3"]]
    everywhere: Float64[np.ndarray, "3"]
    spread: Float64[np.ndarray, "3"]
    absent: dict[str, float]

    @classmethod
    def of(cls, catalogue: Catalogue, index: Index) -> "Prior":
        """Learns from queries, by the index's boxes and areas."""
        told: dict[str, list[np.ndarray]] = {}
        asked: dict[str, list[bool]] = {}
        for query, row in zip(catalogue.queries, catalogue.rows.tolist(), strict=True):
            asked.setdefault(query.text, []).append(not query.right)
            told.setdefault(query.text, []).extend(_where(index, row)[list(query.right)])
        every = np.array([place for places in told.values() for place in places]).reshape(-1, 3)
        if not len(every):
            raise Fault("no query that is trained on has a right mask, so that there is no prior; give queries that have")
        means = {text: np.mean(places, 0) for text, places in told.items() if places}
        return cls(means, every.mean(0), every.std(0) + 1e-6, {text: float(np.mean(each)) for text, each in asked.items()})

    def scores(self, text: str, index: Index, row: int) -> Float64[np.ndarray, "m1"]:
        """Returns a score for each mask of an image by where it lies, and none's."""
        away = (_where(index, row) - self.means.get(text, self.everywhere)) / self.spread
        return np.append(-np.square(away).sum(1), np.inf if self.absent.get(text, 0.0) > 0.5 else -np.inf)


def _where(index: Index, row: int) -> Float64[np.ndarray, "m 3"]:
    """Returns the centres of an image's masks in shares of its sides, and the logarithms of their shares of it."""
    rows, (height, width) = index.mask_rows(row), (int(index.images[name][row]) for name in ("height", "width"))
    boxes, areas = np.asarray(index.masks["box"][rows], np.float64).reshape(-1, 4), np.asarray(index.masks["area"][rows], np.float64)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 / (width, height)
    return np.column_stack([centres, np.log(np.maximum(areas, 1) / (height * width)) / 4])


@dataclass(frozen=True)
class Result:
    """What answers score: of each query by name of the rule, `network` first; its kind; and the calibration before and after fitting."""

    images: int
    kinds: list[str]
    scores: dict[str, list[dict[str, float]]]
    confidence: Confidence
    calibration: dict[str, dict[str, Any]]
    rejected: list[str] = field(default_factory=list)
    refusals: dict[str, dict[str, float]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Returns the means, as `gigamask ground evaluate --json` writes them; None where no query has that measure."""
        network = self.scores["network"]
        by_kind = {kind: [each for each, its in zip(network, self.kinds, strict=True) if its == kind] for kind in sorted(set(self.kinds))}
        return {
            "images": self.images,
            **_means(network),
            "kinds": {kind: _means(each) for kind, each in by_kind.items()},
            "rules": {name: _means(each) for name, each in self.scores.items() if name != "network"},
            "confidence": asdict(self.confidence),
            "calibration": self.calibration,
            "refusals": self.refusals,
            "protocol": asdict(Protocol()),
            "rejected": self.rejected,
        }


def judge(answers: Sequence[Answer], catalogue: Catalogue, index: Index, prior: Prior | None = None, rejected: Sequence[str] = ()) -> Result:
    """Holds answers against the right masks, and rules beside them; raises `Fault` where there is none."""
    if not answers:
        raise Fault("no query could be asked, so there is nothing to score; " + (rejected[0] if rejected else "give queries about these images"))
    scores: dict[str, list[dict[str, float]]] = {name: [] for name in ("network", "chance", "largest", *(["prior"] if prior else []))}
    told: list[tuple[int, Answer]] = []
    for answer, scene in _scenes(answers, catalogue, index):
        query, row = catalogue.queries[answer.number], int(catalogue.rows[answer.number])
        scores["network"].append(measure(answer.scores, query.right, scene))
        scores["chance"].append(by_chance(query.right, scene))
        scores["largest"].append(measure(np.append(scene.masks.areas().astype(np.float64), -np.inf), query.right, scene))
        if prior:
            scores["prior"].append(measure(prior.scores(query.text, index, row), query.right, scene))
        told.append((row, answer))
    confidence, calibrated = calibrate(told, catalogue)
    kinds = [catalogue.queries[answer.number].kind for _, answer in told]
    least, refused = refusals(told, catalogue)
    return Result(len({row for row, _ in told}), kinds, scores, replace(confidence, least=least), calibrated, list(rejected), refused)


def calibrate(told: Sequence[tuple[int, Answer]], catalogue: Catalogue) -> tuple[Confidence, dict[str, dict[str, Any]]]:
    """Returns the confidence fitted to all answers, and the calibration of masks as they come and, image by image, as fitted to the other half."""
    logits = np.concatenate([answer.logits for _, answer in told])
    right = np.concatenate([np.isin(np.arange(len(answer.logits)), catalogue.queries[answer.number].right) for _, answer in told])
    owner = np.concatenate([np.full(len(answer.logits), row) for row, answer in told])
    half = np.searchsorted(np.unique(owner), owner) % 2 == 0
    fitted = np.empty(len(logits))
    if len(told) < FEWEST or not (half.any() and (~half).any()):
        return Confidence(), {"as it comes": calibration.calibrate(Confidence()(logits), right.astype(np.float64)).summary()}
    for side in (half, ~half):
        fitted[side] = Confidence.fit(logits[~side], right[~side])(logits[side])
    outcomes = {"as it comes": Confidence()(logits), "fitted": fitted}
    return Confidence.fit(logits, right), {name: calibration.calibrate(each, right.astype(np.float64)).summary() for name, each in outcomes.items()}


def refusals(told: Sequence[tuple[int, Answer]], catalogue: Catalogue) -> tuple[float, dict[str, dict[str, float]]]:
    """Returns the logit above which a mask had better fit, and how often absent queries are refused, and others, as it comes and as fitted.

    Fitted is to the queries of every other image, for the balance of both; 0 as it comes, and where few queries or one kind of them are there.
    """
    best = np.array([answer.logits.max(initial=-1e4) for _, answer in told])
    absent = np.array([not catalogue.queries[answer.number].right for _, answer in told])
    owner = np.array([row for row, _ in told])
    half = np.searchsorted(np.unique(owner), owner) % 2 == 0

    def shares(least: Float64[np.ndarray, "n"]) -> dict[str, float]:
        return {name: float((best <= least)[those].mean()) for name, those in (("absent", absent), ("refused", ~absent)) if those.any()}

    outcomes = {"as it comes": shares(np.zeros(len(told)))}
    if len(told) < FEWEST or any(not (side & kind).any() for side in (half, ~half) for kind in (absent, ~absent)):
        return 0.0, outcomes
    others = np.where(half, _balanced(best[~half], absent[~half]), _balanced(best[half], absent[half]))
    return _balanced(best, absent), outcomes | {"fitted": shares(others)}


def _balanced(best: Float64[np.ndarray, "n"], absent: Bool[np.ndarray, "n"]) -> float:
    """Returns the threshold below which most absent queries and fewest others lie, both kinds counting alike; of equals the lowest."""
    order = np.argsort(best, kind="stable")
    gains = np.cumsum(absent[order] / absent.sum() - ~absent[order] / (~absent).sum())
    place = int(gains.argmax())
    above = best[order[min(place + 1, len(order) - 1)]]
    return float((best[order[place]] + above) / 2)


def _scenes(answers: Sequence[Answer], catalogue: Catalogue, index: Index) -> Iterator[tuple[Answer, Scene]]:
    """Yields each answer with its image's masks, image by image."""
    before, scene = -1, None
    with closing(Shards(index.shard_paths)) as shards:
        for answer in sorted(answers, key=lambda each: (int(catalogue.rows[each.number]), each.number)):
            row = int(catalogue.rows[answer.number])
            if row != before or scene is None:
                _, json = shards.read_entry(index, row)
                assert json is not None, "what was asked of an image was about the masks of its json"
                before, scene = row, Scene.of(annotation.parse(json, index.entry_name(row)).masks)
            yield answer, scene


def _means(scores: Sequence[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"queries": len(scores)}
    for name in MEASURES:
        values = [each[name] for each in scores if name in each]
        found[name] = float(np.mean(values)) if values else None
    return found


def table(summary: dict[str, Any]) -> str:
    """Returns a summary as a table in per cent: a row for all queries, for each kind, and for each rule."""
    rows = {"all": summary, **summary["kinds"], **{f"({name})": each for name, each in summary["rules"].items()}}
    wide = max(map(len, rows)) + 2
    lines = [
        f"% of {summary['queries']} queries about {summary['images']} images",
        " " * wide + "".join(f"{name:>10}" for name in (*MEASURES, "queries")),
    ]
    for name, each in rows.items():
        values = "".join(f"{'-':>10}" if each[measure] is None else f"{100 * each[measure]:10.1f}" for measure in MEASURES)
        lines.append(f"{name:{wide}}{values}{each['queries']:10,}")
    told = ", ".join(
        f"{100 * each['expected_error']:.1f} {name}" for name, each in summary["calibration"].items() if each["expected_error"] is not None
    )
    lines.append(f"confidence that a mask is right, % off in the mean of ten bins: {told}")
    for name, each in summary["refusals"].items():
        said = ", ".join(f"{100 * each[kind]:.1f} of the {other}" for kind, other in (("absent", "absent"), ("refused", "others")) if kind in each)
        lines.append(f"refused, % {name}: {said}")
    return "\n".join(lines)
