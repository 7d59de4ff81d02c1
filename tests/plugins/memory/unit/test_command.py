"""`gigamask memory`."""

import pytest

from gigamask.data import process_memory
from gigamask.plugins.memory import command as memory
from tests.errors import error_line

pytestmark = pytest.mark.skipif(not process_memory.PROC.is_dir(), reason="this system has no /proc")


@pytest.mark.slow
def test_a_sample_of_a_tar(scenes, capsys):
    found = memory.parse(["sample", f"{scenes}/sa_000000.tar:3"]).run()
    assert found["name"] == "sa_000000.tar:sa_3"
    assert max(found["height"], found["width"]) in range(256, 321)
    assert capsys.readouterr().out.startswith("sa_000000.tar:sa_3: ")


@pytest.mark.slow
def test_a_synthetic_sample(capsys, tmp_path):
    words = "sample --height 90 --width 120 --masks 5 --json found.json"
    command = memory.parse(words.split())
    assert command.json == "found.json"
    found = command.run()
    assert (found["height"], found["width"], found["masks"]) == (90, 120, 5)
    assert found["decoded"]["masks_uint8"] == 5 * 90 * 120
    assert capsys.readouterr().out.startswith("synthetic sample: 90 x 120, 5 masks\n")


@pytest.mark.slow
def test_the_loader_of_a_recipe(scenes, capsys):
    found = memory.parse(f"loader --data {scenes} --workers 1 --batches 9".split()).run()
    assert (found["recipe"], found["image_size"], found["mask_size"]) == ("tiny", 128, 64)
    assert len(found["workers"]) == 1
    assert "recipe tiny: input 128, masks on a grid of 64\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("", r"sample or loader .*; see 'gigamask memory --help'$"),
        ("smaple", r"smaple'.*; see 'gigamask memory --help'$"),
        ("sample --heigth 3", r"--heigth; perhaps you meant --height; "),
        ("loader", r"missing --data"),
    ],
)
def test_wrong_words_are_one_line(words, message):
    with error_line(message) as raised:
        memory.parse(words.split())
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_what_cannot_be_measured_is_named(scenes, tmp_path):
    for words, message in {
        "sample photograph.jpg": r"^'photograph.jpg' .*TAR:IMAGE, such as photograph.jpg:0$",
        "sample --masks -1": r"^-1 masks: ",
        f"loader --data {scenes} --workers 0": r"^--workers must be at least 1 .*0",
    }.items():
        with error_line(message):
            memory.parse(words.split()).run()


def test_an_image_without_json_is_named(tmp_path):
    from gigamask.data import tar
    from gigamask.plugins.memory import large_sample

    tar.write(tmp_path / "a.tar", [("sa_1.jpg", large_sample.make((9, 9), 1)[0])])
    with error_line(r"^a.tar:sa_1"):
        memory.parse(["sample", f"{tmp_path}/a.tar:1"]).run()
