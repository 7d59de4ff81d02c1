"""Model configurations and named sizes, importable without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from gigamask import plugin
from gigamask.errors import GigamaskError, check_counts, check_range
from gigamask.interfaces import ImageEncoder
from gigamask.models.encoder_configs import ConvPyramid, ViT, ViTSmall, ViTTiny, check_multiple
from gigamask.pixels import PixelConfig


@dataclass(frozen=True)
class ModelConfig:
    """Base class of the configurations of models, which files of weights state."""

    model = ""
    """reference of the class of the model, a `models.model.Model`"""

    def build(self) -> Any:
        """Return a model with weights to be set."""
        return plugin.load(self.model)(self)

    @property
    def max_width(self) -> int | None:
        """Channels of the widest block, by which commands tell small models; None: not known."""
        return getattr(self, "embed_dim", None)

    def use_instead(self, weights: str) -> str:
        """Say what to do where a SAM's weights are needed; "" if these are a SAM's.

        Args:
            weights: The weights, as the user named them.
        """
        return ""


MAX_CLASS_NAME = 100
"""Most characters of the name of a class."""
FIND_CLASSES = ("auto",)
"""Value of `SamConfig.class_names` for all categories of the data, which training replaces."""
DECODER_PREFIX, MAE_PREFIX = "decoder:", "mae:"
"""Path prefixes of a SAM whose prompt encoder and mask decoder initialize those of another, and of
an MAE that initializes the image encoder of a SAM."""
ENCODERS: dict[str, type[ImageEncoder]] = {
    "vit": ViT,
    "vit_t": ViTTiny,
    "vit_s": ViTSmall,
    "conv_pyramid": ConvPyramid,
}
"""Built-in image encoders by name."""


@dataclass(frozen=True)
class Decoder:
    """Base class of mask decoder configurations."""

    model: ClassVar[str] = ""
    """reference of the class of the model that has this decoder"""
    family: ClassVar[str] = "gigamask.models.families:SAM"
    """reference of the `ModelFamily` that names its weights in others' files"""
    stretches: ClassVar[bool] = False
    """whether the published model resizes both sides of an image, as SAM 2 does"""
    trains_embedding: ClassVar[bool] = False
    """whether a part of the decoder makes the embedding, which then cannot be kept"""
    pred_iou_thresh: ClassVar[float] = 0.88
    """threshold of the predicted IoU of automatic masks; SAM's"""
    stability_score_thresh: ClassVar[float] = 0.95
    """threshold of the stability score of automatic masks; SAM's"""

    def check(self, model: SamConfig) -> None:
        """Check that the rest of a model fits the decoder.

        Args:
            model: The model's configuration.

        Raises:
            GigamaskError: It does not.
        """

    def embedding_channels(self, model: SamConfig) -> int:
        """Return the number of channels of what `Sam.encode` returns.

        Args:
            model: The model's configuration.
        """
        return model.encoder.channels(model)

    def unpublished(self, model: SamConfig) -> str:
        """Return what other libraries lack to load a model; "" if they load it.

        Args:
            model: The model's configuration.
        """
        return "decoder that answers in windows, which this model has"


@dataclass(frozen=True)
class SamDecoder(Decoder):
    """SAM's mask decoder, sized by `SamConfig`."""

    model: ClassVar[str] = "gigamask.models.sam.sam:Sam"

    def unpublished(self, model: SamConfig) -> str:
        """Return what other libraries lack to load a model; "" if they load it."""
        if type(model.encoder) is not ViT:
            return f"image encoder but SAM's ViT; this model has {model.encoder_name}"
        return ""


