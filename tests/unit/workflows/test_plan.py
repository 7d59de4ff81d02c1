"""What a run is said to take, against what it takes."""

import gc
from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.plan import events_peak
from gigamask.distributed.fsdp import shardable_parameters
from gigamask.losses.ohem import OHEM
from gigamask.profiling.dry_run import blank_batch
from gigamask.profiling.flops import StepFlops
from gigamask.profiling.gpus import Cluster, find
from gigamask.profiling.memory_plan import StateBytes
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.recipes import mae_tiny, mae_vit_l, sam_vit_h, tiny
from gigamask.recipes.sam import finetune
from gigamask.samplers.shards import Sharded
from gigamask.training.config import TrainConfig
from gigamask.training.optim import AdamW8bit, MuonAdamW
from gigamask.training.sam_config import SamLoaderConfig
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.workflows import plan as planning
from gigamask.workflows.plan import (
    DryRun,
    Hardware,
    bytes_by_phase,
    dry_run,
    dry_run_change,
    largest_micro_batch,
    make_plan,
    memory_options,
    peak_bytes,
    resolve,
)
from tests.errors import error_line
from tests.little import little

pytestmark = pytest.mark.usefixtures("no_shape_checks")

BASE = replace(
    little(), precision="fp32", prompts=InteractiveSchedule(clicks=1, mask_only_rounds=False)
)
BIG = replace(BASE, micro_batch_size=8, masks_per_chunk=64, loader=SamLoaderConfig(max_masks=64))


def measured(run: TrainConfig) -> int:
    """Returns the largest sum of torch's own allocations in two updates from a micro-batch."""
    gc.collect()  # what earlier tests left would count as given back
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        state = TrainState.initialize(run, torch.device("cpu"))
        state.model.train()
        batch = blank_batch(
            run.sample_config,
            run.random_spec,
            run.micro_batch_size,
            run.micro_batch_size * run.planning.masks_per_image,
        )
        for _ in range(2):
            step(
                run.task(torch.device("cpu")),
                state,
                [batch],
                run.micro_batch_size,
                0.0,
                run.optimizer.grad_clip,
            )
    return events_peak(profile)


@cache
def base() -> DryRun:
    return dry_run(BASE, "cpu", 2)


def total(run: TrainConfig, result: DryRun) -> int:
    return peak_bytes(replace(run, batch_size=run.micro_batch_size), Hardware(), result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, run",
    [
        (
            "tiny",
            replace(
                tiny(),
                micro_batch_size=2,
                masks_per_chunk=6,
                device="cpu",
                precision="fp32",
                loader=SamLoaderConfig(max_masks=5),
            ),
        ),
        (
            "bf16, recomputed, Muon",
            replace(
                BASE,
                precision="bf16",
                activation_checkpointing=1,
                masks_per_chunk=8,
                optimizer=MuonAdamW(),
            ),
        ),
        ("frozen", replace(BASE, freeze=("image_encoder",))),
        ("averaged", replace(BASE, ema=0.999)),
        ("mae_tiny", replace(mae_tiny(), micro_batch_size=4, device="cpu", precision="fp32")),
    ],
)
def test_the_predicted_peak_is_the_measured_one(name, run):
    """Within a hundredth; 10 % is what is promised."""
    assert total(run, dry_run(run, "cpu", run.micro_batch_size)) == pytest.approx(
        measured(run), rel=0.01
    )


@pytest.mark.slow
def test_what_stands_is_counted_part_by_part():
    model, found = BASE.build(), base()
    blocks = 4 * sum(
        parameter.numel()
        for block in model.image_encoder.blocks
        for parameter in shardable_parameters(block)
    )
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    state = found.state
    assert state.sharded["weights"] == state.sharded["gradients"] == blocks
    assert state.replicated == pytest.approx(
        {
            "weights": whole - blocks + buffers,
            "gradients": whole - blocks,
            "optimizer": 2 * (whole - blocks),
        },
        rel=0.1,
    )
    assert state.sharded["optimizer"] == pytest.approx(2 * blocks, rel=0.02)
    assert state.largest_block["weights"] < state.sharded["weights"]
    assert found.parameters == (whole // 4, whole // 4)


@pytest.mark.slow
def test_an_average_counts_four_bytes_per_trained_parameter():
    run = replace(BASE, freeze=("prompt_encoder",), optimizer=AdamW8bit())
    plain, averaged = (dry_run(replace(run, ema=decay), "cpu", 2) for decay in (0.0, 0.99))

    def held(result: DryRun) -> float:
        return result.state.sharded["optimizer"] + result.state.replicated["optimizer"]

    assert held(averaged) - held(plain) == 4 * plain.parameters[1]
    blocks = averaged.state.sharded["optimizer"] - plain.state.sharded["optimizer"]
    assert blocks == plain.state.sharded["gradients"]
    assert averaged.peaks == plain.peaks


@pytest.mark.slow
def test_a_gpu_is_planned_with_its_own_attention():
    """Its keys and queries carry a channel for each row and column, so that more is kept here."""
    found = dry_run(BASE, "cuda", 2)
    assert found.activation_bytes > base().activation_bytes
    assert found.state == base().state


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"masks_per_chunk": 2}, {"activation_checkpointing": 1}])
def test_partial_dry_runs_of_changes_equal_whole_ones(change):
    other = replace(BASE, **change)
    part, whole = dry_run_change(BASE, other, base()), dry_run(other, "cpu", other.micro_batch_size)
    assert total(other, part) == pytest.approx(total(other, whole), rel=0.002)
    assert part.activation_bytes == whole.activation_bytes


