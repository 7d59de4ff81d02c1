"""Folders of adapters in the format of peft, for Hugging Face's `SamModel`."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.models import convert, lora, weight_files
from gigamask.models.convert import State
from gigamask.serialization import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Start of the names of tensors in an adapter's file."""
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class _AdapterConfig:
    """The entries of adapter_config.json that decide what is computed."""

    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None
    peft_type: str = "LORA"
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False

    def scale(self, path: str) -> float:
        """Return the factor of the adapter of a layer.

        Args:
            path: Path of the layer in the `SamModel`.
        """
        rank, alpha = (
            next((value for key, value in pattern.items() if _matches(key, path)), default)
            for pattern, default in (
                (self.rank_pattern, self.r),
                (self.alpha_pattern, self.lora_alpha),
            )
        )
        return alpha / (rank**0.5 if self.use_rslora else rank)


def _matches(key: str, path: str) -> bool:
    """Return whether an entry of a pattern is for a layer; peft's regular expressions are not."""
    return f".{path}".endswith(f".{key}")


def is_peft(folder: Path) -> bool:
    """Return whether a folder holds adapters."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """Return the id or path of the weights that adapters belong to.

    Raises:
        GigamaskError: The folder does not say, or is not one of LoRA adapters.
    """
    base = _read_config(folder).base_model_name_or_path
    if not base:
        raise GigamaskError(
            f"{folder / CONFIG}: names no base_model_name_or_path; write the id or path of the "
            "weights there"
        )
    return base


def merge(folder: Path, base: State) -> State:
    """Return weights with the adapters of a folder merged into them.

    Args:
        folder: The folder.
        base: The weights that the adapters belong to, with Meta's names.

    Raises:
        GigamaskError: The adapters are for other weights, or not LoRA.
    """
    config, path = _read_config(folder), folder / WEIGHTS
    if not path.is_file():
        raise GigamaskError(f"{folder}: holds no {WEIGHTS}; copy it from where it was trained")
    tensors, _ = weight_files.read_safetensors(path)
    plain: State = {}
    adapters: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        bare = re.sub(r"\.(default|modules_to_save|base_layer|original_module)\b", "", name)
        bare = bare.removeprefix(PREFIX)
        if match := re.fullmatch(r"(.+)\.(lora_[AB])\.weight", bare):
            adapters.setdefault(match[1], {})[match[2]] = value
        else:
            plain[bare] = value
    trained = convert.from_huggingface(plain)
    for layer, parts in adapters.items():
        down, up = parts.get("lora_A"), parts.get("lora_B")
        if down is None or up is None or down.dim() != 2 or up.dim() != 2 or not len(down):
            raise GigamaskError(f"{path}: {layer[:80]} lacks lora_A or lora_B; copy the file again")
        (own,) = convert.from_huggingface({f"{layer}.weight": down})
        prefix = f"{own.removesuffix('.weight')}.parametrizations.weight.0"
        trained |= {
            f"{prefix}.lora_A": down.float(),
            f"{prefix}.lora_B": up.float(),
            f"{prefix}.scale": torch.tensor(config.scale(layer)),
            f"{prefix}.rows": torch.tensor([0, len(up), len(up)]),
        }
    weights = {name: re.sub(r"\.parametrizations\.weight\..*", ".weight", name) for name in trained}
    if unknown := sorted(name for name, weight in weights.items() if weight not in base):
        raise GigamaskError(
            f"{path}: adapters for other weights, which lack {convert.format_names(unknown)}; use "
            "the weights they were trained on"
        )
    return lora.merge(trained, base, str(path))


def _read_config(folder: Path) -> _AdapterConfig:
    content: Any = read_json(folder / CONFIG, dict, MAX_CONFIG_BYTES)
    try:
        config = msgspec.convert(content, _AdapterConfig)
        if config.peft_type != "LORA" or config.use_dora or config.fan_in_fan_out or config.r < 1:
            raise ValueError("only LoRA without DoRA and fan_in_fan_out can be merged")
        return config
    except (ValueError, TypeError) as error:
        raise GigamaskError(
            f"{folder / CONFIG}: not the config of LoRA adapters for a SamModel ({error}); export "
            "them again"
        ) from None


def to_peft(trained: State, source: str) -> tuple[State, dict[str, Any]]:
    """Return adapters in peft's format.

    Several adapters of a layer, as those of queries and values, become one whose rank is the sum.

    Args:
        trained: The first result of `lora.split_trained`.
        source: Where it comes from, for errors.

    Returns:
        The tensors of the file, and the entries of adapter_config.json.

    Raises:
        GigamaskError: A trained parameter is not one of a layer of its own.
    """
    adapters, others = lora.read_adapters(trained, source)
    tensors = convert.to_huggingface(others)
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    scales: dict[str, tuple[int, float]] = {}
    for path, parts in adapters.items():
        down = torch.cat([part.down for part in parts])
        up = torch.zeros(parts[0].outputs, len(down))
        column = 0
        for part in parts:
            end = column + len(part.down)
            up[part.rows[0] : part.rows[1], column:end] = part.up
            column = end
        (weight,) = convert.to_huggingface({f"{path}.weight": down})
        layer = weight.removesuffix(".weight")
        scales[layer] = len(down), parts[0].scale * len(down)
        tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    inner = (*modules, *scales)
    whole = [path for path in modules if any(each.startswith(f"{path}.") for each in inner)]
    if whole:
        raise GigamaskError(
            f"--to peft: parameters of {whole[0]} beside its layers were trained, which the format "
            "cannot describe; use --to huggingface"
        )
    rank, alpha = next(iter(scales.values()))
    return {f"{PREFIX}{name}": value.contiguous() for name, value in tensors.items()}, {
        "peft_type": "LORA",
        "task_type": None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(scales),
        "rank_pattern": {layer: r for layer, (r, _) in scales.items() if r != rank},
        "alpha_pattern": {layer: a for layer, (_, a) in scales.items() if a != alpha},
        "modules_to_save": modules or None,
    }
