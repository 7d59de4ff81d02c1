"""Edge scores of maps whose matches can be counted by hand."""

import importlib.util

import numpy as np
import pytest

from gigamask.evaluate import edges
from gigamask.evaluate.edges import Protocol, count, measure
from gigamask.faults import Fault

HAS_EXTRA = importlib.util.find_spec("scipy") is not None and importlib.util.find_spec("skimage") is not None
scored = pytest.mark.skipif(not HAS_EXTRA, reason="edge scores want scipy and scikit-image: pip install 'gigamask[edges]'")
FEW = Protocol(thresholds=9)


def lines(*columns: int, strength: float = 1.0, size: tuple[int, int] = (100, 100)) -> np.ndarray:
    """Vertical lines of 60 pixels; the tolerance at 100 x 100 is 1.06 pixels."""
    edges = np.zeros(size)
    edges[20:80, list(columns)] = strength
    return edges


def drawn(*people: tuple[int, ...]) -> np.ndarray:
    return np.array([lines(*columns) for columns in people]) > 0


def once(found: np.ndarray, people: np.ndarray) -> tuple[float, float]:
    """Precision and recall at the lowest of nine thresholds."""
    counts = count(found, people, FEW)
    return counts.precision[0].item(), counts.recall[0].item()


@scored
def test_within_the_tolerance_is_found_and_beyond_it_not():
    for shift, share in ((0, 1), (1, 1), (2, 0), (-1, 1), (-2, 0)):
        assert once(lines(50 + shift), drawn((50,))) == (share, share)
    # Moved down by a pixel too, 59 pixels have a partner beside them, and the last one's nearest is the root of 2 away.
    assert once(np.roll(lines(51), 1, 0), drawn((50,))) == (59 / 60, 59 / 60)


@scored
def test_doubled_lines_match_once():
    assert once(lines(49, 51), drawn((50,))) == (0.5, 1)
    assert once(lines(50), drawn((49, 51))) == (1, 0.5)


@scored
def test_a_pixel_is_matched_so_that_another_can_be():
    """Greedy from the left would give 11 to 10 and leave 12 alone."""
    found, wanted = np.zeros((1, 40), bool), np.zeros((1, 40), bool)
    found[0, [11, 13]] = wanted[0, [10, 12]] = True
    assert [each.sum() for each in edges.match(found, wanted, 1.0)] == [2, 2]


@scored
def test_precision_is_with_anyone_and_recall_over_everyone():
    people = drawn((30,), (30, 70))
    assert once(lines(30), people) == (1, 120 / 180)
    assert once(lines(30, 70), people) == (1, 1)
    assert once(lines(30, 50, 70), people) == (pytest.approx(2 / 3), 1)


@scored
def test_empty_maps_and_people_who_drew_nothing():
    assert once(lines(), drawn((30,))) == (0, 0)
    assert once(lines(30), drawn(())) == (0, 0)
    assert once(lines(30), drawn((), (30,))) == (1, 1)
    result = measure([(lines(), drawn(()))], FEW)
    assert (result["ODS"], result["OIS"], result["AP"], result["R50"]) == (0, 0, 0, None)


@scored
def test_thick_lines_are_thinned():
    counts = count(lines(49, 50, 51), drawn((50,)), FEW)
    assert 56 <= counts.found[0] <= 60
    assert counts.precision[0] == 1


@scored
def test_one_threshold_for_all_and_one_for_each():
    """The first image has a right line of 0.9 and a wrong one of 0.5, the second a right one of 0.3.

    By the totals: up to 0.3, precision 2/3 and recall 1; up to 0.5, 1/2 and 1/2; up to 0.9, 1 and 1/2; then nothing.
    """
    images = [(lines(30, strength=0.9) + lines(70, strength=0.5), drawn((30,))), (lines(50, strength=0.3), drawn((50,)))]
    result = measure(images)
    assert result["ODS"] == pytest.approx(0.8)
    assert 0 < result["threshold"] <= 0.3
    assert result["OIS"] == 1
    # Precision over recall: from 0 at 0 by 0.5 at 0.5 to 2/3 at 1, at 101 places, by 100.
    assert result["AP"] == pytest.approx((12.75 + 25 + 4.25) / 100)
    assert result["R50"] == 0.5
    assert result["images"] == 2
    assert result["protocol"]["matching"].startswith("approximate")


@scored
def test_images_of_different_sizes():
    small = np.zeros((40, 50))
    small[20, 10:40] = 1
    assert measure([(lines(50), drawn((50,))), (small, small[None] > 0)], FEW)["ODS"] == 1


@scored
def test_as_many_pairs_as_there_can_be():
    """Against augmenting paths written out (Kuhn), on scattered pixels."""
    random = np.random.default_rng(0)
    for radius in (0.4, 1.0, 2.3, 4.34):
        found, wanted = random.random((2, 18, 23)) < random.uniform(0.05, 0.4)
        ours = edges.match(found, wanted, radius)
        assert ours[0].sum() == ours[1].sum() == most_pairs(np.argwhere(found), np.argwhere(wanted), radius)
        assert not (ours[0] & ~found).any()
        assert not (ours[1] & ~wanted).any()


def most_pairs(found: np.ndarray, wanted: np.ndarray, radius: float) -> int:
    near = [np.flatnonzero(((wanted - place) ** 2).sum(1) <= radius**2).tolist() for place in found]
    owner: dict[int, int] = {}

    def take(place: int, seen: set[int]) -> bool:
        for partner in near[place]:
            if partner not in seen:
                seen.add(partner)
                if partner not in owner or take(owner[partner], seen):
                    owner[partner] = place
                    return True
        return False

    return sum(take(place, set()) for place in range(len(found)))


def test_the_benchmarks_arithmetic_needs_no_extra():
    """Three thresholds of one image: P .5 .8 1, R 1 .8 .2."""
    ten = np.full(3, 10)
    counts = edges.Counts(np.array([10, 8, 2]), ten, np.array([10, 8, 2]), np.array([20, 10, 2]))
    result = edges.summarise([counts], Protocol(thresholds=3))
    assert result["OIS"] == pytest.approx(0.8)
    assert result["ODS"] == pytest.approx(0.8, abs=1e-3)
    assert result["R50"] == 1
    expected = np.interp(np.arange(101) / 100, [0.2, 0.8, 1], [1, 0.8, 0.5])
    assert result["AP"] == pytest.approx(expected[20:].sum() / 100)
    assert (counts + counts).f.tolist() == counts.f.tolist()


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Fault, match=r"^edge scores want scipy and skimage, which is not installed; run pip install 'gigamask\[edges\]'$"):
        measure([(lines(50), drawn((50,)))])


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(Fault, match=r"values from 0.0 to 255.0, they must be in \[0, 1\]"):
        count(lines(3, strength=255.0), drawn((3,)), FEW)
    with pytest.raises(Fault, match=r"values from nan to nan"):
        count(np.full((4, 4), np.nan), np.ones((1, 4, 4), bool), FEW)
    with pytest.raises(Fault, match=r"nobody's boundaries"):
        count(lines(3), drawn()[:0].reshape(0, 100, 100), FEW)
    with pytest.raises(Fault, match=r"no image to score edges on"):
        measure([])
    with pytest.raises(Fault, match=r"Protocol.thresholds is 1, there must be 2 at least"):
        Protocol(thresholds=1)
