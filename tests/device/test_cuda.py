"""What only a CUDA device can show: the same numbers as on the CPU, rounds that never wait, memory
that does not grow.

Skips, and says so, where there is no device: run `pytest -m gpu -rs tests/device` where there is
one."""

import gc
import gzip
from dataclasses import fields, replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from gigamask import config_files
from gigamask.masks.devices import decode_rle
from gigamask.masks.rle import RLEMasks
from gigamask.models import configs
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.sam.attention import rel_pos_attention, rel_pos_attention_augmented
from gigamask.profiling import timeline
from gigamask.profiling.dry_run import blank_batch
from gigamask.profiling.memory_plan import peak_phase
from gigamask.profiling.profiler import Profile
from gigamask.prompts.farthest import center_clicks
from gigamask.prompts.schedule import InteractiveSchedule, center_clicks_in_threads
from gigamask.training.optim import AdamW, AdamW8bit, MuonAdamW
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate, step
from gigamask.training.tasks import SamTask
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from gigamask.types import Batch, RandomInputs
from gigamask.workflows import plan
from tests.laws.test_attention import answer_and_gradients, assert_close, assert_equal, inputs
from tests.little import little

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason=(
            "no CUDA device: equality with the CPU, flash attention, waiting, peak memory, plans, "
            "pinning and profiles on a GPU are not checked"
        ),
    ),
]

SHAPES = [(1, 2, 64, 64, 64), (1, 2, 64, 64, 80), (25, 2, 14, 14, 80)]
# SAM's decoder at its own size; of the encoder, which no round runs, one narrow block.
OFFICIAL_DECODER = SamConfig(embed_dim=64, depth=1, num_heads=1, global_attn_indexes=())


@pytest.fixture
def exact_float32():
    """Keeps cuDNN's convolutions from rounding their inputs to TF32, as they do by default."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def run(scenes, tmp_path):
    return replace(little(), data=(str(scenes),), out=str(tmp_path / "run"), device="cuda")


def first_batch(run, pin=False) -> Batch:
    return next(TrainData(run, open_index(run)).batches(pin=pin))[0]


def task_of(run, precision: Literal["fp32", "bf16"] = "fp32") -> SamTask:
    return SamTask(run.prompts, run.loss, run.masks_per_chunk, precision)


def attention_leaves(*shape_and_dtype):
    return [leaf.detach().cuda().requires_grad_() for leaf in inputs(*shape_and_dtype)]


@pytest.mark.parametrize("shape", [*SHAPES, (25, 2, 14, 14, 64), (1, 1, 5, 9, 16)])
def test_the_gpu_form_is_the_plain_form(shape):
    assert_equal(rel_pos_attention, attention_leaves(*shape), 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attention_uses_the_gpu_form_and_is_close_to_float64(shape):
    """Asking for flash alone raises where its kernel cannot take the padded heads."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert_close(rel_pos_attention_augmented, attention_leaves(*shape, torch.bfloat16))


def test_the_bias_of_all_pairs_never_stands_in_memory():
    leaves = attention_leaves(1, 16, 64, 64, 80, torch.bfloat16)
    answer_and_gradients(rel_pos_attention, leaves)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    answer_and_gradients(rel_pos_attention, leaves)
    # What one matrix of all pairs takes in bf16; the plain form needs several.
    assert torch.cuda.max_memory_allocated() - before < 16 * 4096**2 * 2


def test_runs_become_the_same_pixels():
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (7, 5), (256, 256), (683, 1024)):
        masks = rng.random((9, height, width)) < 0.5
        masks[0], masks[1] = False, True
        masks[2] = np.arange(width) < width // 2
        runs = RLEMasks.from_dense(masks)
        bounds, starts = torch.from_numpy(runs.bounds), torch.from_numpy(runs.offsets)
        there = decode_rle(bounds.cuda(), starts.cuda(), runs.size)
        assert there.is_cuda
        assert torch.equal(there.cpu(), decode_rle(bounds, starts, runs.size))
        assert np.array_equal(there.cpu().numpy(), masks)


