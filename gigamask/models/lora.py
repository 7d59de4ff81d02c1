"""Low-rank adapters (LoRA) on the linear layers of a model's frozen modules.

An adapter is a parametrization of a layer's weight, `weight + scale * lora_B @ lora_A`. The model
with adapters thus computes, bit for bit, what it computes once they are merged into its weights,
and the activations of training need no more memory than those of a frozen layer.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gigamask.errors import GigamaskError, first_line
from gigamask.masks.devices import no_autocast
from gigamask.models.lora_config import LoRA
from gigamask.models.weight_files import State
from gigamask.rng import make_torch_generator

_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
_PROJECTIONS = {"q": ("q_proj", "query"), "k": ("k_proj", "key"), "v": ("v_proj", "value")}
"""Names of layers that compute queries, keys or values alone."""
_FUSED = "qkv"
"""Name of a layer that computes queries, keys and values, in this order."""
ORIGINAL = ".parametrizations.weight.original"
"""End of the name of an adapted layer's own weight."""
_FACTOR = re.compile(r"(.+)\.parametrizations\.weight\.(\d+)\.lora_A")


_CONSTANT = re.compile(r".+\.parametrizations\.weight\.\d+\.(scale|rows)")
"""Name of a buffer of an adapter."""


class LowRank(nn.Module):
    """Adds a matrix of low rank to rows of a weight.

    Args:
        weight: The weight.
        rank: Rank of the matrix.
        scale: Its factor.
        rows: First row, and the one after the last.
    """

    def __init__(
        self, weight: Float[Tensor, "n m"], rank: int, scale: float, rows: tuple[int, int]
    ) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(weight.new_zeros(rank, weight.shape[1]))
        self.lora_B = nn.Parameter(weight.new_zeros(rows[1] - rows[0], rank))
        self._scale, self._rows = float(np.float32(scale)), rows
        # For files of weights, whose readers do not know the settings.
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32).to(weight.device))
        self.register_buffer("rows", torch.tensor([*rows, len(weight)]).to(weight.device))

    def forward(self, weight: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Return the weight with the matrix added."""
        return _add(weight, self.lora_A, self.lora_B, self._scale, self._rows)


def _add(
    weight: Tensor, down: Tensor, up: Tensor, scale: float, rows: tuple[int, int]
) -> Float[Tensor, "n m"]:
    with no_autocast(weight):
        change = scale * (up @ down)
        if rows == (0, len(weight)):
            return weight + change
        first, end = rows
        return torch.cat([weight[:first], weight[first:end] + change, weight[end:]])


def add_adapters(model: nn.Module, lora: LoRA, seed: int) -> None:
    """Add adapters to the chosen linear layers whose weights are frozen.

    `lora_A` is uniform within 1 / sqrt(fan-in), as in peft, and `lora_B` zero, so that the outputs
    do not change.

    Args:
        model: The model, changed in place.
        lora: Rank, scale and layers.
        seed: Seed of the initial values.

    Raises:
        GigamaskError: A kind has no layer, or the rank is larger than a layer.
    """
    layers = dict(_frozen_layers(model, lora.last))
    for kind in lora.on:
        alone = replace(lora, on=(kind,))
        if any(_rows(path, layer, alone) for path, layer in layers.items()):
            continue
        names = sorted({path.rpartition(".")[2] for path in layers})
        raise GigamaskError(
            f"--lora.on {kind}: no frozen linear layer of that kind, in the encoder blocks that "
            f"--lora.last counts; choose attention or all, or from {', '.join(names) or 'none'}"
        )
    for path, layer in layers.items():
        for rows in _rows(path, layer, lora):
            if lora.rank > min(rows[1] - rows[0], layer.in_features):
                raise GigamaskError(
                    f"--lora {lora.rank}: larger than {path}, which has {layer.in_features} inputs "
                    f"and {rows[1] - rows[0]} outputs; choose a smaller rank"
                )
            adapter = LowRank(layer.weight, lora.rank, lora.scale, rows)
            _init(adapter.lora_A, seed, f"lora {path} {rows[0]}")
            parametrize.register_parametrization(layer, "weight", adapter, unsafe=True)


@torch.no_grad()
def _init(down: nn.Parameter, seed: int, name: str) -> None:
    generator = make_torch_generator(seed, name)
    uniform = 2 * torch.rand(down.shape, generator=generator) - 1
    down.copy_(uniform / math.sqrt(down.shape[1]))


def _frozen_layers(model: nn.Module, last: int | None) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers with frozen weights by path, those of the last encoder blocks only.

    None if there are no encoder blocks to count.

    Args:
        model: The model.
        last: Number of encoder blocks; None means all.
    """
    blocks = getattr(model, "encoder_blocks", [])
    if last is not None and not blocks:
        return
    skipped = {
        id(module)
        for block in (blocks[: max(0, len(blocks) - last)] if last is not None else [])
        for module in block.modules()
    }
    for path, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and id(module) not in skipped
        if is_linear and not module.weight.requires_grad:
            yield path, module


def _rows(path: str, layer: nn.Linear, lora: LoRA) -> list[tuple[int, int]]:
    """Return the ranges of a layer's rows that get an adapter each."""
    (parent, _, name), on = path.rpartition("."), lora.on
    is_large = lora.rank <= min(layer.in_features, layer.out_features)
    in_attention = "attention" in on and _ATTENTION.search(parent)
    if ("all" in on and is_large) or in_attention or name in on:
        return [(0, layer.out_features)]
    if name == _FUSED and layer.out_features % 3 == 0:
        size = layer.out_features // 3
        return [(i * size, (i + 1) * size) for i, part in enumerate("qkv") if part in on]
    if any(part in on and name in names for part, names in _PROJECTIONS.items()):
        return [(0, layer.out_features)]
    return []


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters.

    Args:
        name: Its name in a model that may have adapters.
    """
    return f"{name.removesuffix(ORIGINAL)}.weight" if name.endswith(ORIGINAL) else name


def has_adapters(state: State) -> bool:
    """Return whether weights are those of adapters, beside other trained ones."""
    return any(_FACTOR.fullmatch(name) for name in state)


def split_trained(model: nn.Module) -> tuple[State, State]:
    """Return the state dict of a model with adapters in two parts.

    Args:
        model: The model.

    Returns:
        The adapters and other trained parameters by their names in the model; and the rest, which
        training does not change, by the names in the model without adapters.
    """
    trained = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    state = model.state_dict()
    trained |= {name for name in state if _CONSTANT.fullmatch(name)}
    own = {name: value for name, value in state.items() if name in trained}
    return own, {plain_name(name): value for name, value in state.items() if name not in trained}


def join_trained(trained: State, base: State) -> State:
    """Return the state dict of a model with adapters.

    Args:
        trained: First result of `split_trained`.
        base: Second result.
    """
    adapted = {f"{path}.weight": f"{path}{ORIGINAL}" for path, _ in _adapters(trained)}
    return {adapted.get(name, name): value for name, value in base.items()} | trained


def merge(trained: State, base: State, source: str) -> State:
    """Return the state dict of the model without adapters that computes the same.

    Args:
        trained: First result of `split_trained`.
        base: Second result, or weights of the whole model.
        source: Where the adapters come from, for the error.

    Raises:
        GigamaskError: They are adapters for other weights.
    """
    adapters, others = read_adapters(trained, source)
    merged = base | others
    for path, parts in adapters.items():
        name = f"{path}.weight"
        for adapter in parts:
            try:
                merged[name] = _add(
                    merged[name], adapter.down, adapter.up, adapter.scale, adapter.rows
                )
            except (KeyError, RuntimeError) as error:
                raise GigamaskError(
                    f"{source}: adapters for other weights, {name[:80]} does not fit "
                    f"({first_line(error)[:80]}); use the weights they were trained on"
                ) from None
    return merged


@dataclass(frozen=True, eq=False)
class Adapter:
    """What is added to rows of a weight: `scale * up @ down`.

    `rows` are the first of them and the one after the last, `outputs` counts all.
    """

    down: Float[Tensor, "r m"]
    up: Float[Tensor, "n r"]
    scale: float
    rows: tuple[int, int]
    outputs: int


def read_adapters(trained: State, source: str) -> tuple[dict[str, list[Adapter]], State]:
    """Return the adapters of each layer, and the other trained parameters.

    Args:
        trained: First result of `split_trained`.
        source: Where it comes from, for the error.

    Raises:
        GigamaskError: A tensor is missing or has another shape.
    """
    others = {name: value for name, value in trained.items() if ".parametrizations." not in name}
    adapters: dict[str, list[Adapter]] = {}
    for path, prefix in _adapters(trained):
        try:
            down, up = trained[f"{prefix}.lora_A"], trained[f"{prefix}.lora_B"]
            first, end, outputs = trained[f"{prefix}.rows"].tolist()
            scale = trained[f"{prefix}.scale"].item()
            fits = down.dim() == 2 and up.shape == (end - first, len(down))
            if not (fits and 0 <= first < end <= outputs):
                raise ValueError("lora_A and lora_B do not fit")
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise GigamaskError(
                f"{source}: damaged, the adapter of {path[:80]} cannot be read "
                f"({first_line(error)[:80]}); copy or write it again"
            ) from None
        adapters.setdefault(path, []).append(Adapter(down, up, scale, (first, end), outputs))
    return adapters, others


def _adapters(trained: State) -> list[tuple[str, str]]:
    """Return the path of each adapted layer, and the prefix of the adapter's tensors, in order."""
    found = [match for name in trained if (match := _FACTOR.fullmatch(name))]
    found.sort(key=lambda match: (match[1], int(match[2])))
    return [(match[1], match[0].removesuffix(".lora_A")) for match in found]
