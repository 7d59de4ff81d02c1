"""Configuration of SAM training.

Imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from gigamask.data.augment import ColorJitter
from gigamask.data.mask_sampling import MaskFilters, MaskSampler, RandomMasks
from gigamask.data.sample_config import OwnDataOptions, SampleConfig
from gigamask.errors import GigamaskError, abridged, check_range
from gigamask.interfaces import Kernels, Loss, Mining, NoMining, PromptSchedule, Task
from gigamask.losses.sam_loss import SamLoss
from gigamask.models.configs import FIND_CLASSES, SamConfig
from gigamask.models.lora_config import LoRA
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.samplers.validation import UNREAD, reads_attributes
from gigamask.training.config import (
    ImageTrainConfig,
    LoaderConfig,
    item_sampler,
)

if TYPE_CHECKING:
    import torch

    from gigamask.data.index import Index
    from gigamask.models.promptable import PromptableModel
    from gigamask.training.data_source import DataSource
    from gigamask.training.planning_view import PlanningView
    from gigamask.types import RandomSpec


MAX_LISTED = 8
"""Most categories that an error lists."""
DECODER_PARTS = ("prompt_encoder", "mask_decoder")
"""Modules of a SAM behind its image encoder."""

VIT_SIZES = (
    "model.embed-dim model.depth model.num-heads model.window-size model.global-attn-indexes"
)
SMALL_WIDTH = 256
"""Image encoders narrower than this are small: see `recipes.mae.pretraining_for`."""


@dataclass(frozen=True)
class SamLoaderConfig(LoaderConfig):
    """Loading and augmentation of images with their masks."""

    items: Literal["image", "mask"] = "image"
    """unit of sampling: images, each with several masks, or single masks, each with its image"""
    max_masks: int = 64
    """maximum number of masks per image to train on"""
    filters: MaskFilters = field(default_factory=MaskFilters)
    mask_sampler: MaskSampler = field(default_factory=RandomMasks)
    target: Literal["hard", "area", "full"] = "hard"
    """target masks of losses and clicks: hard samples the mask at the centers of the low-resolution
    grid, area averages it over each cell, full keeps the resolution of the input image"""
    mask_store: str | None = None
    """folder made by 'gigamask masks' to read masks from instead of the JSON of each image"""


@dataclass(frozen=True)
class SamTrainConfig(OwnDataOptions, ImageTrainConfig):
    """Configuration of SAM training."""

    compile_backend: ClassVar[str] = "inductor"
    """backend of torch.compile for `compile`"""

    val_split: float = 0.0
    """fraction of the images of --images or --masks to hold out for evaluation in training"""
    masks_per_chunk: int = 64
    """masks per forward pass of the decoder; limits memory without changing gradients"""
    activation_checkpointing: int = 0
    """recompute every n-th encoder block in the backward pass to save memory; 0 disables"""
    drop_path_mode: Literal["sample", "balanced", "batch"] = "sample"
    """which residual branches an image skips: its own (sample); its own, but as many as any other
    (balanced); or those that all images of the step skip, which are never computed (batch)"""
    compile: bool = False
    """compile encoder, decoder, losses and clicks with torch.compile; the first steps take minutes,
    and each forward pass of the decoder has the same number of masks"""
    embedding_cache: str | None = None
    """folder that keeps the embeddings of a frozen image encoder in float16, 2 MB an image for SAM,
    for every later visit and run; default: they are computed at every visit"""
    class_weight: float = 1.0
    """weight of the cross entropy of the masks' classes, beside the loss of the masks"""
    ignore_other_classes: bool = False
    """train masks of categories that --classes lacks without a class; otherwise they are refused"""
    lora: LoRA = field(default_factory=LoRA)  # pyrefly: ignore[bad-override]
    model: SamConfig = field(default_factory=SamConfig)
    loader: SamLoaderConfig = field(default_factory=SamLoaderConfig)
    prompts: PromptSchedule = field(default_factory=InteractiveSchedule)
    loss: Loss = field(default_factory=SamLoss)
    mining: Mining = field(default_factory=NoMining)  # pyrefly: ignore[bad-override]
    kernels: Kernels = field(default_factory=Kernels)  # pyrefly: ignore[bad-override]

    def check(self) -> SamTrainConfig:
        """Check the values and return the configuration itself.

        Raises:
            GigamaskError: A value is invalid.
        """
        check_range("--masks-per-chunk", self.masks_per_chunk, 1)
        check_range("--loader.max-masks", self.loader.max_masks, 1)
        check_range("--activation-checkpointing", self.activation_checkpointing, 0)
        check_range("--class-weight", self.class_weight, 0)
        if self.model.class_names and self.loader.mask_store:
            raise GigamaskError(
                f"--loader.mask-store {self.loader.mask_store} has no categories, which --classes "
                "needs; leave one of the flags out"
            )
        is_frozen = "image_encoder" in self.freeze or self.lora.rank
        if is_frozen and not self.init and not self.model.encoder.pretrained:
            is_named = "image_encoder" in self.freeze
            flag = "--freeze image_encoder" if is_named else f"--lora {self.lora.rank}"
            raise GigamaskError(
                f"{flag} requires trained weights, but the encoder is untrained; pass them with "
                "--init"
            )
        if self.parallel != "ddp" and self.lora.rank:
            raise GigamaskError(
                f"--parallel {self.parallel} shards weights, which have no adapters then; use "
                "--parallel ddp, or leave --lora out"
            )
        if self.parallel != "ddp" and not self.model.encoder.shards:
            raise GigamaskError(
                f"--parallel {self.parallel} shards linear layers of encoder blocks, of which "
                f"{self.model.encoder_name} has none; use --parallel ddp"
            )
        if self.model.rectangular and (self.parallel != "ddp" or self.compile):
            flag = "--compile" if self.compile else f"--parallel {self.parallel}"
            raise GigamaskError(
                f"{flag} needs images of one shape, which --model.rectangular does not pad them "
                "to; leave one of them out"
            )
        if self.compile and self.parallel != "ddp":
            raise GigamaskError(
                f"--compile is for --parallel ddp (got {self.parallel}), since sharded blocks are "
                "not compiled; leave one of the flags out"
            )
        self.kernels.check(self)
        if self.embedding_cache:
            _check_embedding_cache(self)
        if self.compile and not self.loss.supports_filling:
            raise GigamaskError(
                f"--compile fills up the masks of a chunk, for which the loss "
                f"{type(self.loss).__name__} must leave masks with a False Targets.counted out of "
                "its sums and have the property supports_filling; leave the flag out"
            )
        if self.prompts.has_groups and (self.compile or not self.mining.keeps_all):
            raise GigamaskError(
                f"{'--compile' if self.compile else '--mining'} needs the same rounds for all "
                "masks, unlike --prompts.corrected; leave one of them out"
            )
        return super().check()

    def build(self, device: str = "cpu") -> PromptableModel:
        """Build the model and initialize it from the seed; on the meta device, without storage."""
        from gigamask.models.init import build_model

        model = build_model(self.model, self.seed, device)
        if not self.activation_checkpointing:
            return model
        from gigamask.distributed.activation_checkpointing import checkpoint_blocks

        if not model.encoder_blocks:
            raise GigamaskError(
                f"--activation-checkpointing {self.activation_checkpointing}: "
                f"{type(self.model.encoder).__name__} lists no encoder blocks; leave the flag out"
            )
        checkpoint_blocks(model.encoder_blocks, self.activation_checkpointing)
        return model

    def task(self, device: torch.device) -> Task:
        """Return the task that computes the losses of all prompt rounds."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.training.tasks import SamTask

        mining = None if self.mining.keeps_all else self.mining
        cached, loss = None, self.loss
        if self.embedding_cache and device.type != "meta":
            from gigamask.training.frozen_encoder import FrozenEncoder

            cached = FrozenEncoder(Path(self.embedding_cache))
        if self.model.class_names:
            from gigamask.losses.class_loss import ClassLoss

            loss = ClassLoss(loss, self.class_weight)
        most = (self.micro_batch_size or 1) * (
            self.loader.max_masks if self.items == "image" else 1
        )
        return SamTask(
            self.prompts,
            loss,
            min(self.masks_per_chunk, most) if self.compile else self.masks_per_chunk,
            choose_precision(self.precision, device),
            full_resolution=self.loader.target == "full",
            mining=mining,
            compile_backend=self.compile_backend if self.compile else None,
            frozen_encoder=cached,
            kernels=self.kernels,
        )

    @property
    def unused(self) -> dict[str, str]:  # pyrefly: ignore[bad-override]
        """Why values have no effect, by flag without dashes."""
        model, rate = self.model, self.model.drop_path_rate
        is_own, is_vit = model.has_custom_encoder, model.encoder_name == "vit"
        rows = (
            (
                self.items == "image",
                "loader.max-masks loader.mask-sampler",
                "--loader.items mask draws masks one by one",
            ),
            (reads_attributes(item_sampler(self)), "loader.attributes", UNREAD),
            (self.lora.rank, "lora.alpha lora.on lora.last", "--lora is 0"),
            (model.class_names, "class-weight ignore-other-classes", "--classes is empty"),
            (is_own or is_vit, VIT_SIZES, "it is for --model.encoder vit"),
            (
                is_own or not rate or model.encoder.drop_path_blocks(model),
                "model.drop-path-rate",
                "the image encoder has no drop path",
            ),
            (rate, "drop-path-mode", "--model.drop-path-rate is 0"),
            (
                # The model is built, which imports torch, only where it must be.
                is_vit
                or getattr(self.optimizer, "layer_decay", 1) == 1
                or self.build("meta").encoder_blocks,
                "optimizer.layer-decay",
                "the image encoder lists no blocks",
            ),
        )
        return {flag: why for used, flags, why in rows if not used for flag in flags.split()}

    def data_source(self, index: Index) -> DataSource:
        """Return a source of samples, after checking the categories of their masks.

        Args:
            index: Index of the training data.

        Raises:
            GigamaskError: There are no samples, or the categories are not those of the model.
        """
        check_categories(self, index.manifest.categories)
        return super().data_source(index)

    @property
    def is_finding_classes(self) -> bool:  # pyrefly: ignore[bad-override]
        """Whether the classes are to be found in the data, by --classes auto."""
        return self.model.class_names == FIND_CLASSES

    @property
    def items(self) -> Literal["image", "mask"]:
        """Unit of sampling: images, or single masks."""
        return self.loader.items

    @property
    def planning(self) -> PlanningView:
        """The configuration as `gigamask plan` sees it."""
        from gigamask.training.planning_view import MaskPlanningView

        return MaskPlanningView.from_config(self)

    @property
    def random_spec(self) -> RandomSpec:
        """How many random numbers a sample carries."""
        from gigamask.types import RandomSpec

        return RandomSpec(
            seed=self.seed,
            clicks=self.prompts.num_uniforms,
            blocks=self.model.encoder.drop_path_blocks(self.model),
            points=self.loss.num_uniforms,
            drop_path_mode=self.drop_path_mode,
            drop_path_rate=self.model.drop_path_rate,
        )

    @property
    def sample_config(self) -> SampleConfig:
        """How the loader builds samples; area and full targets need masks at input resolution."""
        image_size, loader = self.model.image_size, self.loader
        return SampleConfig(
            image_size=image_size,
            mask_size=self.model.mask_size if loader.target == "hard" else image_size,
            max_masks=loader.max_masks,
            filters=loader.filters,
            mask_sampler=loader.mask_sampler,
            augment=loader.augment,
            color_jitter=loader.color_jitter,
            half_scale=loader.half_scale,
            mask_store=loader.mask_store,
            stretch=self.model.stretch,
            class_names=self.model.class_names,
            pixels=self.model.pixels,
        )


def _check_embedding_cache(config: SamTrainConfig) -> None:
    check_cacheable(config.loader, "--embedding-cache")
    changed = [
        *([f"--lora {config.lora.rank}"] if config.lora.rank else []),
        *(name for name in config.unfreeze if not name.startswith(DECODER_PARTS)),
    ]
    if changed:
        raise GigamaskError(
            f"--embedding-cache keeps the embeddings of a frozen encoder, which {changed[0]} "
            "changes; leave one of them out"
        )
    if "image_encoder" not in config.freeze:
        raise GigamaskError(
            "--embedding-cache keeps the embeddings of a frozen encoder; give --freeze "
            "image_encoder, or leave the flag out"
        )
    if config.model.decoder.trains_embedding:
        raise GigamaskError(
            "--embedding-cache: the decoder trains a part of the embedding; leave the flag out"
        )


def check_cacheable(loader: SamLoaderConfig, flag: str) -> None:
    """Check that an image has the same pixels, or those of its mirror image, at every visit.

    Args:
        loader: Settings of the loader.
        flag: The flag that needs it, for the error.

    Raises:
        GigamaskError: The loader crops, scales or recolors images.
    """
    if not loader.augment.whole_images or loader.color_jitter != ColorJitter():
        raise GigamaskError(
            f"{flag} keeps an embedding for an image and its mirror image; use --loader.augment "
            "none or flip, without color jitter, or leave the flag out"
        )


def check_categories(config: SamTrainConfig, counts: dict[str, int]) -> None:
    """Check that a model has the categories of the masks it is trained on.

    Args:
        config: The training.
        counts: Masks of each category in the data.

    Raises:
        GigamaskError: There are others, or none of the model's.
    """
    names = config.model.class_names
    others = {name: count for name, count in counts.items() if name not in names}
    if not names or (len(others) < len(counts) and (config.ignore_other_classes or not others)):
        return
    listed = ", ".join(f"{name} ({count})" for name, count in [*others.items()][:MAX_LISTED])
    more = ", ..." if len(others) > MAX_LISTED else ""
    if len(others) == len(counts):
        raise GigamaskError(
            f"--classes: no mask of --data {abridged(config.data)} has a category among "
            f"{' '.join(names[:MAX_LISTED])}; it has {listed or 'no categories'}{more}"
        )
    raise GigamaskError(
        f"--classes lacks categories of the data, by masks: {listed}{more}; add them, or train "
        "these masks without a class by --ignore-other-classes"
    )