def test_several_processes_keep_the_gradients_of_the_encoder():
    one, two = (dry_run(BASE, "cpu", 2, processes) for processes in (1, 2))
    kept = sum(each.nbytes for each in BASE.build("meta").encoder.parameters())
    assert two.activation_bytes - one.activation_bytes == kept
    assert one.cleared_bytes - two.cleared_bytes == kept
    for hardware, result in ((Hardware(), one), (Hardware(cluster=Cluster(1, 2)), two)):
        phases = bytes_by_phase(BASE, hardware, result)
        assert all(count >= 0 for kinds in phases.values() for count in kinds.values())
        assert phases["forward"]["activations"] == one.activation_bytes + one.cleared_bytes


@pytest.mark.slow
def test_which_part_of_a_change_is_run(monkeypatch):
    dry_runs = []

    def noted(run, device, images, processes):
        dry_runs.append((run.model.depth, run.masks_per_chunk, run.loader.max_masks, images))
        return base()

    base()
    monkeypatch.setattr(planning, "dry_run", noted)
    frozen = replace(BASE, freeze=("image_encoder.blocks.1",))
    assert dry_run_change(BASE, BASE, base()) is base()
    dry_run_change(BASE, replace(BASE, masks_per_chunk=2), base())
    dry_run_change(BASE, replace(BASE, activation_checkpointing=1), base())
    dry_run_change(BASE, replace(BASE, micro_batch_size=1), base())
    dry_run_change(BASE, replace(BASE, activation_checkpointing=1, masks_per_chunk=2), base())
    dry_run_change(frozen, replace(frozen, masks_per_chunk=2), base())
    assert dry_runs == [(1, 2, 4, 2), (2, 1, 1, 2), (2, 5, 4, 1), (2, 2, 4, 2), (2, 2, 4, 2)]


@pytest.mark.slow
def test_an_optimizer_may_say_what_it_keeps():
    wide = replace(BASE, model=replace(BASE.model, embed_dim=64))
    found = dry_run(replace(wide, optimizer=AdamW8bit()), "cpu", 2)
    whole = sum(
        AdamW8bit().state_bytes(parameter.numel()) for parameter in wide.build("meta").parameters()
    )
    assert found.state.sharded["optimizer"] + found.state.replicated["optimizer"] == whole
    assert found.state.largest_block["optimizer"] < 0.8 * found.state.largest_block["weights"]
    assert found.peaks == dry_run(wide, "cpu", 2).peaks


@pytest.mark.slow
def test_sharded_blocks_in_half_precision_keep_no_copies_of_their_weights():
    half = replace(BASE, precision="bf16")
    whole, shared = (
        dry_run(replace(half, parallel=parallel), "cpu", 2) for parallel in ("ddp", "fsdp")
    )
    assert whole.activation_bytes - shared.activation_bytes == pytest.approx(
        whole.state.sharded["weights"] / 2, rel=0.1
    )
    assert shared.state == whole.state


def test_only_flags_that_can_lower_the_peak_are_options():
    def flags(run: TrainConfig, hardware: Hardware = Hardware()) -> list[list[str]]:  # noqa: B008
        return [[flag for flag, _ in family] for family in memory_options(run, hardware)]

    big = replace(BIG, batch_size=8)
    assert flags(big) == [
        ["--masks-per-chunk 16", "--masks-per-chunk 4"],
        [f"--activation-checkpointing {blocks}" for blocks in (4, 2, 1)],
        ["--micro-batch-size 2", "--micro-batch-size 1"],
        ["--optimizer adamw8bit"],
    ]
    assert flags(replace(big, activation_checkpointing=2, masks_per_chunk=8, micro_batch_size=2))[
        :-1
    ] == [
        ["--masks-per-chunk 4"],
        ["--activation-checkpointing 1"],
        ["--micro-batch-size 1"],
    ]
    two, small = (
        Hardware(cluster=Cluster(1, 2)),
        replace(big, masks_per_chunk=4, activation_checkpointing=1, micro_batch_size=1),
    )
    assert flags(
        replace(big, freeze=("image_encoder",), masks_per_chunk=4, micro_batch_size=1), two
    ) == [["--parallel fsdp"]]
    assert flags(replace(mae_tiny(), micro_batch_size=8)) == [
        ["--micro-batch-size 2", "--micro-batch-size 1"],
        ["--optimizer adamw8bit"],
    ]
    assert flags(small) == [["--optimizer adamw8bit"]]
    assert flags(small, two) == [["--parallel fsdp"]]
    assert flags(replace(small, parallel="fsdp"), two) == []
    assert (
        flags(replace(small, optimizer=MuonAdamW()), two)
        == flags(replace(small, optimizer=AdamW8bit()))
        == []
    )


