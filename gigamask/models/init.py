"""Initialization of models: reproducible, from weights, and the custom one of small models.

A small model trained for minutes from the standard initialization learns to draw blobs around its
prompts and to ignore the image: image content is noise to a decoder that cannot locate prompts yet,
so the encoder collapses to a constant embedding. The custom initialization provides what the model
would have to learn first: attention to prompt positions, an embedding that separates colors, and
masks that follow similarity.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.interfaces import PIXEL_MEAN, PIXEL_STD, ImageEncoder
from gigamask.models import state_dict
from gigamask.models.configs import (
    DECODER_PREFIX,
    MAEConfig,
    ModelConfig,
    SamConfig,
    ViT,
    part_name,
)
from gigamask.models.convert import State, from_mae, plain_vit
from gigamask.models.families import families
from gigamask.models.mae import MAE
from gigamask.models.sam.image_encoder import EncoderAttention, ImageEncoderViT
from gigamask.models.sam.mask_decoder import MaskDecoder
from gigamask.models.sam.prompt_encoder import PositionEmbeddingRandom
from gigamask.models.sam.sam import Sam
from gigamask.models.sam.transformer import DecoderAttention
from gigamask.rng import make_rng, make_torch_generator

MAE_PREFIX = "mae:"
"""Path prefix of an MAE from which the image encoder of a SAM is initialized."""
DECODER = ("prompt_encoder.", "mask_decoder.")
CLASS_HEAD = "mask_decoder.class_head."
TIE_SCALE = 1.5
"""Scale of the orthonormal rows that queries and keys share. The attention logit at the prompt's
position then exceeds distant ones by about 2 * 1.5 ** 2, which outweighs several hundred other
tokens."""
POSITION_GAIN, PATCH_GAIN, BRANCH_GAIN = 0.25, 2.0, 0.3
"""Factors of the encoder's position embedding, patch embedding and residual branches."""
RANDOM_SCALE, SIMILARITY_SCALE, PRIOR_LOGIT = 0.7, 0.5, -2.3
"""Mask decoder: scale of the remaining random initialization, scale of similarities, and logit of
an average pixel (a probability of 9 %)."""
GELU_BIAS, RELU_BIAS = 1.0, 2.0
"""Biases that shift GELU and ReLU to where they are nearly linear."""


ModuleT = TypeVar("ModuleT", bound=nn.Module)


@overload
def build_model(config: SamConfig, seed: int, device: torch.device | str = "cpu") -> Sam: ...
@overload
def build_model(config: MAEConfig, seed: int, device: torch.device | str = "cpu") -> MAE: ...
def build_model(
    config: SamConfig | MAEConfig, seed: int, device: torch.device | str = "cpu"
) -> Sam | MAE:
    """Build a SAM or an MAE with random weights.

    Args:
        config: Configuration of the model.
        seed: Random seed of the weights.
        device: Device of the model; on the meta device it has no storage.
    """
    return materialize(
        lambda: Sam.from_config(config) if isinstance(config, SamConfig) else MAE(config),
        seed,
        device,
    )


def materialize(
    make: Callable[[], ModuleT], seed: int, device: torch.device | str = "cpu"
) -> ModuleT:
    """Build a model and initialize it from a seed.

    Args:
        make: Builds the model; called on the meta device.
        seed: Seed of the initial values.
        device: Device of the model; on the meta device it has no storage.
    """
    with torch.device("meta"):
        model = make()
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device="cpu")
    if isinstance(model, Sam) and model.config.encoder.initializes_itself:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(make_rng(seed, "image encoder").integers(2**31)))
            model.image_encoder = model.config.encoder.build(model.config)
    init_weights(model, seed)
    return model.to(device)


