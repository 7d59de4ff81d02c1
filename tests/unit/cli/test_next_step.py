"""Errors name the command that was meant."""

import pytest

from tests.commands import refusal


@pytest.mark.parametrize(
    "words, said",
    [
        ("segment start photos --out m", "perhaps you meant starter"),
        ("segment photos starter --out m", "'gigamask segment starter photos'"),
        ("train starter --data photos --out r", "compact --init starter"),
        ("evaluate starter photos", "--data photos"),
        ("evaluate photos --data starter", "'gigamask evaluate starter --data photos'"),
        ("evaluate photos --data run", "'gigamask evaluate run --data photos'"),
        ("segment starter photos --out m --conf 0.3", "--pred-iou-thresh"),
        ("train tiny data=photos epochs=3", "--data photos"),
        ("train data=photos epochs=3", "such as compact"),
        ("evaluate starter --data photos --json photos/a.json", "would replace annotations"),
        ("evaluate starter --data photos --json photos/a.jpg", "holds no results"),
    ],
)
def test_the_next_step_is_named(words, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.json").write_text('{"version": "5", "shapes": []}')
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "photos/a.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00")
    monkeypatch.chdir(tmp_path)
    assert said in refusal(capsys, words)
