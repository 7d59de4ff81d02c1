"""Names of components, which select a sampler, a loss or an optimizer.

Only the command line and configuration files use names; elsewhere a component is an object.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import reduce
from typing import Any

from gigamask import plugin
from gigamask.data.augment import Augment
from gigamask.data.mask_sampling import MaskSampler
from gigamask.errors import GigamaskError
from gigamask.interfaces import (
    Evaluator,
    ImageEncoder,
    Kernels,
    Loss,
    LRSchedule,
    Mining,
    Optimizer,
    PromptSchedule,
    Sampler,
)
from gigamask.models.configs import DECODERS, ENCODERS, Decoder, find_part
from gigamask.training.config import TrainConfig, flatten_config


@dataclass(frozen=True)
class Preset:
    """A name for a class with some of its fields set.

    Attributes:
        kind: The reference of the class.
        fixed: Fields that distinguish this preset from others of the same class.
        defaults: Other fields whose default differs from the class's.
    """

    kind: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Return the preset's value."""
        return plugin.load(self.kind)(**self.fixed, **self.defaults)

    def matches(self, value: Any) -> bool:
        """Return whether a value is this preset, whatever its other fields are."""
        return plugin.reference(type(value)) == self.kind and all(
            getattr(value, name) == fixed for name, fixed in self.fixed.items()
        )


# A value is named by the first preset that matches it, so more specific presets come first.
SAMPLERS: dict[str, Preset] = {
    "random": Preset("gigamask.samplers.random:Random"),
    "tar_aware": Preset("gigamask.samplers.shards:TarSubset", {"mixed": False}, {"per_tar": 1000}),
    "stratified_granularity": Preset(
        "gigamask.samplers.stratified:Stratified", {"epoch_length": "smallest"}
    ),
    "distributed_balanced": Preset(
        "gigamask.samplers.stratified:InterleavedStrata", {"ratio": None}
    ),
    "multi_level": Preset("gigamask.samplers.stratified:InterleavedStrata"),
    "curriculum": Preset("gigamask.samplers.curriculum:Curriculum"),
    "adaptive_curriculum": Preset("gigamask.samplers.curriculum:AdaptiveCurriculum"),
    "balanced_tar": Preset("gigamask.samplers.shards:TarSubset", {"mixed": True}, {"per_tar": 100}),
    "streaming_tars": Preset("gigamask.samplers.shards:StreamingTars"),
    "streamed": Preset("gigamask.samplers.shards:Streamed"),
    "loss_weighted": Preset("gigamask.samplers.hard_examples:LossWeighted"),
    "replay": Preset("gigamask.samplers.hard_examples:Replay"),
    "lazy": Preset("gigamask.samplers.random:LazyShuffle", {"chunk": None}),
    "chunked": Preset("gigamask.samplers.random:LazyShuffle", defaults={"chunk": 100_000}),
    "relevance_diversity": Preset(
        "gigamask.samplers.stratified:Stratified",
        {"epoch_length": "data", "attributes": ("granularity", "complexity", "domain")},
    ),
    "multi_attribute": Preset(
        "gigamask.samplers.stratified:Stratified",
        {"epoch_length": "data"},
        {"attributes": ("granularity", "tar")},
    ),
    "sharded": Preset("gigamask.samplers.shards:Sharded"),
}


def _references(kinds: Mapping[str, type]) -> dict[str, str]:
    return {name: plugin.reference(kind) for name, kind in kinds.items()}


