"""Folders of adapters in the format of peft, for Hugging Face's `SamModel`."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.models import convert, lora, state_dict, weight_files, weight_paths
from gigamask.models.configs import ModelConfig
from gigamask.models.hub import parse_hub_id
from gigamask.models.weight_files import State
from gigamask.plugins.peft import config as peft_config
from gigamask.plugins.peft.config import CONFIG

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Start of the names of tensors in an adapter's file."""
_INNER = re.compile(r"\.(default|modules_to_save|base_layer)\b")
"""Parts of the names of tensors in peft's modules that the `SamModel` does not have."""


def read(find: Callable[[Sequence[str]], Path]) -> tuple[State, ModelConfig | None]:
    """Return the weights that adapters belong to, with the adapters merged into them.

    Args:
        find: Returns the folder with files of the given names.

    Raises:
        GigamaskError: They are not those of LoRA adapters, or for other weights.
    """
    folder = find((CONFIG, WEIGHTS))
    base = base_of(folder)
    if not weight_paths.may_be_weights(base) or (Path(base) / CONFIG).is_file():
        raise GigamaskError(
            f"{folder / CONFIG}: its base_model_name_or_path {base[:80]!r} is no model; "
            "write the id or path of the weights there that the adapters were trained on"
        )
    state, config = state_dict.read_file(weight_paths.find_weights(base))
    return merge(folder, state), config


def base_of(folder: Path) -> str:
    """Return the id or path of the weights that adapters belong to.

    Raises:
        GigamaskError: The folder does not say, or is not one of LoRA adapters.
    """
    config = peft_config.read(folder)
    base, revision = config.base_model_name_or_path, config.revision
    if not base:
        raise GigamaskError(
            f"{folder / CONFIG}: names no base_model_name_or_path; write the id or path of the "
            "weights there"
        )
    return f"{base}@{revision}" if revision and parse_hub_id(base) else base


def merge(folder: Path, base: State) -> State:
    """Return weights with the adapters of a folder merged into them.

    Args:
        folder: The folder.
        base: The weights that the adapters belong to, with Meta's names.

    Raises:
        GigamaskError: The adapters are for other weights, or not LoRA.
    """
    config, path = peft_config.read(folder), folder / WEIGHTS
    if not path.is_file():
        raise GigamaskError(f"{folder}: holds no {WEIGHTS}; copy it from where it was trained")
    adapters, plain = _split(weight_files.read_safetensors(path)[0], path)
    trained = convert.from_huggingface(plain)
    own = {
        layer: name
        for layer, parts in adapters.items()
        for name in convert.from_huggingface({f"{layer}.weight": parts["lora_A"]})
    }
    if unknown := sorted({*trained, *own.values()} - base.keys()):
        raise GigamaskError(
            f"{path}: adapters for other weights, which lack {convert.format_names(unknown)}; use "
            "the weights they were trained on"
        )
    ranks = {layer: len(parts["lora_A"]) for layer, parts in adapters.items()}
    matrices = {name: value for name, value in base.items() if value.dim() == 2}
    others = {name.removesuffix(".weight") for name in convert.to_huggingface(matrices)}
    for layer, scale in config.scales(ranks, sorted(others - ranks.keys()), plain).items():
        down, up = adapters[layer]["lora_A"], adapters[layer]["lora_B"]
        prefix = f"{own[layer].removesuffix('.weight')}.parametrizations.weight.0"
        trained |= {
            f"{prefix}.lora_A": down.float(),
            f"{prefix}.lora_B": up.float(),
            f"{prefix}.scale": torch.tensor(scale),
            f"{prefix}.rows": torch.tensor([0, len(up), len(up)]),
        }
    return lora.merge(trained, base, str(path))


def _split(tensors: State, path: Path) -> tuple[dict[str, dict[str, Tensor]], State]:
    """Return the two matrices of each adapter by the path of its layer, and the other tensors.

    Args:
        tensors: Tensors of the file.
        path: The file, for errors.

    Raises:
        GigamaskError: An adapter is not that of a linear layer, or a tensor is there twice.
    """
    plain: State = {}
    adapters: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        bare = _INNER.sub("", name).removeprefix(PREFIX)
        match = re.fullmatch(r"(.+)\.(lora_[AB])\.weight", bare)
        if bare in plain or (match and match[2] in adapters.get(match[1], ())):
            raise GigamaskError(f"{path}: holds {bare[:80]} twice; export the adapters again")
        if match and value.dim() == 2 and len(value):
            adapters.setdefault(match[1], {})[match[2]] = value
        elif ".lora_" in bare:
            raise GigamaskError(
                f"{path}: {bare[:80]} of shape {tuple(value.shape)} is not a part of an adapter of "
                "a linear layer; merge the adapters with peft (merge_and_unload)"
            )
        else:
            plain[bare] = value
    for layer, parts in adapters.items():
        if len(parts) < 2 or len(parts["lora_A"]) != parts["lora_B"].shape[1]:
            raise GigamaskError(
                f"{path}: {layer[:80]} lacks lora_A or lora_B, or they do not fit; copy the file "
                "again"
            )
    return adapters, plain


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
