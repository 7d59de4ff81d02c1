"""Parts of a step: ranges of a trace while one is recorded, nothing else."""

import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gigamask.distributed import profile_ranges
from gigamask.distributed.profile_ranges import PREFIX, profile_generator, profile_range


class Made:
    """What can be held by nobody."""


def test_nothing_is_marked_while_nobody_records(monkeypatch):
    monkeypatch.setattr(profile_ranges, "record_function", None)
    with profile_range("encode"):
        pass
    assert profile_range("all_reduce")(len)([1, 2]) == 2
    assert list(profile_generator("rounds", range(3))) == [0, 1, 2]


def test_parts_are_ranges_of_the_trace_and_what_is_done_with_the_made_is_in_none_of_them():
    def rounds():
        for _ in range(2):
            yield torch.zeros(3).sin()

    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        for each in profile_generator("rounds", rounds()):
            each.cos()
        with profile_range("encode"):
            torch.zeros(3).exp()
    inside = {
        event.name.removeprefix(PREFIX): [child.name for child in event.cpu_children]
        for event in recorder.events()
        if event.name.startswith(PREFIX) and event.cpu_children
    }
    assert "aten::sin" in inside["rounds"]
    assert "aten::exp" in inside["encode"]
    assert not any("aten::cos" in names for names in inside.values())


def test_what_was_made_is_let_go_before_the_next_is_made():
    seen = []

    def makes():
        for _ in range(2):
            made = Made()
            seen.append(weakref.ref(made))
            yield made
            del made
            assert seen[-1]() is None

    made = profile_generator("rounds", makes())
    for _ in range(2):
        next(made)
    with pytest.raises(StopIteration):
        next(made)
    assert len(seen) == 2
