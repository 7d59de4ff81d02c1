"""Reading data in full, and training over data of which some is broken."""

import json
import re

from gigamask.data import tar
from tests import broken
from tests.commands import LITTLE, exit_code, invoke
from tests.journeys.runs import lines


def test_verify_ends_with_2_and_names_what_is_bad(tmp_path, capsys):
    bad = broken.write_samples(tmp_path / "samples.tar")
    tars = broken.write_tars(tmp_path)
    assert exit_code(f"verify {tmp_path} --json {tmp_path}/bad.json") == 2
    said = capsys.readouterr()
    assert f"{len(bad)} of " in said.err
    assert f"{len(tars)} of {len(tars) + 2} tars" in said.err
    assert "zero block" in said.out
    assert re.search(
        r"and \d+ more, all of them with --json FILE|bad .*samples.tar sa_1.jpg at \d+: ", said.out
    )
    found = json.loads((tmp_path / "bad.json").read_text())
    assert {each["sample"] for each in found["bad_members"]} == bad.keys()
    assert {"tar", "member", "offset", "sample", "reason"} == found["bad_members"][0].keys()
    assert sum(bool(each["tar_errors"]) for each in found["tars"]) == len(tars)
    (tmp_path / "sums").write_text(f"{'0' * 32} other.tar\n")
    told = f"--checksums {tmp_path}/sums --json {tmp_path}/sums.json"
    invoke(f"verify {tmp_path}/whole.tar --no-decode {told}")
    unlisted = f"1 tar not listed in --checksums, such as {tmp_path}/whole.tar\n"
    assert unlisted in capsys.readouterr().out
    assert json.loads((tmp_path / "sums.json").read_text())["unlisted"] == [f"{tmp_path}/whole.tar"]


def test_checksums_of_an_index_name_a_flipped_bit(tmp_path, capsys):
    path, out = tmp_path / "a.tar", str(tmp_path / "index")
    broken.write_plain(path, broken.samples(0))
    invoke(f"index {path} --out {out}")
    invoke(f"verify {out}")
    assert re.search("1 JPEG without a checksum.*index .*--checksums", capsys.readouterr().out)
    invoke(f"index {path} --out {out} --checksums")
    assert "(1 scanned, 0 reused)" in capsys.readouterr().out
    invoke(f"verify {out}")
    assert "without a checksum" not in capsys.readouterr().out
    broken.flip(path, 8 * (tar.scan(path).offsets[0] + len(broken.sound(0)[0]) // 2))
    assert exit_code(f"verify {out}") == 2
    assert f"bad {path} sa_0.jpg at 512: " in capsys.readouterr().out


def test_training_leaves_out_what_is_bad_and_says_it_once(tmp_path, capsys):
    """Two broken JPEGs, which no index can know of, and a broken json among 12 samples, seen twice
    each."""
    held = []
    for number in range(12):
        jpg, record = broken.sound(number)
        held += broken.members(
            number,
            broken.interrupt(jpg) if number == 5 else jpg[:-300] if number == 7 else jpg,
            b"{" if number == 9 else record,
        )
    (tmp_path / "data").mkdir()
    tar.write(tmp_path / "data" / "sa_000000.tar", held)
    train = f"train {LITTLE} --data {tmp_path}/data --steps 8 --out"
    invoke(train, tmp_path / "run")
    skipped = [note for note in lines(tmp_path / "run") if "skipped_sample" in note]
    names = sorted(note["skipped_sample"] for note in skipped)
    assert names == ["sa_000000.tar:sa_5", "sa_000000.tar:sa_7"]
    assert all("the JPEG of" in note["reason"] for note in skipped)
    said = capsys.readouterr()
    assert (said.out + said.err).count("skipped sample: sa_000000.tar:sa_5: the JPEG of ") == 1
    assert exit_code(train, f"{tmp_path}/strict --max-bad-fraction 0.0") == 2
    assert re.search(
        r"[12] of \d+ samples .* more than 0.0%; .*--max-bad-fraction",
        capsys.readouterr().err,
    )


def test_a_tar_without_images_is_no_success(tmp_path, capsys):
    tar.write(tmp_path / "t.tar", [("readme.txt", b"")])
    assert exit_code(f"verify {tmp_path}") == 2
    assert "there is no image" in capsys.readouterr().err
