"""`gigamask evaluate` by two processes, as torchrun starts them: the scores of one process, printed
once."""

import json
import os

import pytest

from gigamask.cli.main import main
from gigamask.errors import GigamaskError
from gigamask.evaluation import clicks
from gigamask.synthetic import scenes as synthetic
from tests.little import save_little
from tests.ranks import fork
from tests.tiers import long_after


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_little(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("small")
    synthetic.write(folder, 3, seed=7, long_side=(96, 128))
    return str(folder)


@pytest.mark.parametrize("count", long_after(1, [2, 3]))
def test_several_processes_print_what_one_does(model, scenes, tmp_path, capfd, count):
    """Three images between two, to the bit but for rounding; an odd one out shows that order is
    kept."""
    words = [
        "evaluate",
        model,
        "--data",
        scenes,
        *("--max-images 3 --batch-size 1 --automatic --points-per-side 3 --device cpu").split(),
        *"--refine --box-noise 0.1".split(),
    ]
    assert main([*words, "--json", str(tmp_path / "one.json")]) == 0
    alone = capfd.readouterr().out
    fork(count, main, [*words, "--json", str(tmp_path / "two.json")])
    assert capfd.readouterr().out == alone
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two.keys() == one.keys()
    assert "boxes: refined" in alone
    assert "loose boxes: each side moved by noise of 10 %" in alone
    for name in ("clicks", "oracle", "box", "loose_box", "images", "masks"):
        assert two[name] == pytest.approx(one[name], abs=1e-6)
    for name, value in one["automatic"].items():
        assert two["automatic"][name] == (
            pytest.approx(value, abs=1e-6) if isinstance(value, float) else value
        )


def test_more_processes_than_images(model, scenes, tmp_path):
    fork(
        2,
        main,
        [
            "evaluate",
            model,
            "--data",
            scenes,
            *f"--max-images 1 --device cpu --json {tmp_path}/two.json".split(),
        ],
    )
    assert json.loads((tmp_path / "two.json").read_text())["images"] == 1


def codes(words: list[str], expected: tuple[int, int]) -> int:
    """Returns 0 when this process ends as it should."""
    try:
        code = main(words)
    except SystemExit as end:
        code = int(str(end.code))
    return int(code != expected[int(os.environ["RANK"])])


@pytest.mark.parametrize(
    ("words", "line", "expected"),
    [
        (["evaluate", "gone.pth"], "gone.pth", (2, 2)),
        (["--points-per-side", "0", "--automatic"], "--points-per-side", (2, 2)),
        (["--batch-size", "0"], "batch", (2, 2)),
        (["--box-noise", "-0.1"], "--box-noise is -0.1", (2, 2)),
        (["--min-predicted-iou", "1"], "no mask to evaluate", (2, 0)),
    ],
)
def test_error_common_to_all_ranks_is_printed_once(model, scenes, capfd, words, line, expected):
    asked = words if words[0] == "evaluate" else ["evaluate", model, *words]
    fork(2, codes, [*asked, "--data", scenes, "--max-images", "2", "--device", "cpu"], expected)
    told = capfd.readouterr().err.splitlines()
    assert [each for each in told if line in each] == told
    assert len(told) == 1, told


def test_what_is_wrong_for_one_ends_all(model, scenes, capfd, monkeypatch):
    """The second process cannot go on."""
    score = clicks.score_group

    def failing(*given):
        if os.environ.get("RANK") == "1":
            raise GigamaskError("the second image is too much; leave it out")
        return score(*given)

    monkeypatch.setattr(clicks, "score_group", failing)
    fork(
        2,
        codes,
        ["evaluate", model, "--data", scenes, "--max-images", "2", "--device", "cpu"],
        (2, 2),
    )
    done = capfd.readouterr()
    assert done.err == "gigamask: the second image is too much; leave it out\n"
    assert "mIoU" not in done.out
