"""`gigamask evaluate` by two processes, as torchrun starts them: the scores of one process, printed
once."""

import os

import pytest

from gigamask.errors import GigamaskError
from gigamask.evaluation import clicks
from gigamask.serialization import read_json
from gigamask.synthetic import scenes as synthetic
from tests.commands import exit_code, invoke
from tests.ranks import fork
from tests.tiers import long_after


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("small")
    synthetic.write(folder, 3, seed=7, long_side=(96, 128))
    return str(folder)


@pytest.mark.parametrize("count", long_after(1, [2, 3]))
def test_several_processes_print_what_one_does(weights, scenes, tmp_path, capfd, count):
    """Three images between two, to the bit but for rounding; an odd one out shows that order is
    kept."""
    words = (
        f"evaluate {weights} --data {scenes} --max-images 3 --batch-size 1 --device cpu "
        "--automatic --points-per-side 3 --refine --box-noise 0.1 --json"
    )
    invoke(words, tmp_path / "one.json")
    alone = capfd.readouterr().out
    fork(count, exit_code, words, tmp_path / "two.json")
    assert capfd.readouterr().out == alone
    one, two = (read_json(tmp_path / f"{name}.json") for name in ("one", "two"))
    assert two.keys() == one.keys()
    assert "boxes and first clicks: refined" in alone
    assert "loose boxes: each side moved by noise of 10 %" in alone
    for name in ("clicks", "oracle", "box", "loose_box", "images", "masks"):
        assert two[name] == pytest.approx(one[name], abs=1e-6)
    for name, value in one["automatic"].items():
        assert two["automatic"][name] == (
            pytest.approx(value, abs=1e-6) if isinstance(value, float) else value
        )


def test_more_processes_than_images(weights, scenes, tmp_path):
    words = f"evaluate {weights} --data {scenes} --max-images 1 --device cpu"
    fork(2, exit_code, words, f"--json {tmp_path}/two.json")
    assert read_json(tmp_path / "two.json")["images"] == 1


def codes(words: str, expected: tuple[int, int]) -> int:
    """Returns 0 when this process ends as it should."""
    try:
        code = exit_code(words)
    except SystemExit as end:
        code = int(str(end.code))
    return int(code != expected[int(os.environ["RANK"])])


@pytest.mark.parametrize(
    "words, line, expected",
    [
        ("evaluate gone.pth", "gone.pth", (2, 2)),
        ("evaluate {weights} --points-per-side 0 --automatic", "--points-per-side", (2, 2)),
        ("evaluate {weights} --batch-size 0", "batch", (2, 2)),
        (
            "evaluate {weights} --box-noise -0.1",
            "--box-noise must be between 0 and 1 (got -0.1)",
            (2, 2),
        ),
        ("evaluate {weights} --min-predicted-iou 1", "no mask to evaluate", (2, 0)),
    ],
)
def test_error_common_to_all_ranks_is_printed_once(weights, scenes, capfd, words, line, expected):
    asked = f"{words.format(weights=weights)} --data {scenes} --max-images 2 --device cpu"
    fork(2, codes, asked, expected)
    told = capfd.readouterr().err.splitlines()
    assert [each for each in told if line in each] == told
    assert len(told) == 1, told


def test_what_is_wrong_for_one_ends_all(weights, scenes, capfd, monkeypatch):
    """The second process cannot go on."""
    score = clicks.score_group

    def failing(*given):
        if os.environ.get("RANK") == "1":
            raise GigamaskError("the second image is too much; leave it out")
        return score(*given)

    monkeypatch.setattr(clicks, "score_group", failing)
    words = f"evaluate {weights} --data {scenes} --max-images 2 --device cpu"
    fork(2, codes, words, (2, 2))
    done = capfd.readouterr()
    assert done.err == "gigamask: the second image is too much; leave it out\n"
    assert "mIoU" not in done.out
