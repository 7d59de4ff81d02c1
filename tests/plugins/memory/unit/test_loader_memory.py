"""What loader processes hold, on a loader that is real and on looks that are made up."""

import multiprocessing
from dataclasses import replace

import pytest

from gigamask.data import loader, process_memory
from gigamask.data.process_memory import ProcessMemory
from gigamask.plugins.memory import loader_memory
from gigamask.profiling.held_bytes import held_bytes
from gigamask.training import train_data
from tests.errors import error_line
from tests.little import little

pytestmark = pytest.mark.skipif(not process_memory.PROC.is_dir(), reason="this system has no /proc")
MB = 10**6


def run(scenes, tmp_path, workers):
    plain = little()
    return replace(
        plain, data=(str(scenes),), out=str(tmp_path), loader=replace(plain.loader, workers=workers)
    )


@pytest.mark.slow
def test_a_real_loader_is_looked_at_and_ended(scenes, tmp_path):
    wanted, seen = run(scenes, tmp_path, 2), []
    index = train_data.open_index(wanted)
    found = loader_memory.measure(
        train_data.TrainData(wanted, index).batches(),
        12,
        loader.PREFETCH,
        lambda done, total: seen.append((done, total)),
    )
    assert multiprocessing.active_children() == []
    assert seen == [(number, 12) for number in range(1, 13)]
    steps = train_data.TrainData(
        replace(wanted, loader=replace(wanted.loader, workers=0)), index
    ).batches()
    batches = [batch for _ in range(6) for batch in next(steps)]
    assert found["images"] == sum(len(batch.names) for batch in batches) == 18
    assert found["batch_bytes"] == max(map(held_bytes, batches)) > 2 * 3 * 64 * 64
    masks = [held_bytes((batch.rle_bounds, batch.rle_offsets)) for batch in batches]
    assert found["mask_bytes_per_sample"] == round(sum(masks) / 18)
    assert found["mask_bytes_per_sample_most"] == round(
        max(held / len(batch.names) for held, batch in zip(masks, batches, strict=True))
    )
    assert found["waiting_bytes_limit"] == 2 * loader.PREFETCH * found["batch_bytes"]
    assert len(found["workers"]) == 2
    for each in found["workers"]:
        assert each["resident_bytes"] > each["proportional_bytes"] > 0
        assert each["above_imports_bytes"] < 60 * MB
        assert not each["grew"]
    text = loader_memory.table(found)
    assert text.splitlines()[0] == "18 images in 12 batches from 2 processes; peak of each"
    assert "GROWS" not in text
    assert f"at most 2 processes x {loader.PREFETCH} x " in text


@pytest.mark.parametrize("step_mb, grew", [(0, False), (0.2, False), (1, True)])
def test_growth_is_flagged(step_mb, grew):
    looks = [
        ProcessMemory(200 * MB, 100 * MB, int((150 + 20 * (number % 2) + step_mb * number) * MB))
        for number in range(30)
    ]
    found = loader_memory.worker(7, looks, idle=120 * MB)
    assert found["grew"] is grew
    assert found["above_imports_bytes"] == max(look.allocated for look in looks) - 120 * MB
    assert (found["resident_bytes"], found["proportional_bytes"]) == (200 * MB, 100 * MB)
    told = {
        "images": 30,
        "batches": 30,
        "workers": [found],
        "batch_bytes": 1,
        "mask_bytes_per_sample": 1,
    }
    told |= {"mask_bytes_per_sample_most": 1, "prefetch": 2, "waiting_bytes_limit": 2}
    assert ("GROWS" in loader_memory.table(told)) is grew
    assert ("a growing process may keep" in loader_memory.table(told)) is grew


@pytest.mark.slow
def test_too_few_batches_show_no_growth(scenes, tmp_path):
    with error_line(r"^--batches must be at least 9 .*, got 8$"):
        loader_memory.measure(iter(()), 8, 2, print)


@pytest.mark.slow
def test_a_loader_without_processes_has_none_to_look_at(scenes, tmp_path):
    wanted = run(scenes, tmp_path, 0)
    steps = train_data.TrainData(wanted, train_data.open_index(wanted)).batches()
    with error_line(r"^no loader process could be measured; use at least one worker$"):
        loader_memory.measure(steps, 9, 2, lambda *_: None)


def test_an_idle_process_is_measured_and_gone():
    assert loader_memory.idle_bytes() > 10 * MB
    assert multiprocessing.active_children() == []