@dataclass(frozen=True)
class WindowDecoder(Decoder):
    """SAM's two-way transformer in a window around the prompt, on dense prompts.

    Each of the three masks of a prompt has its own window (`models.compact.decoder`).
    """

    click_windows: tuple[float, float, float] = (0.117, 0.3, 1.0)
    """sides of the windows of a click, as fractions of the input's side"""
    box_windows: tuple[float, float, float] = (1.2, 1.4, 1.8)
    """sizes of the windows of a box, relative to it"""
    correction_windows: tuple[float, float, float] = (1.3, 1.6, 2.2)
    """sizes of the windows of a correction, relative to the mask and the clicks"""
    widths: tuple[int, int] = (48, 96)
    """channels of the dense prompt encoder at 16 x 16 and 4 x 4 samples; multiples of 8"""
    model: ClassVar[str] = "gigamask.models.compact.model:CompactSam"
    pred_iou_thresh: ClassVar[float] = 0.4
    stability_score_thresh: ClassVar[float] = 0.4

    def __post_init__(self) -> None:
        for name in ("click_windows", "box_windows", "correction_windows"):
            sizes = getattr(self, name)
            if not 0 < sizes[0] <= sizes[1] <= sizes[2]:
                raise GigamaskError(
                    f"WindowDecoder.{name} must be positive and ascending (got {sizes})"
                )
        if any(width < 8 or width % 8 for width in self.widths):
            raise GigamaskError(
                f"WindowDecoder.widths must be positive multiples of 8 (got {self.widths})"
            )

    def check(self, model: SamConfig) -> None:
        """Check that the rest of a model fits the decoder."""
        if model.encoder.decoder != "window":
            raise GigamaskError(
                "the decoder window needs --model.encoder conv_pyramid (got "
                f"{type(model.encoder).__name__}); the recipe compact has both"
            )
        if model.custom_init:
            raise GigamaskError(
                "SamConfig.custom_init is for the encoder vit and the decoder sam; leave it out "
                "with the decoder window"
            )
        if model.patch_size != 4:
            raise GigamaskError(
                "SamConfig.patch_size must be 4, the stride of the embedding of conv_pyramid "
                f"(got {model.patch_size})"
            )
        check_multiple(model, "image_size", 16, "the coarsest stride of conv_pyramid")
        check_multiple(model, "embedding_dim", 16, "the mask upscaling in windows")


DECODERS: dict[str, type[Decoder]] = {"sam": SamDecoder, "window": WindowDecoder}
"""Built-in mask decoders by name."""
PARTS: dict[str, Mapping[str, type]] = {"encoder": ENCODERS, "decoder": DECODERS}
"""The built-in classes of the parts of a SAM."""


def find_part(part: str, name: str) -> type | None:
    """Return the class of an image encoder or mask decoder; None if nothing installed has it.

    Args:
        part: "encoder" or "decoder".
        name: Its name, built-in or of a plugin.
    """
    if name in PARTS[part]:
        return PARTS[part][name]
    reference = plugin.merged("components").get(f"model.{part}", {}).get(name)
    return plugin.load(reference) if reference else None


def part_name(part: str, kind: type) -> str | None:
    """Return the name of the class of an image encoder or mask decoder; None of a user's own.

    Args:
        part: "encoder" or "decoder".
        kind: The class.
    """
    added = plugin.merged("components").get(f"model.{part}", {})
    names = {plugin.reference(each): name for name, each in PARTS[part].items()}
    names |= {reference: name for name, reference in added.items()}
    return names.get(plugin.reference(kind))


