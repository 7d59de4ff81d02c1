"""`gigamask repack`: what it prints, refuses and leaves, also in parts and on a full disk."""

import pytest

from gigamask.cli.main import main
from gigamask.serialization import read_json
from gigamask.synthetic import scenes as synthetic
from tests.commands import exit_code, invoke, refusal
from tests.limits import check_full_disk
from tests.plugins.repack.unit.test_repack import check_same_tars


def test_what_is_printed(scenes, tmp_path, capsys):
    command = f"repack {scenes} --out {tmp_path}/small --size 128"
    invoke(command, f"--json {tmp_path}/r.json")
    done, printed = read_json(tmp_path / "r.json"), capsys.readouterr().out
    assert f"/small: 12 images with {done['masks']} masks in {done['tars']} tar" in printed
    assert "(0 done before)" in printed
    assert "times smaller" in printed
    invoke(command)
    assert f"({done['tars']} done before)" in capsys.readouterr().out
    invoke(f"index {tmp_path}/small --out {tmp_path}/index")
    (tmp_path / "z.tar").write_bytes(b"")
    assert exit_code(f"repack {scenes} {tmp_path}/z.tar --out {tmp_path}/large --size 5000") == 2
    printed = capsys.readouterr()
    assert "12 images copied: small already" in printed.out
    assert "tars skipped: 1\n" in printed.out
    assert "1 tar could not be repacked" in printed.err
    assert "no such" in refusal(capsys, f"repack nowhere --out {tmp_path}/out")


def test_the_parts_give_the_result_of_one_process(tmp_path):
    synthetic.write(tmp_path / "in", 4, shard_images=2)
    words = f"repack {tmp_path}/in --size 48 --out {tmp_path}"
    invoke(f"{words}/plain --json {tmp_path}/plain.json")
    for number in range(2):
        with pytest.raises(SystemExit):
            main(f"{words}/joined --part {number}/2@{tmp_path}/parts".split())
    invoke(f"{words}/joined --part join/2@{tmp_path}/parts --json {tmp_path}/joined.json")
    assert read_json(tmp_path / "joined.json") == read_json(tmp_path / "plain.json")
    check_same_tars(tmp_path / "joined", tmp_path / "plain")


def test_a_full_disk_is_one_line_and_leaves_no_half_file(scenes, tmp_path, capsys):
    words = f"repack {scenes} --out {{out}} --size 64 --json {{out}}.json"
    check_full_disk(words, tmp_path, capsys)
