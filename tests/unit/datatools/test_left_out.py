"""What a conversion leaves out is counted by its kind, and by all readers alike."""

import json

import pytest

from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.datatools.left_out import LeftOutEntry, LeftOutRecord
from gigamask.errors import CorruptSampleError
from tests.errors import error_line
from tests.unit.datatools.test_convert import Case, row, thing


def a_record() -> LeftOutRecord:
    masks = [LeftOutEntry(f"{i}", f"{i}: is a crowd", "crowd") for i in range(3)]
    record = LeftOutRecord(
        [LeftOutEntry.of("x", CorruptSampleError("x: gone", "no such file"))], masks
    )
    record.masks.append(LeftOutEntry("b", "b: is a box", "box"))
    record.note("rings dropped", 2)
    return record


def test_lines_count_by_kind_with_the_first_reason():
    assert list(a_record().lines("all.json")) == [
        "  images left out: 1 (listed in all.json)",
        "    no such file: 1; x: gone",
        "  masks left out: 4 (listed in all.json)",
        "    crowd: 3, such as 0: is a crowd",
        "    box: 1; b: is a box",
        "  rings dropped: 2",
    ]


def test_a_record_survives_json_and_adds_up():
    record = LeftOutRecord.from_counts(json.loads(json.dumps(a_record().as_counts())))
    assert record == a_record()
    record.add(a_record())
    assert (len(record), record.notes) == (10, {"rings dropped": 4})
    assert record.as_counts()["left_out"] == {
        "images": {"no such file": 2},
        "masks": {"crowd": 6, "box": 2},
    }


def test_what_a_rule_leaves_out_is_not_unusable():
    record = a_record()
    record.check_half("source", 1, 1)
    with error_line(r"1 of its 1 images .*no such file: 1"):
        record.check_half("source", 0, 1)
    record.masks.insert(0, LeftOutEntry("c", "c: is thin", "line"))
    record.masks += record.masks[-1:]
    with error_line(r"masks .*box: 2, line: 1.*\(such as: b: is a box\)"):
        record.check_half("source", 1, 1)


@pytest.mark.parametrize(
    "things, taken",
    [([], "no mask is annotated"), ([thing(iscrowd=1), thing(iscrowd=1)], "crowd: 2")],
)
def test_a_source_without_a_usable_mask_is_refused(tmp_path, things, taken):
    case = Case(tmp_path)
    case.put()
    with error_line(rf"none of its 1 image .*{taken}"):
        case.coco([row()], things)
    assert not list(case.out.glob("*.tar"))
    if things:
        source = tmp_path / "instances.json"
        done = convert(source, case.pictures, tmp_path / "kept", ConvertOptions(keep_crowds=True))
        assert (done["masks"], done["left_out"]["masks"]) == (2, {})