COMPONENTS: dict[str, tuple[type, Mapping[str, str | Preset]]] = {
    "sampler": (Sampler, SAMPLERS),
    "loader.mask-sampler": (
        MaskSampler,
        {
            "random": "gigamask.data.mask_sampling:RandomMasks",
            "diverse": "gigamask.data.mask_sampling:DiverseMasks",
            "quality": "gigamask.data.mask_sampling:BestMasks",
            "size_balanced": "gigamask.data.mask_sampling:SizeBalancedMasks",
        },
    ),
    "loader.augment": (
        Augment,
        {
            "none": "gigamask.data.augment:NoAugment",
            "flip": "gigamask.data.augment:HorizontalFlip",
            "large_scale_jitter": "gigamask.data.augment:LargeScaleJitter",
            "scale_jitter": "gigamask.data.augment:ScaleJitter",
            "crop": "gigamask.data.augment:RandomCrop",
            "random_resized_crop": "gigamask.data.augment:RandomResizedCrop",
        },
    ),
    "prompts": (
        PromptSchedule,
        {
            "interactive": "gigamask.prompts.schedule:InteractiveSchedule",
            "mixed": "gigamask.prompts.mixed:MixedPrompts",
            "two_sided": "gigamask.prompts.two_sided:TwoSidedCorrection",
        },
    ),
    "loss": (
        Loss,
        {
            "sam": "gigamask.losses.sam_loss:SamLoss",
            "window": "gigamask.losses.window_loss:WindowLoss",
        },
    ),
    "mining": (
        Mining,
        {"none": "gigamask.interfaces:NoMining", "ohem": "gigamask.losses.ohem:OHEM"},
    ),
    "kernels": (Kernels, {"torch": "gigamask.interfaces:Kernels"}),
    "optimizer": (
        Optimizer,
        {
            "adamw": "gigamask.training.optim:AdamW",
            "adamw8bit": "gigamask.training.optim:AdamW8bit",
            "muon": "gigamask.training.optim:MuonAdamW",
        },
    ),
    "schedule": (
        LRSchedule,
        {
            "multistep": "gigamask.training.optim:WarmupMultiStep",
            "cosine": "gigamask.training.optim:WarmupCosine",
        },
    ),
    "model.encoder": (ImageEncoder, _references(ENCODERS)),
    "model.decoder": (Decoder, _references(DECODERS)),
    "evaluation": (
        Evaluator,
        {
            "none": "gigamask.interfaces:NoEvaluation",
            "clicks": "gigamask.evaluation.click_evaluation:ClickEvaluation",
        },
    ),
}
"""The interface of each kind of component, and its built-in classes by name: references."""


def kinds() -> list[str]:
    """Return all kinds of components, those that plugins add last."""
    return [*COMPONENTS, *plugin.merged("interfaces")]


def names(kind: str) -> list[str]:
    """Return the names of the components of a kind, those of plugins last.

    Args:
        kind: Kind of component, such as `loader.augment`.
    """
    return [*_known(kind), *_added(kind)]


def _known(kind: str) -> Mapping[str, str | Preset]:
    """Return the components of a kind in the core by name."""
    return COMPONENTS[kind][1] if kind in COMPONENTS else {}


def _added(kind: str) -> Mapping[str, str]:
    """Return the references of the components of a kind that plugins add, by name."""
    return plugin.merged("components").get(kind, {})


def select_components(config: TrainConfig, chosen: Mapping[str, str]) -> TrainConfig:
    """Return the configuration with the named components.

    Args:
        config: The configuration; components that have these names already keep their fields.
        chosen: Names by kind, such as `{"sampler": "streamed"}`.

    Raises:
        GigamaskError: The configuration has no such kind of component, or there is no such name.
    """
    for kind, name in chosen.items():
        known = components_of(config)
        if kind not in known:
            raise GigamaskError(
                f"--{kind} {name}: recipe {config.recipe} has no {kind}; it has {', '.join(known)}"
            )
        if name != name_of_component(kind, get_component(config, kind)):
            config = config.with_(**{kind: make_component(kind, name)})
    return config


def components_of(config: TrainConfig) -> list[str]:
    """Return the kinds of components that a configuration has; pre-training has no prompts."""
    known = flatten_config(config)
    return [kind for kind in kinds() if kind in known]


