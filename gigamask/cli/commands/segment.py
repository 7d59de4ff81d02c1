"""`gigamask segment`: everything in images, as SA-1B's annotations."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from shlex import quote
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, Positional, arg

from gigamask.inference.amg_config import AutomaticMaskConfig


@dataclass(frozen=True)
class SegmentCommand:
    """segments everything in images into SA-1B's jsons, or into tars to train on; the same command goes on where it was stopped"""

    weights: Positional[Annotated[str, arg(metavar="WEIGHTS")]]
    """a run folder, a checkpoint, an official .pth, a .safetensors, or a Hugging Face folder"""
    images: Positional[Annotated[tuple[str, ...], arg(metavar="IMAGE ...")]]
    """pictures, folders of them at any depth, globs, tars, or an index"""
    out: str
    """folder for the jsons, and for the tars"""
    to_shards: bool = False
    """also write tars of images and jsons, which 'gigamask index' reads"""
    shard_images: int = 500
    """images a tar"""
    pictures: str | None = None
    """folder for a picture of each image with its masks"""
    cache: str | None = None
    """folder that keeps the images' embeddings, for a later run with other numbers"""
    cache_gb: float = 10.0
    """how much it keeps, in 10^9 bytes; what was used longest ago goes first"""
    device: str = "auto"
    """auto is cuda when there is one"""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """what the model computes in; scores and masks of bf16 differ a little"""
    masks: Annotated[AutomaticMaskConfig, OmitArgPrefixes] = field(
        default_factory=AutomaticMaskConfig
    )
    """what is asked, and which masks stay; names and defaults are those of SamAutomaticMaskGenerator"""
    json: str | None = None
    """file for what was printed, as data, with all that was left out"""

    def run(self) -> dict[str, Any]:
        from pathlib import Path

        from gigamask import config_files
        from gigamask.cli.commands import omissions
        from gigamask.cli.commands.progress import bar
        from gigamask.distributed.precision import autocast
        from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
        from gigamask.inference.embedding_cache import EmbeddingCache
        from gigamask.training.checkpoint import load_model
        from gigamask.workflows.segment import Output, find, segment_all

        output = Output(
            Path(self.out),
            self.to_shards,
            self.shard_images,
            None if self.pictures is None else Path(self.pictures),
        )
        cache = (
            None
            if self.cache is None
            else EmbeddingCache(Path(self.cache), int(self.cache_gb * 1e9))
        )
        masks = SamAutomaticMaskGenerator(
            load_model(self.weights, self.device, config_files.config_of_weights),
            cache=cache,
            **vars(self.masks),
        )
        with tempfile.TemporaryDirectory() as scratch:
            pictures, rejected = find(self.images, scratch)
            with bar("segment") as progress, autocast(self.precision, masks.predictor.device):
                done = segment_all(pictures, masks, output, rejected, progress)
        each = done["masks"] / done["images"]
        print(
            f"{self.out}: {done['images']} images with {done['masks']} masks, {each:.1f} each ({done['kept']} images were done before)"
        )
        if not done["masks"]:
            print(
                "  no mask passed; lower --pred-iou-thresh and --stability-score-thresh, which are made for well-trained models"
            )
        if self.to_shards:
            print(f"  {len(done['tars'])} tars ({done['tars_kept']} were done before)")
        omissions.tell("images", [each["reason"] for each in done["left_out"]])
        if self.to_shards:
            print(f"next: gigamask index {quote(self.out)} --out {quote(self.out)}/index")
        return done