@dataclass(frozen=True)
class SamConfig(ModelConfig):
    """Sizes, drop path rate and initialization of a SAM; the defaults are ViT-B's."""

    image_size: int = 1024
    """side of the square model input in pixels"""
    patch_size: int = 16
    """side of a patch in pixels; must divide image_size"""
    embed_dim: int = 768
    """width of the image encoder"""
    depth: int = 12
    """number of blocks of the image encoder"""
    num_heads: int = 12
    """attention heads per encoder block; must divide embed_dim"""
    window_size: int = 14
    """side of the attention windows in tokens"""
    global_attn_indexes: tuple[int, ...] = (2, 5, 8, 11)
    """indexes of the blocks with global instead of windowed attention"""
    drop_path_rate: float = 0.0
    """drop path rate of the last block, increasing linearly from 0 at the first block"""
    embedding_dim: int = 256
    """channels of the image embedding, and width of the mask decoder"""
    decoder_num_heads: int = 8
    """attention heads of the mask decoder; must divide embedding_dim / 2"""
    decoder_mlp: int = 2048
    """hidden width of the mask decoder's MLPs"""
    iou_hidden: int = 256
    """hidden width of the IoU prediction head"""
    custom_init: bool = False
    """initialization for small models: attention to prompt positions, a color embedding, and masks
    by similarity (models.init)"""
    stretch: bool = False
    """resize both sides of an image to image_size, as SAM 2 does, instead of padding the shorter"""
    class_names: tuple[str, ...] = ()
    """classes that a head on the mask token predicts, such as cat dog; auto takes all categories of
    the data; default: masks have no classes (also --classes)"""
    rectangular: bool = False
    """encode only the tokens that an image covers, rather than the padded square; for the encoders
    vit, vit_t and vit_s"""
    encoder: ImageEncoder = field(default_factory=ViT)
    """image encoder; embed-dim, depth, num-heads, window-size and global-attn-indexes apply to
    vit"""
    decoder: Decoder = SamDecoder()
    """mask decoder; window requires the encoder conv_pyramid"""
    pixels: PixelConfig = field(default_factory=PixelConfig)

    def __post_init__(self) -> None:
        check_counts(
            self,
            "embed_dim",
            "depth",
            "num_heads",
            "window_size",
            "embedding_dim",
            "decoder_num_heads",
            "decoder_mlp",
            "iou_hidden",
        )
        _check_patches(self)
        check_multiple(self, "embed_dim", self.num_heads, "num_heads")
        check_multiple(self, "embed_dim", 4, "the position embedding")
        check_multiple(self, "embedding_dim", 8, "the mask upscaling")
        check_multiple(self, "embedding_dim", 2 * self.decoder_num_heads, "2 x decoder_num_heads")
        if invalid := [block for block in self.global_attn_indexes if not 0 <= block < self.depth]:
            raise GigamaskError(
                f"SamConfig.global_attn_indexes must be in 0 to {self.depth - 1} for depth "
                f"{self.depth} (got {invalid[0]})"
            )
        if not 0 <= self.drop_path_rate < 1:
            raise GigamaskError(
                f"SamConfig.drop_path_rate must be in [0, 1) (got {self.drop_path_rate})"
            )
        if wrong := [name for name in self.class_names if not 0 < len(name) <= MAX_CLASS_NAME]:
            raise GigamaskError(
                f"SamConfig.class_names must have 1 to {MAX_CLASS_NAME} characters each (got "
                f"{wrong[0]!r})"
            )
        if repeated := [name for name, count in Counter(self.class_names).items() if count > 1]:
            raise GigamaskError(f"SamConfig.class_names has {repeated[0]!r} twice; give it once")
        self._check_parts()

    def _check_parts(self) -> None:
        """Check that the encoder and the decoder fit each other."""
        if self.rectangular and not self.encoder.encodes_rectangles:
            raise GigamaskError(
                "SamConfig.rectangular is for --model.encoder vit, vit_t and vit_s (got "
                f"{self.encoder_name}); leave it out"
            )
        needed = self.encoder.decoder
        if needed and (own := part_name("decoder", type(self.decoder))) != needed:
            raise GigamaskError(
                f"the encoder {self.encoder_name} needs --model.decoder {needed}; for the decoder "
                f"{own} use --model.encoder vit"
            )
        self.decoder.check(self)

    @property
    def model(self) -> str:  # pyrefly: ignore[bad-override]
        """Reference of the class of the model, which the decoder has."""
        return self.decoder.model

    @property
    def max_width(self) -> int:
        """Channels of the widest block of the image encoder."""
        return self.encoder.max_width(self)

    @property
    def in_channels(self) -> int:
        """Channels of the input, 3 for RGB."""
        return self.pixels.channels

    @property
    def pixel_scale(self) -> tuple[tuple[float, ...], ...]:
        """Mean and standard deviation of each channel in 0..255; RGB's mean for other channels."""
        return tuple(
            values if len(values) == self.in_channels else (sum(values) / 3,) * self.in_channels
            for values in self.encoder.pixel_scale
        )

    @property
    def has_custom_encoder(self) -> bool:
        """Whether the image encoder is a user's own, which initializes itself."""
        return part_name("encoder", type(self.encoder)) is None

    @property
    def encoder_name(self) -> str:
        """Name of the image encoder: that of `--model.encoder`, or the class of a user's own."""
        return part_name("encoder", type(self.encoder)) or type(self.encoder).__name__

    @property
    def embedding_size(self) -> int:
        """Side of the image embedding in tokens, E."""
        return self.image_size // self.patch_size

    @property
    def embedding_channels(self) -> int:
        """Channels of what `Sam.encode` returns."""
        return self.decoder.embedding_channels(self)

    @property
    def mask_size(self) -> int:
        """Side of the low-resolution masks, G: four times the embedding's."""
        return 4 * self.embedding_size


