"""The arithmetic of a plan: who holds what, how batches are split, how long it takes, and how it is told."""

from itertools import islice

import numpy as np
import pytest

from gigamask.faults import Fault
from gigamask.memory.gpus import find
from gigamask.memory.planner import GIB, Fleet, Share, Standing, held, peak_of, table, time
from gigamask.samplers.batch_sampler import SampleSequence, iter_steps
from gigamask.samplers.random import Random
from gigamask.seams import Items

STANDING = Standing(
    inside={"weights": 800.0, "gradients": 400.0, "optimizer": 1600.0},
    outside={"weights": 100.0, "gradients": 50.0, "optimizer": 200.0},
    largest={"weights": 80.0, "gradients": 40.0, "optimizer": 160.0},
)
PEAKS = {"forward": 30, "rounds": 90, "backward": 70, "update": 5}


def test_a_world_is_machines_and_gpus():
    assert (Fleet.parse("32x8"), Fleet.parse("8"), Fleet.parse("1x1")) == (Fleet(32, 8), Fleet(1, 8), Fleet(1, 1))
    assert Fleet.parse("32x8").size == 256
    for words in ("", "8x", "x8", "0x8", "8x0", "2x3x4", "-1", "two"):
        with pytest.raises(Fault, match=rf"^--world is '{words}', it must be machines x GPUs on each, such as 32x8"):
            Fleet.parse(words)


@pytest.mark.parametrize(("batch", "micro", "processes"), [(8, 2, 4), (10, 2, 4), (3, 4, 8), (7, 1, 1), (256, 1, 256), (5, 3, 2)])
def test_a_batch_is_shared_as_it_is_split(batch, micro, processes):
    sequence = SampleSequence(Random(), Items(1000, {}), None, lambda items: (items, np.full(len(items), -1)), False)
    steps = [next(islice(iter_steps(sequence, 0, batch, micro, rank, processes), 1)) for rank in range(processes)]
    images = [sum(map(len, step.micros)) for step in steps]
    share = Share.of(batch, micro, processes)
    assert share.images == max(images)
    assert share.busy == images.count(max(images))
    assert set(images) <= {share.images, share.images - 1}
    assert {len(step.micros) for step in steps} == {share.micros}
    assert share.micro == max(len(visits) for step in steps for visits in step.micros)


def test_what_is_said_of_a_share():
    assert Share.of(256, 1, 256).told(256, 256) == "batch of 256 images over 256 processes: 1 each, in 1 micro-batch of at most 1"
    assert Share.of(10, 2, 4).told(10, 4) == "batch of 10 images over 4 processes: 3 on 2 of them, 2 on the others, in 2 micro-batches of at most 2"
    assert Share.of(4, 4, 1).told(4, 1) == "batch of 4 images over 1 process: 4 each, in 1 micro-batch of at most 4"


def test_one_process_holds_everything_and_exchanges_nothing():
    found = held(STANDING, PEAKS, 20, 7, "ddp", Fleet(1, 1), 1.0)
    assert found["rounds"] == {"weights": 900, "gradients": 450, "optimizer": 1800, "batch": 7, "activations": 20, "at work": 70}
    assert found["update"] == {"weights": 900, "gradients": 450, "optimizer": 1800, "batch": 7, "activations": 0, "at work": 5}
    assert peak_of(found) == ("rounds", 900 + 450 + 1800 + 7 + 90)


def test_many_sum_a_flat_copy_of_their_gradients():
    found = held(STANDING, PEAKS, 20, 7, "ddp", Fleet(2, 4), 1.0)
    assert found["update"]["at work"] == 5 + 450
    assert found["rounds"]["at work"] == 70


@pytest.mark.parametrize(("parallel", "parts", "width"), [("fsdp", 8, 1.0), ("hsdp", 4, 0.5)])
def test_blocks_are_split_and_gathered_one_at_a_time(parallel, parts, width):
    found = held(STANDING, PEAKS, 20, 7, parallel, Fleet(2, 4), width)
    assert {kind: found["rounds"][kind] for kind in STANDING.inside} == {
        kind: round(STANDING.outside[kind] + STANDING.inside[kind] / parts) for kind in STANDING.inside
    }
    assert found["forward"]["at work"] == 10 + 2 * width * 80
    assert found["rounds"]["at work"] == 70
    assert found["backward"]["at work"] == 50 + 2 * width * 80 + (1 + width) * 40
    assert found["update"]["at work"] == 5 + 50


def test_activations_are_no_more_than_a_phase_holds():
    assert held(STANDING, {"forward": 30}, 40, 0, "ddp", Fleet(1, 1), 1.0)["forward"]["activations"] == 30


