"""Reading data in full, and training over data of which some is broken."""

import json
import re
from pathlib import Path

from gigamask.cli.main import main
from gigamask.data import tar
from tests import broken

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"


def test_verify_ends_with_2_and_names_what_is_bad(tmp_path, capsys):
    bad = broken.write_samples(tmp_path / "samples.tar")
    tars = broken.write_tars(tmp_path)
    assert main(f"verify {tmp_path} --json {tmp_path}/bad.json".split()) == 2
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
    assert main(["verify", str(tmp_path / "whole.tar"), "--no-decode"]) == 0


def test_checksums_of_an_index_name_a_flipped_bit(tmp_path, capsys):
    path, out = tmp_path / "a.tar", str(tmp_path / "index")
    broken.write_plain(path, broken.members(0, *broken.sound(0)))
    assert main(["index", str(path), "--out", out]) == 0
    assert main(["verify", out]) == 0
    assert re.search("1 JPEG without a checksum.*index .*--checksums", capsys.readouterr().out)
    assert main(["index", str(path), "--out", out, "--checksums"]) == 0
    assert "(1 scanned, 0 reused)" in capsys.readouterr().out
    assert main(["verify", out]) == 0
    assert "without a checksum" not in capsys.readouterr().out
    broken.flip(path, 8 * (tar.scan(path).offsets[0] + len(broken.sound(0)[0]) // 2))
    assert main(["verify", out]) == 2
    assert f"bad {path} sa_0.jpg at 512: " in capsys.readouterr().out


def train(folder: Path, out: Path, *words: str) -> tuple[int, list[dict]]:
    code = main([*f"train {LITTLE} --data {folder} --out {out}".split(), *words])
    return code, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


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
    code, notes = train(tmp_path / "data", tmp_path / "run", "--steps", "8")
    assert code == 0
    skipped = [note for note in notes if "skipped_sample" in note]
    assert {note["skipped_sample"] for note in skipped} == {
        "sa_000000.tar:sa_5",
        "sa_000000.tar:sa_7",
    }
    assert len(skipped) == 2
    assert all("the JPEG of" in note["reason"] for note in skipped)
    said = capsys.readouterr()
    assert (said.out + said.err).count("skipped sample: sa_000000.tar:sa_5: the JPEG of ") == 1
    code, _ = train(
        tmp_path / "data", tmp_path / "strict", "--steps", "8", "--max-bad-fraction", "0.0"
    )
    assert code == 2
    assert re.search(
        r"[12] of \d+ samples .* more than 0.0%; .*--max-bad-fraction",
        capsys.readouterr().err,
    )
