"""Evaluation's next click against RITM's rule written out with distances in whole numbers, which
know no rounding.

The rule (Sofiiuk et al. 2021, `Clicker._get_next_click`; Kirillov et al. 2023, appendix D.1):
misses and false alarms apart, each padded by a pixel of outside; every pixel's distance to the
nearest outside it; pixels clicked before do not count; the larger maximum wins, a tie is negative;
among equals the first in reading order."""

import cv2
import numpy as np
import pytest
import torch

from gigamask.prompts.clicks import input_to_cell
from gigamask.prompts.schedule import CenterClicks
from gigamask.types import Prediction, PromptRound, Targets


def squares(region: np.ndarray) -> np.ndarray:
    """Each pixel's squared distance to the nearest pixel outside, by trying them all; 0 outside."""
    padded = np.pad(region, 1)
    inside, outside = np.argwhere(padded), np.argwhere(~padded)
    distances = np.zeros(padded.shape, np.int64)
    for start in range(0, len(inside), 500):
        some = inside[start : start + 500]
        distances[tuple(some.T)] = ((some[:, None] - outside[None]) ** 2).sum(-1).min(1)
    return distances[1:-1, 1:-1]


def roots(region: np.ndarray) -> np.ndarray:
    """The same from cv2, as RITM has it, for larger pictures."""
    return cv2.distanceTransform(np.pad(region, 1).astype(np.uint8), cv2.DIST_L2, 0)[1:-1, 1:-1]


def click_by_rule(truth, guess, valid, clicked, distance=squares) -> tuple[int, int, int]:
    """The next click x, y and label; without an error left it confirms, as `CenterClicks` says,
    where the papers say nothing."""
    free = np.ones(truth.shape, np.int64)
    for x, y in clicked:
        free[y, x] = 0
    misses, alarms = (
        distance(truth & ~guess & valid) * free,
        distance(~truth & guess & valid) * free,
    )
    chosen, label = (misses, 1) if misses.max() > alarms.max() else (alarms, 0)
    if chosen.max() == 0:
        chosen, label = distance(truth & valid) * free, 1
    if chosen.max() == 0:
        chosen, label = distance(~truth & valid) * free, 0
    if chosen.max() == 0:
        return 0, 0, -1
    y, x = np.argwhere(chosen == chosen.max())[0]
    return int(x), int(y), label


def play_and_compare(
    truth: np.ndarray, guesses: list[np.ndarray], valid: np.ndarray | None = None, distance=squares
) -> list[tuple[int, int, int]]:
    """Plays a click against each guess, the first against none, and compares each with the rule's;
    returns the clicks."""
    valid = np.ones_like(truth) if valid is None else valid
    given = Targets(
        torch.from_numpy(truth)[None],
        torch.from_numpy(valid)[None],
        torch.zeros(1, 4),
        (4.0, 4.0),
        torch.ones(1, 2),
    )
    policy, played, clicks = CenterClicks(clicks=len(guesses) + 1), None, []
    for guess in [np.zeros_like(truth), *guesses]:
        if clicks:
            logits = torch.from_numpy(np.where(guess, 1.0, -1.0).astype(np.float32))[None, None]
            played = PromptRound(
                len(clicks) - 1,
                prompts,
                Prediction(logits, torch.ones(1, 1), torch.zeros(1, 1, 4, 4)),
            )
        prompts = policy.next(played, given, None, 0.0)
        x, y = input_to_cell(prompts.points_xy_input[:, -2], given)[0].tolist()
        found = x, y, int(prompts.labels[0, -2])
        expected = click_by_rule(truth, guess, valid, [click[:2] for click in clicks], distance)
        assert found[2] == expected[2]
        assert found[2] == -1 or found == expected
        clicks.append(found)
    return clicks


def blob(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Noise, or a smooth region."""
    noise = random.normal(size=size).astype(np.float32)
    return (
        noise if random.random() < 0.3 else cv2.GaussianBlur(noise, (0, 0), random.uniform(0.8, 5))
    ) > random.normal(0, 0.05)


@pytest.mark.parametrize("seed", range(40))
def test_random_regions(seed):
    random = np.random.default_rng(seed)
    size = tuple(map(int, random.integers(1, 28, 2)))
    valid = blob(random, size) | (random.random() < 0.7)
    play_and_compare(blob(random, size), [blob(random, size) for _ in range(5)], valid)


@pytest.mark.parametrize("seed", range(15))
def test_prediction_that_never_changes(seed):
    """Then clicked pixels decide: the deepest that is left, however near to an earlier click."""
    random = np.random.default_rng(100 + seed)
    size = tuple(map(int, random.integers(3, 20, 2)))
    clicks = play_and_compare(blob(random, size), [blob(random, size)] * 8)
    there = [click[:2] for click in clicks if click[2] >= 0]
    assert len(set(there)) == len(there)


def test_equally_deep_errors_are_clicked_as_false_positives():
    truth, guess = np.zeros((12, 45), bool), np.zeros((12, 45), bool)
    truth[1:11, 34:44] = guess[1:11, 34:44] = True  # what is clicked first, and found
    truth[2:9, 3:10] = True
    guess[2:9, 18:25] = True
    assert play_and_compare(truth, [guess])[1] == (21, 5, 0)
    guess[2:9, 24] = False
    assert play_and_compare(truth, [guess])[1] == (6, 5, 1)


def test_errors_that_end_where_the_picture_does():
    full, empty = np.ones((9, 14), bool), np.zeros((9, 14), bool)
    assert play_and_compare(full, [empty])[:2] == [(4, 4, 1), (5, 4, 1)]
    assert play_and_compare(empty, [full])[:2] == [(4, 4, 0), (5, 4, 0)]
    corner = empty.copy()
    corner[:4, :4] = True
    assert play_and_compare(corner, [empty, full, ~corner])[0] == (1, 1, 1)


def test_thin_and_scattered_errors():
    size = (15, 17)
    y, x = np.mgrid[: size[0], : size[1]]
    row, column, dot = y == 7, x == 16, (y == 14) & (x == 0)
    checks, ring, stairs = (
        (x + y) % 2 == 0,
        (np.hypot(y - 7, x - 8) > 4) & (np.hypot(y - 7, x - 8) < 7),
        x == y,
    )
    everything = [row, column, dot, checks, ring, stairs, x < 0, x >= 0]
    for truth in everything:
        play_and_compare(truth, everything)


def test_nearly_equal_depths():
    """A miss and a false alarm as deep as the roots of 225 and 226, either way round."""
    y, x = np.mgrid[:41, :140]
    first, left, right = ((y - 20) ** 2 + (x - centre) ** 2 for centre in (19, 65, 115))
    for miss, label in ((226, 1), (225, 0)):
        truth, guess = (first < 300) | (left < miss), (first < 300) | (right < 451 - miss)
        assert play_and_compare(truth, [guess])[1] == (65 if label else 115, 20, label)


@pytest.mark.parametrize("seed", range(3))
def test_pictures_of_true_size(seed):
    random = np.random.default_rng(seed)
    size = (480, 640)
    regions = [
        cv2.resize(
            blob(random, (48, 64)).astype(np.uint8), size[::-1], interpolation=cv2.INTER_LINEAR
        )
        > 0
        for _ in range(4)
    ]
    play_and_compare(regions[0], regions[1:], distance=roots)
