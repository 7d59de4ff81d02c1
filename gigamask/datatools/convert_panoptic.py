"""Reading of COCO's panoptic json: the segments of an image are the colors of a PNG."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath

import msgspec
import numpy as np

from gigamask.data.image import check_size
from gigamask.datatools import coco_json
from gigamask.datatools.coco_json import Id, canonical_id, extra_fields
from gigamask.datatools.convert_labels import label_masks, read_labels
from gigamask.datatools.left_out import CROWD, LeftOutEntry
from gigamask.datatools.objects import EMPTY, NO_PIXEL, Objects, SourceImage
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.serialization import JSON_ERRORS


@dataclass(frozen=True)
class CocoEntry(SourceImage):
    """One image, its undecoded annotations, and the names of categories by id.

    `size` is (H, W); None if the annotations do not state it.
    """

    size: tuple[int, int] | None
    annotations: list[msgspec.Raw]
    keep_crowds: bool
    names: Mapping[Id, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PanopticImage(CocoEntry):
    """An image whose annotation is the name of a PNG in a folder, and its segments."""

    folder: Path = Path()

    def objects(self, stored: bytes) -> Objects:
        """Read one mask for each segment; those that are no color of the PNG are left out."""
        if (number := len(self.annotations)) != 1:
            reason = f"{self.source}: has {number} panoptic annotations, it must have one"
            raise CorruptSampleError(reason, "no outline")
        try:
            row = coco_json.PANOPTIC.decode(self.annotations[0])
        except JSON_ERRORS as error:
            raise CorruptSampleError(f"{self.source}: its annotation is broken ({error})") from None
        stated = PureWindowsPath(row.file_name)
        path = self.folder / stated.as_posix()
        if stated.anchor or ".." in stated.parts or not path.is_file():
            path = self.folder / stated.name
        labels = read_labels(path, f"{self.source}: {path.name}")
        if self.size:
            check_size(labels.shape, self.size, f"{self.source}: its {path.name}")
        masks, values = label_masks(labels, self.source)
        rank = {value: i for i, value in enumerate(values.tolist())}
        kept, extras, skipped = [], [], []
        for i, raw in enumerate(row.segments_info):
            name = f"{self.source}: its segment {i}"
            try:
                segment = coco_json.ANNOTATION.decode(raw)
                at = None if segment.id is None else rank.pop(canonical_id(segment.id), None)
                if segment.iscrowd and not self.keep_crowds:
                    raise CorruptSampleError("is marked iscrowd; --keep-crowds keeps it", CROWD)
                if at is None:
                    raise CorruptSampleError(EMPTY, NO_PIXEL)
            except (*JSON_ERRORS, CorruptSampleError) as error:
                skipped.append(LeftOutEntry.of(name, error, f"{name}: "))
                continue
            kept.append(at)
            extras.append(extra_fields(segment, self.names))
        for value in rank:
            name = f"{self.source}: its segment of id {value}"
            reason = f"{name} is in {path.name}, but not in segments_info; add it there"
            skipped.append(LeftOutEntry(name, reason, "not in segments_info"))
        return Objects(masks[np.array(kept, np.int64)], extras, skipped)


def label_folder(path: Path) -> Path:
    """Return the folder of the PNGs of a panoptic json.

    Args:
        path: The json.

    Raises:
        GigamaskError: There is none.
    """
    folder = path.with_suffix("")
    if not folder.is_dir():
        raise GigamaskError(
            f"{path}: is COCO's panoptic json, whose segments are in PNGs in {folder}; unpack them "
            "there, or give the instances json"
        )
    return folder
