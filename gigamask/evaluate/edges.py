"""Edge detection scored against several people's boundaries, as on BSDS500: ODS, OIS, AP and R50.

Enters soft edge maps in [0, 1] and, for each, the boundary maps that people drew; leaves the four numbers. The counts and what is made of them are
those of Berkeley's benchmark (Arbelaez et al. 2011; Dollar's `edgesEvalImg` and `edgesEvalDir`). Pixels are matched at the least cost, exactly,
where Berkeley's `correspondPixels` draws at random which pixels may stay alone together: so the numbers are near those published, not equal (ODS
.70466 for .70463, OIS .70871 for .70870 on the five images that the benchmark carries). Write the protocol beside them. Matching and thinning are
scipy's and scikit-image's, from the extra `edges`.

Not here: edge maps from masks (`edge_maps`), boundaries of single masks (`boundary_scores`).
"""

import importlib.util
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from gigamask.faults import Fault


@dataclass(frozen=True)
class Protocol:
    """What the numbers depend on besides the maps; written beside every result."""

    thresholds: int = 99
    """at how many evenly spaced values between 0 and 1 a map is cut"""
    tolerance: float = 0.0075
    """how far apart matching pixels may be, as a share of the image's diagonal"""
    matching: str = (
        "approximate to Berkeley's: pairs within the tolerance at the least sum of distances, a found pixel left alone costing 100 tolerances"
    )
    thinning: str = "each cut map, as bwmorph's 'thin' (skimage.morphology.thin)"
    people: str = "precision: matched to anyone; recall: summed over people"
    interpolation: str = "ODS between thresholds, as edgesEvalDir; OIS at thresholds; AP as the sum over recalls 0.00, 0.01 ... 1.00, by 100"

    def __post_init__(self) -> None:
        if self.thresholds < 2:
            raise Fault(f"Protocol.thresholds is {self.thresholds}, there must be 2 at least; give another number")

    @property
    def cuts(self) -> Float64[np.ndarray, "T"]:
        """The thresholds."""
        return np.linspace(1 / (self.thresholds + 1), 1 - 1 / (self.thresholds + 1), self.thresholds)


@dataclass(frozen=True, eq=False)
class Counts:
    """Pixels at each threshold: people's that were found, people's, found that people drew, found. Sums over images are these again."""

    recalled: Int64[np.ndarray, "T"]
    wanted: Int64[np.ndarray, "T"]
    right: Int64[np.ndarray, "T"]
    found: Int64[np.ndarray, "T"]

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.recalled + other.recalled, self.wanted + other.wanted, self.right + other.right, self.found + other.found)

    def at(self, place: int) -> "Counts":
        """Returns the counts at one threshold."""
        chosen = slice(place, place + 1)
        return Counts(self.recalled[chosen], self.wanted[chosen], self.right[chosen], self.found[chosen])

    @property
    def recall(self) -> Float64[np.ndarray, "T"]:
        return self.recalled / np.maximum(self.wanted, 1)

    @property
    def precision(self) -> Float64[np.ndarray, "T"]:
        """Precision; 0 where nothing was found."""
        return self.right / np.maximum(self.found, 1)

    @property
    def f(self) -> Float64[np.ndarray, "T"]:
        return _f(self.precision, self.recall)


def measure(images: Iterable[tuple[Float[np.ndarray, "_ _"], Bool[np.ndarray, "_ _ _"]]], protocol: Protocol | None = None) -> dict:
    """Returns `images`, `ODS` and the `threshold` it is at, `OIS`, `AP`, `R50` and the protocol, of pairs of an edge map and people's boundaries.

    ODS is the best F of all images at one threshold, OIS that at each image's own, AP the area under precision over recall, R50 the recall at a
    precision of a half: None where precision is never so low or never so high but at one threshold. Images may differ in size.
    """
    protocol = protocol or Protocol()
    counts = [count(edges, people, protocol) for edges, people in images]
    if not counts:
        raise Fault("no image to score edges on; give at least one")
    return {"images": len(counts), **summarise(counts, protocol), "protocol": asdict(protocol)}


def count(edges: Float[np.ndarray, "h w"], people: Bool[np.ndarray, "p h w"], protocol: Protocol) -> Counts:
    """Returns one image's counts at each threshold. Cuts that choose the same pixels are matched once."""
    if not (edges.size and float(edges.min()) >= 0 and float(edges.max()) <= 1):
        raise Fault(f"an edge map of size {edges.shape} with values from {edges.min(initial=1)} to {edges.max(initial=0)}, they must be in [0, 1]")
    if not len(people):
        raise Fault("an edge map with nobody's boundaries to hold it against; leave this image out")
    radius = protocol.tolerance * math.sqrt(edges.shape[0] ** 2 + edges.shape[1] ** 2)
    sizes = [int((edges >= cut).sum()) for cut in protocol.cuts]
    # Cuts of one map hold each other, so as many pixels are the same pixels.
    rows = {size: _count_once(_thin(edges >= cut), people, radius) for size, cut in dict(zip(sizes, protocol.cuts, strict=True)).items()}
    return Counts(*np.array([rows[size] for size in sizes], np.int64).T)


def _count_once(lines: Bool[np.ndarray, "h w"], people: Bool[np.ndarray, "p h w"], radius: float) -> tuple[int, int, int, int]:
    matches = [match(lines, drawn, radius) for drawn in people]
    right = np.logical_or.reduce([found for found, _ in matches])
    return sum(int(recalled.sum()) for _, recalled in matches), int(people.sum()), int(right.sum()), int(lines.sum())