def get_component(config: TrainConfig, kind: str) -> Any:
    """Return a configuration's component.

    Args:
        config: The configuration.
        kind: Kind of component, such as `loader.augment`.
    """
    return reduce(
        lambda value, name: getattr(value, name.replace("-", "_")), kind.split("."), config
    )


def name_of_component(kind: str, value: Any) -> str:
    """Return the name by which `make_component` makes a component.

    Args:
        kind: Kind of component, such as `loader.augment`.
        value: The component.

    Returns:
        A built-in name, `package.module:Class`, or `file.py:Class` with the absolute path.
    """
    module = f"{type(value).__module__}."
    # A package names its own classes alone, so that no other is imported here.
    own = {
        name: each if isinstance(each := plugin.load(where), Preset) else where
        for name, where in _added(kind).items()
        if module.startswith("".join(where.partition(":")[0].rpartition(".")[:2]))
    }
    for name, each in {**_known(kind), **own}.items():
        is_kind = each == plugin.reference(type(value))
        if is_kind if isinstance(each, str) else each.matches(value):
            return name
    from gigamask.recipes.user_code import name_of_class

    return name_of_class(type(value))


def make_component(kind: str, name: str) -> Any:
    """Return a component with default fields.

    Args:
        kind: Kind of component, such as `loader.augment`.
        name: Built-in name, entry point, `file.py:Class`, or `package.module:Class`.

    Raises:
        GigamaskError: There is no such class, it does not implement the kind's interface, or a
            field has no default.
    """
    if built_in := _known(kind).get(name):
        return (plugin.load(built_in) if isinstance(built_in, str) else built_in)()
    known, _, value = name.partition(":")
    if kind == "model.encoder" and value and (encoder := find_part("encoder", known)):
        if not encoder.argument:
            raise GigamaskError(f"--{kind} {name}: {known} takes no value; use --{kind} {known}")
        return encoder(**{encoder.argument: value})
    from gigamask.recipes import user_code

    name = _added(kind).get(name, name)
    path, colon, attribute = name.rpartition(":")
    installed = {} if colon else user_code.entry_points(kind)
    if not colon and name not in installed:
        near = difflib.get_close_matches(name, [*names(kind), *installed], 1)
        hint = f"; perhaps you meant {near[0]}" if near else ""
        raise GigamaskError(f"--{kind} {name!r} is unknown; choose from {_choices(kind)}{hint}")
    component = (
        user_code.find_object(name) if colon else user_code.load_entry_point(installed[name])
    )
    path, attribute = path or installed[name].value, attribute or name
    if isinstance(component, Preset):
        return component()
    interface = (
        COMPONENTS[kind][0]
        if kind in COMPONENTS
        else plugin.load(plugin.merged("interfaces")[kind])
    )
    if not (
        isinstance(component, type) and issubclass(component, interface) and is_dataclass(component)
    ):
        raise GigamaskError(
            f"--{kind}: {path} has no frozen dataclass {attribute!r} that is a "
            f"{interface.__module__}.{interface.__name__}; write one there"
        )
    required = [
        field.name
        for field in fields(component)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    if required:
        raise GigamaskError(
            f"--{kind}: {attribute}.{required[0]} in {path} has no default; every field needs one, "
            "and flags change it"
        )
    if missing := sorted(getattr(component, "__abstractmethods__", ())):
        raise GigamaskError(f"--{kind}: {attribute} in {path} has no method {' or '.join(missing)}")
    return component()


def _choices(kind: str) -> str:
    """Return the names of a kind of component, for an error message."""
    from gigamask.recipes import user_code

    listed = list(dict.fromkeys([*names(kind), *user_code.entry_points(kind)]))
    if kind == "model.encoder":
        arguments = {name: getattr(find_part("encoder", name), "argument", "") for name in listed}
        listed = [f"{name}:{field.upper()}" if field else name for name, field in arguments.items()]
    return f"{', '.join(listed)}, or file.py:Class for your own"
