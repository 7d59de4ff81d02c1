import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask import config_files, recipes
from gigamask.cli.commands.train import fitted, stages_of, use_index
from gigamask.config_files import TrainFlags
from gigamask.data import index
from gigamask.distributed import local_processes, precision
from gigamask.distributed.world import World
from gigamask.synthetic import scenes
from gigamask.workflows import demo, fit
from gigamask.workflows.train import (
    Run,
    choose_micro_batch_size,
    count_processes,
    open_world,
    opening,
    steps_for_epochs,
    train,
)
from tests.errors import error_line
from tests.little import little


def test_metrics_are_those_that_count(tmp_path, monkeypatch):
    """Killed while it wrote a line after step 3, and begun again at the checkpoint of step 1."""
    monkeypatch.chdir(tmp_path)
    run = Run(Path(), little(), 3)
    monkeypatch.chdir("/")
    start, again = ({"step": step, "started": "2026-01-02"} for step in (0, 1))
    steps = [{"step": step, "loss": step / 4} for step in (1, 2, 3)]
    later = [{"step": step, "loss": step / 2} for step in (2, 3)]
    before, after = (
        "\n".join(map(json.dumps, each)) for each in ([start, *steps], [again, *later])
    )
    (tmp_path / "metrics.jsonl").write_text(f'{before}\n{{"step": 4, "lo\n{after}\n{{"st')
    assert run.metrics == [start, steps[0], again, *later]


@pytest.mark.parametrize(
    "epochs, batch_size, steps", [(1.0, 3, 4), (1.0, 5, 3), (2.5, 4, 8), (0.01, 12, 1)]
)
def test_epochs_become_steps(tmp_path, scenes, epochs, batch_size, steps, capsys, monkeypatch):
    config = replace(
        little(), data=(str(scenes),), out=str(tmp_path / "run"), batch_size=batch_size
    )
    assert steps_for_epochs(config, epochs) == (steps, 12)
    assert f": {epochs:g} epochs of {batch_size} samples" in opening(config, epochs)
    assert opening(config).endswith("without --evaluation.data")
    assert ", from random weights: " in opening(config)
    monkeypatch.setattr(type(config.model.encoder), "pretrained", True)
    assert ", from random weights but the encoder's: " in opening(config)
    assert "evaluated on --val-split 0.2 of " in opening(replace(config, val_split=0.2))
    flags = use_index(TrainFlags(config, epochs=epochs))
    assert flags == TrainFlags(replace(config, steps=steps))
    assert f"{steps} step{'s' * (steps > 1)} (12 samples" in capsys.readouterr().out


def test_epochs_are_those_of_the_last_stage(tmp_path, scenes):
    own = {"wandb": "project", "tf32": True, "reduce_precision": "bf16", "data_weights": (1,)}
    config = replace(little(), data=(str(scenes),), out=str(tmp_path / "run"), **own)
    flags = use_index(TrainFlags(config, epochs=45.0, stages="mae,decoder,joint"))
    assert [stage.steps for stage in stages_of(flags)[1:]] == [10, 180]
    assert all(own.items() <= vars(stage).items() for stage in stages_of(flags)), "of all stages"


CPU = torch.device("cpu")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "recipe, environment, processes, expected",
    [
        ("tiny", {}, 2, 1),
        ("compact", {}, 3, 1),
        ("mae_tiny", {}, 2, 1),
        ("tiny", {"OMP_NUM_THREADS": "3"}, 1, 3),
        ("sam_vit_b", {}, 1, 3),
        ("tiny", {"WORLD_SIZE": "1"}, 1, 1),
    ],
)
def test_small_models_train_in_processes_of_one_thread_unless_told(
    monkeypatch, threads, recipe, environment, processes, expected
):
    """As many as there are cores, three here, and as divide the batch."""
    started = []

    @contextmanager
    def start(arguments, count, environment, timeout_s):
        started.append((count, arguments))
        yield World(0, count)

    monkeypatch.setattr(local_processes, "start_world", start)
    config = replace(recipes.make(recipe), recipe=recipe, device="cpu")
    assert count_processes(config, CPU, environment) == processes
    with open_world(config, ["train", recipe], environment) as world:
        assert (world.size, torch.get_num_threads()) == (processes, expected)
    assert torch.get_num_threads() == 3, "as before"
    assert started == ([(processes, ["train", recipe])] if processes > 1 else [])


