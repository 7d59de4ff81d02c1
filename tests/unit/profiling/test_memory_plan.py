"""The arithmetic of a plan: bytes of each process, batch splits, hours, and the printed table."""

from itertools import islice

import numpy as np
import pytest

from gigamask.interfaces import SampleTable
from gigamask.profiling.gpus import find
from gigamask.profiling.memory_plan import (
    GIB,
    BatchSplit,
    Cluster,
    StateBytes,
    bytes_by_phase,
    loading,
    peak_phase,
    table,
    training_hours,
)
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.random import Random
from tests.errors import error_line
from tests.orders import iter_steps

STATE = StateBytes(
    sharded={"weights": 800.0, "gradients": 400.0, "optimizer": 1600.0},
    replicated={"weights": 100.0, "gradients": 50.0, "optimizer": 200.0},
    largest_block={"weights": 80.0, "gradients": 40.0, "optimizer": 160.0},
)
PEAKS = {"forward": 30, "rounds": 90, "backward": 70, "update": 5}


def test_a_world_is_machines_and_gpus():
    assert (Cluster.parse("32x8"), Cluster.parse("8"), Cluster.parse("1x1")) == (
        Cluster(32, 8),
        Cluster(1, 8),
        Cluster(1, 1),
    )
    assert Cluster.parse("32x8").size == 256
    for words in ("", "8x", "x8", "0x8", "8x0", "2x3x4", "-1", "two"):
        with error_line(rf"^--world must be .*, got '{words}'$"):
            Cluster.parse(words)


@pytest.mark.parametrize(
    "batch, micro, processes",
    [(8, 2, 4), (10, 2, 4), (3, 4, 8), (7, 1, 1), (256, 1, 256), (5, 3, 2)],
)
def test_a_batch_is_shared_as_it_is_split(batch, micro, processes):
    sequence = SampleSequence(
        Random(), SampleTable(1000, {}), None, lambda items: (items, np.full(len(items), -1)), False
    )
    steps = [
        next(islice(iter_steps(sequence, 0, batch, micro, rank, processes), 1))
        for rank in range(processes)
    ]
    images = [sum(map(len, step.micro_batches)) for step in steps]
    split = BatchSplit.from_batch_size(batch, micro, processes)
    assert split.images == max(images)
    assert split.busiest == images.count(max(images))
    assert set(images) <= {split.images, split.images - 1}
    assert {len(step.micro_batches) for step in steps} == {split.micro_batches}
    assert split.micro_batch_size == max(len(refs) for step in steps for refs in step.micro_batches)


def test_an_uneven_batch_is_described():
    assert BatchSplit.from_batch_size(10, 2, 4).describe(10, 4) == (
        "batch of 10 images over 4 processes: 3 on 2 of them, 2 on the others, in 2 "
        "micro-batches of at most 2"
    )


def test_one_process_holds_everything_and_exchanges_nothing():
    found = bytes_by_phase(STATE, PEAKS, 20, 7, "ddp", Cluster(1, 1), 1.0)
    assert found["rounds"] == {
        "weights": 900,
        "gradients": 450,
        "optimizer": 1800,
        "batch": 7,
        "activations": 20,
        "temporary": 70,
    }
    assert found["update"] == {
        "weights": 900,
        "gradients": 450,
        "optimizer": 1800,
        "batch": 7,
        "activations": 0,
        "temporary": 5,
    }
    assert peak_phase(found) == ("rounds", 900 + 450 + 1800 + 7 + 90)


def test_many_sum_a_flat_copy_of_the_gradients_that_no_bucket_has():
    found = bytes_by_phase(STATE, PEAKS, 20, 7, "ddp", Cluster(2, 4), 1.0)
    assert found["update"]["temporary"] == 5 + 50
    assert found["rounds"]["temporary"] == 70


@pytest.mark.parametrize("parallel, parts, width", [("fsdp", 8, 1.0), ("hsdp", 4, 0.5)])
def test_blocks_are_split_and_gathered_one_at_a_time(parallel, parts, width):
    found = bytes_by_phase(STATE, PEAKS, 20, 7, parallel, Cluster(2, 4), width)
    assert {kind: found["rounds"][kind] for kind in STATE.sharded} == {
        kind: round(STATE.replicated[kind] + STATE.sharded[kind] / parts) for kind in STATE.sharded
    }
    assert found["forward"]["temporary"] == 10 + 2 * width * 80
    assert found["rounds"]["temporary"] == 70
    assert found["backward"]["temporary"] == 50 + 2 * width * 80 + (1 + width) * 40
    assert found["update"]["temporary"] == 5 + 50


def test_activations_are_no_more_than_a_phase_holds():
    assert (
        bytes_by_phase(STATE, {"forward": 30}, 40, 0, "ddp", Cluster(1, 1), 1.0)["forward"][
            "activations"
        ]
        == 30
    )


def test_hours_and_cost():
    gpu = find("mine=80,100")
    rows = training_hours(
        3.6e15, 1000, gpu, "bf16", Cluster(2, 4), {"one": 0.5, "other": 0.25}, 2.0
    )
    assert [row["hours"] for row in rows] == pytest.approx([20, 40])
    assert [row["gpu_hours"] for row in rows] == pytest.approx([160, 320])
    assert [row["dollars"] for row in rows] == pytest.approx([320, 640])
    assert (
        "dollars" not in training_hours(1.0, 1, gpu, "bf16", Cluster(1, 1), {"one": 0.5}, None)[0]
    )


