"""The configuration of a folder of peft's adapters: what it means, and what cannot be merged.

The rules are peft's: patterns of names are regular expressions, of which the first that matches
counts. What the file of tensors shows, as the rank of an adapter, is checked against them.
"""

import json
import math
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from gigamask.errors import GigamaskError
from gigamask.serialization import read_json

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
ALL_LINEAR = "all-linear"
MAX_MATCH_S = 20.0
"""Seconds that the patterns of a configuration may take; some never end."""
PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the weights of the model as they are."""
WITHOUT_EFFECT = {
    *("auto_mapping", "bias", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "runtime_config", "task_type"),
}
"""Entries that change nothing about adapters of linear layers that are trained already."""

Regex = tuple[str, str]
"""A function of `re`, and the regular expression that peft gives it."""
_MATCH = """import json, re, sys
regexes, paths = json.load(sys.stdin)
print(json.dumps([[x for x in paths if getattr(re, way)(regex, x)] for way, regex in regexes]))"""
"""The program of the process that matches patterns."""


@dataclass(frozen=True)
class AdapterConfig:
    """The entries of adapter_config.json that decide what is computed.

    Attributes:
        source: Path of the file, for errors.
    """

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    base_model_name_or_path: str | None = None
    revision: str | None = None
    peft_type: str = "LORA"
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    init_lora_weights: bool | str = True
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    source: str = field(default="", kw_only=True)

    def scales(
        self, ranks: dict[str, int], others: Iterable[str], saved: Collection[str]
    ) -> dict[str, float]:
        """Return the factor of each adapter, after checking which layers have one.

        Args:
            ranks: Rank of each adapter by the path of its layer in the `SamModel`.
            others: Paths of the layers without adapters.
            saved: Names of the other tensors in the file.

        Raises:
            GigamaskError: The tensors are not those of this configuration.
        """
        paths = [*ranks, *others]
        matched = _match([*self._regexes()], paths, self.source)
        targets = self._targets(paths, matched)
        if wrong := [path for path in ranks if path not in targets]:
            raise GigamaskError(
                f"{self.source}: there is an adapter of {wrong[0][:80]}, which target_modules and "
                "the entries beside it leave out; copy both files from where it was trained"
            )
        if self.target_modules != ALL_LINEAR and (lacking := targets - ranks.keys()):
            raise GigamaskError(
                f"{self.source}: target_modules has {min(lacking)[:80]}, of which there is no "
                "adapter; copy both files from where it was trained"
            )
        for name in self.modules_to_save or ():
            if not any(f".{name}." in f".{tensor}" for tensor in saved):
                raise GigamaskError(
                    f"{self.source}: modules_to_save has {name[:80]}, of which there is no tensor; "
                    "copy both files from where it was trained"
                )
        scales = {}
        for path, rank in ranks.items():
            # peft saves them in another order than it has used them in, so any may have counted.
            stated = [self.r, *_values(self.rank_pattern, path, matched)]
            if rank not in stated:
                raise GigamaskError(
                    f"{self.source}: r and rank_pattern state the rank {str(stated[-1])[:20]} of "
                    f"{path[:80]}, whose lora_A has {rank}; copy both files from where it was "
                    "trained"
                )
            alpha = [*_values(self.alpha_pattern, path, matched), self.lora_alpha][0]
            scales[path] = alpha / (math.sqrt(rank) if self.use_rslora else rank)
        return scales

    def _regexes(self) -> Iterable[Regex]:
        """Yield every regular expression of the configuration, as peft makes them."""
        for key in (*(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            yield _of_pattern(key)
        for name in self.modules_to_save or ():
            yield _of_module(name)
        for whole in (self.target_modules, self.exclude_modules):
            if isinstance(whole, str):
                yield "fullmatch", whole

    def _targets(self, paths: Sequence[str], matched: dict[Regex, set[str]]) -> set[str]:
        """Return the modules that peft adapts."""
        if self.target_modules == ALL_LINEAR:
            targets = set(paths)
        else:
            targets = _named(self.target_modules, paths, matched)
            if isinstance(self.target_modules, list):
                exact = set(self.target_modules)
                targets = {path for path in targets if path in exact or self._is_chosen(path)}
        targets -= _named(self.exclude_modules or [], paths, matched)
        for name in self.modules_to_save or ():
            targets -= matched[_of_module(name)]
        return targets

    def _is_chosen(self, path: str) -> bool:
        """Return whether layers_to_transform has the number of a module's layer."""
        chosen, lists = self.layers_to_transform, self.layers_pattern
        if chosen is None or chosen == []:
            return True
        lists = [lists] if isinstance(lists, str) else lists or []
        parts = path.split(".")
        number = next(
            (
                int(part)
                for before, part in pairwise(parts[:-1])
                if part.isdecimal() and (before in lists or not lists)
            ),
            None,
        )
        return number in (chosen if isinstance(chosen, list) else [chosen])


