"""Reading of parquet files of images and masks, as Hugging Face data sets and mirrors of SA-1B are.

A row is an image: its encoded bytes, alone or as `bytes` of a struct, and its masks as a label
image, as a list of binary images, or as annotations in the manner of COCO and SA-1B (run lengths or
polygons, as JSON, a list of structs or a struct of lists). Columns are found by name and type.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from gigamask.data import annotation, storage
from gigamask.data.image import check_size
from gigamask.datatools.convert_coco import AnnotationRow, CocoImage, Id, extra_fields
from gigamask.datatools.convert_labels import LabelImage, decode_labels
from gigamask.datatools.formats import LABEL_FLAGS, ConvertOptions
from gigamask.datatools.image_files import fit, size_of
from gigamask.datatools.left_out import LeftOutEntry, LeftOutRecord
from gigamask.datatools.objects import EMPTY, NO_PIXEL, Objects, SourceImage, SourceListing
from gigamask.datatools.sources import GivenData, Source, file_line
from gigamask.errors import CorruptSampleError, GigamaskError, first_line
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.formats.parquet_files import (
    MAX_ROW_BYTES,
    bytes_of,
    find,
    import_pyarrow,
    open_file,
    read_errors,
    read_rows,
)
from gigamask.serialization import decode_json

IMAGES = ("image", "jpg", "jpeg", "pixel_values", "img", "images", "png", "webp")
"""Names of columns of images, the likeliest first."""
MASKS = (
    *("annotations", "json", "objects", "instances", "masks", "rles", "mask", "rle"),
    *("annotation", "label", "labels", "segmentation", "segmentations", "segmentation_mask"),
    *("segmentation_map", "instance_map", "label_map", "semantic_map", "png"),
)
"""Names of columns of masks, the likeliest first."""
CATEGORIES = ("categories", "category_ids", "category_id", "category", "classes", "label", "labels")
"""Names of columns of the masks' categories, and of fields of annotations."""
NUMBERS = ("category_id", *CATEGORIES, "name")
"""Fields of an annotation with its category, the likeliest first."""
SEGMENTATIONS = ("segmentation", "rle", "mask", "polygon")
"""Names of the field of an annotation with its mask."""
Kind = Literal["labels", "masks", "annotations"]
"""A label image, a list of binary images, or annotations."""


@dataclass(frozen=True)
class ParquetFiles(Source):
    """Parquet files, and the columns of images and masks, which are found by name if None."""

    files: tuple[str, ...]
    image_column: str | None = None
    mask_column: str | None = None

    def __str__(self) -> str:
        return self.files[0] if len(self.files) == 1 else self.folder

    @property
    def folder(self) -> str:
        """The folder that has all files."""
        folders = {os.path.dirname(path) for path in self.files}
        return os.path.commonpath(folders) if len(folders) > 1 else folders.pop()

    @classmethod
    def find(cls, given: GivenData) -> Source | None:
        """Return the parquet files that paths name.

        Args:
            given: The paths, and the columns of images and masks.
        """
        files = find(given.paths)
        return cls(files, given.images, given.masks) if files else None

    def listing(self, options: ConvertOptions, with_annotations: bool = True) -> SourceListing:
        """List the rows.

        Args:
            options: What counts as a mask.
            with_annotations: Whether masks will be read.

        Raises:
            GigamaskError: A file is not parquet, has no columns of images and masks, or pyarrow is
                not installed.
        """
        return SourceListing(_rows(self, options), LeftOutRecord(), True)

    def cache_lines(self, listing: SourceListing) -> list[str]:
        """Return a line for every file, and the columns.

        Args:
            listing: The images.
        """
        lines = [
            f"{path} {stat}"
            if storage.is_remote(path)
            else file_line(Path(path), Path(path).parent)
            for path, stat in zip(self.files, storage.stat_all(self.files), strict=True)
        ]
        return [*lines, f"{self.image_column} {self.mask_column}"]


@dataclass(frozen=True)
class ParquetTable:
    """One file, its columns that are read, and the names of categories by number."""

    path: str
    image: str
    masks: str
    kind: Kind
    categories: str | None
    names: Mapping[Id, str]

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.image, self.masks, *([self.categories] if self.categories else [])]


