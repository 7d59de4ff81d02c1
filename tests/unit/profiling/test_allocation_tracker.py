"""Live bytes of real tensors: each storage counts once, from its creation until it is freed."""

import pytest
import torch

from gigamask.profiling.dry_run import AllocationTracker


@pytest.mark.slow
def test_storages_count_once_until_they_are_freed():
    with AllocationTracker() as tracker:
        first = torch.zeros(1000)
        view = first.view(10, 100)[3:]
        assert tracker.current == 4000
        second = first + 1
        del first
        assert tracker.current == 8000  # the view still holds it
        del view
        assert tracker.current == 4000
        second += 1
        assert (tracker.current, tracker.peak) == (4000, 8000)
        assert tracker.take_peak() == 8000
        assert tracker.take_peak() == 4000
        del second
    assert tracker.current == 0


def test_saved_tensors_of_autograd_count():
    weight = torch.ones(100, 100, requires_grad=True)
    with AllocationTracker() as tracker:
        answer = (weight @ weight).exp().sum()
        kept = tracker.current
        assert kept == 40000 + 4
        answer.backward()
        del answer
        assert tracker.current == 40000  # the gradient
        assert tracker.peak > kept + 40000


def test_sizes_round_up_to_blocks():
    with AllocationTracker(512) as tracker:
        one, two = torch.zeros(1), torch.zeros(129)
        assert tracker.current == 512 + 1024
        del one, two


def test_all_results_of_an_operator_count():
    with AllocationTracker() as tracker:
        parts = torch.ones(10, 10).unbind()
        assert tracker.current == 400
        values, places = torch.arange(8.0).topk(2)
        assert tracker.current == 400 + 8 + 16
    assert len(parts) == 10
    assert len(values) == len(places)
