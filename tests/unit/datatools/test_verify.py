"""Everything that is wrong with data is found and named, and nothing else."""

import hashlib
import json
import os
import re
import shutil
import tarfile
from codecs import BOM_UTF8
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import image, index, tar
from gigamask.data.shard_index import index_tar
from gigamask.datatools import verify as verification
from gigamask.synthetic import scenes
from tests import broken
from tests.errors import error_line
from tests.servers import FileServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, dict, dict]:
    """A folder with every defect: the folder, the bad samples, the broken tars."""
    path = tmp_path_factory.mktemp("broken")
    return path, broken.write_samples(path / "samples.tar"), broken.write_tars(path)


def checked(
    path: Path | str, sums: dict[str, str] | None = None, decode: bool = True
) -> verification.TarReport:
    return verification.check_tar(str(path), sums or {}, decode=decode)


@pytest.mark.slow
def test_every_defect_is_found_and_named_and_nothing_else(folder):
    path, bad, tars = folder
    told = []
    reports, stale = verification.verify(
        path, progress=lambda done, total: told.append((done, total))
    )
    assert stale == []
    assert told == [(number + 1, len(tars) + 2) for number in range(len(tars) + 2)]
    by_name = {os.path.basename(report.path): report for report in reports}
    found = {finding.sample: finding for report in reports for finding in report.bad_members}
    assert found.keys() == bad.keys()
    for sample, (member, words) in bad.items():
        assert found[sample].member == member
        assert re.search(words, found[sample].reason), (sample, found[sample].reason)
    assert {name for name, report in by_name.items() if report.tar_errors} == tars.keys()
    for name, (words, before) in tars.items():
        assert len(by_name[name].tar_errors) == 1
        assert re.search(words, by_name[name].tar_errors[0]), (name, by_name[name].tar_errors)
        assert by_name[name].tar_errors[0].startswith(f"{path / name}: ")
        # A jpg may be whole while its json is behind the break.
        assert by_name[name].images - by_name[name].without_json == before, name
    assert [report.mismatches for report in reports if report.mismatches] == []
    assert (by_name["whole.tar"].images, by_name["whole.tar"].bad_samples) == (4, [])
    assert verification.summary(reports)["bad_samples"] == len(bad)


def test_findings_lie_where_they_say(folder):
    path, bad, _ = folder
    with tarfile.open(path / "samples.tar") as archive:
        offsets = {member.name: member.offset_data for member in archive}
    report = checked(path / "samples.tar")
    assert {finding.member: finding.offset for finding in report.bad_members} == {
        member: offsets[member] for member, _ in bad.values()
    }
    assert {finding.tar for finding in report.bad_members} == {str(path / "samples.tar")}


def test_verify_names_all_where_the_index_names_the_first(folder):
    path, _, _ = folder
    with error_line(r"\d+ of its \d+ entries.*samples.tar:sa_13"):
        index_tar(str(path / "samples.tar"))
    assert len(checked(path / "samples.tar", {}, False).bad_samples) > 20


def test_without_decoding_pixels_are_not_looked_at(folder):
    path, bad, _ = folder
    found = {each.sample for each in checked(path / "samples.tar", {}, False).bad_members}
    unseen = {
        f"samples.tar:sa_{2 * number + 1}"
        for number, name in enumerate(broken.JPG_FAULTS)
        if name in ("truncated", "corrupt")
    }
    assert found == bad.keys() - unseen


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_processes_find_the_same(folder):
    path, _, _ = folder
    paths = [path / "samples.tar", path / "bad header.tar"]
    assert verification.verify(paths, workers=2) == verification.verify(paths)


def test_harmless_properties_are_counted(tmp_path):
    jpg, record = broken.sound(3)
    held = (
        broken.samples(0)
        + broken.members(1, broken.sound(1)[0], None)
        + broken.members(2, None, broken.sound(2)[1])
    )
    held += broken.members(3, jpg, record | {"annotations": []})
    held += [("readme.txt", b"x"), ("._sa_0.jpg", b"x"), ("deep/sa_4.JPEG", jpg[:-2])]
    tar.write(tmp_path / "t.tar", held)
    report = checked(tmp_path / "t.tar")
    assert (report.tar_errors, report.bad_members, report.mismatches) == ([], [], [])
    assert (report.images, report.without_json, report.without_jpg) == (4, 2, 1)
    assert (report.without_masks, report.other_members) == (1, 2)
    assert report.masks == len(broken.sound(0)[1]["annotations"])
    assert report.without_end_marker == 1


