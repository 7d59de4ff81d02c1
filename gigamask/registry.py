"""Names for parts: how a word on the command line or in a file chooses a sampler, a mask choice, an augmentation.

In: a run and `{"sampler": "streamed"}`. Out: the run with that part, its fields at their defaults. A part of one's own is named `file.py:Class`,
`package.module:Class`, or by the name of an entry point (`recipes.user_code`).
Only the command line knows names; below it a part is a value.

Not here: the parts' fields, which are flags like any other (`arguments`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import reduce
from typing import Any

from gigamask.data import augment, mask_sampling
from gigamask.errors import GigamaskError
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.grounding.config import GroundingEvalConfig
from gigamask.grounding.text_encoders import HuggingFace, MiniLm, TextEncoder
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
from gigamask.models.configs import ViT
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
        fixed: Fields that tell this preset from others of the same class.
        defaults: Other fields that start with a value of their own.
    """

    kind: type
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Return the preset's value."""
        return self.kind(**self.fixed, **self.defaults)

    def matches(self, value: Any) -> bool:
        """Return whether the preset with other flags can give this value."""
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
            "resized_crop": augment.ScaleJitter,
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
    "loss": (Loss, {"sam": SamLoss}),
    "mining": (Mining, {"none": NoMining, "ohem": OHEM}),
    "text": (TextEncoder, {"minilm": MiniLm, "huggingface": HuggingFace}),
    "optimizer": (Optimizer, {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": MuonAdamW}),
    "schedule": (LRSchedule, {"multistep": WarmupMultiStep, "cosine": WarmupCosine}),
    "model.encoder": (ImageEncoder, {"vit": ViT}),
    "evaluation": (
        Evaluator,
        {"none": NoEvaluation, "clicks": ClickEvaluation, "queries": GroundingEvalConfig},
    ),
}
"""What each part must be, and the names of ours."""


def split_component_flags(
    words: Sequence[str], parts: Collection[str] = COMPONENTS.keys()
) -> tuple[dict[str, str], list[str]]:
    """Takes the words that name some parts, `--sampler streamed` or `--sampler=streamed`, out of the others."""
    chosen, rest = {}, []
    left = list(words)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        part = flag.removeprefix("--").replace("_", "-")
        if not flag.startswith("--") or part not in parts:
            rest.append(flag + equals + value)
            continue
        if not equals:
            if not left or left[0].startswith("--"):
                raise GigamaskError(f"--{part} wants a name: {_known(part)}")
            value = left.pop(0)
        chosen[part] = value
    return chosen, rest


def select_components(run: TrainConfig, chosen: Mapping[str, str]) -> TrainConfig:
    """Returns the run with the parts that are named; one that it has already keeps its fields."""
    for part, name in chosen.items():
        if part not in components_of(run):
            raise GigamaskError(
                f"--{part} is {name!r}, but recipe {run.recipe} has no such part; it has {', '.join(components_of(run))}"
            )
        if name != name_of_component(part, get_component(run, part)):
            run = _with(run, part.split("."), make_component(part, name))
    return run


def component_names(run: TrainConfig) -> dict[str, str]:
    """Returns the name of each part of the run."""
    return {part: name_of_component(part, get_component(run, part)) for part in components_of(run)}


def components_of(run: TrainConfig) -> list[str]:
    """Returns which parts the run has; what trains an encoder alone has no prompts."""
    return [part for part in COMPONENTS if part in component_types(run)]


def get_component(run: TrainConfig, part: str) -> Any:
    """Returns the value at `section.leaf`."""
    return reduce(
        lambda value, field: getattr(value, field.replace("-", "_")), part.split("."), run
    )


def name_of_component(part: str, value: Any) -> str:
    """Returns the name of a part; that of a user's own class is `package.module:Class`, or `file.py:Class` with the file's whole path."""
    for name, kind in COMPONENTS[part][1].items():
        if kind.matches(value) if isinstance(kind, Preset) else type(value) is kind:
            return name
    return user_code.name_of_class(type(value))


def make_component(part: str, name: str) -> Any:
    """Returns the part of that name, its fields at their defaults."""
    seam, known = COMPONENTS[part]
    if name in known:
        return known[name]()
    path, colon, attribute = name.rpartition(":")
    installed = {} if colon else user_code.entry_points(part)
    if not colon and name not in installed:
        near = difflib.get_close_matches(name, [*known, *installed], 1)
        raise GigamaskError(
            f"--{part} is {name!r}, known are {_known(part)}"
            + (f"; perhaps you meant {near[0]}" if near else "")
        )
    kind = user_code.find_object(name) if colon else user_code.load_entry_point(installed[name])
    path, attribute = path or installed[name].value, attribute or name
    if not (isinstance(kind, type) and issubclass(kind, seam) and is_dataclass(kind)):
        raise GigamaskError(
            f"--{part}: {path} has no frozen dataclass {attribute!r} that is a {seam.__module__}.{seam.__name__}; write one there"
        )
    bare = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    if bare:
        raise GigamaskError(
            f"--{part}: {attribute}.{bare[0]} in {path} has no default; give every field one, flags change them"
        )
    return kind()


def _with(record: Any, path: list[str], value: Any) -> Any:
    name = path[0].replace("-", "_")
    return replace(
        record, **{name: value if len(path) == 1 else _with(getattr(record, name), path[1:], value)}
    )


def _known(part: str) -> str:
    known = [*COMPONENTS[part][1], *user_code.entry_points(part)]
    return f"{', '.join(known)}, and file.py:Class for your own"