@dataclass(frozen=True)
class ParquetRow(SourceImage):
    """One row of a file; `values` are those of its masks and categories once they are read."""

    table: ParquetTable
    row: int
    row_group: int
    options: ConvertOptions
    values: tuple[Any, Any] = field(default=(None, None), repr=False)

    def exists(self) -> bool:
        """Return True: the file has been opened."""
        return True

    @property
    def block(self) -> tuple[Path, int]:
        """The file and the number of the row group."""
        return self.path, self.row_group

    @classmethod
    def read_all(
        cls, images: Sequence[Any]
    ) -> Iterator[tuple[SourceImage, bytes | CorruptSampleError]]:
        """Yield each image with its bytes, reading every file once and a few rows at a time."""
        for table, rows in groupby(images, lambda image: image.table):
            wanted = {image.row: image for image in rows}
            reason = "its row is missing; download the file again"
            try:
                for number, values in read_rows(table.path, table.columns, set(wanted)):
                    image = wanted.pop(number)
                    try:
                        if (size := sum(map(bytes_of, values))) > MAX_ROW_BYTES:
                            raise ValueError(f"it has {size:,} bytes in memory")
                        raw, masks, *categories = (value[0].as_py() for value in values)
                    except (ValueError, OverflowError, MemoryError) as error:
                        bad = f"{image.source}: cannot be decoded ({first_line(error)})"
                        yield image, CorruptSampleError(f"{bad}; leave it out")
                        continue
                    image = replace(image, values=(masks, *(categories or [None])))
                    try:
                        yield image, _image_bytes(raw, image.source)
                    except CorruptSampleError as bad:
                        yield image, bad
            except read_errors() as error:
                if isinstance(error, GigamaskError):
                    raise
                reason = f"the file is damaged here ({first_line(error)}); download it again"
            for image in wanted.values():
                yield image, CorruptSampleError(f"{image.source}: {reason}")

    def objects(self, stored: bytes) -> Objects:
        """Decode the masks of a row; broken ones are left out and listed with their reasons."""
        masks, categories = self.values
        if masks is None:
            raise CorruptSampleError(f"{self.source}: its {self.table.masks} is null; leave it out")
        is_json = isinstance(masks, bytes) and masks.lstrip()[:1] in (b"{", b"[")
        if self.table.kind == "labels" and not is_json:
            raw, is_binary = _image_bytes(masks, self.source), self.options.binary is not None
            labels = decode_labels(raw, self.source, brightest=is_binary)
            number, source, path = self.number, self.source, self.path
            image = LabelImage(number, source, path, path, None, {}, self.options)
            return image.objects_of(labels)
        named = f"{self.source}: its {self.table.masks}"
        if self.table.kind == "masks":
            stated = _size_of_first(masks, named)
            size = _meant_size(stored, stated, self.source)
            drawn = self._binary_masks(masks, categories, size)
            return replace(drawn, size_is_stated=stated is not None)
        entries = _annotations(masks, named)
        stated = _stated_size(entries)
        size = _meant_size(stored, stated, self.source)
        known = categories if isinstance(categories, list) else []
        known = known if len(known) == len(entries) else [None] * len(entries)
        raws = [
            msgspec.Raw(msgspec.json.encode(_annotation(entry, category, size, named)))
            for entry, category in zip(entries, known, strict=True)
        ]
        names, crowds = self.table.names, self.options.keep_crowds
        coco = CocoImage(self.number, self.source, self.path, size, raws, crowds, names)
        return replace(coco.objects(stored), size_is_stated=stated is not None)

    def _binary_masks(self, masks: Any, categories: Any, size: tuple[int, int]) -> Objects:
        """Decode a list of images, each of which is not 0 where its mask is."""
        if len(masks) > annotation.MAX_MASKS:
            raise CorruptSampleError(
                f"{self.source}: has {len(masks)} masks, at most {annotation.MAX_MASKS} are read"
            )
        found, extras, skipped = [RLEMasks.from_coco([], size)], [], []
        for i, mask in enumerate(masks):
            name = f"{self.source}: its mask {i}"
            try:
                dense = decode_labels(_image_bytes(mask, name), name) != 0
                check_size(dense.shape, size, f"{name}:")
                if not dense.any():
                    raise CorruptSampleError(f"{name}: {EMPTY}", NO_PIXEL)
            except CorruptSampleError as bad:
                skipped.append(LeftOutEntry.of(name, bad))
                continue
            found.append(RLEMasks.from_dense(dense[None]))
            one_each = isinstance(categories, list) and len(categories) == len(masks)
            category = categories[i] if one_each else None
            category = category if isinstance(category, int | str) else None
            row = AnnotationRow([], category_id=category)
            extras.append(extra_fields(row, self.table.names))
        return Objects(RLEMasks.concatenate(found), extras, skipped)


