"""How a model starts: every tensor from a named draw, and for small models an informed start.

A small model trained for minutes from the plain start learns to draw blobs around its prompts and to ignore the picture: content is noise to a
decoder that has not found its places yet, so the encoder is trained towards a constant embedding, and stays there. The informed start
gives it what it would have to find out: a prompt's place in the image, an embedding that tells colours apart, and masks that follow likeness.

Enters: a spec and a seed. Leaves: a `Sam` or a `MAE`.

Not here: the modules (`model.sam`, `model.mae`), weights from files (`model.weights`).
"""

import math
from collections.abc import Callable
from typing import TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gigamask.errors import GigamaskError
from gigamask.models.configs import MAEConfig, SamConfig, ViT
from gigamask.models.mae import MAE
from gigamask.models.sam.image_encoder import EncoderAttention, ImageEncoderViT
from gigamask.models.sam.prompt_encoder import PositionEmbeddingRandom
from gigamask.models.sam.sam import PIXEL_MEAN, PIXEL_STD, Sam
from gigamask.models.sam.transformer import DecoderAttention as CrossAttention
from gigamask.rng import make_rng

TIE_SCALE = 1.5
"""Scale of the orthogonal start of tied queries and keys: a prompt's logit at its own place is then about 2 * 1.5 ** 2 above one far away, which
outweighs the few hundred other tokens."""
POSITION_GAIN, PATCH_GAIN, BRANCH_GAIN = 0.25, 2.0, 0.3
"""Of the encoder at the informed start: positions are quieter, patches louder and residual branches quieter than at the plain one."""
RANDOM_SHARE, LIKENESS, PRIOR_LOGIT = 0.7, 0.5, -2.3
"""Of the decoder: how much of the plain random start stays, how strongly likeness speaks, and the logit of an average pixel (a share of 9 %)."""
LIFT, HEAD_LIFT = 1.0, 2.0
"""Biases that lift GELU and ReLU to where they are nearly linear."""


Built = TypeVar("Built", bound=nn.Module)


@overload
def build_model(config: SamConfig, seed: int, device: torch.device | str = "cpu") -> Sam: ...
@overload
def build_model(config: MAEConfig, seed: int, device: torch.device | str = "cpu") -> MAE: ...
def build_model(
    config: SamConfig | MAEConfig, seed: int, device: torch.device | str = "cpu"
) -> Sam | MAE:
    """Returns the model of this spec that starts from `seed`; on the meta device, one without numbers."""
    return materialize(
        lambda: Sam(config) if isinstance(config, SamConfig) else MAE(config), seed, device
    )