@pytest.mark.parametrize("decode", [True, False])
def test_verify_and_index_count_alike(tmp_path, decode):
    """With every kind of odd member, only `verify` counts what does not decode as bad."""
    (jpg, record), half = broken.sound(0), broken.sound(0)[0][: len(broken.sound(0)[0]) // 2]
    held = []
    for number, (one, other) in enumerate(
        [
            *[(jpg, "json")] * 6,
            (jpg, {"annotations": []}),
            (jpg, None),
            (None, "json"),
            (None, b"{"),
            (jpg, b"{"),
            (half, "json"),
            (half, None),  # its header is intact
            (b"x" + jpg[1:], "json"),
            (b"x" + jpg[1:], None),
            (b"", None),
            (broken.restate(jpg, 60_000, 60_000), None),
        ]
    ):
        stated = broken.sound(number)[1] | {"annotations": record["annotations"]}
        stated["image"] |= record["image"] | {"file_name": f"sa_{number}.jpg"}
        made = stated if other == "json" else stated | other if isinstance(other, dict) else other
        held += broken.members(number, one, made)
    held += [("readme.txt", b"x"), ("._sa_0.jpg", b"x"), ("deep/sa_40.JPEG", jpg)]
    tar.write(tmp_path / "t.tar", held)
    counted = index.build(tmp_path / "t.tar", tmp_path / "index").report()
    reports, _ = verification.verify(tmp_path / "index", decode=decode)
    found = verification.summary(reports)
    kinds = ("images", "masks", "without_json", "without_jpg", "other_members")
    assert {kind: found[kind] for kind in kinds} == {kind: counted[kind] for kind in kinds}
    assert found["skipped"] == len(counted["skipped"]) == 4
    assert (counted["images"], counted["without_json"], counted["without_jpg"]) == (12, 3, 2)
    assert {one["name"] for one in counted["skipped"]} < set(reports[0].bad_samples)


def test_a_second_member_of_the_same_name_is_bad(tmp_path):
    jpg, record = broken.sound(1)
    tar.write(tmp_path / "t.tar", [*broken.members(1, jpg, record), ("again/sa_1.jpg", jpg)])
    (finding,) = checked(tmp_path / "t.tar").bad_members
    assert finding.member == "again/sa_1.jpg"
    assert finding.reason.startswith("sa_1.jpg ")


def test_stated_areas_and_boxes_are_compared(tmp_path):
    jpg, record = broken.sound(0)
    first, second, third = record["annotations"][:3]
    first["area"] += 1
    second["bbox"][2] += 1  # as COCO states it
    third["bbox"][0] += 2
    odd_fields = broken.sound(2)[1]
    odd_fields["annotations"][0]["bbox"] = "none"
    unstated = broken.sound(1)[1]
    for annotation in unstated["annotations"]:
        del annotation["area"], annotation["bbox"]
    held = (
        broken.members(0, jpg, record)
        + broken.members(1, broken.sound(1)[0], BOM_UTF8 + json.dumps(unstated).encode())
        + broken.members(2, broken.sound(2)[0], odd_fields)
    )
    tar.write(tmp_path / "t.tar", held)
    report = checked(tmp_path / "t.tar")
    assert report.bad_members == []
    one, other = report.mismatches
    count = len(record["annotations"])
    assert re.fullmatch(
        rf"1 of {count} areas differ, annotation 0 states (\d+)\.0, its mask has \d+; "
        rf"1 of {count} boxes differ, annotation 2 states \(.*\), its mask's is \(.*\)",
        one.reason,
    )
    assert (one.sample, one.member) == ("t.tar:sa_0", "sa_0.json")
    assert "(Expected `array | null`, got `str`" in other.reason
    assert verification.summary([report])["mismatched_samples"] == 2


@pytest.mark.slow
def test_real_annotations_are_consistent(real_data, tmp_path):
    held = []
    for path in sorted((real_data / "sa1b_real" / "annotations").glob("*.json")):
        record = json.loads(path.read_text())
        if "annotations" in record:
            held.append((path.name, path.read_bytes()))
    tar.write(tmp_path / "t.tar", held)
    paths = [
        str(tmp_path / "t.tar"),
        str(real_data / "sa1b_real"),
        str(real_data / "bsds_val" / "bsds500_val_000000.tar"),
    ]
    reports, _ = verification.verify(paths, decode=False)
    assert [(report.tar_errors, report.bad_members, report.mismatches) for report in reports] == [
        ([], [], [])
    ] * 3


def test_checksums_are_compared(tmp_path):
    told = broken.write_tars(tmp_path)
    sums = {
        name: hashlib.md5((tmp_path / name).read_bytes()).hexdigest()
        for name in ("whole.tar", "cut between members.tar")
    }
    assert checked(tmp_path / "whole.tar", sums, False).tar_errors == []
    (fault,) = checked(tmp_path / "cut between members.tar", sums, False).tar_errors
    assert fault.endswith("(but its checksum is the listed one: it was published like this)")
    report = checked(tmp_path / "whole.tar", {"whole.tar": "0" * 32}, False)
    (fault,) = report.tar_errors
    assert re.match(f"{tmp_path}/whole.tar: .*{sums['whole.tar']}.*{'0' * 32}", fault)
    assert report.images == 4
    first, second = checked(tmp_path / "empty.tar", {"empty.tar": "0" * 32}, False).tar_errors
    assert "d41d8cd98f00b204e9800998ecf8427e" in first
    assert re.search(told["empty.tar"][0], second)


def test_an_index_is_compared_with_its_tars(tmp_path):
    for name in ("a", "b", "c"):
        tar.write(tmp_path / f"{name}.tar", broken.samples(1))
    folder = tmp_path / "index"
    index.build([tmp_path], folder)
    reports, stale = verification.verify(folder)
    assert (len(reports), stale) == (3, [])
    (tmp_path / "a.tar").unlink()
    tar.write(tmp_path / "b.tar", broken.samples(1, 2))
    os.utime(tmp_path / "c.tar", ns=(1, 1))
    reports, stale = verification.verify([folder])
    assert len(stale) == 3
    assert re.search(r"index: .*a.tar .*\(No such file or directory\).*'gigamask index'", stale[0])
    assert re.search(r"index: .*b.tar had \d+ bytes, .* \d+; .*'gigamask index'", stale[1])
    assert re.search(r"index: .*c.tar .*since; index again", stale[2])
    assert [bool(report.tar_errors) for report in reports] == [True, False, False]
    assert re.search(r"a.tar: .*\(No such file or directory\)", reports[0].tar_errors[0])


def test_a_damaged_index_is_said(tmp_path):
    tar.write(tmp_path / "a.tar", broken.samples(1))
    index.build([tmp_path], tmp_path / "index")
    (tmp_path / "index" / "masks_area.npy").unlink()
    _, stale = verification.verify(tmp_path / "index")
    assert re.search(r"masks_area.npy: has 0 bytes", stale[0])


def test_a_tar_that_is_gone_with_a_checksum_is_one_line(tmp_path):
    report = checked(tmp_path / "gone.tar", {"gone.tar": "0" * 32})
    (fault,) = report.tar_errors
    assert re.match(rf"{tmp_path}/gone.tar: .*\(No such file or directory\)", fault)


def test_members_that_are_too_large_or_cannot_be_read(tmp_path, monkeypatch):
    tar.write(tmp_path / "t.tar", broken.samples(1, 2))
    size = len(broken.sound(1)[0])
    monkeypatch.setattr(image, "MAX_BYTES", size - 1)
    report = checked(tmp_path / "t.tar")
    assert any(f"{size} bytes" in finding.reason for finding in report.bad_members)
    monkeypatch.setattr(image, "MAX_BYTES", 2**20)
    read = os.pread

    def failing(descriptor: int, count: int, offset: int) -> bytes:
        if count == size:
            raise OSError(5, "Input/output error")
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", failing)
    (finding,) = checked(tmp_path / "t.tar").bad_members
    assert re.search(rf"{size} bytes at \d+ \(Input/output error\)", finding.reason)


@pytest.mark.slow
def test_a_remote_tar_is_verified(folder):
    path, bad, _ = folder
    sums = {"samples.tar": hashlib.md5((path / "samples.tar").read_bytes()).hexdigest()}
    with FileServer(path) as server:
        (report,), _ = verification.verify(f"{server.url}/samples.tar?sig=1", sums)
        assert {finding.sample for finding in report.bad_members} == bad.keys()
        assert report.tar_errors == []
        gone = checked(f"{server.url}/gone.tar")
        assert re.search(r"gone.tar: .*\(not found: ", gone.tar_errors[0])
        short = checked(f"{server.url}/cut%20between%20members.tar")
        assert re.search(
            r"after member 4 \(sa_1.json\) without the zero blocks", short.tar_errors[0]
        )


def test_server_that_stops_responding_is_an_error_of_the_tar(folder, tmp_path, monkeypatch):
    path, _, _ = folder
    ranges = verification.storage.read_ranges
    with FileServer(path) as server:

        def refused(places):
            if len(places) > 1:
                server.status = 403
            return ranges(places)

        monkeypatch.setattr(verification.storage, "read_ranges", refused)
        report = checked(f"{server.url}/whole.tar")
    assert re.search(r"no permission.*credentials", report.tar_errors[0])
    assert report.bad_members == []


def test_an_index_of_remote_tars_is_compared(folder, tmp_path):
    path, _, _ = folder
    shutil.copy(path / "whole.tar", tmp_path)
    with FileServer(tmp_path) as server:
        index.build([f"{server.url}/whole.tar"], tmp_path / "index")
        assert verification.check_index(tmp_path / "index") == []
        os.utime(tmp_path / "whole.tar", ns=(1, 1))
        assert "since; index again" in verification.check_index(tmp_path / "index")[0]
        server.status = 404
        assert "its size" in verification.check_index(tmp_path / "index")[0]


@pytest.mark.slow
def test_every_flipped_bit_of_a_payload_is_found(tmp_path):
    """A JPEG with a flipped bit mostly still decodes; the crc32 in the header tells."""
    [path] = scenes.write(tmp_path, 2, long_side=(64, 80))
    whole, members = path.read_bytes(), tar.scan(path)
    random = np.random.default_rng(0)
    for name, offset, size in zip(members.names, members.offsets, members.sizes, strict=True):
        for bit in random.integers(0, 8 * size, 10):
            flipped = bytearray(whole)
            flipped[offset + bit // 8] ^= 1 << int(bit % 8)
            path.write_bytes(flipped)
            report = checked(path)
            found = [(finding.member, finding.offset) for finding in report.bad_members]
            assert (name, offset) in found, f"bit {bit} of {name}"


def test_members_without_a_partner_are_named(tmp_path):
    (jpg, _), (_, other) = broken.sound(0), broken.sound(1)
    tar.write(tmp_path / "a.tar", [*broken.members(0, jpg, None), *broken.members(1, None, other)])
    report = checked(tmp_path / "a.tar")
    assert [(finding.member, finding.reason) for finding in report.unpaired] == [
        ("sa_0.jpg", "has no json of its name"),
        ("sa_1.json", "has no jpg of its name"),
    ]


@pytest.mark.slow
def test_every_flipped_bit_is_found_with_recorded_checksums(tmp_path):
    """In a tar of others, without them, most flipped bits are not."""
    held = broken.samples(*range(40))
    path, random = tmp_path / "a.tar", np.random.default_rng(0)
    broken.write_plain(path, held)
    index.build(path, tmp_path / "plain")
    index.build(path, tmp_path / "index", checksums=True)
    members, bad = tar.scan(path), set()
    for name, offset, size in zip(members.names, members.offsets, members.sizes, strict=True):
        if name.endswith(".jpg"):
            broken.flip(path, 8 * int(offset) + int(random.integers(8 * size)))
            bad.add((str(path), name, int(offset)))
    [before], _ = verification.verify(tmp_path / "plain")
    assert (len(before.bad_members) < 20, before.without_checksum) == (True, 40)
    for stale in ([], [f"index: its tar {path} has been written since"]):
        [report], faults = verification.verify([tmp_path / "index"])
        assert {(one.tar, one.member, one.offset) for one in report.bad_members} == bad
        assert report.without_checksum == 0
        assert [fault.split(";")[0].removeprefix(f"{tmp_path}/") for fault in faults] == stale
        os.utime(path, ns=(1, 1))


def test_a_flipped_bit_of_a_json_is_found_by_any_index(tmp_path):
    path = tmp_path / "a.tar"
    broken.write_plain(path, broken.samples(0))
    index.build(path, tmp_path / "index")
    digit = path.read_bytes().index(b'"stability_score": 0.') + len(b'"stability_score": 0.')
    broken.flip(path, 8 * digit)
    assert checked(path).bad_members == []
    [report], _ = verification.verify(tmp_path / "index")
    assert [finding.member for finding in report.bad_members] == ["sa_0.json"]


def test_members_of_a_replaced_tar_are_not_compared(tmp_path):
    path = tmp_path / "a.tar"
    broken.write_plain(path, broken.samples(0))
    index.build(path, tmp_path / "index", checksums=True)
    broken.write_plain(path, broken.samples(1))
    [report], stale = verification.verify(tmp_path / "index")
    assert (report.bad_members, len(stale), report.without_checksum) == ([], 1, 1)