def test_hours_and_dollars():
    gpu = find("mine=80,100")
    rows = time(3.6e15, 1000, gpu, "bf16", Fleet(2, 4), {"one": 0.5, "other": 0.25}, 2.0)
    assert [row["hours"] for row in rows] == pytest.approx([20, 40])
    assert [row["gpu_hours"] for row in rows] == pytest.approx([160, 320])
    assert [row["dollars"] for row in rows] == pytest.approx([320, 640])
    assert "dollars" not in time(1.0, 1, gpu, "bf16", Fleet(1, 1), {"one": 0.5}, None)[0]


def plan(**changed):
    phases = held(
        Standing(
            *({kind: bytes_held * GIB / 1000 for kind, bytes_held in part.items()} for part in (STANDING.inside, STANDING.outside, STANDING.largest))
        ),
        PEAKS,
        20,
        7,
        "ddp",
        Fleet(2, 4),
        1.0,
    )
    return {
        "recipe": "mine",
        "device": "cuda",
        "precision": "bf16",
        "gpu": {"name": "h100", "gib": 79.1, "source": "a sheet", "tflops": {"bf16": 989.0}},
        "world": {"nodes": 2, "each": 4},
        "parallel": "ddp",
        "batch": 16,
        "share": {"images": 2, "busy": 8, "micros": 2, "micro": 1},
        "masks": 64,
        "masks_at_once": 32,
        "rounds": 11,
        "parameters": 2_000_000,
        "trained": 2_000_000,
        "phases": phases,
        "peak_phase": "rounds",
        "peak_bytes": peak_of(phases)[1],
        "flops_an_image": {"encoder": 3e12, "rounds": 1e12, "computed_again": 0.0, "mining": 0.0},
        "flops_a_step": 64e12,
        "steps": 1000,
        "room_bytes": 77.6 * GIB,
        "spare_gib": 1.5,
        "fits": True,
        "time": [{"efficiency": 0.25, "source": "somewhere", "hours": 12.34, "gpu_hours": 98.7, "dollars": 1234.5}],
        "changes": [],
    } | changed


def test_a_table():
    assert table(plan()).splitlines() == [
        "mine: 2.0 M parameters; bf16 on a GPU",
        "batch of 16 images over 8 processes: 2 each, in 2 micro-batches of at most 1",
        "64 masks an image, 32 at once, 11 rounds",
        "",
        "GiB of one process, when each phase of a step holds most:",
        "                 forward    rounds  backward    update",
        "  weights           0.90      0.90      0.90      0.90",
        "  gradients         0.45      0.45      0.45      0.45",
        "  optimizer         1.80      1.80      1.80      1.80",
        "  batch             0.00      0.00      0.00      0.00",
        "  activations       0.00      0.00      0.00      0.00",
        "  at work           0.00      0.00      0.00      0.45",
        "  in all            3.15      3.15      3.15      3.60",
        "peak 3.60 GiB of 79.1 GiB (h100: a sheet), of which 1.5 stay free: fits, 74.0 GiB left",
        "",
        "1,000 steps of 64 TFLOP, 4 an image (encoder 3 + rounds 1)",
        "hours at a share of the peak of 989 TFLOP/s; loading and exchange are not counted:",
        "      12.3 h           99 GPU hours  $1,234  at 25.0%: somewhere",
    ]


def test_a_table_of_what_does_not_fit():
    tried = {"flags": "--micro 1", "peak_bytes": 3 * GIB, "fits": False, "more_flops": 0.0}
    lines = table(plan(fits=False, room_bytes=2.0 * GIB, changes=[tried])).splitlines()
    assert any(line.endswith("DOES NOT FIT, 1.6 GiB too much") for line in lines)
    assert "      3.00 GiB        with --micro 1" in lines
    assert any(line.startswith("  none of these makes it fit: try") for line in lines)
    lines = table(plan(fits=False, changes=[tried, tried | {"fits": True, "flags": "--recompute 1", "more_flops": 0.2}])).splitlines()
    assert "      3.00 GiB  fits  with --recompute 1, 20% more FLOPs" in lines
    assert not any("none of these" in line for line in lines)


def test_a_table_without_a_gpu_of_a_little_run_without_rounds():
    little = dict.fromkeys(STANDING.inside, 1000)
    changed = {"gpu": None, "masks": 0, "rounds": 0, "trained": 1_900_000, "phases": {"forward": little, "rounds": little}, "peak_bytes": 3000}
    share = {"images": 1, "busy": 6, "micros": 1, "micro": 1}
    text = table(plan(**changed, share=share, flops_an_image={"encoder": 3e12, "rounds": 0.0}))
    assert "mine: 2.0 M parameters, 1.9 M of them trained; bf16 on a GPU" in text
    assert "2 processes have no image in any step: give more --batch, or fewer GPUs" in text
    assert "MiB of one process" in text
    assert "rounds" not in text.replace("in the phase rounds", "")
    assert "1,000 steps of 64 TFLOP, 3 an image" in text.splitlines()[-1]
