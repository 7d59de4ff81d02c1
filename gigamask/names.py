"""Names for parts: how a word on the command line or in a file chooses a sampler, a mask choice, an augmentation.

In: a run and `{"sampler": "streamed"}`. Out: the run with that part, its fields at their defaults. A part of one's own is named `file.py:Class`.
Only the command line knows names; below it a part is a value.

Not here: the parts' fields, which are flags like any other (`arguments`).
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import reduce
from typing import Any

from gigamask import recipes
from gigamask.data import augment, choose
from gigamask.faults import Fault
from gigamask.grounding.text_encoders import HuggingFace, MiniLm, TextEncoder
from gigamask.losses.mining import EveryMask, Hardest
from gigamask.losses.objective import MaskObjective
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.policy import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.samplers.chunked import Chunked
from gigamask.samplers.curriculum import AdaptiveCurriculum, Curriculum
from gigamask.samplers.lazy import Lazy
from gigamask.samplers.loss_weighted import LossWeighted
from gigamask.samplers.relevance import RelevanceDiversity
from gigamask.samplers.replay import Replay
from gigamask.samplers.sharded import Sharded
from gigamask.samplers.stratified import DistributedBalanced, MultiAttribute, MultiLevel, Stratified
from gigamask.samplers.streamed import Streamed
from gigamask.samplers.tars import BalancedTars, StreamingTars, TarAware
from gigamask.samplers.uniform import Uniform
from gigamask.seams import Mining, Objective, Policy, Sampler
from gigamask.train.optim import AdamW, AdamW8bit, MuonAdamW
from gigamask.train.run import Run, kinds
from gigamask.train.schedule import Schedule, WarmupCosine, WarmupDrops

SEAMS: dict[str, tuple[type, dict[str, type]]] = {
    "sampler": (
        Sampler,
        {
            "random": Uniform,
            "tar_aware": TarAware,
            "stratified_granularity": Stratified,
            "multi_level": MultiLevel,
            "curriculum": Curriculum,
            "adaptive_curriculum": AdaptiveCurriculum,
            "balanced_tar": BalancedTars,
            "streaming_tars": StreamingTars,
            "streamed": Streamed,
            "loss_weighted": LossWeighted,
            "replay": Replay,
            "chunked": Chunked,
            "lazy": Lazy,
            "multi_attribute": MultiAttribute,
            "distributed_balanced": DistributedBalanced,
            "relevance_diversity": RelevanceDiversity,
            "sharded": Sharded,
        },
    ),
    "loading.choice": (
        choose.Choice,
        {"random": choose.RandomChoice, "diverse": choose.Diverse, "quality": choose.Quality, "size_balanced": choose.SizeBalanced},
    ),
    "loading.augment": (
        augment.Augment,
        {
            "none": augment.Plain,
            "flip": augment.Flip,
            "large_scale_jitter": augment.LargeScaleJitter,
            "resized_crop": augment.ResizedCrop,
            "random_resized_crop": augment.RandomResizedCrop,
        },
    ),
    "policy": (Policy, {"interactive": InteractiveSchedule, "mixed": MixedPrompts, "two_sided": TwoSidedCorrection}),
    "objective": (Objective, {"masks": MaskObjective}),
    "mining": (Mining, {"none": EveryMask, "hardest": Hardest}),
    "text": (TextEncoder, {"minilm": MiniLm, "huggingface": HuggingFace}),
    "optimizer": (AdamW, {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": MuonAdamW}),
    "schedule": (Schedule, {"drops": WarmupDrops, "cosine": WarmupCosine}),
}
"""What each part must be, and the names of ours."""


def split(words: Sequence[str], parts: Collection[str] = SEAMS.keys()) -> tuple[dict[str, str], list[str]]:
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
                raise Fault(f"--{part} wants a name: {_known(part)}")
            value = left.pop(0)
        chosen[part] = value
    return chosen, rest


def choose_parts(run: Run, chosen: Mapping[str, str]) -> Run:
    """Returns the run with the parts that are named; one that it has already keeps its fields."""
    for part, name in chosen.items():
        if part not in parts_of(run):
            raise Fault(f"--{part} is {name!r}, but recipe {run.recipe} has no such part; it has {', '.join(parts_of(run))}")
        if name != name_of(part, part_of(run, part)):
            run = _with(run, part.split("."), make(part, name))
    return run


def named_parts(run: Run) -> dict[str, str]:
    """Returns the name of each part of the run."""
    return {part: name_of(part, part_of(run, part)) for part in parts_of(run)}


def parts_of(run: Run) -> list[str]:
    """Returns which parts the run has; what trains an encoder alone has no prompts."""
    return [part for part in SEAMS if part in kinds(run)]


def part_of(run: Run, part: str) -> Any:
    """Returns the value at `section.leaf`."""
    return reduce(lambda value, field: getattr(value, field.replace("-", "_")), part.split("."), run)


def name_of(part: str, value: Any) -> str:
    """Returns the name of a part; that of a user's own class is `file.py:Class` with the file's whole path."""
    for name, kind in SEAMS[part][1].items():
        if type(value) is kind:
            return name
    return f"{os.path.abspath(inspect.getfile(type(value)))}:{type(value).__qualname__}"


def make(part: str, name: str) -> Any:
    """Returns the part of that name, its fields at their defaults."""
    seam, known = SEAMS[part]
    if name in known:
        return known[name]()
    path, colon, attribute = name.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, known, 1)
        raise Fault(f"--{part} is {name!r}, known are {_known(part)}" + (f"; perhaps you meant {near[0]}" if near else ""))
    kind = getattr(recipes.load_file(path), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, seam) and is_dataclass(kind)):
        raise Fault(f"--{part}: {path} has no frozen dataclass {attribute!r} that is a {seam.__module__}.{seam.__name__}; write one there")
    bare = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if bare:
        raise Fault(f"--{part}: {attribute}.{bare[0]} in {path} has no default; give every field one, flags change them")
    return kind()


def _with(record: Any, path: list[str], value: Any) -> Any:
    name = path[0].replace("-", "_")
    return replace(record, **{name: value if len(path) == 1 else _with(getattr(record, name), path[1:], value)})


def _known(part: str) -> str:
    return f"{', '.join(SEAMS[part][1])}, and file.py:Class for your own"