@pytest.fixture
def quick(monkeypatch):
    """Dry runs that hold 1000 bytes per image, half with a recomputed block, and ten per mask
    decoded at once; nothing else."""
    state = StateBytes(
        *(dict.fromkeys(("weights", "gradients", "optimizer"), held) for held in (80.0, 20.0, 10.0))
    )

    def fake(run: TrainConfig, device: str, images: int, processes: int = 1) -> DryRun:
        kept = round(
            1000
            * images
            * (1 - 0.5 / run.activation_checkpointing if run.activation_checkpointing else 1)
        )
        return DryRun(
            images,
            {
                "forward": kept,
                "rounds": kept + 10 * run.masks_per_chunk,
                "backward": kept,
                "update": 0,
            },
            kept,
            state,
            (25, 25),
        )

    monkeypatch.setattr(planning, "dry_run", fake)
    monkeypatch.setattr(
        planning,
        "count_flops",
        lambda run: StepFlops((100.0, 200.0), (30.0, 60.0), (50.0, 50.0), 11),
    )
    monkeypatch.setattr(
        planning,
        "dry_run_change",
        lambda run, other, result: planning.dry_run(
            other, "cuda", min(other.micro_batch_size, result.images)
        ),
    )


@pytest.mark.parametrize(
    "less, fits",
    [
        (100, [True] * 4),
        # A second step of both, of which one is enough.
        (1500, [False, False, False, True, True, False]),
    ],
)
def test_what_to_change_is_tried_from_the_mildest_on_until_it_fits(quick, less, fits):
    most, found = tried(less)
    sizes = {"masks-per-chunk": (16, 4), "activation-checkpointing": (4, 2)}
    assert [each["flags"] for each in found] == [
        *(f"--{name} {size}" for name in sizes for size in sizes[name][: len(fits) // 2 - 1]),
        *("--micro-batch-size 2", "--parallel fsdp"),
    ]
    assert [each["fits"] for each in found] == fits
    by_flags = {each["flags"]: each for each in found}
    assert by_flags["--activation-checkpointing 4"]["more_flops"] == pytest.approx(50 / 390)
    assert by_flags["--micro-batch-size 2"] == {
        "flags": "--micro-batch-size 2",
        "peak_bytes": most - 6000,
        "fits": True,
        "more_flops": 0,
    }


def test_all_together_is_tried_where_nothing_alone_is_enough(quick):
    _, found = tried(10**5)
    assert not any(each["fits"] for each in found)
    assert (
        found[-1]["flags"]
        == "--masks-per-chunk 4 --activation-checkpointing 1 --micro-batch-size 1 --parallel fsdp"
    )
    assert found[-1]["peak_bytes"] == min(each["peak_bytes"] for each in found)


def tried(less: int) -> tuple[int, list[dict]]:
    """Return the peak of a run, and the suggestions for a GPU with `less` bytes less."""
    run = replace(BIG, batch_size=16, device="cuda")
    hardware = Hardware(cluster=Cluster(1, 2), spare_gib=0.0)
    most = make_plan(run, hardware)["peak_bytes"]
    return most, make_plan(run, replace(hardware, gpu=find(f"mine={(most - less) / 2**30!r},1")))[
        "changes"
    ]


@pytest.mark.long
def test_the_largest_micro_batch_that_fits_shares_the_images_evenly(monkeypatch):
    """Of seven images on the busier of two processes: 1, 2, 3, 4 or 7 at once."""
    run = replace(BASE, batch_size=13, micro_batch_size=None, device="auto")
    hardware = Hardware(cluster=Cluster(1, 2))

    sized = {size: replace(run, micro_batch_size=size) for size in (1, 2, 3, 4, 7)}
    known = {size: dry_run(each, "cuda", size) for size, each in sized.items()}
    made = []
    monkeypatch.setattr(
        planning, "dry_run", lambda run, device, images, _: made.append(images) or known[images]
    )
    peaks = {size: peak_bytes(each, hardware, known[size]) for size, each in sized.items()}
    for size, larger in ((2, 3), (3, 4), (4, 7)):
        middle = (peaks[size] + peaks[larger]) / 2
        chosen = largest_micro_batch(run, hardware, middle / planning.MICRO_BATCH_SHARE)
        assert chosen == size
    assert largest_micro_batch(run, hardware, peaks[1] / 2) == 1
    assert largest_micro_batch(run, hardware, 1e12) == 7
    gpu = find(f"mine={middle / planning.MICRO_BATCH_SHARE / 2**30!r},1")
    made.clear()
    found = make_plan(run, replace(hardware, gpu=gpu, spare_gib=0.0))
    assert found["batch_split"]["micro_batch_size"] == 4
    assert len(made) == len(set(made)), "each size is run once"
    assert make_plan(run, hardware)["batch_split"]["micro_batch_size"] == 1


def test_one_image_a_process_is_not_planned(monkeypatch):
    monkeypatch.setattr(planning, "dry_run", None)
    run = replace(BASE, batch_size=8, micro_batch_size=None)
    assert largest_micro_batch(run, Hardware(cluster=Cluster(2, 4)), 1.0) == 1


def test_a_plan(quick):
    hardware = Hardware(find("h200"), Cluster(2, 4), efficiency=0.5, price=2.0)
    found = make_plan(
        replace(
            little(), batch_size=12, activation_checkpointing=1, device="auto", parallel="hsdp"
        ),
        hardware,
    )
    expected = {"precision": "bf16", "device": "cuda", "fits": True, "changes": []}
    expected |= {"masks": 4, "masks_per_chunk": 5, "rounds": 11, "flops_per_step": 12 * 490}
    assert found == found | expected
    assert found["batch_split"] == {
        "images": 2,
        "busiest": 4,
        "micro_batches": 1,
        "micro_batch_size": 2,
    }
    assert found["peak_bytes"] == sum(found["phases"][found["peak_phase"]].values())
    assert found["flops_per_image"] == {
        "encoder": 300,
        "rounds": 90,
        "recomputed": 100,
        "mining": 0,
    }
    (row,) = found["time"]
    assert row["hours"] == pytest.approx(4 * 2 * 490 / 989e12 / 0.5 / 3600)
    assert row["dollars"] == pytest.approx(row["hours"] * 8 * 2)


def test_a_plan_without_a_gpu_for_a_cpu_that_mines_single_masks(quick):
    run = replace(little(), mining=OHEM(), loader=SamLoaderConfig(items="mask"))
    found = make_plan(run, Hardware())
    assert found == found | {"precision": "fp32", "device": "cpu", "gpu": None, "masks": 1}
    assert found["flops_per_image"]["mining"] == 130
    assert "time" not in found
    assert "fits" not in found


@pytest.mark.slow
def test_hours_use_measured_utilization(quick, monkeypatch):
    """SAM's 68 hours come out of its FLOPs, 256 A100, and the fraction of their peak that they
    imply."""
    monkeypatch.setattr(
        planning, "count_flops", lambda run: StepFlops((16.99e12, 0.0), (6.287e12, 0.0), (), 11)
    )
    published, hoped = make_plan(sam_vit_h(), Hardware(find("a100"), Cluster(32, 8)))["time"]
    assert published["source"].startswith("SAM's own run")
    assert published["hours"] == pytest.approx(68, rel=0.01)
    assert "not measured" in hoped["source"]
    monkeypatch.setattr(planning, "dry_run", lambda *run: base())
    assert make_plan(mae_vit_l(), Hardware(find("a100")))["time"][0]["source"].startswith(
        "MAE's own run"
    )


def test_data_and_weights_are_not_needed_but_numbers_must_be_sound():
    assert resolve(finetune(), Hardware()).precision == "bf16"
    cuda = {"device": "cuda"}
    for changes, hardware, message in (
        ({"batch_size": 0}, Hardware(), r"^--batch-size must be at least 1 \(got 0\)$"),
        (
            {"sampler": Sharded(), "batch_size": 3},
            Hardware(cluster=Cluster(2, 1)),
            r"^--sampler.nodes.*2 nodes",
        ),
        ({}, Hardware(find("h200")), r"^--gpu h200 with --device cpu: a plan is for one of them"),
        (cuda | {"parallel": "fsdp"}, Hardware(), r"^--parallel fsdp .* --world has one"),
        (
            cuda | {"parallel": "hsdp"},
            Hardware(cluster=Cluster(1, 8)),
            r"^--parallel hsdp requires at least 2 machines",
        ),
        (cuda, Hardware(find("v100")), r"^--gpu v100 has no units for bf16"),
    ):
        with error_line(message):
            resolve(replace(little(), **changes), hardware)
