"""What the index holds of one tar: a path enters, its image and mask columns leave, with what was left out and why.

A part depends on its tar alone, so parts may be made in any order, kept, and joined later.

Not here: joining parts and reading them back (`data.index`), tar headers (`data.tar`).
"""

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gigamask.contracts import Rejected
from gigamask.data import annotation, image, tar
from gigamask.faults import BadSample, Fault

IMAGE_COLUMNS = {
    "jpg_offset": "<i8",
    "jpg_bytes": "<i8",
    "json_offset": "<i8",
    "json_bytes": "<i8",
    "image_id": "<i8",
    "width": "<i4",
    "height": "<i4",
    "masks": "<i4",
}
MASK_COLUMNS = {"area": "<i4", "box": "<u2", "predicted_iou": "<f4", "stability_score": "<f4"}
PART = "part.json"
HEADER_BYTES = 2**16
"""A JPEG's size stands in its first kilobyte unless a preview or a colour profile comes first."""
_JPG = {".jpg", ".jpeg"}


class Tar(msgspec.Struct, frozen=True):
    """The tar that a part describes, as it was."""

    path: str
    bytes: int
    mtime_ns: int


class LeftOut(msgspec.Struct, frozen=True):
    """What a tar holds beside usable images; `rejected` says of each unusable one why."""

    rejected: list[Rejected]
    json_without_jpg: int
    other_files: int


class Summary(msgspec.Struct, frozen=True):
    """What joining needs to know of a part before it reads the columns."""

    tar: Tar
    left_out: LeftOut
    images: int
    masks: int
    name_bytes: int


@dataclass(frozen=True)
class Part:
    """The columns of one tar: rows of `images` in stored order, rows of `masks` image by image in the json's order."""

    tar: Tar
    images: dict[str, np.ndarray]
    masks: dict[str, np.ndarray]
    left_out: LeftOut

    def save(self, folder: Path) -> None:
        """Writes the part as a folder of columns and `part.json`."""
        folder.mkdir(parents=True)
        for kind, columns in (("images", self.images), ("masks", self.masks)):
            for name, column in columns.items():
                np.save(folder / f"{kind}_{name}.npy", column)
        names = self.images["name"]
        summary = Summary(self.tar, self.left_out, len(names), len(self.masks["area"]), names.dtype.itemsize)
        (folder / PART).write_bytes(msgspec.json.encode(summary))


def read_summary(folder: Path) -> Summary:
    """Returns the summary of a saved part."""
    return msgspec.json.decode((folder / PART).read_bytes(), type=Summary)


def stored_tar(path: str) -> Tar:
    """Returns a tar as it is now; two that differ were not the same bytes."""
    status = os.stat(path)
    return Tar(path, status.st_size, status.st_mtime_ns)


def index_tar(path: str) -> Part:
    """Returns one tar's part. A broken entry is left out and named; raises Fault when the tar is unusable or more than half of its entries are."""
    members, stored = tar.scan(path), stored_tar(path)
    jpgs, jsons, others = _pair(path, members)
    if not jpgs:
        raise Fault(f"{path}: holds no .jpg among its {len(members.names)} files; give tars of .jpg and .json files as SA-1B's are")
    rows, tables, names, rejected = [], [], [], []
    with open(path, "rb") as file:
        for stem, jpg in jpgs.items():
            name = f"{os.path.basename(path)}:{stem}"
            places = (int(members.offsets[jpg]), int(members.sizes[jpg]))
            json = jsons.get(stem)
            try:
                if json is None:
                    described, table = _describe_jpg(file.fileno(), *places, name), _no_masks()
                    places += (-1, 0)
                else:
                    places += (int(members.offsets[json]), int(members.sizes[json]))
                    described, table = _describe_json(file.fileno(), *places[2:], name)
            except BadSample as bad:
                rejected.append(Rejected(name, str(bad)))
                continue
            rows.append((*places, *described, len(table["area"])))
            tables.append(table)
            names.append(stem)
    if 2 * len(rejected) > len(jpgs):
        first = f"the first: {rejected[0].reason}"
        raise Fault(f"{path}: {len(rejected)} of its {len(jpgs)} entries are unusable, at most half may be; fetch it again or leave it out ({first})")
    columns = zip(*rows, strict=True)
    images = {key: np.array(column, dtype) for (key, dtype), column in zip(IMAGE_COLUMNS.items(), columns, strict=True)}
    images["name"] = np.array([os.fsencode(name) for name in names])
    masks = {key: np.concatenate([table[key] for table in tables]) for key in MASK_COLUMNS}
    left_out = LeftOut(rejected, len(jsons.keys() - jpgs.keys()), others)
    return Part(stored, images, masks, left_out)


def _pair(path: str, members: tar.Members) -> tuple[dict[str, int], dict[str, int], int]:
    """Returns the member of each stem's jpg, of each stem's json, and how many files are neither; folders do not matter."""
    jpgs, jsons, others = {}, {}, 0
    for member, name in enumerate(members.names):
        stem, extension = posixpath.splitext(posixpath.basename(name))
        found = jpgs if extension.lower() in _JPG else jsons if extension.lower() == ".json" else None
        if found is None or stem.startswith("."):  # macOS packs a '._sa_1.jpg' beside each file
            others += 1
        elif stem in found:
            raise Fault(f"{path}: two members are called {stem}{extension} ({members.names[found[stem]]}, {name}); give each image a name of its own")
        else:
            found[stem] = member
    return jpgs, jsons, others


def _describe_jpg(descriptor: int, offset: int, size: int, name: str) -> tuple[int, int, int]:
    """Returns image id, width and height of an image without annotation: the number its name ends in (-1 without), and its header's size."""
    try:
        height, width = image.size(os.pread(descriptor, min(size, HEADER_BYTES), offset), name)
    except BadSample:
        height, width = image.size(os.pread(descriptor, size, offset), name)
    digits = re.search(r"\d{1,18}$", name, re.ASCII)
    return int(digits.group()) if digits else -1, width, height


def _describe_json(descriptor: int, offset: int, size: int, name: str) -> tuple[tuple[int, int, int], dict[str, np.ndarray]]:
    """Returns image id, width and height, and the mask columns."""
    record = annotation.read(os.pread(descriptor, min(size, annotation.MAX_BYTES + 1), offset), name)
    stem = posixpath.splitext(posixpath.basename(record.image.file_name))[0]
    if stem and stem != name.rpartition(":")[2]:
        raise BadSample(f"{name}: its json says it describes {record.image.file_name!r}; put each json beside its own jpg")
    entry = annotation.check(record, name)
    areas, boxes = entry.masks.areas(), entry.masks.boxes()
    boxes[areas == 0] = (1, 1, 0, 0)
    table = {"area": areas, "box": boxes, "predicted_iou": entry.predicted_iou, "stability_score": entry.stability_score}
    described = record.image.image_id, record.image.width, record.image.height
    return described, {key: table[key].astype(dtype) for key, dtype in MASK_COLUMNS.items()}


def _no_masks() -> dict[str, np.ndarray]:
    return {key: np.zeros((0, 4) if key == "box" else 0, dtype) for key, dtype in MASK_COLUMNS.items()}
