"""Images become annotated data: pictures, folders, tars or an index enter; SA-1B's jsons leave, and tars that are read like SA-1B's own.

Each image's json is written as soon as it is made and appears whole, so that whatever ends the process, the same command goes on behind it. Beside
them `.segment/made.json` says by which weights and numbers they were made; no others go on in that folder. Images that cannot be read are left out
and named; each command tries them again.

Not here: how masks are found (`predict.automatic`), the words of the command (`verbs.segment`).
"""

import contextlib
import glob
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import msgspec
import numpy as np
import torch
from jaxtyping import UInt8

from gigamask.data import annotation, image, image_folder, storage, tar, worker_pool
from gigamask.data import annotation_json as records
from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.data.index import Index
from gigamask.data.index_format import is_index
from gigamask.datatools.objects import image_ids
from gigamask.datatools.partial_download import lock_folder
from gigamask.datatools.pictures import to_jpeg
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.inference.automatic_mask_generator import MaskProposals, SamAutomaticMaskGenerator
from gigamask.inference.embedding_cache import digest_weights
from gigamask.masks.rle import RLEMasks
from gigamask.models.sam.sam import Sam
from gigamask.rng import make_rng
from gigamask.types import ImageAnnotation, SkippedSample
from gigamask.workflows.evaluate import load_model

KEPT = ".segment"
MADE = "made.json"
OPACITY = 0.5
"""Of a mask's colour on a picture."""


@dataclass(frozen=True)
class InputImage:
    """One image: the name by which errors know it, its file's, its json's place in the output folder (without `.json`), and how its bytes are had."""

    name: str
    file_name: str
    place: str
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Output:
    """Where results go, and which: jsons into `out`; tars of `shard_images` images each beside them, where asked; a picture each into `pictures`."""

    out: Path
    to_shards: bool = False
    shard_images: int = 500
    pictures: Path | None = None

    def __post_init__(self) -> None:
        if self.shard_images < 1:
            raise GigamaskError(
                f"{self.shard_images} images a shard: at least one has to be; give a number from 1 on"
            )


@dataclass
class SegmentCounts:
    """What became of the images so far."""

    images: int = 0
    masks: int = 0
    kept: int = 0
    tars: list[str] = field(default_factory=list)
    tars_kept: int = 0
    rejected: list[SkippedSample] = field(default_factory=list)


def find(paths: Sequence[str], scratch: str) -> tuple[list[InputImage], list[SkippedSample]]:
    """Returns the images that some paths mean, in order, and those that are known already to be of no use; tars are indexed into `scratch`.

    A path is an image, a folder of images or of tars, a tar, a glob of either, or an index. Raises Fault where it means nothing, or where two images
    would have one json.
    """
    found: list[InputImage] = []
    rejected: list[SkippedSample] = []
    for path in paths:
        files, others = _split(path)
        found += [
            InputImage(file, Path(file).name, Path(file).stem, partial(_read_file, file))
            for file in files
        ]
        if others:
            index = indexes.open_or_build(others, scratch)
            rejected += [each for part in index.manifest.parts for each in part.left_out.rejected]
            found += _indexed(index, path)
    if not found and not rejected:
        raise GigamaskError(
            "no image was given; give pictures, folders of them, tars, globs or an index"
        )
    places: dict[str, str] = {}
    for picture in found:
        if picture.place in places:
            both = f"{places[picture.place]} and {picture.name}"
            raise GigamaskError(
                f"{both} would both be written to {picture.place}.json; segment them into folders of their own"
            )
        places[picture.place] = picture.name
    return found, rejected


def _split(path: str) -> tuple[list[str], list[str]]:
    """Returns the image files that a path means, and what else it means."""
    text = storage.normalize(path)
    held = [text]
    if not storage.is_remote(text) and not os.path.exists(text) and glob.has_magic(text):
        held = sorted(filter(os.path.isfile, glob.glob(text, recursive=True)))
    files = [
        each
        for each in held
        if not storage.is_remote(each) and image_folder.is_image(each) and os.path.isfile(each)
    ]
    others = [each for each in held if each not in set(files)]
    return files, others or ([] if files else [path])


def _read_file(path: str) -> bytes:
    try:
        if os.path.getsize(path) > image.MAX_BYTES:
            raise CorruptSampleError(
                f"{path}: has {os.path.getsize(path)} bytes, at most {image.MAX_BYTES} are read; leave it out"
            )
        return Path(path).read_bytes()
    except OSError as error:
        raise CorruptSampleError(
            f"{path}: cannot be read ({error.strerror}); check the path, its permissions and the disk"
        ) from error