@dataclass(frozen=True)
class MAEConfig(ModelConfig):
    """Sizes, mask ratio and targets of a masked autoencoder.

    The defaults are those of ViT-B in MAE's pre-training (He et al. 2021, arXiv 2111.06377).
    """

    image_size: int = 224
    """side of the square model input in pixels"""
    patch_size: int = 16
    """side of a patch in pixels; must divide image_size (SAM uses 16)"""
    embed_dim: int = 768
    """width of the encoder"""
    depth: int = 12
    """number of encoder blocks"""
    num_heads: int = 12
    """attention heads per encoder block; must divide embed_dim"""
    decoder_dim: int = 512
    """width of the decoder, which is used only in pre-training"""
    decoder_depth: int = 8
    """number of decoder blocks"""
    decoder_num_heads: int = 16
    """attention heads per decoder block; must divide decoder_dim"""
    mask_ratio: float = 0.75
    """fraction of an image's patches that is hidden"""
    normalize_pixels: bool = True
    """predict each patch's pixels normalized by their mean and standard deviation, which trains
    better encoders"""
    feature_channels: int = 0
    """predict this many channels of a teacher's embedding instead of pixels, as SAMI does; the
    decoder then predicts hidden patches only; 0: pixels"""
    model = "gigamask.models.mae:MAE"

    def __post_init__(self) -> None:
        check_counts(
            self,
            "embed_dim",
            "depth",
            "num_heads",
            "decoder_dim",
            "decoder_depth",
            "decoder_num_heads",
        )
        _check_patches(self)
        check_multiple(self, "embed_dim", self.num_heads, "num_heads")
        check_multiple(self, "decoder_dim", self.decoder_num_heads, "decoder_num_heads")
        for name in ("embed_dim", "decoder_dim"):
            check_multiple(self, name, 4, "the position embedding")
        check_range("MAEConfig.feature_channels", self.feature_channels, 0)
        if not 0 < self.mask_ratio < 1:
            raise GigamaskError(f"MAEConfig.mask_ratio must be in (0, 1) (got {self.mask_ratio})")
        if not 0 < self.visible < self.patches:
            raise GigamaskError(
                f"MAEConfig.mask_ratio {self.mask_ratio} of {self.patches} patches leaves "
                f"{self.visible} visible; choose a ratio that hides some patches but not all"
            )

    @property
    def embedding_size(self) -> int:
        """Patches along a side of the image, E."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Number of patches of an image, P."""
        return self.embedding_size**2

    @property
    def visible(self) -> int:
        """Number of patches of an image that the encoder sees."""
        return self.patches - round(self.patches * self.mask_ratio)

    def use_instead(self, weights: str) -> str:
        """Say what to do where a SAM's weights are needed."""
        return (
            f"{weights}: a pre-trained encoder without a mask decoder; train a SAM with "
            f"--init mae:{weights}, then use that run"
        )


