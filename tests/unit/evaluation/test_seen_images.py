"""Scores of training data are said to be that, wherever the run keeps its index."""

import pytest

from gigamask.data.index import build
from gigamask.evaluation.seen_images import say_seen
from gigamask.synthetic import scenes as synthetic


@pytest.mark.parametrize("is_index", [False, True])
def test_images_that_a_run_was_trained_on_are_counted(tmp_path, capsys, is_index):
    """Two of three; names alone are no proof, since all sets number their images alike."""
    seen, new, run = (tmp_path / name for name in ("seen", "new", "run"))
    for seed, (folder, count) in enumerate([(seen, 2), (new, 1)]):
        synthetic.write(folder, count, seed=seed, long_side=(48, 64))
    trained = build(seen, tmp_path / "own" if is_index else run / "index-0123456789abcdef")
    data = [str(trained.folder if is_index else seen)]
    index = build([seen, new], tmp_path / "all")
    assert len(set(index.images["name"][:].tolist())) == 2
    say_seen(index, range(3), run, data)
    assert f"2 of 3 images are training data of {run}" in capsys.readouterr().out
    say_seen(build(new, tmp_path / "other"), [0], run, data)
    assert not capsys.readouterr().out