def load_init_weights(model: nn.Module, path: str) -> set[str]:
    """Load initial weights into a model.

    Args:
        model: Model to load into; with `mae:PATH`, a SAM of which only the image encoder is loaded.
        path: Path of the weights; `mae:PATH` of an MAE or EfficientSAM; or `decoder:PATH` of a SAM,
            of which only prompt encoder and mask decoder are loaded, beside a pretrained encoder's
            own weights.

    Returns:
        Names of the tensors whose values come from the weights. An MAE has no relative positions:
        zeros, their initial values, reproduce it and count as its own.

    Raises:
        GigamaskError: The weights do not fit the model.
    """
    if path.startswith(DECODER_PREFIX):
        return _load_decoder(model, path)
    if not path.startswith(MAE_PREFIX):
        weights, config = state_dict.read_weights(path)
        if isinstance(model, Sam) and "cls_token" in weights:
            raise GigamaskError(
                f"{path}: holds an MAE; give {MAE_PREFIX}{path} to start the image encoder from it"
            )
        with _suggest_recipe(weights):
            if isinstance(model, Sam) and isinstance(config, SamConfig):
                _check_encoder(config.encoder, model.config.encoder, path)
            weights, loaded = _fit_class_head(model, weights, config, path)
            state_dict.load_weights(model, weights, path)
        if isinstance(model, Sam) and isinstance(config, SamConfig):
            # With relative positions, shapes determine the encoder's heads, but not the decoder's.
            heads, own = config.decoder_num_heads, model.config.decoder_num_heads
            if heads != own:
                raise GigamaskError(
                    f"{path}: has {heads} attention heads in the mask decoder, the model has "
                    f"{own}; use --model.decoder-num-heads {heads}"
                )
        return loaded
    path = path.removeprefix(MAE_PREFIX)
    if not isinstance(model, Sam):
        kind = "MAE" if isinstance(model, MAE) else "grounding model"
        raise GigamaskError(
            f"{MAE_PREFIX}{path}: {MAE_PREFIX} starts a SAM from an MAE; "
            f"to continue with the {kind} itself, pass {path}"
        )
    weights, config = state_dict.read_weights(path)
    sizes, flag = plain_vit(model.config, path)
    if isinstance(config, MAEConfig) and config.num_heads != sizes.num_heads:
        raise GigamaskError(
            f"{path}: has {config.num_heads} attention heads, the model has {sizes.num_heads}; use "
            f"{flag}.num-heads {config.num_heads}"
        )
    own = model.state_dict()
    with _suggest_recipe(weights):
        encoder = from_mae(weights, model.config, path)
        state_dict.load_weights(model, {**own, **encoder}, path)
    return set(encoder) | {name for name in own if ".attn.rel_pos_" in name}


def _load_decoder(model: nn.Module, path: str) -> set[str]:
    """Load the prompt encoder and mask decoder of a SAM, and an encoder's pretrained weights."""
    weights, config = state_dict.read_weights(path.removeprefix(DECODER_PREFIX))
    weights, loaded = _fit_class_head(model, weights, config, path)
    decoder = {name: value for name, value in weights.items() if name.startswith(DECODER)}
    if not isinstance(model, Sam) or not decoder:
        raise GigamaskError(f"{path}: {DECODER_PREFIX} starts a SAM from the decoder of another")
    own = {
        name: value for name, value in model.state_dict().items() if not name.startswith(DECODER)
    }
    try:
        state_dict.load_weights(model, own | decoder, path)
    except GigamaskError as error:
        raise GigamaskError(
            f"{error}; a decoder needs --model.embedding-dim, --model.decoder and the other sizes "
            "as they were"
        ) from None
    model.config.encoder.load_pretrained(model.image_encoder)
    return loaded & set(decoder)


def _fit_class_head(
    model: nn.Module, weights: State, config: ModelConfig | None, path: str
) -> tuple[State, set[str]]:
    """Return weights with the model's initial head for classes unless they have the same classes.

    Args:
        model: The model.
        weights: The weights.
        config: Configuration that the weights state.
        path: Where they come from, for the error.

    Returns:
        The weights, and the names of those that are not the model's own.
    """
    own = model.config.class_names if isinstance(model, Sam) else ()
    stated = config.class_names if isinstance(config, SamConfig) else ()
    if stated == own:
        return weights, set(weights)
    if not own:
        raise GigamaskError(
            f"{path}: its masks have the classes {', '.join(stated)[:200]}; give --classes auto or "
            "names, the same ones to keep its head"
        )
    others = {name: value for name, value in weights.items() if not name.startswith(CLASS_HEAD)}
    head = {name: v for name, v in model.state_dict().items() if name.startswith(CLASS_HEAD)}
    return others | head, set(others)


def _check_encoder(stated: ImageEncoder, own: ImageEncoder, path: str) -> None:
    """Check that weights are for an image encoder of the same kind."""
    first, second = (part_name("encoder", type(each)) for each in (stated, own))
    if first and second and first != second:
        value = f":{getattr(stated, stated.argument)}" if stated.argument else ""
        raise GigamaskError(
            f"{path}: has the image encoder {first}, the model has {second}; use --model.encoder "
            f"{first}{value}"
        )


