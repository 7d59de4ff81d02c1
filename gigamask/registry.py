"""Names of components, which select a sampler, a loss or an optimizer.

Only the command line and configuration files use names; elsewhere a component is an object.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import reduce
from typing import Any

from gigamask import plugin
from gigamask.data import augment, mask_sampling
from gigamask.errors import GigamaskError
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.interfaces import (
    Evaluator,
    ImageEncoder,
    Loss,
    LRSchedule,
    Mining,
    NoEvaluation,
    Optimizer,
    PromptSchedule,
    Sampler,
)
from gigamask.losses.ohem import OHEM, NoMining
from gigamask.losses.sam_loss import SamLoss
from gigamask.losses.window_loss import WindowLoss
from gigamask.models.configs import DECODERS, ENCODERS, Decoder, find_part
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.recipes import user_code
from gigamask.samplers.curriculum import AdaptiveCurriculum, Curriculum
from gigamask.samplers.hard_examples import LossWeighted, Replay
from gigamask.samplers.random import LazyShuffle, Random
from gigamask.samplers.shards import Sharded, Streamed, StreamingTars, TarSubset
from gigamask.samplers.stratified import RELEVANCE, InterleavedStrata, Stratified
from gigamask.training.config import TrainConfig, component_types
from gigamask.training.optim import AdamW, AdamW8bit, MuonAdamW
from gigamask.training.schedule import WarmupCosine, WarmupMultiStep


@dataclass(frozen=True)
class Preset:
    """A name for a class with some of its fields set.

    Attributes:
        kind: The class.
        fixed: Fields that distinguish this preset from others of the same class.
        defaults: Other fields whose default differs from the class's.
    """

    kind: type
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Return the preset's value."""
        return self.kind(**self.fixed, **self.defaults)

    def matches(self, value: Any) -> bool:
        """Return whether a value is this preset, whatever its other fields are."""
        return type(value) is self.kind and all(
            getattr(value, name) == fixed for name, fixed in self.fixed.items()
        )


# A value is named by the first preset that matches it, so more specific presets come first.
SAMPLERS: dict[str, Preset] = {
    "random": Preset(Random),
    "tar_aware": Preset(TarSubset, {"mixed": False}, {"per_tar": 1000}),
    "stratified_granularity": Preset(Stratified, {"epoch_length": "smallest"}),
    "distributed_balanced": Preset(InterleavedStrata, {"ratio": None}),
    "multi_level": Preset(InterleavedStrata),
    "curriculum": Preset(Curriculum),
    "adaptive_curriculum": Preset(AdaptiveCurriculum),
    "balanced_tar": Preset(TarSubset, {"mixed": True}, {"per_tar": 100}),
    "streaming_tars": Preset(StreamingTars),
    "streamed": Preset(Streamed),
    "loss_weighted": Preset(LossWeighted),
    "replay": Preset(Replay),
    "lazy": Preset(LazyShuffle, {"chunk": None}),
    "chunked": Preset(LazyShuffle, defaults={"chunk": 100_000}),
    "relevance_diversity": Preset(Stratified, {"epoch_length": "data", "attributes": RELEVANCE}),
    "multi_attribute": Preset(
        Stratified, {"epoch_length": "data"}, {"attributes": ("granularity", "tar")}
    ),
    "sharded": Preset(Sharded),
}

COMPONENTS: dict[str, tuple[type, Mapping[str, type | Preset]]] = {
    "sampler": (Sampler, SAMPLERS),
    "loader.mask-sampler": (
        mask_sampling.MaskSampler,
        {
            "random": mask_sampling.RandomMasks,
            "diverse": mask_sampling.DiverseMasks,
            "quality": mask_sampling.BestMasks,
            "size_balanced": mask_sampling.SizeBalancedMasks,
        },
    ),
    "loader.augment": (
        augment.Augment,
        {
            "none": augment.NoAugment,
            "flip": augment.HorizontalFlip,
            "large_scale_jitter": augment.LargeScaleJitter,
            "scale_jitter": augment.ScaleJitter,
            "crop": augment.RandomCrop,
            "random_resized_crop": augment.RandomResizedCrop,
        },
    ),
    "prompts": (
        PromptSchedule,
        {
            "interactive": InteractiveSchedule,
            "mixed": MixedPrompts,
            "two_sided": TwoSidedCorrection,
        },
    ),
    "loss": (Loss, {"sam": SamLoss, "window": WindowLoss}),
    "mining": (Mining, {"none": NoMining, "ohem": OHEM}),
    "optimizer": (Optimizer, {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": MuonAdamW}),
    "schedule": (LRSchedule, {"multistep": WarmupMultiStep, "cosine": WarmupCosine}),
    "model.encoder": (ImageEncoder, ENCODERS),
    "model.decoder": (Decoder, DECODERS),
    "evaluation": (
        Evaluator,
        {"none": NoEvaluation, "clicks": ClickEvaluation},
    ),
}
"""The interface of each kind of component, and its built-in classes by name."""


def kinds() -> list[str]:
    """Return all kinds of components, those that plugins add last."""
    return [*COMPONENTS, *plugin.merged("interfaces")]


def names(kind: str) -> list[str]:
    """Return the names of the components of a kind, those of plugins last.

    Args:
        kind: Kind of component, such as `loader.augment`.
    """
    return [*_known(kind), *_added(kind)]


def _known(kind: str) -> Mapping[str, type | Preset]:
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
            config = _replace(config, kind.split("."), make_component(kind, name))
    return config


def components_of(config: TrainConfig) -> list[str]:
    """Return the kinds of components that a configuration has; pre-training has no prompts."""
    types = component_types(config)
    return [kind for kind in kinds() if kind in types]


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
        name: plugin.load(where)
        for name, where in _added(kind).items()
        if module.startswith(_package(where))
    }
    for name, each in {**_known(kind), **own}.items():
        if each.matches(value) if isinstance(each, Preset) else type(value) is each:
            return name
    return user_code.name_of_class(type(value))


def _package(reference: str) -> str:
    """Return the package of a reference's module, with a dot at its end; "" for a lone module."""
    return "".join(reference.partition(":")[0].rpartition(".")[:2])


def make_component(kind: str, name: str) -> Any:
    """Return a component with default fields.

    Args:
        kind: Kind of component, such as `loader.augment`.
        name: Built-in name, entry point, `file.py:Class`, or `package.module:Class`.

    Raises:
        GigamaskError: There is no such class, it does not implement the kind's interface, or a
            field has no default.
    """
    if name in _known(kind):
        return _known(kind)[name]()
    known, _, value = name.partition(":")
    if kind == "model.encoder" and value and (encoder := find_part("encoder", known)):
        if not encoder.argument:
            raise GigamaskError(f"--{kind} {name}: {known} takes no value; use --{kind} {known}")
        return encoder(**{encoder.argument: value})
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
    return component()


def _replace(record: Any, path: list[str], value: Any) -> Any:
    """Return a copy of a nested dataclass with the value at `path` replaced."""
    name = path[0].replace("-", "_")
    if len(path) > 1:
        value = _replace(getattr(record, name), path[1:], value)
    return replace(record, **{name: value})


def _choices(kind: str) -> str:
    """Return the names of a kind of component, for an error message."""
    listed = [*names(kind), *user_code.entry_points(kind)]
    if kind == "model.encoder":
        arguments = {name: getattr(find_part("encoder", name), "argument", "") for name in listed}
        listed = [f"{name}:{field.upper()}" if field else name for name, field in arguments.items()]
    return f"{', '.join(listed)}, or file.py:Class for your own"
