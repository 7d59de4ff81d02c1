"""`gigamask plan` as a user types it."""

import pytest

from gigamask.recipes.photographs import compact
from gigamask.serialization import read_json
from gigamask.synthetic.shapes import OUTLINES
from tests.commands import LITTLE, exit_code, invoke, refusal


def test_a_plan_is_printed_and_written(tmp_path, capsys):
    """The flags are those of `train`, in a file too; no data, weights or folder are needed."""
    config, told = tmp_path / "mine.yaml", tmp_path / "plan.json"
    config.write_text("masks-per-chunk: 2\noptimizer: muon\n")
    words = (
        f"plan {LITTLE} --device auto --gpu h200 --world 2x3 --micro-batch-size 1 "
        "--prompts.clicks 0 --prompts.no-mask-only-rounds"
    )
    invoke(words, f"--config {config} --dollars-per-gpu-hour 3 --efficiency 0.4 --json {told}")
    found, text = read_json(told), capsys.readouterr().out
    assert found["world"] == {"nodes": 2, "gpus_per_node": 3}
    assert (found["masks_per_chunk"], found["rounds"]) == (2, 1)
    assert (found["batch_split"]["images"], found["batch_split"]["busiest"]) == (1, 3)
    assert found["fits"]
    assert found["gpu"]["name"] == "h200"
    assert found["time"][0]["dollars"] == pytest.approx(3 * found["time"][0]["gpu_hours"])
    assert found["peak_bytes"] == max(sum(kinds.values()) for kinds in found["phases"].values())
    assert "3 processes" in text
    assert "at 40.0%: as given" in text
    assert "138.2 GiB" in text


def test_a_pre_training_is_planned_too(capsys):
    invoke("plan mae_tiny --micro-batch-size 2")
    text = capsys.readouterr().out
    assert "\nmae_tiny: 0.6 M parameters" in text
    assert "per image" in text
    assert "hours" not in text.partition("\n")[2]  # but in what the command says first


def test_help(capsys):
    with pytest.raises(SystemExit) as left:
        exit_code("plan --help")
    assert not left.value.code
    text = capsys.readouterr().out
    assert "sam_vit_h" in text
    assert "mae_vit_b" in text
    with pytest.raises(SystemExit):
        exit_code("plan tiny --help")
    text = capsys.readouterr().out
    assert "--dollars-per-gpu-hour" in text
    assert "--optimizer.lr" in text


@pytest.mark.parametrize(
    "words, message",
    [
        ("plan", "plan needs a recipe, such as compact"),
        ("plan tiny --gpu h2000", "no GPU is called 'h2000'; known are b200, h200"),
        ("plan tiny --world 8by8", "GPUs, got '8by8'"),
        ("plan tiny --efficiency 0.3", "--efficiency needs a GPU; give --gpu"),
        ("plan tiny --gpu h200 --efficiency 0", "--efficiency must be > 0 and finite (got 0.0)"),
        (
            "plan tiny --gpu h200 --efficiency 30",
            "--efficiency, a share of the GPU's peak, must be between 0 and 1 (got 30.0)",
        ),
        (
            "plan tiny --gpu h200 --dollars-per-gpu-hour -1",
            "--dollars-per-gpu-hour must be > 0 and finite (got -1.0)",
        ),
        ("plan tiny --gpu h200 --spare-gib -1", "--spare-gib must be at least 0 (got -1.0)"),
        ("plan tiny --json nowhere/plan.json", "--json nowhere/plan.json: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(words, message, capsys):
    told = refusal(capsys, words)
    assert told.startswith("gigamask: ")
    assert message in told


@pytest.mark.long
def test_classes_are_counted_in_the_data(scenes, tmp_path, capsys):
    """The head is larger by the classes found; without data, there are none to count."""
    counts = []
    for words in ("--classes disc", f"--classes auto --data {scenes}"):
        path = tmp_path / "plan.json"
        invoke("plan compact", words, f"--json {path}")
        counts.append(read_json(path)["parameters"])
    inputs = compact().model.iou_hidden + 1
    assert counts[1] - counts[0] == (len(OUTLINES) - 1) * inputs
    assert "--classes auto: " in refusal(capsys, "plan compact --classes auto")
