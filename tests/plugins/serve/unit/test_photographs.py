"""Renamed photographs are found by their content, and only if there is no doubt."""

from pathlib import Path

import msgspec

from gigamask.plugins.serve.photographs import (
    ANNOTATIONS,
    annotated_names,
    content_of,
    find_by_content,
    unread_files,
)


def annotate(folder: Path, name: str, content: object) -> None:
    path = folder / ANNOTATIONS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode({"content": content}))


def test_each_missing_image_is_found_where_one_candidate_equals_it_and_no_other(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    texts = {"new.jpg": b"one", "twin_a.jpg": b"two", "twin_b.jpg": b"two", "same_size.jpg": b"six"}
    for name, text in texts.items():
        (photos / name).write_bytes(text)
    contents = {name: content_of(photos / name) for name in texts}
    annotate(tmp_path, "old.jpg", contents["new.jpg"])
    annotate(tmp_path, "ambiguous.jpg", contents["twin_a.jpg"])
    annotate(tmp_path, "more/without.jpg", None)
    annotate(tmp_path, "damaged.jpg", "no content")
    missing = annotated_names(tmp_path)
    assert missing == {"old.jpg", "ambiguous.jpg", "more/without.jpg", "damaged.jpg"}
    assert find_by_content(tmp_path, missing, photos, [*texts, "gone.jpg"]) == {
        "old.jpg": "new.jpg"
    }
    assert content_of(photos / "gone.jpg") is None
    annotate(tmp_path, "also_old.jpg", contents["new.jpg"])
    assert find_by_content(tmp_path, annotated_names(tmp_path), photos, texts) == {}


def test_photographs_of_kinds_that_are_not_read_are_counted(tmp_path):
    (tmp_path / "phone").mkdir()
    for name in ("phone/1.heic", "phone/2.heic", "3.bmp", "notes.txt", "4.jpg"):
        (tmp_path / name).touch()
    bmp, heic = sorted(unread_files(str(tmp_path)))
    assert bmp == f"1 file in {tmp_path} left out: BMP is not read; save it as JPEG, PNG or TIFF"
    assert heic.startswith(f"2 files in {tmp_path} left out: HEIC is not read")
