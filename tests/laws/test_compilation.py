"""Compiled training is eager training to rounding, with graphs that no image changes.

Graphs are captured, and differentiated ahead of time where that differs (`aot_eager`), then run by
torch's own kernels: an inductor on a CPU takes minutes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from gigamask import config_files
from gigamask.cli.main import main
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.losses.ohem import OHEM
from gigamask.losses.sam_loss import SamLoss
from gigamask.models.init import build_model
from gigamask.models.lora_config import LoRA
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.training import checkpoint
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.train_data import TrainData
from gigamask.training.trainer import train
from tests.little import COMPACT, SPEC, little, little_compact
from tests.ranks import fork

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

CPU = torch.device("cpu")
SAM = InteractiveSchedule(clicks=8)
"""SAM's eleven rounds."""


@pytest.fixture(autouse=True)
def captured(request, monkeypatch):
    """Runs captured graphs by torch's own kernels, and forgets them afterwards."""
    if not request.config.getoption("--no-shape-checks"):
        pytest.skip(
            "torch cannot trace shape checks: run with --no-shape-checks, as make test does beside"
        )
    monkeypatch.setattr(SamTrainConfig, "compile_backend", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Returns the number of graphs captured so far."""
    return counters["stats"]["unique_graphs"]


def batches_of(run, index, counts):
    """Returns micro-batches of the run, each with a number of masks."""
    made = TrainData(replace(run, batch_size=2, micro_batch_size=2), index).batches()
    return [
        batch.select(torch.arange(count)) for count, (batch,) in zip(counts, made, strict=False)
    ]


def trained(run, batches):
    """Returns gradients and sums of each batch, and the number of graphs after each."""
    state = TrainState.from_model(run.build().double(), run)
    state.model.train()
    found = []
    with run.task(CPU).compiled(state.model) as task:
        for batch in batches:
            metrics = StepMetrics.zero(run.batch_size, torch.zeros((), dtype=torch.float64))
            accumulate(task, state.model, batch, metrics)
            gradients = {
                name: parameter.grad.clone()
                for name, parameter in state.model.named_parameters()
                if parameter.requires_grad
            }
            state.model.zero_grad(set_to_none=False)
            found.append((gradients, metrics, graphs()))
    return found


def assert_equal(run, batches):
    """Compares gradients, sums and counts with eager ones; returns the graphs after each batch."""
    eager, compiled = trained(run, batches), trained(replace(run, compile=True), batches)
    for (wanted, sums, _), (gradients, compiled_sums, _) in zip(eager, compiled, strict=True):
        largest = max(gradient.abs().max() for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert (gradients[name] - gradient).abs().max() <= 1e-12 * largest, name
        assert torch.equal(sums.count, compiled_sums.count)
        assert torch.equal(sums.counts, compiled_sums.counts)
        assert sums.sums.keys() == compiled_sums.sums.keys()
        for name, total in sums.sums.items():
            limit = 1e-12 if total.dtype == torch.float64 else 1e-6
            assert float(compiled_sums.sums[name]) == pytest.approx(float(total), rel=limit), name
        assert (sums.losses - compiled_sums.losses).abs().max() <= 1e-12 * sums.losses.max()
    assert not counters["graph_break"]
    return [count for *_, count in compiled]


def short(clicks=1, **changes):
    """Returns SAM's schedule with fewer rounds."""
    return replace(SAM, clicks=clicks, mask_only_rounds=False, **changes)


ONE_ROUND = replace(
    little(),
    model=replace(SPEC, depth=1, global_attn_indexes=(0,)),
    prompts=short(clicks=0),
    masks_per_chunk=8,
)
IN_WINDOWS = replace(
    little_compact(), prompts=short(3), masks_per_chunk=8, freeze=("image_encoder",)
)


def compact_with_all() -> SamTrainConfig:
    """Central clicks, recomputed stages, classes."""
    return replace(
        little_compact(),
        model=replace(COMPACT, class_names=("star", "ring", "ellipse")),
        ignore_other_classes=True,
        activation_checkpointing=1,
    )


@pytest.mark.parametrize(
    "recipe, backend, prompts",
    [
        (little, "eager", SAM),
        pytest.param(
            *(compact_with_all, "aot_eager", short(2, center_click_prob=0.75)),
            marks=pytest.mark.long,
        ),
    ],
)
def test_gradients_of_rounds_equal_eager_ones_and_graphs_do_not_grow(
    recipe, backend, prompts, index, monkeypatch
):
    """Of SAM's eleven; other models have three."""
    monkeypatch.setattr(SamTrainConfig, "compile_backend", backend)
    monkeypatch.setattr("gigamask.models.compact.encoder.is_readable", lambda tensor: False)
    run = replace(recipe(), prompts=prompts, masks_per_chunk=8)
    counts = [8, 3, 1, 5]
    found = assert_equal(run, batches_of(run, index, counts))
    assert found[0] > 0
    assert found[1:] == found[1:2] * (len(counts) - 1)
    assert found[1] <= 16


def test_adapters_are_compiled(index):
    """Those of a frozen encoder and of a frozen decoder."""
    frozen = ("image_encoder", "prompt_encoder", "mask_decoder")
    run = replace(little(), prompts=short(0), freeze=frozen, lora=LoRA(rank=2), masks_per_chunk=8)
    run = replace(run, model=replace(SPEC, depth=1, global_attn_indexes=()))
    assert_equal(run, batches_of(run, index, [8]))


CHANGES = {
    "recomputed blocks, dropped branches, several chunks, area targets": {
        "activation_checkpointing": 1,
        "model": replace(SPEC, drop_path_rate=0.6),
        "masks_per_chunk": 3,
        "loader": replace(little().loader, target="area"),
    },
    "the hardest pixels at the image's size, two points a round": {
        "loader": replace(little().loader, target="full"),
        "loss": SamLoss(ohem_pixel_ratio=0.2, ohem_min_pixels=10),
        "prompts": TwoSidedCorrection(corrections=2),
    },
    "losses at points, mixed prompts, a frozen encoder": {
        "loss": SamLoss(num_points=48),
        "prompts": MixedPrompts(),
        "freeze": ("image_encoder",),
    },
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_what_else_is_compiled(changes, index, monkeypatch):
    monkeypatch.setattr(SamTrainConfig, "compile_backend", "eager")
    run = replace(little(), prompts=short(), masks_per_chunk=8)
    run = replace(run, **changes)
    assert_equal(run, batches_of(run, index, [8, 5]))


@pytest.mark.long
def test_a_compiled_training_evaluates_resumes_and_leaves_the_model_as_it_was(
    scenes, tmp_path, monkeypatch
):
    """With averaged weights, hard masks and an evaluation; in bf16, whose weights are copied."""
    monkeypatch.setattr(SamTrainConfig, "compile_backend", "eager")
    base = replace(
        little(),
        data=(str(scenes),),
        prompts=short(clicks=0),
        ema=0.5,
        mining=OHEM(keep_ratio=0.5),
        precision="bf16",
        compile=True,
        evaluation=ClickEvaluation(data=(str(scenes),), images=1, interval=2),
    )
    whole, parts, eager = (replace(base, out=str(tmp_path / name)) for name in "wpe")
    ended = train(whole)
    train(replace(parts, steps=2))
    resumed = train(parts)
    plain = train(replace(eager, compile=False))
    assert not counters["graph_break"]
    names = dict(plain.model.named_parameters()).keys()
    assert plain.model.state_dict().keys() == ended.model.state_dict().keys()
    assert not any("compiled" in name or "orig" in name for name in ended.model.state_dict())
    for name, weight in ended.model.named_parameters():
        assert torch.equal(weight, dict(resumed.model.named_parameters())[name]), name
        assert torch.equal(ended.average[name], resumed.average[name]), name
    assert names == ended.average.keys()
    block = ended.model.image_encoder.blocks[0]
    assert not {"attend", "transform"} & vars(block).keys()
    # Eager rounds share tensors, so bf16 rounds elsewhere; with other masks it is far away.
    start = build_model(base.model, base.seed)
    apart, moved = (
        torch.cat([(p - other.get_parameter(name)).flatten() for name, p in own.named_parameters()])
        for own, other in ((plain.model, ended.model), (plain.model, start))
    )
    assert apart.norm() <= 0.25 * moved.norm()


def test_two_processes_of_the_command_do_what_one_does(scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(SamTrainConfig, "compile_backend", "eager")
    one, two = (
        replace(
            little(),
            data=(str(scenes),),
            out=str(tmp_path / name),
            prompts=short(clicks=0),
            batch_size=4,
            steps=2,
        )
        for name in ("one", "two")
    )
    config_files.save_config(two)
    ended = train(replace(one, compile=True))
    fork(2, main, ["train", "--resume", two.out, "--compile"])
    assert config_files.load_config(two.out, trust=True).compile
    weights = load_file(checkpoint.newest(Path(two.out)) / checkpoint.MODEL)
    for name, weight in ended.model.state_dict().items():
        # The gradient of a key's bias is zero but for rounding, which AdamW enlarges.
        limit = 1e-4 if name.endswith("k_proj.bias") else 1e-5
        assert (weights[name] - weight).abs().max() <= limit, name


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(
    not shutil.which("g++"), reason="no C++ compiler: the default backend, inductor, is not tested"
)
@pytest.mark.parametrize("run, counts", [(ONE_ROUND, [8, 3]), (IN_WINDOWS, [8, 3])])
def test_inductor_compiles_small_models(run, counts, index, monkeypatch, tmp_path):
    """One round, and four with prompts of other lengths than the compiled one."""
    monkeypatch.setattr(SamTrainConfig, "compile_backend", "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Not optimized, not vectorized, and one file a graph in place of one a kernel.
    quick = {"aot_inductor.debug_compile": True, "cpp.vec_isa_ok": False, "cpp.simdlen": 0}
    with inductor.patch(quick | {"cpp_wrapper": True, "compile_threads": 1}):
        assert_equal(run, batches_of(run, index, counts))
