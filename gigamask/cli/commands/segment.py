"""`gigamask segment`: generate all masks of images, as SA-1B annotations."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from gigamask.datatools import formats
from gigamask.errors import check_range
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.launch import PartOptions
from gigamask.parser import FLAT, Positional, check_writable
from gigamask.pixels import WindowOptions

if TYPE_CHECKING:
    from gigamask.data.worker_pool import Part
    from gigamask.records import SkippedSample
    from gigamask.workflows.input_images import InputImage

    Format = str
else:
    Format = Literal[tuple(formats.writers())]
MAX_CACHE_GB = 1e9


@dataclass(frozen=True)
class SegmentCommand(WindowOptions, PartOptions):
    """generate all masks of images, as JSONs in SA-1B's format and in others; resumable"""

    needs_flags: ClassVar = {
        "polygons": "to coco",
        "cache_gb": "cache",
        "shard_images": "to-shards or to shards",
    }

    weights: Annotated[str, Positional("WEIGHTS")]
    """a run folder, a checkpoint, a .pth, a .safetensors, a Hugging Face folder or id, or starter,
    the small model in this package"""
    images: Annotated[tuple[str, ...], Positional("IMAGE ...")]
    """images, folders of images (searched recursively), globs, tars, or an index"""
    out: str
    """output folder for the JSONs and all other formats"""
    to: tuple[Format, ...] = ()
    """formats to write besides the JSONs, such as COCO's instances, label images, or tars of images
    and JSONs, for 'gigamask index'"""
    to_shards: bool = False
    """the same as --to shards"""
    polygons: bool = False
    """write polygons in place of run lengths with --to coco, but for masks with holes"""
    table: str | None = None
    """CSV file with area, centroid, box, mean intensity, class and score of each mask, by the
    names of scikit-image's regionprops"""
    shard_images: int = 500
    """images per tar"""
    pictures: str | None = None
    """folder for one picture per image, with its masks"""
    cache: str | None = None
    """folder to cache image embeddings in, for further runs with other thresholds"""
    cache_gb: float = 10.0
    """size of the cache in GB (10^9 bytes); the least recently used embeddings are removed"""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto uses cuda if available"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """number format of the model; scores and masks differ slightly in bf16 and fp16; auto: bf16 on
    a GPU, fp32 on a CPU"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""
    masks: Annotated[AutomaticMaskConfig, FLAT] = field(default_factory=AutomaticMaskConfig)
    """how masks are generated: the arguments of SamAutomaticMaskGenerator"""
    strict: bool = False
    """end with exit code 2 if an image could not be read; the others are segmented all the same"""
    json: str | None = None
    """write the results to this JSON file, with everything that was skipped"""

    def run(self) -> dict[str, Any]:
        """Segment the images, and return the counts."""
        from gigamask.cli.commands.output import print_skipped
        from gigamask.data.worker_pool import part_of
        from gigamask.errors import counted
        from gigamask.models.weight_paths import check_order, check_weights_exist
        from gigamask.workflows.input_images import find_images, outputs_of_images

        part = part_of(self.part)
        if self.table and os.path.isfile(self.table):
            check_writable("--table", self.table)
        check_range("--cache-gb", self.cache_gb, 0, MAX_CACHE_GB)
        for last in self.images[-1:]:
            check_order(self.weights, last, "gigamask segment {} {}")
        check_weights_exist(self.weights)
        with tempfile.TemporaryDirectory() as scratch:
            written = outputs_of_images(self.out, self.all_formats, self.pictures)
            result = self._segment(*find_images(self.images, scratch, written), part)
        mean = result["masks"] / result["images"]
        images, masks = counted(result["images"], "image"), counted(result["masks"], "mask")
        count = f"{images} with {masks}, {mean:.1f} per image"
        print(f"{self.out}: {count} ({result['existing']} done before)")
        print(
            f"  kept masks with a predicted IoU above {result['pred_iou_thresh']:.3f} and a "
            f"stability score of at least {result['stability_score_thresh']:.3f}; lower "
            "--pred-iou-thresh and --stability-score-thresh for more masks"
        )
        if result["turned"]:
            print(f"  images turned upright, as EXIF says, with their masks: {result['turned']:,}")
        if self.flags and not result["kept"]:
            print(f"  {self.flags} changed nothing: no image has more than 8 bits per channel")
        if not result["masks"]:
            print("  no mask passed the thresholds, which are meant for fully trained models")
        if "shards" in self.all_formats:
            print(
                f"  {counted(len(result['tars']), 'tar')} ({result['existing_tars']} done before)"
            )
        print_skipped("images", [sample["reason"] for sample in result["skipped"]])
        for line in (*result["notes"], *result["written"]):
            print(f"  {line}")
        if "shards" in self.all_formats:
            index = quote(os.path.join(self.out, "index"))
            print(f"next: gigamask index {quote(self.out)} --out {index}")
        if self.strict and result["skipped"]:
            result["fault"] = f"--strict: {len(result['skipped'])} images were left out, see above"
        return result

    def _segment(
        self, images: list[InputImage], skipped: list[SkippedSample], part: Part | None
    ) -> dict[str, Any]:
        """Load the model, which takes seconds, segment the images, and return the counts."""
        from pathlib import Path

        from gigamask import config_files
        from gigamask.errors import counted
        from gigamask.progress import progress_bar, say

        pictures = Path(self.pictures) if self.pictures else None
        table = Path(self.table) if self.table else None
        config_of = partial(config_files.config_of_weights, trust=self.trust)
        say(
            f"segment {counted(len(images), 'image')} ({len(skipped)} left out) with "
            f"{self.weights}; masks go to {self.out}"
        )
        with progress_bar("segment") as progress:
            from gigamask.datatools.export_formats import ExportOptions
            from gigamask.distributed.precision import describe_device
            from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
            from gigamask.models.embedding_cache import EmbeddingCache
            from gigamask.training.checkpoint import load_model
            from gigamask.workflows.segment import Output, segment_all

            size = int(self.cache_gb * 1e9)
            cache = EmbeddingCache(Path(self.cache), size) if self.cache else None
            export = ExportOptions(self.all_formats, self.polygons, table)
            output = Output(Path(self.out), export, self.shard_images, pictures)
            model = load_model(self.weights, self.device, config_of)
            model.set_window(self.window, self.percentiles)
            generator = SamAutomaticMaskGenerator(
                model, cache=cache, precision=self.precision, **vars(self.masks)
            )
            say(f"  device: {describe_device(model.device)}")
            result = segment_all(images, generator, output, skipped, progress, part)
        names = ("pred_iou_thresh", "stability_score_thresh")
        return result | {name: getattr(generator, name) for name in names}

    @property
    def all_formats(self) -> tuple[str, ...]:
        """The formats to write besides the JSONs."""
        return (*self.to, "shards") if self.to_shards and "shards" not in self.to else self.to