def plan(**changed):
    phases = bytes_by_phase(
        StateBytes(
            *(
                {kind: bytes_held * GIB / 1000 for kind, bytes_held in part.items()}
                for part in (STATE.sharded, STATE.replicated, STATE.largest_block)
            )
        ),
        PEAKS,
        20,
        7,
        "ddp",
        Cluster(2, 4),
        1.0,
    )
    return {
        "recipe": "mine",
        "device": "cuda",
        "precision": "bf16",
        "gpu": {"name": "h100", "gib": 79.1, "source": "a sheet", "tflops": {"bf16": 989.0}},
        "world": {"nodes": 2, "gpus_per_node": 4},
        "parallel": "ddp",
        "batch": 16,
        "batch_split": {"images": 2, "busiest": 8, "micro_batches": 2, "micro_batch_size": 1},
        "masks": 64,
        "masks_per_chunk": 32,
        "rounds": 11,
        "parameters": 2_000_000,
        "trained": 2_000_000,
        "phases": phases,
        "peak_phase": "rounds",
        "peak_bytes": peak_phase(phases)[1],
        "flops_per_image": {"encoder": 3e12, "rounds": 1e12, "recomputed": 0.0, "mining": 0.0},
        "flops_per_step": 64e12,
        "steps": 1000,
        "available_bytes": 77.6 * GIB,
        "spare_gib": 1.5,
        "fits": True,
        "time": [
            {
                "efficiency": 0.25,
                "source": "somewhere",
                "hours": 12.34,
                "gpu_hours": 98.7,
                "dollars": 1234.5,
            }
        ],
        "loading": {"images_per_s": 31.25, "loader_processes": 2},
        "changes": [],
    } | changed


def test_the_fastest_says_how_many_loader_processes_it_needs():
    rows = [{"hours": 10.0}, {"hours": 2.0}]
    assert loading(rows, 3600, 8) == {"images_per_s": 4.0, "loader_processes": 1}
    assert loading(rows, 3600, 51) == {"images_per_s": 25.5, "loader_processes": 2}


def test_a_table():
    assert table(plan()).splitlines() == [
        "mine: 2.0 M parameters; bf16 on a GPU",
        "batch of 16 images over 8 processes: 2 each, in 2 micro-batches of at most 1",
        "64 masks per image, 32 at once, 11 rounds",
        "",
        "GiB of one process at the peak of each phase of a step:",
        "                 forward    rounds  backward    update",
        "  weights           0.90      0.90      0.90      0.90",
        "  gradients         0.45      0.45      0.45      0.45",
        "  optimizer         1.80      1.80      1.80      1.80",
        "  batch             0.00      0.00      0.00      0.00",
        "  activations       0.00      0.00      0.00      0.00",
        "  temporary         0.00      0.00      0.00      0.05",
        "  total             3.15      3.15      3.15      3.20",
        "peak 3.20 GiB of 79.1 GiB (h100: a sheet), 1.5 kept free: fits, 74.4 GiB left",
        "",
        "1,000 steps of 64 TFLOP, 4 per image (encoder 3 + rounds 1)",
        "hours at a share of the peak of 989 TFLOP/s, without loading and communication:",
        "      12.3 h           99 GPU hours  $1,234  at 25.0%: somewhere",
        "the fastest needs 31.2 images/s for each GPU, about 2 loader processes at 25 images/s"
        " from SA-1B's tars",
    ]


def test_a_table_of_what_does_not_fit():
    tried = {
        "flags": "--micro-batch-size 1",
        "peak_bytes": 3 * GIB,
        "fits": False,
        "more_flops": 0.0,
    }
    lines = table(plan(fits=False, available_bytes=2.0 * GIB, changes=[tried])).splitlines()
    assert any(line.endswith("DOES NOT FIT, 1.2 GiB over") for line in lines)
    assert "      3.00 GiB        with --micro-batch-size 1" in lines
    assert any(line.startswith("  none of these is enough: try") for line in lines)
    lines = table(
        plan(
            fits=False,
            changes=[
                tried,
                tried | {"fits": True, "flags": "--activation-checkpointing 1", "more_flops": 0.2},
            ],
        )
    ).splitlines()
    assert "      3.00 GiB  fits  with --activation-checkpointing 1, 20% more FLOPs" in lines
    assert not any("none of these" in line for line in lines)


def test_a_table_without_a_gpu_of_a_little_run_without_rounds():
    little = dict.fromkeys(STATE.sharded, 1000)
    changed = {
        "gpu": None,
        "masks": 0,
        "rounds": 0,
        "trained": 1_900_000,
        "phases": {"forward": little, "rounds": little},
        "peak_bytes": 3000,
    }
    split = {"images": 1, "busiest": 6, "micro_batches": 1, "micro_batch_size": 1}
    text = table(
        plan(**changed, batch_split=split, flops_per_image={"encoder": 3e12, "rounds": 0.0})
    )
    assert "mine: 2.0 M parameters, 1.9 M of them trained; bf16 on a GPU" in text
    assert "2 processes have no image in any step: use a larger --batch-size, or fewer GPUs" in text
    assert "MiB of one process" in text
    assert "rounds" not in text.replace("in the phase rounds", "")
    assert "1,000 steps of 64 TFLOP, 3 per image" in text.splitlines()[-1]