def test_more_pixels_than_an_int32_counts_become_dense():
    count = 2**31 // 1024**2 + 1
    starts = 2 * torch.arange(count + 1, device="cuda")
    first = torch.arange(count, device="cuda") * 300
    bounds = torch.stack([first, first + 1 + torch.arange(count, device="cuda")], 1).flatten().int()
    areas = decode_rle(bounds, starts, (1024, 1024)).sum((1, 2))
    assert torch.equal(areas, 1 + torch.arange(count, device="cuda"))


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_step_has_the_gradients_of_the_cpu(run, exact_float32, dtype, limit):
    batch = first_batch(run)
    states, records = [], []
    for device in ("cpu", "cuda"):
        state = TrainState.from_model(build_model(run.model, run.seed).to(device, dtype), run)
        records.append(
            step(task_of(run), state, [batch.to(device)], len(batch.names), run.optimizer.lr, None)
            .result()
            .record
        )
        states.append(state)
    assert records[0]["skipped"] == 0
    assert records[1] == pytest.approx(records[0], rel=limit)
    here, there = (
        {name: parameter.grad.cpu() for name, parameter in state.model.named_parameters()}
        for state in states
    )
    for name, gradient in here.items():
        # A hundredth of the whole, because some gradients are rounding alone.
        assert (there[name] - gradient).norm() <= limit * (
            gradient.norm() + 0.01 * records[0]["grad_norm"]
        ), name


def test_a_step_in_bf16_is_finite_and_near_float32(run, exact_float32):
    batch = first_batch(run).to("cuda")
    records = {}
    for precision in ("fp32", "bf16"):
        state = TrainState.initialize(run, torch.device("cuda"))
        records[precision] = (
            step(task_of(run, precision), state, [batch], len(batch.names), run.optimizer.lr, 1.0)
            .result()
            .record
        )
        assert records[precision]["skipped"] == 0
        for name, parameter in state.model.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.isfinite().all(), name
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    assert records["bf16"]["loss"] == pytest.approx(records["fp32"]["loss"], rel=0.1)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_micro_batch_never_waits_for_the_device(run, precision):
    """The encoder, and prompts, answers, clicks, losses and backward of all eleven rounds are
    queued without one look at a result."""
    run = replace(run, prompts=InteractiveSchedule())
    batch = first_batch(run).to("cuda")
    model = TrainState.initialize(run, torch.device("cuda")).model
    task = task_of(run, precision)
    totals = StepMetrics.zero(len(batch.names), next(model.parameters()))
    accumulate(task, model, batch, totals)  # what is loaded once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulate(task, model, batch, totals)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert totals.means()["loss"] > 0


def test_peak_memory_does_not_grow_with_the_rounds(run):
    run = replace(
        run, model=OFFICIAL_DECODER, prompts=InteractiveSchedule(), batch_size=1, micro_batch_size=1
    )
    batch = first_batch(run).to("cuda")
    model = TrainState.initialize(run, torch.device("cuda")).model
    peaks = {}
    for clicks in (8, 2, 8):  # the first time, libraries claim what they keep
        schedule = InteractiveSchedule(clicks=clicks)
        task = task_of(replace(run, prompts=schedule), "bf16")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        accumulate(task, model, batch, StepMetrics.zero(1, next(model.parameters())))
        peaks[schedule.rounds] = torch.cuda.max_memory_allocated() - before
    assert peaks[11] <= 1.02 * peaks[5]


@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_batches_are_the_same_batches(run, workers):
    run = replace(run, loader=replace(run.loader, workers=workers))
    plain, pinned = first_batch(run), first_batch(run, pin=True)
    there = pinned.to("cuda")
    for pair in (
        (plain, pinned, there),
        tuple(each.random_inputs for each in (plain, pinned, there)),
    ):
        for field in fields(Batch if pair[0] is plain else RandomInputs):
            here, locked, moved = (getattr(each, field.name) for each in pair)
            if isinstance(here, torch.Tensor):
                assert locked.is_pinned() or not locked.numel(), field.name
                assert torch.equal(here, locked)
                assert torch.equal(here, moved.cpu())
    assert (plain.names, plain.mask_only_round_u, plain.cursor) == (
        there.names,
        there.mask_only_round_u,
        there.cursor,
    )