@pytest.mark.parametrize(
    "device, recipe, processes, message",
    [
        ("cuda", "tiny", 2, "--processes 2 is for training on a CPU .* use torchrun"),
        ("cpu", "", 2, "needs a configuration that was made from a recipe"),
        ("cpu", "tiny", 9999, "--processes 9999: more than four for each .* its memory"),
    ],
)
def test_processes_that_cannot_be_started(device, recipe, processes, message):
    config = replace(recipes.make("tiny"), recipe=recipe, processes=processes)
    with error_line(message):
        count_processes(config, torch.device(device), {})
    assert count_processes(replace(config, processes=1), torch.device(device), {}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes.names("train"))
def test_other_processes_get_the_same_configuration(tmp_path, recipe):
    """As `gigamask.train` hands it on: as a file of flags, warm-up included."""
    config = recipes.make(recipe).with_(data="scenes/", steps=7, ema=0.5)
    config = replace(config, recipe=recipe, data=("scenes/", "more/"))
    path = tmp_path / "config.yaml"
    path.write_text(config_files.config_yaml(config))
    flags = config_files.parse_train([recipe, "--config", str(path)])
    assert flags.run == flags.limited == config


@pytest.mark.long
def test_the_micro_batch_that_fits_in_free_memory_is_chosen(monkeypatch, capsys):
    """A GPU of 1 TB holds the whole batch, one of 1 MB a single image."""
    run = replace(little(), batch_size=2, micro_batch_size=None)
    assert choose_micro_batch_size(run, World()).micro_batch_size == 1, "on a CPU"
    monkeypatch.setattr(precision, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for free, size in ((1e12, 2), (1e6, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2e12))
        assert choose_micro_batch_size(run, World()).micro_batch_size == size
    assert "--micro-batch-size 2: the most that fits in 931.3 GiB\n" in capsys.readouterr().out
    assert choose_micro_batch_size(replace(run, micro_batch_size=4), World()).micro_batch_size == 4


@pytest.mark.slow
def test_a_resumed_run_keeps_its_micro_batch(tmp_path, scenes):
    run = replace(
        little(), data=(str(scenes),), out=str(tmp_path / "run"), steps=1, micro_batch_size=2
    )
    train(run)
    resumed = train(replace(run, steps=2, micro_batch_size=None))
    assert resumed.config.micro_batch_size == 2
    assert config_files.load_config(run.out, trust=True).micro_batch_size == 2


def test_the_demo_goes_on_with_as_many_scenes(tmp_path):
    scenes.write(tmp_path / "train", 2, seed=0)
    index.build(tmp_path / "train", tmp_path / "train" / "index")
    with error_line("train: holds 2 scenes, not 3; ask for as many"):
        demo.run(str(tmp_path), 3, 2, 1)
    *_, (command, _) = demo.next_commands("my runs")
    assert command == "gigamask follow 'my runs/test/sa_000000.tar:0'"


def test_a_training_of_several_processes_is_fitted_for_them(monkeypatch):
    asked = []

    def note(config, memory, hardware):
        asked.append(hardware.cluster.size)
        return config, ""

    monkeypatch.setattr(fit, "fit", note)
    flags = TrainFlags(replace(little(), processes=2, device="cpu"))
    fitted(flags, "1GB")
    monkeypatch.setenv("WORLD_SIZE", "3")
    fitted(flags, "1GB")
    assert asked == [2, 3]