def read(folder: Path) -> AdapterConfig:
    """Return the configuration of a folder of adapters.

    Args:
        folder: The folder.

    Raises:
        GigamaskError: It is not one of LoRA adapters, or has an entry that is not understood or
            whose adapters cannot be merged into the weights.
    """
    path = folder / CONFIG
    content: Any = read_json(path, dict, MAX_CONFIG_BYTES)
    known = {each.name for each in fields(AdapterConfig)} - {"source"}
    refused = [
        f"{str(name)[:40]} {json.dumps(value)[:40]}"
        for name, value in content.items()
        if value and name not in known and name not in WITHOUT_EFFECT
    ]
    kind = content.get("peft_type", "LORA")
    if kind != "LORA":
        refused = [f"peft_type {json.dumps(kind)[:40]}"]
    elif content.get("init_lora_weights", True) not in PLAIN_INITS:
        refused.insert(0, f"init_lora_weights {json.dumps(content['init_lora_weights'])[:40]}")
    if refused:
        raise GigamaskError(
            f"{path}: adapters with {', '.join(refused[:3])} cannot be merged here; merge them "
            "with peft (merge_and_unload), and give the folder that save_pretrained writes"
        )
    try:
        config = msgspec.convert(
            {name: value for name, value in content.items() if name in known}, AdapterConfig
        )
        if min([config.r, *(config.rank_pattern or {}).values()]) < 1:
            raise ValueError("r and rank_pattern must be at least 1")
        if not all(map(math.isfinite, [config.lora_alpha, *(config.alpha_pattern or {}).values()])):
            raise ValueError("lora_alpha and alpha_pattern must be finite")
    except (ValueError, TypeError, OverflowError) as error:
        raise GigamaskError(
            f"{path}: not the config of LoRA adapters for a SamModel ({str(error)[:200]}); export "
            "them again"
        ) from None
    return replace(config, source=str(path))


def _of_pattern(key: str) -> Regex:
    return "match", rf"(.*\.)?({key})$"


def _of_module(name: str) -> Regex:
    return "match", rf"(^|.*\.){name}($|\..*)"


def _values(pattern: dict[str, Any] | None, path: str, matched: dict[Regex, set[str]]) -> list[Any]:
    """Return the values of all entries whose key is for a layer."""
    entries = (pattern or {}).items()
    return [value for key, value in entries if path in matched[_of_pattern(key)]]


def _named(
    names: list[str] | str, paths: Sequence[str], matched: dict[Regex, set[str]]
) -> set[str]:
    """Return the paths that are, or end with, one of some names, or that a regex matches."""
    if isinstance(names, str):
        return matched["fullmatch", names]
    return {path for path in paths if any(f".{path}".endswith(f".{name}") for name in names)}


def _match(regexes: Sequence[Regex], paths: Sequence[str], source: str) -> dict[Regex, set[str]]:
    """Return the paths that each regular expression matches.

    They come with the adapters, from anyone; some take years, and cannot be interrupted in
    this process.

    Args:
        regexes: The regular expressions.
        paths: The paths.
        source: File of the regular expressions, for the error.

    Raises:
        GigamaskError: They are not valid, or take too long.
    """
    if not regexes:
        return {}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _MATCH],
            input=json.dumps([regexes, paths]),
            capture_output=True,
            text=True,
            timeout=MAX_MATCH_S,
        )
    except subprocess.TimeoutExpired:
        problem = f"take more than {MAX_MATCH_S:g} seconds to match"
    else:
        if not done.returncode:
            found = map(set, json.loads(done.stdout))
            return dict(zip(regexes, found, strict=True))
        problem = f"are not regular expressions ({done.stderr.strip()[-120:]})"
    raise GigamaskError(
        f"{source}: rank_pattern, alpha_pattern, target_modules, exclude_modules or "
        f"modules_to_save {problem}; write the names of the layers there"
    )