@contextmanager
def _suggest_recipe(weights: State) -> Iterator[None]:
    """Add to the error of weights of another size which recipes they fit."""
    try:
        yield
    except GigamaskError as error:
        names = next(filter(None, (each.recipe(weights) for each in families())), "")
        hint = f"; these weights fit the recipe {names}" if names else ""
        raise GigamaskError(f"{error}{hint}") from None


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Initialize every parameter and buffer from a random generator keyed by its name.

    Values thus depend neither on the order nor on the sizes of other parameters. Except in an MAE,
    weight matrices are normal, truncated at two standard deviations, of variance 1 / (3 * fan-in),
    a standard deviation of 0.02 at ViT-B's width. Biases and relative positions are 0, embeddings
    and the Gaussian position matrix are standard normal, and absolute positions are sines and
    cosines. The direct parameters of a module with `parameter_std` are normal with that standard
    deviation. An MAE follows its authors' code (`models_mae.py`): matrices are uniform with
    variance 2 / (fan-in + fan-out) (Glorot and Bengio 2010), tokens normal with standard deviation
    0.02. A custom image encoder keeps its own initialization.

    Args:
        model: The model, changed in place.
        seed: Random seed of the run.
    """
    custom_encoder = isinstance(model, Sam) and model.config.encoder.initializes_itself
    skipped = set(model.get_submodule("image_encoder").modules()) if custom_encoder else set()
    init = _init_mae if isinstance(model, MAE) else _init_sam
    for path, module in model.named_modules():
        if module in skipped:
            continue
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            tensor.copy_(init(module, name, tensor, seed, f"{path}.{name}"))
    if isinstance(model, Sam) and model.config.custom_init:
        init_tied_cross_attention(model, seed)
        if isinstance(model.config.encoder, ViT):
            init_color_passthrough(model)
        init_similarity_head(model, seed)


def _generator(seed: int, name: str) -> torch.Generator:
    return make_torch_generator(seed, f"weights {name}")


def _init_sam(module: nn.Module, name: str, tensor: Tensor, seed: int, full: str) -> Tensor:
    """Return the initial value of a parameter or buffer, on the CPU."""
    shape = tuple(tensor.shape)
    if (std := getattr(module, "parameter_std", None)) is not None:
        return std * torch.randn(shape, generator=_generator(seed, full))
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and name == "weight":
        # Each pixel of a 2 x 2 transposed convolution has one weight per input channel.
        fan_in = shape[0] if isinstance(module, nn.ConvTranspose2d) else math.prod(shape[1:])
        std = (3 * fan_in) ** -0.5
        return nn.init.trunc_normal_(
            torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=_generator(seed, full)
        )
    if isinstance(module, (nn.Embedding, PositionEmbeddingRandom)):
        return torch.randn(shape, generator=_generator(seed, full))
    if isinstance(module, ImageEncoderViT):
        return sine_positions(shape[1], shape[3])
    if isinstance(module, Sam):
        mean, std = module.config.pixel_scale
        return torch.tensor(mean if name == "pixel_mean" else std).view(-1, 1, 1)
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) and name == "weight":
        return torch.ones(shape)
    if name == "bias" or isinstance(module, EncoderAttention):
        return torch.zeros(shape)
    raise GigamaskError(
        f"{full}: there is no initialization for {type(module).__name__}; set `parameter_std`, "
        "load weights, or initialize it yourself"
    )


def _init_mae(module: nn.Module, name: str, tensor: Tensor, seed: int, full: str) -> Tensor:
    """Return the initial value of a parameter or buffer of an MAE, on the CPU."""
    if isinstance(module, (nn.Linear, nn.Conv2d)) and name == "weight":
        # The patch embedding's kernel counts as one matrix over all pixels of a patch.
        matrix = nn.init.xavier_uniform_(
            torch.empty(len(tensor), tensor[0].numel()), generator=_generator(seed, full)
        )
        return matrix.view(tensor.shape)
    if name in ("cls_token", "mask_token"):
        return 0.02 * torch.randn(tuple(tensor.shape), generator=_generator(seed, full))
    if name in ("pos_embed", "decoder_pos_embed"):
        return get_2d_sincos_pos_embed(math.isqrt(tensor.shape[1] - 1), tensor.shape[2])
    if isinstance(module, MAE):
        return torch.tensor(PIXEL_MEAN if name == "pixel_mean" else PIXEL_STD).view(3, 1, 1)
    return (torch.ones if isinstance(module, nn.LayerNorm) and name == "weight" else torch.zeros)(
        tuple(tensor.shape)
    )


def get_2d_sincos_pos_embed(side: int, dim: int) -> Float[Tensor, "1 N C"]:
    """Return MAE's fixed position embedding of a class token and N - 1 patches.

    The class token's embedding is 0. A patch's embedding holds sines and cosines of its column,
    then of its row, with wavelengths from 2 pi to 10000 * 2 pi patches in geometric progression
    (Vaswani et al. 2017).

    Args:
        side: Patches along a side of the image.
        dim: Channels, C.
    """
    count = dim // 4
    angles = torch.arange(side, dtype=torch.float64)[:, None] * 10000.0 ** -(
        torch.arange(count, dtype=torch.float64) / count
    )
    encoding = torch.cat([angles.sin(), angles.cos()], 1)
    grid = torch.cat(
        [encoding[None].expand(side, -1, -1), encoding[:, None].expand(-1, side, -1)], 2
    ).flatten(0, 1)
    return torch.cat([torch.zeros(1, dim), grid.float()])[None]


def sine_positions(side: int, dim: int) -> Float[Tensor, "1 E E C"]:
    """Return a position embedding of sines and cosines of each token's row and column.

    Frequencies range from half a wave across the image to one wave per two tokens, in geometric
    progression.

    Args:
        side: Tokens along a side of the image, E.
        dim: Channels, C; a quarter each for sine and cosine of rows and columns.
    """
    position = (torch.arange(side) + 0.5) / side
    count = dim // 4
    frequencies = 0.5 * side ** (torch.arange(count) / max(1, count - 1))
    angles = 2 * math.pi * position[:, None] * frequencies
    encoding = torch.cat([angles.sin(), angles.cos()], 1)
    down, across = encoding[:, None].expand(-1, side, -1), encoding[None].expand(side, -1, -1)
    return torch.cat([down, across], 2)[None].float()


def init_tied_cross_attention(model: Sam, seed: int) -> None:
    """Initialize each token-image attention with the same projection of queries and keys.

    Its rows are orthonormal, times `TIE_SCALE`, so that a prompt attends to the image tokens at its
    position.

    Args:
        model: The model, changed in place.
        seed: Random seed of the run.
    """
    for path, module in model.get_submodule("mask_decoder.transformer").named_modules():
        if (
            isinstance(module, DecoderAttention)
            and module.q_proj.out_features < module.q_proj.in_features
        ):
            rows = _orthonormal(
                module.q_proj.out_features, module.q_proj.in_features, seed, f"tie {path}"
            )
            module.q_proj.weight.copy_(TIE_SCALE * rows)
            module.k_proj.weight.copy_(TIE_SCALE * rows)


def init_color_passthrough(model: Sam) -> None:
    """Scale the encoder so that its embedding is a blurred copy of the image's colors."""
    gains = {"pos_embed": POSITION_GAIN, "patch_embed.proj.weight": PATCH_GAIN}
    for index in range(model.config.depth):
        gains |= {
            f"blocks.{index}.attn.proj.weight": BRANCH_GAIN,
            f"blocks.{index}.mlp.lin2.weight": BRANCH_GAIN,
        }
    for name, gain in gains.items():
        model.get_parameter(f"image_encoder.{name}").mul_(gain)