def _indexed(index: Index, path: str) -> Iterator[InputImage]:
    """Yields an index's images; below `path` a json lies where its image does, if that is a folder of images, else in a folder named as the shard."""
    dataset, root = Sa1bDataset(index), storage.normalize(path)
    within = os.path.isdir(root) and not is_index(root)
    for row in range(len(index)):
        shard, stem = (
            index.shard_paths[index.images["shard"][row]],
            os.fsdecode(index.images["name"][row]),
        )
        if not image_folder.is_folder(shard):
            place, file_name = f"{Path(storage.basename(shard)).stem}/{stem}", f"{stem}.jpg"
        else:
            above = os.path.relpath(shard, root) if within else os.path.basename(shard)
            place, file_name = os.path.normpath(os.path.join(above, Path(stem).stem)), stem
        yield InputImage(
            index.entry_name(row), file_name, place, partial(_read_image, dataset, row)
        )


def _read_image(dataset: Sa1bDataset, row: int) -> bytes:
    return dataset.read(row, with_json=False).jpg


def segment(
    weights: str | Path | Sam,
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    to_shards: bool = False,
    shard_images: int = 500,
    pictures: str | Path | None = None,
    device: str = "auto",
    **generator: Any,
) -> dict[str, Any]:
    """Generate all masks of images and write them as SA-1B annotations; resumable.

    Args:
        weights: A run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face
            folder, or a model.
        images: Images, folders of images, globs, tars, or an index.
        out: Folder for one JSON per image, and for the tars.
        to_shards: Whether to write tars of images and JSONs too.
        shard_images: Images per tar.
        pictures: Folder for a picture of each image with its masks.
        device: cpu, cuda, cuda:N, or auto for cuda if there is one.
        **generator: Arguments of `SamAutomaticMaskGenerator`, such as `pred_iou_thresh=0.8`.

    Returns:
        Counts of images and masks, the tars, and what was skipped, as `gigamask segment --json`.

    Raises:
        GigamaskError: No image can be used, or the folder holds results of other settings.
    """
    paths = [str(path) for path in ([images] if isinstance(images, str | Path) else images)]
    output = Output(
        Path(out), to_shards, shard_images, None if pictures is None else Path(pictures)
    )
    masks = SamAutomaticMaskGenerator(load_model(weights, device), **generator)
    with tempfile.TemporaryDirectory() as scratch:
        found, rejected = find(paths, scratch)
        return segment_all(found, masks, output, rejected)


def segment_all(
    pictures: Sequence[InputImage],
    masks: SamAutomaticMaskGenerator,
    output: Output,
    rejected: Sequence[SkippedSample] = (),
    progress: worker_pool.Progress | None = None,
) -> dict[str, Any]:
    """Segments everything in the images and returns what was done; those with a json already are kept as they are. `progress` counts images.

    `rejected` are images that were left out before. Raises Fault where none is usable, or where the folder holds what others have made.
    """
    tally, done = SegmentCounts(rejected=list(rejected)), 0
    given, _ = image_ids([Path(each.place).name.removeprefix("sa_") for each in pictures])
    with lock_folder(output.out, KEPT):
        _begin(output.out, masks)
        for start in range(0, len(pictures), output.shard_images):
            some, fresh = [], False
            for picture, number in zip(
                pictures[start : start + output.shard_images], given[start:], strict=False
            ):
                try:
                    new = _segment_one(picture, number, masks, output, tally)
                except CorruptSampleError as bad:
                    tally.rejected.append(SkippedSample(picture.name, str(bad)))
                else:
                    some.append((picture, number))
                    fresh |= new
                done += 1
                if progress:
                    progress(done, len(pictures))
            if output.to_shards and some:
                _pack(output.out, start // output.shard_images, some, fresh, tally)
    if not tally.images:
        raise GigamaskError(
            f"none of {len(tally.rejected)} images can be used, the first: {tally.rejected[0].reason}"
        )
    return {
        **{name: getattr(tally, name) for name in ("images", "masks", "kept", "tars", "tars_kept")},
        "left_out": [{"name": each.name, "reason": each.reason} for each in tally.rejected],
    }


def _begin(out: Path, masks: SamAutomaticMaskGenerator) -> None:
    """Writes down what the folder's jsons are made by, and sweeps half-written tars; raises Fault where it is something else already."""
    for left in out.glob(".sa_*.tar.*"):  # by a process that was killed
        left.unlink()
    weights, device = (
        digest_weights(masks.model.state_dict(), str(masks.model.config)),
        masks.predictor.device.type,
    )
    computed = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    )
    told = json.dumps(
        {"weights": weights, "computed": str(computed), **vars(masks.config)}, indent=1
    ).encode()
    path = out / KEPT / MADE
    if path.exists():
        before = path.read_bytes()
        if before != told:
            raise GigamaskError(
                f"--out {out}: holds what other weights or other numbers have made ({path}); give them again, or another folder"
            )
        return
    strangers = sorted(out.glob("*.tar"))
    if strangers:
        raise GigamaskError(
            f"--out {out}: holds {len(strangers)} tars such as {strangers[0].name}, which new ones would mix with; give another folder"
        )
    storage.write(path, told)