def materialize(make: Callable[[], Built], seed: int, device: torch.device | str = "cpu") -> Built:
    """Make a model and initialise it from a seed.

    Args:
        make: Makes the model; called on the meta device.
        seed: Seed of the initial values.
        device: Device of the model; on the meta device it has no values.

    Returns:
        The model.
    """
    with torch.device("meta"):
        model = make()
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device="cpu")
    if isinstance(model, Sam) and not isinstance(model.config.encoder, ViT):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(make_rng(seed, "image encoder").integers(2**31)))
            model.image_encoder = model.config.encoder.build(model.config)
    init_weights(model, seed)
    return model.to(device)


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Fills every parameter and buffer, each from a draw of its own that bears its name, so that sizes and order do not matter.

    In all models but a Mae, matrices are normal, cut at two deviations, with variance 1 / (3 fan-in), which is 0.02 at ViT-B's width; biases and
    relative positions are 0, embeddings and the position code standard normal, positions sines and cosines of the place in the image, and
    the own parameters of a module with `parameter_std` normal with that deviation. A Mae starts as
    its authors' does (`models_mae.py`): matrices uniform with variance 2 / (fan-in + fan-out) (Glorot and Bengio 2010), tokens normal with deviation
    0.02. An image encoder of the user's own keeps the start that it was built with.
    """
    own = isinstance(model, Sam) and not isinstance(model.config.encoder, ViT)
    kept = set(model.get_submodule("image_encoder").modules()) if own else set()
    first = _init_mae if isinstance(model, MAE) else _init_sam
    for path, module in model.named_modules():
        if module in kept:
            continue
        for name, tensor in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            tensor.copy_(first(module, name, tensor, seed, f"{path}.{name}"))
    if isinstance(model, Sam) and model.config.custom_init:
        init_tied_cross_attention(model, seed)
        if not own:
            init_color_passthrough(model)
        init_similarity_head(model, seed)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(make_rng(seed, f"weights {name}").integers(2**63)))


def _init_sam(module: nn.Module, name: str, tensor: Tensor, seed: int, full: str) -> Tensor:
    """Returns the first value of one parameter or buffer, on the CPU."""
    shape = tuple(tensor.shape)
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and name == "weight":
        # A pixel of a 2 x 2 transposed convolution sees each input channel once.
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
        return _pixel_scale(name)
    if (std := getattr(module, "parameter_std", None)) is not None:
        return std * torch.randn(shape, generator=_generator(seed, full))
    if isinstance(module, nn.LayerNorm) and name == "weight":
        return torch.ones(shape)
    if name == "bias" or isinstance(module, EncoderAttention):
        return torch.zeros(shape)
    raise GigamaskError(
        f"{full}: nothing says how a {type(module).__name__} starts; load weights into it, or start it yourself"
    )


def _init_mae(module: nn.Module, name: str, tensor: Tensor, seed: int, full: str) -> Tensor:
    """Returns the first value of one parameter or buffer of a `MAE`, on the CPU."""
    if isinstance(module, (nn.Linear, nn.Conv2d)) and name == "weight":
        # A patch's kernel is one matrix from all its pixels.
        matrix = nn.init.xavier_uniform_(
            torch.empty(len(tensor), tensor[0].numel()), generator=_generator(seed, full)
        )
        return matrix.view(tensor.shape)
    if name in ("cls_token", "mask_token"):
        return 0.02 * torch.randn(tuple(tensor.shape), generator=_generator(seed, full))
    if name in ("pos_embed", "decoder_pos_embed"):
        return fixed_positions(math.isqrt(tensor.shape[1] - 1), tensor.shape[2])
    if isinstance(module, MAE):
        return _pixel_scale(name)
    return (torch.ones if isinstance(module, nn.LayerNorm) and name == "weight" else torch.zeros)(
        tuple(tensor.shape)
    )


def _pixel_scale(name: str) -> Float[Tensor, "3 1 1"]:
    return torch.tensor(PIXEL_MEAN if name == "pixel_mean" else PIXEL_STD).view(3, 1, 1)


def fixed_positions(side: int, dim: int) -> Float[Tensor, "1 N C"]:
    """Returns MAE's positions, never trained: 0 for the class token, then each patch's sines and cosines, those of its column before its row's.

    The waves have lengths of 2 pi to 10000 * 2 pi patches, in equal ratios (Vaswani et al. 2017).
    """
    count = dim // 4
    angles = torch.arange(side, dtype=torch.float64)[:, None] * 10000.0 ** -(
        torch.arange(count, dtype=torch.float64) / count
    )
    code = torch.cat([angles.sin(), angles.cos()], 1)
    grid = torch.cat(
        [code[None].expand(side, -1, -1), code[:, None].expand(-1, side, -1)], 2
    ).flatten(0, 1)
    return torch.cat([torch.zeros(1, dim), grid.float()])[None]


def sine_positions(side: int, dim: int) -> Float[Tensor, "1 E E C"]:
    """Returns sines and cosines of each token's place: a quarter of the channels for each of the two and each axis.

    The waves are relative to the image, from half a wave across it to one every two tokens, in equal ratios.
    """
    place = (torch.arange(side) + 0.5) / side
    count = dim // 4
    waves = 0.5 * side ** (torch.arange(count) / max(1, count - 1))
    angles = 2 * math.pi * place[:, None] * waves
    code = torch.cat([angles.sin(), angles.cos()], 1)
    down, across = code[:, None].expand(-1, side, -1), code[None].expand(side, -1, -1)
    return torch.cat([down, across], 2)[None].float()


def init_tied_cross_attention(model: Sam, seed: int) -> None:
    """Starts queries and keys of every attention between tokens and image at one scaled matrix of orthonormal rows."""
    for path, module in model.mask_decoder.transformer.named_modules():
        if (
            isinstance(module, CrossAttention)
            and module.q_proj.out_features < module.q_proj.in_features
        ):
            rows = _orthonormal(
                module.q_proj.out_features, module.q_proj.in_features, seed, f"tie {path}"
            )
            module.q_proj.weight.copy_(TIE_SCALE * rows)
            module.k_proj.weight.copy_(TIE_SCALE * rows)


def init_color_passthrough(model: Sam) -> None:
    """Lets the embedding start as a blurred copy of the picture's colours."""
    gains = {"pos_embed": POSITION_GAIN, "patch_embed.proj.weight": PATCH_GAIN}
    for index in range(model.config.depth):
        gains |= {
            f"blocks.{index}.attn.proj.weight": BRANCH_GAIN,
            f"blocks.{index}.mlp.lin2.weight": BRANCH_GAIN,
        }
    for name, gain in gains.items():
        model.get_parameter(f"image_encoder.{name}").mul_(gain)


def init_similarity_head(model: Sam, seed: int) -> None:
    """Lets a mask start as the likeness between its token and each image token, seen through one projection, above a prior for background.

    The upscaling and the hypernetworks are lifted to where they are nearly linear; both then apply the same orthonormal rows.
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
    upscaling["0.weight"].mul_(RANDOM_SHARE).add_(first.T[:, :, None, None])
    upscaling["3.weight"].mul_(RANDOM_SHARE).add_(second.T[:, :, None, None])
    upscaling["1.bias"].fill_(LIFT)
    upscaling["3.bias"].fill_(LIFT)
    average = functional.gelu(
        functional.gelu(upscaling["1.bias"]) @ upscaling["3.weight"].mean((2, 3))
        + upscaling["3.bias"]
    )
    for number, head in enumerate(model.mask_decoder.output_hypernetworks_mlps):
        names = ("0.weight", "1.weight", "2.weight", "0.bias", "2.bias")
        layers = {
            name: model.get_parameter(
                f"mask_decoder.output_hypernetworks_mlps.{number}.layers.{name}"
            )
            for name in names
        }
        layers["0.weight"].mul_(RANDOM_SHARE).add_(torch.eye(dim))
        layers["1.weight"].mul_(RANDOM_SHARE).add_(torch.eye(dim))
        layers["2.weight"].mul_(RANDOM_SHARE).add_(LIKENESS * second @ first)
        layers["0.bias"].fill_(HEAD_LIFT)
        # A token without content, looking at a pixel without content, says the prior.
        silent = head(torch.zeros(dim)) - layers["2.bias"]
        layers["2.bias"].copy_(PRIOR_LOGIT * average / average.square().sum() - silent)


def _orthonormal(rows: int, columns: int, seed: int, name: str) -> Float[Tensor, "rows columns"]:
    return nn.init.orthogonal_(torch.empty(rows, columns), generator=_generator(seed, name))
