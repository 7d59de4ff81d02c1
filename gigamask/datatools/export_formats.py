"""Masks of images in the formats of other programs: the one writer of them.

| format | files |
|---|---|
| `coco` | `coco.json`: COCO instances, as run lengths, or as polygons unless a mask has holes |
| `labels` | `labels/NAME.png`: 16-bit label images; of masks that overlap, the smaller is on top |
| `shards` | `shards/*.tar`: images and masks in SA-1B's format |

Plugins add others. Ids depend on names only: they stay when an image is added. Files replace those
of an earlier export once all are written, and no others.
"""

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np
from jaxtyping import Float64

from gigamask import files, plugin
from gigamask.data import annotation, image, tar
from gigamask.data.orientation import Frame, turn
from gigamask.datatools.formats import MISSING_PLUGIN, absent, writers
from gigamask.datatools.image_files import fit, is_jpeg, to_member
from gigamask.errors import CorruptSampleError, GigamaskError, counted
from gigamask.masks.components import crop_to_box, outlines
from gigamask.masks.rle import RLEMasks
from gigamask.serialization import read_json

COCO, SHARDS, TABLE = "coco.json", "shards", "regions.csv"
PARTIAL, RECORD = ".export", ".exported"
"""Folder of an unfinished export, and file that names the files and images of earlier ones."""
NOT_OURS = "no export wrote it, or it was changed since; move it, or give another folder"
"""Why a file that exists is not replaced, and what to do."""
SHARD_IMAGES = 500
MAX_LABEL = 2**16 - 1
COCO_NAME = re.compile(r"(\d{12})\.jpg", re.ASCII)
"""Names of COCO's images, which state their ids."""
COLUMNS = (
    *("image", "label", "area", "centroid-0", "centroid-1", "bbox-0", "bbox-1", "bbox-2"),
    *("bbox-3", "mean_intensity", "class", "score"),
)
"""Columns of the table, by the names of scikit-image's `regionprops_table`."""


@dataclass(frozen=True)
class ExportedImage:
    """An image with its masks.

    Attributes:
        name: Its path in the folder of images, with slashes.
        masks: The masks.
        objects: Of each mask, its `id`, from 1, its `category` ("" if it has none), its `score`
            (None if it has none), and further fields for COCO and the shards.
        read: Returns the bytes of the image file.
        file: The image file, to which annotations may refer; None if it has none of its own.
    """

    name: str
    masks: RLEMasks
    objects: Sequence[Mapping[str, Any]]
    read: Callable[[], bytes]
    file: Path | None = None

    @property
    def number(self) -> int:
        """Id of the image: COCO's if it has such a name, else a digest of it."""
        coco = COCO_NAME.fullmatch(self.name)
        return int(coco[1]) if coco else 2**40 + _digest(self.name, 5)

    def annotation_id(self, key: int) -> int:
        """Return the id of a mask among those of all images.

        Args:
            key: Its id in the image.
        """
        return 1 + _digest(f"{self.number}/{key}", 6)

    def path(self, folder: Path, suffix: str) -> Path:
        """Return the path of a file for this image.

        Args:
            folder: The folder of such files.
            suffix: Its suffix, in place of the image's.
        """
        return folder / PurePosixPath(self.name).with_suffix(suffix)


Images = Callable[[], Iterable[ExportedImage]]


@dataclass(frozen=True)
class ExportOptions:
    """What is written.

    Attributes:
        formats: Names of the formats.
        polygons: Whether COCO gets polygons of masks without holes.
        table: A CSV file with a row for each mask; None for none.
        images: Whether to write the folder `images`: links to the image files, and copies of those
            that have none, or that EXIF turns, which some programs ignore: upright.
        categories: Names of the known categories in order; others follow as they occur.
        category_ids: Ids of all categories in COCO's file; empty: their numbers from 1.
        owned: Whether the folder is for these exports alone, so that the images may be others.
        check: Called before each image; what it raises ends the export.
        skipped: Images that cannot be read, with the reasons; they are added here.
        notes: Lines about what a format cannot hold; they are added here.
    """

    formats: tuple[str, ...] = ("coco",)
    polygons: bool = False
    table: Path | None = None
    images: bool = False
    categories: tuple[str, ...] = ()
    category_ids: dict[str, int] = field(default_factory=dict)
    owned: bool = False
    check: Callable[[], object] = lambda: None
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict, init=False)

    @property
    def names(self) -> set[str]:
        """Names of the files and folders that are written: a format has a folder of its name."""
        written = {*self.formats, "images"} if self.images else {*self.formats}
        return {COCO if name == "coco" else name for name in written}

    def __post_init__(self) -> None:
        if self.table is not None and self.table.is_dir():
            raise GigamaskError(f"--table {self.table}: is a folder; give a file")

    def number_of(self, category: str) -> int:
        """Return the number of a category, from 0.

        Args:
            category: Its name; "" counts as "object".
        """
        if not self.numbers:
            self.numbers.update({name: i for i, name in enumerate(self.categories)})
        return self.numbers.setdefault(category or "object", len(self.numbers))

    def id_of(self, category: str) -> int:
        """Return the id of a category in COCO's file.

        Args:
            category: As for `number_of`.
        """
        return self.category_ids.get(category, self.number_of(category) + 1)