def _rows(source: ParquetFiles, options: ConvertOptions) -> list[ParquetRow]:
    images: list[ParquetRow] = []
    for path in source.files:
        with open_file(path) as file:
            table = _table(path, file.schema_arrow, source)
            groups = [
                group
                for group in range(file.num_row_groups)
                for _ in range(file.metadata.row_group(group).num_rows)
            ]
        if options.has_labels and table.kind != "labels":
            raise GigamaskError(
                f"{path}: column {table.masks} has {table.kind}, not label images; drop "
                f"{LABEL_FLAGS}"
            )
        name = os.path.relpath(path, source.folder)
        images += [
            ParquetRow(len(images) + row, f"{name}:{row}", Path(path), table, row, group, options)
            for row, group in enumerate(groups)
        ]
    return images


def _table(path: str, schema: Any, source: ParquetFiles) -> ParquetTable:
    """Find the columns of images and masks."""
    images = [name for name in schema.names if _is_image(schema.field(name).type)]
    image = _column(path, "--images", source.image_column, IMAGES, images, schema)
    kinds = {
        name: kind
        for name in schema.names
        if name != image and (kind := _mask_kind(schema.field(name).type))
    }
    masks = _column(path, "--masks", source.mask_column, MASKS, list(kinds), schema)
    lists = [name for name in CATEGORIES if name in schema.names and name != masks]
    categories = next((name for name in lists if _is_numbers(schema.field(name).type)), None)
    names = _category_names(schema.metadata or {}, categories or masks)
    return ParquetTable(path, image, masks, kinds[masks], categories, names)


def _column(
    path: str,
    flag: str,
    given: str | None,
    likely: Sequence[str],
    usable: Sequence[str],
    schema: Any,
) -> str:
    """Return the column that is given, or the likeliest one of those of a fitting type."""
    if given is not None and given in usable:
        return given
    if given is None:
        for name in likely:
            if name in usable:
                return name
    listed = ", ".join(f"{each.name} ({str(each.type)[:60]})" for each in list(schema)[:20])
    wanted = "encoded images" if flag == "--images" else "label images, mask images or run lengths"
    problem = f"column {given} does not hold" if given else "no column is known to hold"
    raise GigamaskError(
        f"{path}: {problem} {wanted}; name one with {flag} COLUMN (its columns: {listed})"
    )


def _is_image(kind: Any) -> bool:
    """Return whether values are encoded images: bytes, or a struct with bytes."""
    types = import_pyarrow().types
    if types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _is_image(kind.field(index).type)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_list(kind: Any) -> bool:
    types = import_pyarrow().types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_numbers(kind: Any) -> bool:
    """Return whether values are lists of whole numbers or of texts."""
    types = import_pyarrow().types
    return _is_list(kind) and (
        types.is_integer(kind.value_type) or types.is_string(kind.value_type)
    )


def _mask_kind(kind: Any) -> Kind | None:
    """Return how values of a type state masks; None if they cannot."""
    types = import_pyarrow().types
    if types.is_string(kind) or types.is_large_string(kind):
        return "annotations"
    if _is_image(kind):
        return "labels"
    if _is_list(kind):
        if types.is_floating(kind.value_type):
            return "annotations"  # a polygon
        inner = _mask_kind(kind.value_type)
        return "masks" if inner == "labels" else None if inner == "masks" else inner
    if types.is_struct(kind):
        names = {kind.field(i).name for i in range(kind.num_fields)}
        return "annotations" if names & {*SEGMENTATIONS, "counts", "annotations"} else None
    return None


def _category_names(metadata: Mapping[bytes, bytes], column: str) -> dict[Id, str]:
    """Return the names of the class labels of a column, which `datasets` keeps in the schema."""
    try:
        info = decode_json(metadata.get(b"huggingface", b"{}"), "metadata")
        left = [(column, info["info"]["features"][column])]
    except (GigamaskError, KeyError, TypeError):
        return {}
    found: dict[str, dict[Id, str]] = {}
    while left:
        key, feature = left.pop()
        if isinstance(feature, list):
            left += [(key, each) for each in feature]
        elif isinstance(feature, dict):
            names = feature.get("names")
            if feature.get("_type") == "ClassLabel" and isinstance(names, list):
                found[key] = {number: str(name) for number, name in enumerate(names)}
            left += feature.items()
    keys = [key for key in NUMBERS if key in found] or (list(found) if len(found) == 1 else [])
    return found[keys[0]] if keys else {}


def _image_bytes(value: Any, name: str) -> bytes:
    """Return the bytes of an encoded image; raise CorruptSampleError if there are none."""
    raw = value.get("bytes") if isinstance(value, dict) else value
    if isinstance(raw, bytes) and raw:
        return raw
    path = value.get("path") if isinstance(value, dict) else None
    lies = f"only its path {path} is" if path else "nothing is"
    raise CorruptSampleError(f"{name}: {lies} in the file, not the image; leave it out")


