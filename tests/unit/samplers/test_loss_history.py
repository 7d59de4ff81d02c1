"""The loss history."""

import numpy as np
import pytest

from gigamask.samplers.loss_history import LossHistory
from tests.errors import error_line


def updated(history: LossHistory, items: list[int], epoch: int, losses: list[float]) -> LossHistory:
    history.update(np.array(items), np.full(len(items), epoch), np.array(losses))
    return history


def test_an_average_begins_with_the_first_loss_and_moves_by_decay():
    history = updated(updated(LossHistory.empty("", 4, 0.75), [0, 2], 0, [4.0, 8.0]), [2], 1, [4.0])
    assert np.array_equal(
        history.losses, np.array([4.0, np.nan, 7.0, np.nan], np.float32), equal_nan=True
    )
    assert history.seen.tolist() == [0, -1, 1, -1]


def test_without_decay_the_last_loss_stands():
    assert updated(
        updated(LossHistory.empty("", 1, 0.0), [0], 0, [4.0]), [0], 0, [1.0]
    ).losses.tolist() == [1.0]


def test_an_item_that_a_step_holds_twice_counts_with_its_mean():
    history = updated(updated(LossHistory.empty("", 2, 0.5), [1], 0, [8.0]), [1, 1], 0, [1.0, 3.0])
    assert history.losses[1] == 5.0
    history.take_snapshot(1)
    assert history.snapshot.epoch_losses.tolist() == [4.0]


def test_last_epoch_of_an_item_is_right_if_a_step_spans_two():
    history = LossHistory.empty("", 3, 0.5)
    history.update(np.array([0, 1, 0, 2]), np.array([0, 0, 1, 1]), np.ones(4))
    assert history.seen.tolist() == [1, 0, 1]


def test_what_has_no_loss_changes_nothing():
    history = updated(LossHistory.empty("", 2, 0.5), [0, 1], 3, [np.nan, np.inf])
    assert np.isnan(history.losses).all()
    assert history.seen.tolist() == [-1, -1]
    history.take_snapshot(0)
    assert not len(history.snapshot.epoch_losses)


def test_epochs_have_means_and_those_without_losses_none():
    history = updated(
        updated(updated(LossHistory.empty("", 9, 0.5), [0, 1], 0, [1.0, 3.0]), [2], 2, [5.0]),
        [3],
        0,
        [5.0],
    )
    history.take_snapshot(4)
    assert np.array_equal(history.snapshot.epoch_losses, [3.0, np.nan, 5.0, np.nan], equal_nan=True)
    history.take_snapshot(1)
    assert history.snapshot.epoch_losses.tolist() == [3.0], "what goes on has no mean yet"


def test_what_is_frozen_stays():
    history = updated(LossHistory.empty("", 2, 0.5), [0], 0, [1.0])
    history.take_snapshot(1)
    updated(history, [0, 1], 1, [9.0, 9.0])
    assert np.array_equal(
        history.snapshot.losses, np.array([1.0, np.nan], np.float32), equal_nan=True
    )
    assert history.snapshot.seen.tolist() == [0, -1]
    assert history.snapshot.epoch_losses.tolist() == [1.0]


def test_loss_history_round_trips():
    history = updated(LossHistory.empty("", 3, 0.5), [0, 1], 0, [1.0, 2.0])
    history.take_snapshot(1)
    updated(history, [1, 2], 1, [5.0, 7.0])
    back = LossHistory.from_arrays(history.arrays(), "", 0.5, "there")
    assert history.arrays().keys() == back.arrays().keys()
    assert all(
        np.array_equal(array, back.arrays()[name], equal_nan=True)
        for name, array in history.arrays().items()
    )


@pytest.mark.parametrize("odd", ["sums", "more"])
def test_loss_history_with_other_arrays_is_rejected(odd):
    arrays = LossHistory.empty("", 3, 0.5).arrays()
    if arrays.pop(odd, None) is None:
        arrays[odd] = np.zeros(1)
    with error_line(f"^there: array '{odd}' .*--out"):
        LossHistory.from_arrays(arrays, "", 0.5, "there")