Writer = Callable[[Images, Path, ExportOptions], None]
"""Writes images in one format, to files or folders of its own in a folder that has `images` if the
options ask for it, so before all others."""


def check_formats(formats: str | Sequence[str], given_as: str = "--to") -> tuple[str, ...]:
    """Return the formats, each once; raise `GigamaskError` if one is unknown.

    Args:
        formats: Names of formats, or a single one.
        given_as: The flag or the field in which the user named them.
    """
    formats = (formats,) if isinstance(formats, str) else formats
    if unknown := [name for name in formats if name not in writers()]:
        known = f"must be one of {', '.join(writers())}"
        if unknown[0] in map(str.lower, absent()):
            known = f"needs {MISSING_PLUGIN}"
        raise GigamaskError(f"{given_as} {unknown[0]}: {known}")
    return tuple(dict.fromkeys(formats))


def write(images: Images, out: Path, options: ExportOptions) -> list[Path]:
    """Write masks in some formats; files of an earlier export are replaced once all are written.

    Args:
        images: Returns the images, in order; it is called once for each format.
        out: Folder for the files.
        options: What is written.

    Returns:
        The files and folders that were written.

    Raises:
        GigamaskError: The folder cannot be written, another process exports to it, or it holds a
            file of the same name that no export wrote or that was changed since; or a format cannot
            hold a mask.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        busy = f"{out}: another process exports to it; wait for it, or give another folder"
        with files.folder_lock(out, busy):
            return _write(images, out, options)
    except OSError as error:
        raise GigamaskError(
            f"{out}: cannot be written ({error.strerror}); free space or correct the permissions"
        ) from None


def _write(images: Images, out: Path, options: ExportOptions) -> list[Path]:
    check_replaceable(out, options.names, options.owned)
    partial, record = out / PARTIAL, out / RECORD
    own, earlier, crcs = _recorded(out)
    names = dict[int, str]()
    chosen: list[Writer] = [_write_images] if options.images else []
    chosen += [plugin.load(writers()[name]) for name in check_formats(options.formats)]
    chosen += [_write_table] if options.table is not None else []

    def checked() -> Iterator[ExportedImage]:
        for each in images():
            options.check()
            if (other := names.setdefault(each.number, each.name)) != each.name:
                raise GigamaskError(
                    f"{other} and {each.name}: their names give the same id; rename one"
                )
            yield each

    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for write_format in chosen:
            write_format(checked, partial, options)
            if not options.owned and (lost := earlier - {*names.values()}):
                act = f"export all together, give another folder, or remove {record} and its files"
                if why := options.skipped.get(min(lost)):
                    act = f"it is left out now: {why}"
                raise GigamaskError(
                    f"{out}: holds an export of {counted(len(lost), 'other image')} such as "
                    f"{min(lost)}; {act}"
                )
        options.check()
        new = set(_files_in(partial)) - {TABLE}
        folders = set(map(_first, new))
        stale = {name for name in own - new if _first(name) in folders}
        check_replaceable(out, folders, options.owned)
        files.check_absent([out / each for each in new - own], NOT_OURS)
        crcs |= {
            each: files.crc32(path) for each in new if not (path := partial / each).is_symlink()
        }
        told = {"files": sorted(own - stale | new), "images": sorted(names.values())}
        files.write_text(record, json.dumps({**told, "crc32s": crcs}))
        _remove(out, stale)
        return _moved(partial, out, new, options.table)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _moved(partial: Path, out: Path, names: set[str], table: Path | None) -> list[Path]:
    """Move the files of an export into place; return these, or the folders that they lie in."""
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).replace(out / name)
    written = [out / name for name in sorted(set(map(_first, names)))]
    if table is not None:
        table.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(partial / TABLE, table)
        written.append(table)
    return written


def check_replaceable(out: Path, names: set[str], owned: bool = False) -> None:
    """Check that an export replaces only what exports wrote and nobody has changed since.

    Args:
        out: The folder.
        names: Names of the files and folders in it that the export will write.
        owned: As in `ExportOptions`.

    Raises:
        GigamaskError: One is there that no export wrote, or that was changed since.
    """
    own, _, crcs = _recorded(out)
    others = sorted(names - set(map(_first, own)))
    if not owned:
        written = [each for each in own & crcs.keys() if _first(each) in names]
        others += [each for each in written if _is_changed(out, each, crcs[each])]
    files.check_absent([out / each for each in others], NOT_OURS)


def _is_changed(out: Path, name: str, crc: int) -> bool:
    """Return whether a file was changed since an export wrote it, as by a person who corrects it.

    Args:
        out: The folder of the export.
        name: The file's path in it.
        crc: crc32 of what was written.
    """
    if not (path := out / name).is_file():
        return False
    found, since_s = path.stat(), (out / RECORD).stat().st_mtime
    # A file that is copied here may keep the time of its modification.
    return max(found.st_mtime, found.st_ctime) > since_s and crc != files.crc32(path)


def _recorded(out: Path) -> tuple[set[str], set[str], dict[str, int]]:
    """Return the files in a folder that exports wrote, by their paths in it, the images, and the
    crc32s of files that are no links."""
    record = out / RECORD
    told = read_json(record, dict) if record.exists() else {}
    # Records of earlier versions name folders.
    own = {name for each in told.get("files", ()) for name in (_files_in(out, each) or [each])}
    return own, set(told.get("images", ())), told.get("crc32s", {})


def remove_export(out: Path, name: str) -> None:
    """Remove the files of an export, and no others.

    Args:
        out: Folder of the exports.
        name: The file or folder in it.
    """
    _remove(out, [each for each in _recorded(out)[0] if _first(each) == name])


def _files_in(out: Path, folder: str = "") -> list[str]:
    """Return the files in a folder of `out` and in its subfolders, by their paths in `out`."""
    return [
        path.relative_to(out).as_posix()
        for path in (out / folder).rglob("*")
        if path.is_symlink() or not path.is_dir()
    ]


def _first(name: str) -> str:
    return name.partition("/")[0]


def _remove(out: Path, names: Iterable[str]) -> None:
    """Remove files, and the folders in `out` that are empty then."""
    for path in (out / name for name in names):
        path.unlink(missing_ok=True)
        with suppress(OSError):
            while (path := path.parent) != out:
                path.rmdir()


def write_coco(images: Images, out: Path, options: ExportOptions) -> None:
    """Write COCO's instances, as run lengths, or as polygons unless a mask has holes.

    Args:
        images: Returns the images.
        out: The folder.
        options: What is written.
    """
    listed, annotations, ids = [], [], set[int]()
    for each in images():
        height, width = each.masks.size
        listed.append({"id": each.number, "file_name": each.name, "height": height, "width": width})
        for i, fields in enumerate(annotation.mask_fields([each.masks])):
            told = dict(each.objects[i])
            key = each.annotation_id(told.pop("id"))
            while key in ids:  # of a million masks, two may have the same
                key += 1
            ids.add(key)
            x0, y0, wide, high = fields["bbox"]
            shape = options.polygons and _polygons(each.masks[i : i + 1])
            annotations.append(
                {
                    **fields,
                    "segmentation": shape or fields["segmentation"],
                    "bbox": [x0, y0, wide + 1, high + 1],  # COCO's boxes have exclusive ends
                    "iscrowd": 0,
                    "image_id": each.number,
                    "category_id": options.id_of(told.pop("category")),
                    "id": key,
                    **{name: value for name, value in told.items() if value is not None},
                }
            )
    categories = [{"id": options.id_of(name), "name": name} for name in options.numbers]
    content = {"images": listed, "annotations": annotations, "categories": categories}
    files.write_text(out / COCO, json.dumps(content))


def _polygons(mask: RLEMasks) -> list[list[int]] | None:
    """Return the outlines of a mask; None if it has holes, which COCO's polygons cannot have."""
    parts = outlines(mask)
    if any(len(rings) > 1 for rings in parts):
        return None
    return [rings[0].ravel().tolist() for rings in parts]


