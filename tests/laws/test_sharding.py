"""Any number of processes, sharded or not, trains the parameters of one process, in float64."""

import os
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import distributed

from gigamask import config_files
from gigamask.distributed.fsdp import is_sharded_tensor, shard
from gigamask.distributed.world import World, destroy_world, init_world
from gigamask.interfaces import EvaluationResult, Evaluator
from gigamask.losses.ohem import OHEM
from gigamask.models import manifest
from gigamask.models.sam.sam import Sam
from gigamask.training import checkpoint, step
from gigamask.training.optim import AdamW8bit, MuonAdamW
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from tests.errors import error_line
from tests.journeys.runs import lines
from tests.little import SPEC, little, little_classes
from tests.ranks import fork

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Exact(SamTrainConfig):
    """A run in float64, unless it asks for another precision."""

    def build(self, device: str = "cpu") -> Sam:
        model = super().build(device)
        return model.double() if self.precision == "auto" else model


def exact(run: SamTrainConfig | None = None, name: str = "exact") -> Exact:
    """A batch of five in micro-batches of one, so that some processes have an empty micro-batch."""
    run = run or little()
    return Exact(
        **{field.name: getattr(run, field.name) for field in fields(run)}
        | {"recipe": f"{__file__}:{name}", "batch_size": 5, "micro_batch_size": 1}
    )


def exact_classes() -> Exact:
    """The same of a model that answers in windows, with classes."""
    return exact(little_classes(), "exact_classes")


SKIPS_BY_STEP = {"drop_path_mode": "batch", "model": replace(SPEC, drop_path_rate=0.6)}
CASES = {
    2: {
        "ddp": {"parallel": "ddp", "ema": 0.5, **SKIPS_BY_STEP},
        "fsdp": {"parallel": "fsdp", "ema": 0.5, **SKIPS_BY_STEP},
    },
    4: {
        "ddp": {"parallel": "ddp"},
        "hsdp": {
            "parallel": "hsdp",
            "freeze": ("image_encoder.blocks.0", "prompt_encoder"),
            "ema": 0.5,
        },
        "fsdp": {"parallel": "fsdp", "activation_checkpointing": 1, "mining": OHEM(0.3)},
    },
}


HALVES = {
    "ddp, bf16": {"parallel": "ddp", "precision": "bf16"},
    "fsdp, bf16": {"parallel": "fsdp", "precision": "bf16"},
}


@dataclass(frozen=True)
class Measured(Evaluator):
    """Scores the size of the parameters."""

    interval: int = 2

    def open(self, config, world):
        def evaluate(model: Sam) -> EvaluationResult:
            assert not any(map(is_sharded_tensor, model.parameters()))
            return EvaluationResult(
                {
                    "size": float(
                        sum(parameter.detach().abs().sum() for parameter in model.parameters())
                    )
                },
                "size",
            )

        return evaluate


def case(folder: Path, scenes: Path, recipe=exact, **changes):
    run = replace(recipe(), out=str(folder), data=(str(scenes),), steps=3, save_every=2, **changes)
    config_files.save_config(run)
    return run