@pytest.mark.parametrize(
    "precision, optimizer",
    [
        ("fp32", AdamW(lr=1e-3)),
        ("bf16", MuonAdamW(lr=1e-3)),
        ("fp16", AdamW(lr=1e-3)),
        ("bf16", AdamW8bit(lr=1e-3)),
    ],
)
def test_a_run_is_resumed_on_the_device(run, precision, optimizer):
    """The optimizer's step counters come back where its kernel looks for them."""
    run = replace(
        run, precision=precision, optimizer=optimizer, model=replace(run.model, embedding_dim=32)
    )  # large enough for 8 bits
    config_files.save_config(run)
    train(replace(run, steps=2))
    state = train(run)
    assert state.step == run.steps == 4
    entries = state.optimizer_tensors()
    counts = {name: float(tensor) for name, tensor in entries.items() if name.startswith("step/")}
    assert all(tensor.is_cuda for tensor in entries.values() if tensor.dtype != torch.int64)
    assert len(set(counts.values())) == 1
    assert precision == "fp16" or set(counts.values()) == {
        4.0
    }  # the first updates in fp16 may be left out
    assert all(tensor.isfinite().all() for tensor in state.model.state_dict().values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": 1},
        {"precision": "fp32"},
        {"optimizer": AdamW8bit()},
        {"masks_per_chunk": 4},
    ],
)
def test_a_plan_is_what_the_device_holds(run, changes):
    """Within a tenth; libraries have claimed what they keep by the second step."""
    spec = replace(configs.vit_b(), depth=4, global_attn_indexes=(1, 3))
    usual = replace(
        run,
        model=spec,
        precision="bf16",
        masks_per_chunk=16,
        batch_size=2,
        micro_batch_size=2,
        loader=replace(run.loader, max_masks=8),
    )
    run = replace(usual, **changes)
    device = torch.device("cuda")
    hardware = plan.Hardware()
    predicted = peak_phase(
        plan.bytes_by_phase(run, hardware, plan.dry_run(run, "cuda", run.micro_batch_size))
    )[1]
    gc.collect()
    before = torch.cuda.memory_allocated()
    state = TrainState.initialize(run, device)
    state.model.train()
    batch = blank_batch(
        run.sample_config,
        run.random_spec,
        run.micro_batch_size,
        run.micro_batch_size * run.loader.max_masks,
    ).to(device)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        step(run.task(device), state, [batch], run.micro_batch_size, 0.0, run.optimizer.grad_clip)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(predicted, rel=0.1)


def test_profile_reports_kernel_times_and_allocator_bytes(run, tmp_path):
    """Backward passes launch from threads of their own; copies to the device are in no part."""
    told = []

    def meters(done, device):
        profile = Profile(tmp_path, 2, done, run.steps, device)
        return [
            lambda done, over: told.extend(line for line, _ in profile.observe(done, over)) or ()
        ]

    train(replace(run, steps=6), make_observers=meters)
    assert len(told) == 1
    assert told[0].startswith("profiled ")
    assert sorted(path.name for path in tmp_path.glob("*.*")) == [
        "allocator.txt",
        "memory.pickle",
        "profile.md",
        "trace.json.gz",
    ]
    parts, operators = timeline.read(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()), 2)
    took = {each.name: each.gpu_ms for each in parts}
    assert all(
        took[part] > 0 for part in ("encode", "rounds", "backward", "encoder backward", "optimizer")
    )
    assert took["backward"] > took["all_reduce"]
    assert sum(each.gpu_ms for each in operators) == pytest.approx(sum(took.values()))
    assert next(each.gpu_ms for each in operators if each.name == "aten::addmm") > 0


def test_the_next_clicks_are_those_of_the_cpu():
    random = torch.Generator().manual_seed(0)
    noise = torch.rand(2, 6, 1, 40, 60, generator=random)
    target, pred_mask = (
        functional.interpolate(noise.flatten(0, 1), (400, 600), mode="bicubic")
        .gt(0.5)[:, 0]
        .chunk(2)
    )
    valid, clicked = torch.ones_like(target), torch.zeros(6, 0, 2, dtype=torch.int64)
    pred_mask[5] = target[5]
    for _ in range(4):
        tensors = target, pred_mask, valid, clicked
        expected = center_clicks_in_threads(*tensors)
        assert torch.equal(center_clicks(*(each.cuda() for each in tensors)).cpu(), expected)
        clicked = torch.cat([clicked, expected[:, None, :2]], 1)