def write_labels(images: Images, out: Path, options: ExportOptions) -> None:
    """Write 16-bit label images, and note the objects that have no pixel in them.

    Args:
        images: Returns the images.
        out: The folder.
        options: What is written.
    """
    covered = 0
    for each in with_own_files(images):
        labels = np.zeros(each.masks.size, np.uint16)
        for i in np.argsort(-each.masks.areas(), kind="stable"):
            key = each.objects[i]["id"]
            if key > MAX_LABEL:
                raise GigamaskError(
                    f"{each.name}: object {key} is above {MAX_LABEL}, the most that a label image"
                    " can hold; choose another format"
                )
            box, inside = crop_to_box(each.masks[i : i + 1])
            labels[box][inside] = key
        covered += len(each.objects) - int(np.count_nonzero(np.unique(labels)))
        save(each.path(out / "labels", ".png"), cv2.imencode(".png", labels)[1].tobytes())
    if covered:
        options.notes.append(
            f"{counted(covered, 'object')} left out of the label images: others cover all pixels"
        )


def write_shards(images: Images, out: Path, options: ExportOptions) -> None:
    """Write tars in SA-1B's format.

    Args:
        images: Returns the images.
        out: The folder.
        options: What is written.
    """
    remaining, number = iter(images()), 0
    while some := list(islice(remaining, SHARD_IMAGES)):
        tar.write(out / SHARDS / f"sa_{number:06d}.tar", _members(some, options))
        number += 1