def by_ranks(folders: list[str]) -> None:
    """Train the run of each folder to its end, in every process."""
    world = init_world(os.environ, CPU, little().timeout_s)
    try:
        for folder in folders:
            run, here = config_files.load_config(folder, trust=True), world
            if (
                run.parallel == "hsdp"
            ):  # as if each half of the processes were on a machine of its own
                half = world.size // 2
                here = replace(world, node=world.rank // half, nodes=2)
            if not world.is_main:  # reads what the main process has verified, and copies nothing
                checkpoint.newest = checkpoint.Snapshot.from_state = None
                checkpoint.weight_files = None
            sums, add = [], distributed.all_reduce
            distributed.all_reduce = lambda *given, sums=sums, add=add, **named: (
                sums.append(1),
                add(*given, **named),
            )[1]
            state = train(replace(run, evaluation=Measured()), here)
            distributed.all_reduce = add
            check_averages(state, here)
            shares = [is_sharded_tensor(parameter) for parameter in state.model.parameters()]
            assert any(shares) == (run.parallel != "ddp"), shares
            for mesh in {
                parameter.device_mesh
                for parameter in state.model.parameters()
                if is_sharded_tensor(parameter)
            }:
                waits = [
                    group._get_backend(CPU).options._timeout.total_seconds()
                    for group in mesh.get_all_groups()
                ]
                assert waits == [run.timeout_s] * mesh.ndim, waits
            if world.is_main:
                (Path(folder) / "all_reduces").write_text(str(len(sums)))
    finally:
        destroy_world(world)


def check_averages(state: TrainState, world: World) -> None:
    """Check that averages are sharded as parameters are, and otherwise equal in all processes."""
    average = state.average or {}
    for name, parameter in state.model.named_parameters():
        if name in average:
            assert is_sharded_tensor(average[name]) == is_sharded_tensor(parameter)
    whole = [float(each.sum()) for each in average.values() if not is_sharded_tensor(each)]
    assert world.gather(whole) == [whole] * world.size


def kept(run) -> dict[str, np.ndarray]:
    folder = checkpoint.newest(Path(run.out))
    assert folder.name == "step_00000003"
    last = (checkpoint.LAST,) if run.ema else ()
    return {
        f"{file}: {name}": array
        for file in (checkpoint.MODEL, checkpoint.OPTIMIZER, *last)
        for name, array in load_file(folder / file).items()
    }


def alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], apart: float = 1e-10) -> bool:
    assert ours.keys() == theirs.keys()
    return all(
        ours[name].shape == theirs[name].shape
        and np.allclose(ours[name], theirs[name], rtol=0, atol=apart)
        for name in ours
    )


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_processes_train_what_one_trains(tmp_path, scenes, count):
    """Also alone where they stopped, and they where one stopped: checkpoints are not sharded."""
    runs = {
        name: case(tmp_path / name, scenes, **changes) for name, changes in CASES[count].items()
    }
    on = case(tmp_path / "on", scenes, **CASES[count]["fsdp"])
    alone = {name: replace(run, out=str(tmp_path / f"{name}_alone")) for name, run in runs.items()}
    for run in alone.values():
        Path(run.out).mkdir()
        train(replace(run, evaluation=Measured()))
    shutil.copytree(
        Path(alone["fsdp"].out) / "checkpoints" / "step_00000002",
        Path(on.out) / "checkpoints" / "step_00000002",
    )
    halves = [
        case(tmp_path / name, scenes, **changes) for name, changes in HALVES.items() if count == 2
    ]
    fork(count, by_ranks, [run.out for run in (*runs.values(), on, *halves)])
    assert not halves or alike(*map(kept, halves), apart=1e-6), (
        "in half precision sharding rounds nothing that is not rounded without"
    )
    for name, run in runs.items():
        assert alike(kept(alone[name]), kept(run)), name
        best = manifest.verify(Path(run.out) / "checkpoints" / manifest.BEST)["score"]
        assert best == pytest.approx(
            manifest.verify(Path(alone[name].out) / "checkpoints" / manifest.BEST)["score"],
            rel=1e-12,
        ), name
    assert alike(kept(alone["fsdp"]), kept(on))
    assert (Path(runs["ddp"].out) / "all_reduces").read_text() == "6", "the encoder's, the rest"
    if "hsdp" in runs:  # and one for the trained block, after both micro-batches
        assert (Path(runs["hsdp"].out) / "all_reduces").read_text() == "6"
    shutil.rmtree(Path(runs["fsdp"].out) / "checkpoints" / "step_00000003")
    train(runs["fsdp"])
    assert alike(kept(alone["fsdp"]), kept(runs["fsdp"]))


def test_processes_train_the_windows_that_one_trains(tmp_path, scenes):
    alone = case(tmp_path / "alone", scenes, exact_classes)
    train(replace(alone, evaluation=Measured()))
    run = case(tmp_path / "ranks", scenes, exact_classes, activation_checkpointing=1)
    fork(2, by_ranks, [run.out])
    assert alike(kept(alone), kept(run))
    assert (Path(run.out) / "all_reduces").read_text() == "6"


def spoilt_by_ranks(folder: str) -> None:
    """Train; the second process finds a gradient of NaN in the second step."""
    world, real, steps = init_world(os.environ, CPU, little().timeout_s), step.accumulate, []

    def accumulate(task, model, *given) -> None:
        real(task, model, *given)
        steps.append(1)
        if world.rank and len(steps) == 2:
            # Of the decoder: the encoder's gradients are being exchanged already.
            next(model.mask_decoder.parameters()).grad.fill_(float("nan"))

    step.accumulate = accumulate
    train(config_files.load_config(folder, trust=True), world)
    destroy_world(world)


@pytest.mark.long
def test_a_step_that_one_process_spoils_is_skipped_by_all_and_its_samples_named(tmp_path, scenes):
    run = case(tmp_path / "run", scenes, batch_size=2, micro_batch_size=1, log_every=1, ema=0.5)
    fork(2, spoilt_by_ranks, run.out)
    recorded = lines(tmp_path / "run")
    skipped = {line["skipped_step"] for line in recorded if "skipped_step" in line}
    data = TrainData(run, open_index(run)).batches()
    next(data)
    assert skipped == {name for batch in next(data) for name in batch.names}
    assert [line["skipped"] for line in recorded if "skipped" in line] == [0, 1, 0]
    assert all(np.isfinite(array).all() for array in kept(run).values())


@pytest.mark.parametrize("size, nodes, each", [(4, 1, 4), (4, 4, 1)])
def test_hsdp_wants_machines_with_several_processes(size, nodes, each):
    encoder = little().build().image_encoder
    with error_line(rf"^--parallel hsdp.*{nodes}.*{each}"):
        shard(encoder, World(0, size, 0, nodes), "hsdp", (None, None), 60.0, [])


@pytest.mark.parametrize("optimizer", [MuonAdamW(), AdamW8bit()])
def test_some_optimizers_want_whole_parameters(optimizer):
    name = type(optimizer).__name__
    with error_line(rf"^--parallel hsdp.*{name}.*--parallel ddp"):
        replace(little(), optimizer=optimizer, parallel="hsdp").check()