def init_similarity_head(model: Sam, seed: int) -> None:
    """Initialize mask logits to the similarity between the mask token and each image token.

    Both are projected by the same orthonormal rows, and the bias is a background prior. The
    activations of the upscaling and the hypernetworks are shifted to where they are nearly linear.

    Args:
        model: The model, changed in place.
        seed: Random seed of the run.
    """
    dim = model.config.embedding_dim
    first, second = (
        _orthonormal(dim // 4, dim, seed, "match first"),
        _orthonormal(dim // 8, dim // 4, seed, "match second"),
    )
    upscaling = {
        name: model.get_parameter(f"mask_decoder.output_upscaling.{name}")
        for name in ("0.weight", "1.bias", "3.weight", "3.bias")
    }
    upscaling["0.weight"].mul_(RANDOM_SCALE).add_(first.T[:, :, None, None])
    upscaling["3.weight"].mul_(RANDOM_SCALE).add_(second.T[:, :, None, None])
    upscaling["1.bias"].fill_(GELU_BIAS)
    upscaling["3.bias"].fill_(GELU_BIAS)
    average = functional.gelu(
        functional.gelu(upscaling["1.bias"]) @ upscaling["3.weight"].mean((2, 3))
        + upscaling["3.bias"]
    )
    heads = cast(MaskDecoder, model.mask_decoder).output_hypernetworks_mlps
    for index, head in enumerate(heads):
        names = ("0.weight", "1.weight", "2.weight", "0.bias", "2.bias")
        layers = {
            name: model.get_parameter(
                f"mask_decoder.output_hypernetworks_mlps.{index}.layers.{name}"
            )
            for name in names
        }
        layers["0.weight"].mul_(RANDOM_SCALE).add_(torch.eye(dim))
        layers["1.weight"].mul_(RANDOM_SCALE).add_(torch.eye(dim))
        layers["0.bias"].fill_(RELU_BIAS)
        layers["2.weight"].mul_(RANDOM_SCALE).add_(SIMILARITY_SCALE * second @ first)
        # A zero token and an average pixel then give the prior.
        at_zero = head(torch.zeros(dim)) - layers["2.bias"]
        layers["2.bias"].copy_(PRIOR_LOGIT * average / average.square().sum() - at_zero)


def _orthonormal(rows: int, columns: int, seed: int, name: str) -> Float[Tensor, "rows columns"]:
    return nn.init.orthogonal_(torch.empty(rows, columns), generator=_generator(seed, name))