def _members(
    images: Iterable[ExportedImage], options: ExportOptions
) -> Iterator[tuple[str, bytes]]:
    """Yield a tar's members: each image, mostly as JPEG, and its JSON."""
    for each in images:
        try:
            raw = each.read()
            member = to_member(raw, fit(raw, each.masks.size, each.name), each.name)
        except CorruptSampleError as error:
            options.skipped[each.name] = str(error)
            continue
        ids = [each.annotation_id(told["id"]) for told in each.objects]
        (record,) = annotation.image_records([(each.number, each.masks, ids)])
        name = f"sa_{each.number}{image.member_suffix(member)}"
        record["image"] |= {"source": each.name, "file_name": name}
        for entry, told in zip(record["annotations"], each.objects, strict=True):
            more = {name: told[name] for name in told if name != "id" and told[name] is not None}
            entry |= more if more["category"] else {**more, "category": "object"}
        yield name, member
        yield f"sa_{each.number}.json", annotation.encode(record)


def _write_table(images: Images, out: Path, options: ExportOptions) -> None:
    with open(out / TABLE, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for each in images():
            try:
                pixels = _intensity(each)
            except CorruptSampleError as error:
                options.skipped[each.name] = str(error)
                continue
            for i, told in enumerate(each.objects):
                (lines, columns), inside = crop_to_box(each.masks[i : i + 1])
                area = int(inside.sum())
                row = inside.sum(1) @ np.arange(lines.start, lines.stop) / area
                column = inside.sum(0) @ np.arange(columns.start, columns.stop) / area
                place = row, column, lines.start, columns.start, lines.stop, columns.stop
                more = pixels[lines, columns][inside].mean(), told["category"], told["score"]
                rows.writerow([each.name, told["id"], area, *place, *more])


def _intensity(each: ExportedImage) -> Float64[np.ndarray, "H W"]:
    """Return the mean of the channels of an image as it is stored, upright."""
    raw = each.read()
    frame = fit(raw, each.masks.size, each.name)
    return turn(image.read_stored(raw, each.name).mean(2, dtype=np.float64), frame.turn)


def _write_images(images: Images, out: Path, options: ExportOptions) -> None:
    for each in images():
        try:
            raw = each.read()
            frame = fit(raw, each.masks.size, each.name)
            path = out / "images" / each.name
            if each.file and frame.orientation == 1:
                save(path, raw, each.file.absolute())
            elif each.file and not is_jpeg(raw):
                save(path, _upright(raw, frame, each.name))
            else:
                save(path, to_member(raw, frame, each.name))
        except CorruptSampleError as error:
            options.skipped[each.name] = str(error)


def _upright(raw: bytes, frame: Frame, name: str) -> bytes:
    """Return an image file that is turned, in its own format and without loss."""
    pixels = turn(image.read_stored(raw, name), frame.turn)
    with suppress(cv2.error, TypeError):
        if pixels.shape[2] in (1, 3):
            return cv2.imencode(PurePosixPath(name).suffix, pixels[..., ::-1])[1].tobytes()
    raise CorruptSampleError(f"{name}: cannot be turned as its EXIF says; save it upright")


def with_own_files(images: Images) -> Iterator[ExportedImage]:
    """Yield the images; raise `GigamaskError` if the files of two would have the same name.

    Args:
        images: Returns the images.
    """
    names: dict[PurePosixPath, str] = {}
    for each in images():
        stem = PurePosixPath(each.name).with_suffix("")
        if (other := names.setdefault(stem, each.name)) != each.name:
            raise GigamaskError(
                f"{other} and {each.name}: differ only in their suffixes, so their masks would have"
                " the same file; rename one, or choose coco or shards"
            )
        yield each


def save(path: Path, raw: bytes | Path, target: Path | str = "") -> None:
    """Write a file, which must not exist, and the folders that it lies in.

    Args:
        path: The file.
        raw: Its bytes, or a file that has them.
        target: A file of these bytes, to which a link is written if the file system has links.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if target:
        with suppress(OSError):  # as on a memory stick
            return path.symlink_to(target)
    with path.open("xb") as file:
        file.write(raw if isinstance(raw, bytes) else raw.read_bytes())


def _digest(text: str, size: int) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest())