def as_sam(stated: ModelConfig | None, weights: str) -> SamConfig | None:
    """Return what weights state, which are to be a SAM's; None if they state nothing.

    Args:
        stated: The configuration that they state.
        weights: The weights, as the user named them.

    Raises:
        GigamaskError: They are another model's.
    """
    if reason := stated.use_instead(weights) if stated else "":
        raise GigamaskError(reason)
    return cast(SamConfig | None, stated)


def _check_patches(config: SamConfig | MAEConfig) -> None:
    check_counts(config, "image_size", "patch_size")
    image, patch = config.image_size, config.patch_size
    if image % patch:
        raise GigamaskError(
            f"{type(config).__name__}.image_size must be a multiple of patch_size {patch} "
            f"(got {image}); the nearest is {max(patch, round(image / patch) * patch)}"
        )


def vit_b() -> SamConfig:
    """Return the configuration of SAM ViT-B: 93.7 M parameters."""
    return SamConfig()


def vit_l() -> SamConfig:
    """Return the configuration of SAM ViT-L: 312.3 M parameters."""
    return SamConfig(embed_dim=1024, depth=24, num_heads=16, global_attn_indexes=(5, 11, 17, 23))


def vit_h() -> SamConfig:
    """Return the configuration of SAM ViT-H: 641.1 M parameters."""
    return SamConfig(embed_dim=1280, depth=32, num_heads=16, global_attn_indexes=(7, 15, 23, 31))


def vit_s() -> SamConfig:
    """Return the configuration of a SAM with ViT-S for 320 px, with 1,600 image tokens."""
    return SamConfig(
        image_size=320, patch_size=8, embed_dim=384, num_heads=6, window_size=10, custom_init=True
    )


def tiny() -> SamConfig:
    """Return a SAM configuration that trains in minutes on two CPU cores: 128 px, 0.7 M parameters.

    The patch size is 8 because clicks did not help with 16. Two decoder heads learned slightly more
    than four heads of eight channels.
    """
    return SamConfig(
        image_size=128,
        patch_size=8,
        embed_dim=96,
        depth=4,
        num_heads=3,
        window_size=8,
        global_attn_indexes=(1, 3),
        embedding_dim=64,
        decoder_num_heads=2,
        decoder_mlp=256,
        iou_hidden=64,
        custom_init=True,
    )


def compact() -> SamConfig:
    """Return a configuration that learns in minutes on a CPU: 256 px, about 1.5 M parameters.

    A convolutional encoder, and SAM's transformer in windows around the prompts.
    """
    return SamConfig(
        image_size=256,
        patch_size=4,
        embedding_dim=64,
        decoder_num_heads=4,
        decoder_mlp=256,
        iou_hidden=64,
        encoder=ConvPyramid(),
        decoder=WindowDecoder(),
    )


def mae_vit_b() -> MAEConfig:
    """Return the configuration of MAE ViT-B: 85.8 M encoder and 26.1 M decoder parameters."""
    return MAEConfig()


def mae_vit_l() -> MAEConfig:
    """Return the configuration of MAE ViT-L: 303.3 M encoder and 26.2 M decoder parameters."""
    return MAEConfig(embed_dim=1024, depth=24, num_heads=16)


def mae_vit_h() -> MAEConfig:
    """Return the configuration of MAE ViT-H with SAM's patch size: 630.9 M encoder parameters.

    The patch size is 16; the published MAE ViT-H uses 14.
    """
    return MAEConfig(embed_dim=1280, depth=32, num_heads=16)


def mae_tiny() -> MAEConfig:
    """Return the configuration of the MAE for the encoder of `tiny()`: 128 px, patch size 8."""
    return MAEConfig(
        image_size=128,
        patch_size=8,
        embed_dim=96,
        depth=4,
        num_heads=3,
        decoder_dim=64,
        decoder_depth=2,
        decoder_num_heads=2,
    )
