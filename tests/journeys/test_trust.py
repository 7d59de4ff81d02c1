"""A run folder of others: no command runs code that it names, unless told to."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import gigamask
from gigamask import config_files
from gigamask.cli.main import commands as installed
from gigamask.training import checkpoint
from gigamask.training.retention import Retention
from gigamask.training.state import TrainState
from gigamask.workflows.train import Run
from tests.commands import exit_code, invoke, refusal
from tests.errors import error_line
from tests.little import little

CODE = """
from dataclasses import dataclass
from pathlib import Path
Path({marker!r}).write_text("")
from gigamask.losses.sam_loss import SamLoss
from tests.little import little
@dataclass(frozen=True)
class Own(SamLoss):
    pass
"""


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """Written when the code of the run folder is imported."""
    site, marker = tmp_path / "site", tmp_path / "marker"
    site.mkdir()
    (site / "evil.py").write_text(CODE.format(marker=str(marker)))
    (site / "evil_module.py").write_text(CODE.format(marker=str(marker)))
    info = site / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[gigamask.components]\nrecipe.evil_recipe = evil_module:little\n"
    )
    monkeypatch.syspath_prepend(str(site))
    for name in ("evil", "evil_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield marker
    for name in ("evil", "evil_module"):
        sys.modules.pop(name, None)


def change_config(run: Path, **changes: str) -> None:
    """Change values of a run's config.yaml."""
    content = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(content | changes))


@pytest.fixture
def run(tmp_path, marker) -> Path:
    """A run with a tensor more than its built-in model has, and a recipe of others."""
    config = replace(little(), out=str(tmp_path / "run"), data=("x.tar",))
    config_files.save_config(config)
    change_config(tmp_path / "run", recipe=f"{tmp_path}/site/evil.py:little")
    state = TrainState.initialize(config, torch.device("cpu"))
    snapshot = checkpoint.Snapshot.from_state(state)
    odd = snapshot.model | {"image_encoder.odd": torch.zeros(1)}
    folder = checkpoint.write(replace(snapshot, model=odd), config, Retention(config.keep))
    (tmp_path / "run" / "checkpoints" / "best").symlink_to(folder.name)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1, "images_per_s": 1}\n')
    return tmp_path / "run"


def commands(run: Path, scenes: Path, out: Path) -> list[str]:
    """Every installed command that reads a run folder, except training."""
    words = [
        f"evaluate {run} --data {scenes} --device cpu",
        f"export {run} --to official --out {out}/exported_official",
        f"export {run} --to huggingface --out {out}/exported_huggingface",
        f"segment {run} {scenes} --out {out}/segmented --device cpu",
        f"serve --weights {run} --port 0 --device cpu",
        f"ask {run} {scenes}/sa_000000.tar:sa_0 red --device cpu",
        f"ground evaluate {run} --device cpu",
        f"plan tiny --init {run}",
        f"report {run} --out {out}/report.html",
    ]
    return [each for each in words if each.split()[0] in installed()]


@pytest.mark.parametrize("name", ["file", "module", "entry point"])
def test_no_command_runs_code_that_a_run_names(name, run, marker, scenes, tmp_path, capsys):
    names = {
        "file": {"recipe": f"{tmp_path}/site/evil.py:little"},
        "module": {"recipe": "tiny", "loss": "evil_module:Own"},
        "entry point": {"recipe": "evil_recipe"},
    }[name]
    change_config(run, **names)
    newest = run / "checkpoints" / "step_00000000"
    every = commands(run, scenes, tmp_path)
    for weights in (newest, run / "checkpoints" / "best", newest / "model.safetensors"):
        every.append(f"export {weights} --to safetensors --out {tmp_path}/x")
    for words in every:
        reads = words.startswith(("report", "plan"))
        code = exit_code(words)
        assert code == (0 if words.startswith("report") else 2), words
        said = capsys.readouterr().err
        assert not marker.exists(), words
        assert reads or ("--trust" in said and f"{run}/config.yaml" in said), (words, said)
    calls = {
        "load_model": lambda: gigamask.load_model(run),
        "evaluate": lambda: gigamask.evaluate(run, scenes, device="cpu"),
        "segment": lambda: gigamask.segment(run, scenes, tmp_path / "out", device="cpu"),
        "Run.open": lambda: Run.open(run),
        "load_config": lambda: config_files.load_config(str(run)),
    }
    for call, function in calls.items():
        with error_line(r"trust=True"):
            function()
        assert not marker.exists(), call


def test_trust_and_training_run_it_and_resuming_says_so(run, marker, scenes, tmp_path, capsys):
    words = f"evaluate {run} --data {scenes} --device cpu --trust"
    assert "image_encoder.odd" in refusal(capsys, words)
    assert marker.exists()
    marker.unlink()
    sys.modules.pop("evil")
    invoke(f"train --resume {run} --print-config")
    assert marker.exists()
    said = capsys.readouterr().err
    assert "evil.py:little" in said
    assert said.count("\n") == 1


def test_a_config_above_a_checkpoint_of_another_folder_does_not_count(run, tmp_path):
    newest = run / "checkpoints" / "step_00000000"
    assert config_files.run_folder_of(str(newest / "model.safetensors")) == run
    other = run / "imported" / "deep"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes((newest / "model.safetensors").read_bytes())
    assert config_files.run_folder_of(str(other / "model.safetensors")) is None
    assert config_files.run_folder_of(str(other)) is None


@pytest.mark.parametrize(
    "line", ["help: now", "print-help: [bash, {written}]", "steps: --help", "sampler: [a, b]"]
)
def test_a_config_cannot_pass_other_flags(line, tmp_path):
    written = tmp_path / "written"
    (tmp_path / "config.yaml").write_text("recipe: tiny\n" + line.format(written=written) + "\n")
    with error_line(r"config\.yaml: ") as fault:
        config_files.load_config(str(tmp_path))
    assert line.partition(":")[0] in str(fault.value)
    assert not written.exists()
