"""The model: pixels become an embedding once, prompts become masks as often as asked.

Enters: uint8 images fitted to the input square with the size of their valid part, and `contracts.Prompts`. Leaves: the embedding
`(B, C, E, E)`; mask logits `(M, K, G, G)` and predicted IoU `(M, K)`. The state dict is Meta's, key by key.

Not here: rounds of prompts (`prompts.rounds`), reading and writing weights (`model.weights`), masks at the image's own size (`predict`).
"""

import math

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from gigamask.contracts import Prompts
from gigamask.draws import draw
from gigamask.faults import Fault
from gigamask.model.image_encoder import Attention, ImageEncoder
from gigamask.model.mask_decoder import MaskDecoder
from gigamask.model.prompt_encoder import PositionCode, PromptEncoder
from gigamask.model.sizes import SamSpec
from gigamask.model.two_way import Attention as CrossAttention
from gigamask.model.two_way import DensePrompt

# ImageNet's mean and standard deviation in 0..255, red first (Segment Anything, `modeling/sam.py`).
PIXEL_MEAN = (123.675, 116.28, 103.53)
PIXEL_STD = (58.395, 57.12, 57.375)

# Scale of the orthogonal start of tied queries and keys: a prompt's logit at its own place is then about 2 * 1.5 ** 2 above one far away, which
# outweighs the few hundred other tokens.
TIE_SCALE = 1.5


class Sam(nn.Module):
    """Segment Anything at any size. Any `seams.Encoder` may be assigned to `image_encoder`."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, spec: SamSpec) -> None:
        super().__init__()
        self.spec = spec
        self.image_encoder = ImageEncoder(spec)
        self.prompt_encoder = PromptEncoder(spec)
        self.mask_decoder = MaskDecoder(spec)
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    def encode(
        self, images: UInt8[Tensor, "B 3 S S"], input_sizes: Int64[Tensor, "B 2"], drop_path: Float[Tensor, "B L 2"] | None = None
    ) -> Float[Tensor, "B C E E"]:
        """Returns the embedding of images whose valid part, `input_sizes` (height, width), lies at the top left; the rest is zero once normalised.

        `drop_path` holds the uniforms that decide which residual branches are skipped; None in evaluation. Raises a Fault at another side.
        """
        if images.shape[-1] != self.spec.input_side:
            side = images.shape[-1]
            raise Fault(
                f"images have side {side}, the model takes {self.spec.input_side}; build it with input_side={side} and load its weights there"
            )
        pixels = (images.to(self.pixel_mean.dtype) - self.pixel_mean) / self.pixel_std
        place = torch.arange(images.shape[-1], device=images.device)
        rows, columns = place < input_sizes[:, :1], place < input_sizes[:, 1:]
        return self.image_encoder(pixels * (rows[:, None, :, None] & columns[:, None, None, :]), drop_path)

    def decode(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> tuple[Float[Tensor, "M K G G"], Float[Tensor, "M K"]]:
        """Returns mask logits and predicted IoU of prompt m on image `mask_image[m]`; K is 3 when `prompts.several`, else 1."""
        encoder = self.prompt_encoder
        tokens = encoder.points(prompts.points_xy_input, prompts.labels)
        if prompts.masks is None:
            dense = None
            embedding = embedding + encoder.no_mask_embed.weight.view(1, -1, 1, 1)
        else:
            dense = DensePrompt(encoder.mask_features(prompts.masks), *encoder.mask_projection())
        return self.mask_decoder(embedding, encoder.grid(), tokens, mask_image, dense, prompts.several)


def build(spec: SamSpec, seed: int, device: torch.device | str = "cpu") -> Sam:
    """Returns a model that starts from `seed`; on the meta device, one without numbers."""
    with torch.device("meta"):
        model = Sam(spec)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: Sam, seed: int) -> None:
    """Fills every parameter and buffer, each from a draw of its own that bears its name, so that sizes and order do not matter.

    Matrices are normal, cut at two deviations, with variance 1 / (3 fan-in), which is 0.02 at ViT-B's width; biases and relative positions are 0,
    embeddings and the position code standard normal, positions sines and cosines of the place in the image.
    """
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            tensor.copy_(_start(module, name, tensor, seed, f"{path}.{name}"))
    if model.spec.tie_cross_attention:
        _tie(model, seed)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int(draw(seed, f"weights {name}").integers(2**63)))


def _start(module: nn.Module, name: str, tensor: Tensor, seed: int, full: str) -> Tensor:
    """Returns the first value of one parameter or buffer, on the CPU."""
    shape = tuple(tensor.shape)
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and name == "weight":
        # A pixel of a 2 x 2 transposed convolution sees each input channel once.
        fan_in = shape[0] if isinstance(module, nn.ConvTranspose2d) else math.prod(shape[1:])
        std = (3 * fan_in) ** -0.5
        return nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std, generator=_generator(seed, full))
    if isinstance(module, (nn.Embedding, PositionCode)):
        return torch.randn(shape, generator=_generator(seed, full))
    if isinstance(module, ImageEncoder):
        return sine_positions(shape[1], shape[3])
    if isinstance(module, Sam):
        return torch.tensor(PIXEL_MEAN if name == "pixel_mean" else PIXEL_STD).view(3, 1, 1)
    if isinstance(module, nn.LayerNorm) and name == "weight":
        return torch.ones(shape)
    if name == "bias" or isinstance(module, Attention):
        return torch.zeros(shape)
    raise Fault(f"{full}: nothing says how a {type(module).__name__} starts; load weights into it, or start it yourself")


def sine_positions(side: int, dim: int) -> Float[Tensor, "1 E E C"]:
    """Returns sines and cosines of each token's place: a quarter of the channels for each of the two and each axis.

    The waves are relative to the image, from half a wave across it to one every two tokens, in equal ratios.
    """
    place = (torch.arange(side) + 0.5) / side
    count = dim // 4
    waves = 0.5 * max(side, 1) ** (torch.arange(count) / max(1, count - 1))
    angles = 2 * math.pi * place[:, None] * waves
    code = torch.cat([angles.sin(), angles.cos()], 1)
    down, across = code[:, None].expand(-1, side, -1), code[None].expand(side, -1, -1)
    return torch.cat([down, across], 2)[None].float()


def _tie(model: Sam, seed: int) -> None:
    """Starts queries and keys of every attention between tokens and image at one scaled matrix of orthonormal rows."""
    for path, module in model.mask_decoder.transformer.named_modules():
        if isinstance(module, CrossAttention) and module.q_proj.out_features < module.q_proj.in_features:
            shape = tuple(module.q_proj.weight.shape)
            rows = nn.init.orthogonal_(torch.empty(shape), TIE_SCALE, generator=_generator(seed, f"tie {path}"))
            module.q_proj.weight.copy_(rows)
            module.k_proj.weight.copy_(rows)
