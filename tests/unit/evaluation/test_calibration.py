"""Calibration of predictions whose numbers are worked out by hand."""

import numpy as np
import pytest

from gigamask.evaluation.calibration import calibrate
from tests.errors import error_line


def test_by_hand():
    """Bins: 0.1 alone; 0.72 and 0.78, which were 0.5 and 0.9; 0.95, which was 0.55."""
    found = calibrate(np.array([0.1, 0.72, 0.78, 0.95]), np.array([0.3, 0.5, 0.9, 0.55]))
    assert [each.count for each in found.bins] == [0, 1, 0, 0, 0, 0, 0, 2, 0, 1]
    seventies = found.bins[7]
    assert (seventies.low, seventies.high, seventies.predicted, seventies.actual) == pytest.approx(
        (0.7, 0.8, 0.75, 0.7)
    )
    assert (found.bins[0].predicted, found.bins[0].actual) == (None, None)
    assert found.expected_error == pytest.approx((0.2 + 2 * 0.05 + 0.4) / 4)
    assert found.bias == pytest.approx((-0.2 + 0.22 - 0.12 + 0.4) / 4)
    predicted = np.array([-0.5375, 0.0825, 0.1425, 0.3125])
    actual = np.array([-0.2625, -0.0625, 0.3375, -0.0125])
    expected = predicted @ actual / np.sqrt(predicted @ predicted * (actual @ actual))
    assert found.correlation == pytest.approx(expected)
    assert found.masks == 4


def test_errors_within_a_bin_cancel():
    """What expected calibration error is known for: right on the average of a bin is right."""
    found = calibrate(np.array([0.75, 0.75]), np.array([0.5, 1.0]))
    assert found.expected_error == 0
    assert found.correlation is None


def test_edges_belong_to_the_bin_above_and_one_to_the_last():
    edges = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1])
    assert [each.count for each in calibrate(edges, edges).bins] == [1] * 9 + [2]


def test_predictions_beyond_zero_and_one_stay_what_they_are():
    found = calibrate(np.array([-0.5, 1.5]), np.array([0.0, 1.0]))
    assert (found.bins[0].predicted, found.bins[9].predicted) == (-0.5, 1.5)
    assert found.expected_error == 0.5


def test_half_precision_is_summed_in_double():
    predicted = np.full(100_000, 0.95, np.float16)
    assert calibrate(predicted, predicted).bins[9].predicted == pytest.approx(
        float(np.float16(0.95)), abs=1e-12
    )


def test_no_masks():
    found = calibrate(np.zeros(0), np.zeros(0))
    assert (found.masks, found.expected_error, found.bias, found.correlation) == (
        0,
        None,
        None,
        None,
    )


def test_what_is_no_number_is_refused():
    with error_line(r"predicted IoU.*mask 1.*nan"):
        calibrate(np.array([0.5, np.nan]), np.zeros(2))
    with error_line(r"actual IoU.*mask 0.*inf"):
        calibrate(np.zeros(2), np.array([np.inf, 0]))