def match(found: Bool[np.ndarray, "h w"], wanted: Bool[np.ndarray, "h w"], radius: float) -> tuple[Bool[np.ndarray, "h w"], Bool[np.ndarray, "h w"]]:
    """Returns which pixels of either map have a partner in the other, at most `radius` away.

    Partners are chosen so that the distances sum to the least, where a found pixel without one counts as 100 radii: so nearly all have one who can.
    """
    require_extra()
    from scipy.sparse import csr_array  # pyrefly: ignore[missing-import]
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching  # pyrefly: ignore[missing-import]

    matched = np.zeros_like(found), np.zeros_like(wanted)
    places, drawn = np.argwhere(found), np.argwhere(wanted)
    if not len(places) or not len(drawn):
        return matched
    pairs = np.concatenate(list(_neighbours(places, wanted, radius)))
    # Who has nobody near is alone in any case; with them, a map full of wrong edges took 13 times as long.
    near, pairs[:, 0] = np.unique(pairs[:, 0], return_inverse=True)
    if not len(near):
        return matched
    places, pairs = places[near], np.concatenate([pairs, _loners(len(near), len(drawn))])
    # Each found pixel has a stand-in of its own to be alone with.
    met = pairs[:, 1] < len(drawn)
    costs = np.full(len(pairs), 100 * max(radius, 1.0))
    costs[met] = np.hypot(*(places[pairs[met, 0]] - drawn[pairs[met, 1]]).T)
    # 1 is added to all costs, since scipy takes 0 for "no pair".
    graph = csr_array((costs + 1, tuple(pairs.T)), shape=(len(places), len(drawn) + len(places)))
    which, partner = min_weight_full_bipartite_matching(graph)
    met = partner < len(drawn)
    for pixels, map_ in zip((places[which[met]], drawn[partner[met]]), matched, strict=True):
        map_[tuple(pixels.T)] = True
    return matched


def _loners(count: int, after: int) -> Int64[np.ndarray, "n 2"]:
    """Returns pairs of each number and its stand-in."""
    return np.stack([np.arange(count), after + np.arange(count)], 1)


def _neighbours(places: Int64[np.ndarray, "n 2"], wanted: Bool[np.ndarray, "h w"], radius: float) -> Iterator[Int64[np.ndarray, "k 2"]]:
    """Yields pairs of the number of a place and that of a wanted pixel, in reading order, for one offset within the radius after the other."""
    reach = math.floor(radius)
    numbers = np.full((wanted.shape[0] + 2 * reach, wanted.shape[1] + 2 * reach), -1)
    numbers[reach : reach + wanted.shape[0], reach : reach + wanted.shape[1]][wanted] = np.arange(wanted.sum())
    for dy, dx in np.argwhere(np.hypot(*np.ogrid[-reach : reach + 1, -reach : reach + 1]) <= radius):
        there = numbers[places[:, 0] + dy, places[:, 1] + dx]
        met = np.flatnonzero(there >= 0)
        yield np.stack([met, there[met]], 1)


def summarise(counts: list[Counts], protocol: Protocol) -> dict[str, float | None]:
    """Returns ODS with its threshold, OIS, AP and R50 of some images' counts."""
    total, own = counts[0], counts[0].at(int(counts[0].f.argmax()))
    for each in counts[1:]:
        total, own = total + each, own + each.at(int(each.f.argmax()))
    ods, threshold = _best(total, protocol.cuts)
    return {"ODS": ods, "threshold": threshold, "OIS": float(own.f[0]), "AP": _area(total), "R50": _recall_at_half(total)}


def _best(total: Counts, cuts: Float64[np.ndarray, "T"]) -> tuple[float, float]:
    """Returns the best F on straight lines between neighbouring thresholds' precision and recall, 100 points each, and where it is."""
    share = np.linspace(0, 1, 100)
    precision, recall, cut = (each[1:, None] * share + each[:-1, None] * (1 - share) for each in (total.precision, total.recall, cuts))
    f = _f(precision, recall)
    place = np.unravel_index(f.argmax(), f.shape)
    return float(f[place]), float(cut[place])


def _area(total: Counts) -> float:
    """Returns the area under precision over recall; beyond the recalls that occur it counts as none."""
    recall, first = np.unique(total.recall, return_index=True)
    if len(recall) < 2:
        return 0.0
    return float(np.interp(np.arange(101) / 100, recall, total.precision[first], 0, 0).sum() / 100)


def _recall_at_half(total: Counts) -> float | None:
    """Returns the recall where precision is a half, or the least that occurs if that is more; None where all are less or one only occurs."""
    precision, first = np.unique(total.precision, return_index=True)
    if len(precision) < 2 or precision[-1] < 0.5:
        return None
    return float(np.interp(max(precision[0], 0.5), precision, total.recall[first]))


def _f(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    return 2 * precision * recall / np.maximum(precision + recall, np.finfo(float).eps)


def _thin(lines: Bool[np.ndarray, "h w"]) -> Bool[np.ndarray, "h w"]:
    """Returns lines one pixel wide."""
    require_extra()
    from skimage.morphology import thin  # pyrefly: ignore[missing-import]

    return thin(lines)


def require_extra() -> None:
    """Raises Fault where a library of the extra is missing."""
    missing = [name for name in ("scipy", "skimage") if importlib.util.find_spec(name) is None]
    if missing:
        raise Fault(f"edge scores want {' and '.join(missing)}, which is not installed; run pip install 'gigamask[edges]'")