def _segment_one(
    picture: InputImage,
    number: int,
    masks: SamAutomaticMaskGenerator,
    output: Output,
    tally: SegmentCounts,
) -> bool:
    """Writes one image's json, and its picture where asked, unless they are there, and says whether the json is new."""
    path, pixels = output.out / f"{picture.place}.json", None
    entry = _done(path, picture.name)
    new = entry is None
    if entry is None:
        pixels = image.decode(picture.read(), picture.name)
        told = told_of(masks.generate_proposals(pixels), number, picture)
        raw = records.encode(told)
        entry = annotation.parse(raw, picture.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, raw)
    drawn = output.pictures / f"{picture.place}.png" if output.pictures else None
    if drawn and (new or not drawn.exists()):
        drawn.parent.mkdir(parents=True, exist_ok=True)
        pixels = image.decode(picture.read(), picture.name) if pixels is None else pixels
        storage.write(
            drawn, cv2.imencode(".png", painted(pixels, entry.masks)[..., ::-1])[1].tobytes()
        )
    tally.images += 1
    tally.masks += len(entry.masks)
    tally.kept += not new
    return new


def _done(path: Path, name: str) -> ImageAnnotation | None:
    """Returns what an earlier command wrote, None where there is nothing or it is damaged."""
    with contextlib.suppress(FileNotFoundError, CorruptSampleError):
        return annotation.parse(path.read_bytes(), name)
    return None


def told_of(found: MaskProposals, number: int, picture: InputImage) -> dict[str, Any]:
    """Returns SA-1B's json of what was found; masks without a pixel and scores that are no numbers, which no reader takes, are left out."""
    found = found[
        (found.masks.areas() > 0)
        & np.isfinite(found.predicted_iou)
        & np.isfinite(found.stability_score)
    ]
    ids = [number * annotation.MAX_MASKS + i for i in range(len(found))]
    scores = found.predicted_iou.astype(np.float64), found.stability_score.astype(np.float64)
    told = records.image_record(number, found.masks, ids, found.points_xy, *scores, found.crops)
    told["image"] |= {"file_name": _text(picture.file_name), "source": _text(picture.name)}
    return told


def painted(pixels: UInt8[np.ndarray, "H W 3"], masks: RLEMasks) -> UInt8[np.ndarray, "H W 3"]:
    """Returns the image with each mask in a colour of its own, large ones below small ones, white where two meet."""
    canvas, areas = pixels.copy(), masks.areas()
    for i in np.argsort(-areas, kind="stable"):
        dense = masks[i : i + 1].to_dense()[0]
        colour = make_rng(0, "mask colour", int(i)).integers(40, 256, 3)
        canvas[dense] = ((1 - OPACITY) * pixels[dense] + OPACITY * colour).astype(np.uint8)
        outline, _ = cv2.findContours(dense.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, outline, -1, (255, 255, 255), 1)
    return canvas


def _pack(
    out: Path, shard: int, some: Sequence[tuple[InputImage, int]], fresh: bool, tally: SegmentCounts
) -> None:
    """Writes a tar of images and their jsons, unless it is there already, of the same images and none of them new."""
    path = out / f"sa_{shard:06d}.tar"
    tally.tars.append(str(path))
    if not fresh and path.exists():
        with contextlib.suppress(GigamaskError):
            if tar.scan(path).names == [
                f"sa_{number}.{end}" for _, number in some for end in ("jpg", "json")
            ]:
                tally.tars_kept += 1
                return
    try:
        tar.write(path, _members(out, some))
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be written ({error.strerror}); free space on the disk and run the same command again"
        ) from error


def _members(out: Path, some: Sequence[tuple[InputImage, int]]) -> Iterator[tuple[str, bytes]]:
    """Yields what a tar holds: each image as a JPEG, and its json with the number that it has here."""
    for picture, number in some:
        told = msgspec.json.decode((out / f"{picture.place}.json").read_bytes())
        size = told["image"]["height"], told["image"]["width"]
        told["image"] |= {"image_id": number, "file_name": f"sa_{number}.jpg"}
        for i, each in enumerate(told["annotations"]):
            each["id"] = number * annotation.MAX_MASKS + i
        yield f"sa_{number}.jpg", to_jpeg(picture.read(), size, picture.name)
        yield f"sa_{number}.json", records.encode(told)


def _text(name: str) -> str:
    """Returns a name as text, also where it holds bytes that no text can."""
    return name.encode("utf-8", "replace").decode()
