"""Boundary scores of masks whose boundaries can be counted by hand."""

import numpy as np
import pytest

from gigamask.evaluation.boundary import BoundaryProtocol, boundary_f, boundary_iou


def square(start: int, stop: int, size: tuple[int, int] = (100, 100)) -> np.ndarray:
    mask = np.zeros((1, *size), bool)
    mask[0, start:stop, start:stop] = True
    return mask


def test_f_within_the_tolerance_is_one_and_beyond_it_falls():
    """100 x 100 has a diagonal of 141.4 and a tolerance of 1.13, which is 2 pixels."""
    assert BoundaryProtocol().tolerance_px((100, 100)) == 2
    assert boundary_f(square(20, 60), square(21, 61)).item() == 1
    assert boundary_f(255 * square(20, 60).astype(np.uint8), square(21, 61)).item() == 1
    assert 0 < boundary_f(square(20, 60), square(24, 64)).item() < 0.2


def test_bands_are_counted():
    """Bands 3 wide of squares 40 and 36 wide share a ring from 36 to 34 wide."""
    assert BoundaryProtocol().band_px((100, 100)) == 3
    outer, inner = 40**2 - 34**2, 36**2 - 30**2
    shared = 36**2 - 34**2
    assert boundary_iou(square(20, 60), square(22, 58)).item() == shared / (outer + inner - shared)


def test_other_protocols():
    guess, truth = square(20, 60), square(24, 64)
    assert boundary_f(guess, truth, BoundaryProtocol(tolerance=0.04)).item() == 1
    assert boundary_iou(guess, truth, BoundaryProtocol(band=0.5)).item() == pytest.approx(
        36**2 / (2 * 40**2 - 36**2)
    )


def test_no_masks():
    assert boundary_f(np.zeros((0, 5, 5), bool), np.zeros((0, 5, 5), bool)).shape == (0,)
    assert boundary_iou(np.zeros((0, 5, 5), bool), np.zeros((0, 5, 5), bool)).shape == (0,)