def _meant_size(raw: bytes, stated: tuple[int, int] | None, name: str) -> tuple[int, int]:
    """Return (H, W) of the pixels that masks refer to; masks of another size are refused later."""
    with suppress(CorruptSampleError):
        return fit(raw, stated, name).size
    return fit(raw, None, name).size


def _size_of_first(masks: Sequence[Any], name: str) -> tuple[int, int] | None:
    """Return (H, W) of the first of several mask images; None if it has none."""
    with suppress(CorruptSampleError):
        return size_of(_image_bytes(masks[0], name), name) if masks else None
    return None


def _stated_size(entries: Sequence[Any]) -> tuple[int, int] | None:
    """Return (H, W) that the run lengths of annotations state; None if none of them does."""
    for entry in entries:
        masks = [entry] if isinstance(entry, dict) else []
        masks += [each[key] for each in masks for key in SEGMENTATIONS if key in each]
        for mask in masks:
            size = mask.get("size") if isinstance(mask, dict) else None
            if isinstance(size, list) and len(size) == 2 and all(type(x) is int for x in size):
                return size[0], size[1]
    return None


def _annotations(value: Any, name: str) -> list[Any]:
    """Return the annotations of an image as a list."""
    value = _decoded(value, name)
    if isinstance(value, dict) and "annotations" in value:
        value = _decoded(value["annotations"], name)
    if isinstance(value, dict):
        known = {key: each for key, each in value.items() if each is not None}
        lengths = {key: len(each) for key, each in known.items() if isinstance(each, list)}
        size = next((lengths.get(key, 0) for key in SEGMENTATIONS if key in known), 0)
        is_listed = size > 0 and any(lengths.get(key) == size for key in ("id", *NUMBERS))
        is_alike = len(lengths) == len(known) and len({*lengths.values()}) == 1
        if "counts" not in known and (is_alike or is_listed):  # a struct of lists
            columns = [
                [(key, item) for item in known[key]]
                for key, length in lengths.items()
                if is_alike or length == size
            ]
            return [dict(items) for items in zip(*columns, strict=True)]
        value = [value]
    if not isinstance(value, list):
        raise CorruptSampleError(f"{name}: its masks are no list of annotations; leave it out")
    if len(value) > annotation.MAX_MASKS:
        raise CorruptSampleError(
            f"{name}: has {len(value)} annotations, at most {annotation.MAX_MASKS} are read"
        )
    return value


def _annotation(entry: Any, category: Any, size: tuple[int, int], name: str) -> dict[str, Any]:
    """Return an annotation with COCO's names of fields; its mask is checked when it is decoded."""
    try:
        entry = _decoded(entry, name)
    except CorruptSampleError:
        entry = {"size": size, "counts": entry}  # run lengths alone
    fields = entry if isinstance(entry, dict) and "counts" not in entry else {}
    mask = next((fields[key] for key in SEGMENTATIONS if fields.get(key) is not None), None)
    mask = entry if mask is None and not fields else mask
    if isinstance(mask, str | bytes):
        mask = _annotation(mask, None, size, name)["segmentation"]
    if isinstance(mask, dict) and isinstance(mask.get("counts"), bytes):
        mask = mask | {"counts": mask["counts"].decode("ascii", "replace")}
    if isinstance(mask, dict) and all(isinstance(mask.get(key), list) for key in "xy"):  # ADE20K's
        mask = [value for xy in zip(mask["x"], mask["y"], strict=False) for value in xy]
    if isinstance(mask, list) and mask and isinstance(mask[0], int | float):
        mask = [mask]
    named = next(
        (fields[key] for key in NUMBERS if isinstance(fields.get(key), int | str)), category
    )
    kept = {
        "id": fields.get("id") if isinstance(fields.get("id"), int) else None,
        "category_id": named if isinstance(named, int | str) else None,
        "iscrowd": fields.get("iscrowd") or 0,
        "predicted_iou": fields.get("predicted_iou"),
        "stability_score": fields.get("stability_score"),
    }
    return {"segmentation": mask, **kept}


def _decoded(value: Any, name: str) -> Any:
    """Return the content of JSON, and any other value unchanged."""
    if not isinstance(value, str | bytes):
        return value
    if len(value) > annotation.MAX_BYTES:
        raise CorruptSampleError(f"{name}: its annotations are larger than any; leave it out")
    try:
        return decode_json(value, name)
    except GigamaskError as error:
        raise CorruptSampleError(str(error)) from None
