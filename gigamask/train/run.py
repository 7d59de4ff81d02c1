"""A run: the whole configuration of one training, frozen. Recipes return one; flags and files change its leaves; parts of it are handed down.

Imports no torch, so that `--help` answers at once.

Not here: how flags become a run (`cli`), what the parts do (their own modules).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from gigamask.data.augment import Augment, Plain
from gigamask.data.choose import Choice, Filters, RandomChoice
from gigamask.data.colour import ColourJitter
from gigamask.data.settings import Assembly
from gigamask.faults import Fault
from gigamask.losses.objective import MaskObjective
from gigamask.model.sizes import SamSpec
from gigamask.prompts.policy import InteractiveSchedule
from gigamask.samplers.uniform import Uniform
from gigamask.seams import Objective, Policy, Sampler
from gigamask.train.optim import AdamW
from gigamask.train.schedule import Schedule, WarmupDrops

DATA = "data.json"
"""In the run folder: what the run's data were when it began."""


@dataclass(frozen=True)
class Loading:
    """How samples are made."""

    items: Literal["image", "mask"] = "image"
    """what is sampled: images, each with several masks, or single masks, each with its image"""
    attributes: str | None = None
    """CSV file of what else is known of images or tars, for samplers (docs/samplers.md)"""
    max_masks: int = 64
    """masks of an image that are trained on"""
    filters: Filters = field(default_factory=Filters)
    choice: Choice = field(default_factory=RandomChoice)
    augment: Augment = field(default_factory=Plain)
    colour: ColourJitter = field(default_factory=ColourJitter)
    target: Literal["hard", "area"] = "hard"
    """what the loss sees on the low-resolution grid: the mask at cell centres, or each cell's covered share"""
    half_scale: bool = False
    """decode large JPEGs at half scale: 1.3x faster, about 42 dB from the exact route"""
    mask_store: str | None = None
    """folder that 'gigamask masks' made: masks are read from it instead of each image's json"""
    workers: int = 2
    """loader processes; 0 loads in the training process"""
    read_ahead_mb: int = 0
    """size of the blocks that remote tars are fetched in, of which each process holds two x micro; for --sampler streamed"""


@dataclass(frozen=True)
class Run:
    """Everything that decides what a training does."""

    recipe: str = "tiny"
    """the recipe this run was made from"""
    data: tuple[str, ...] = ()
    """tars, folders of tars, globs, or an index"""
    out: str = "runs/run"
    """the run folder: configuration, metrics, checkpoints"""
    init: str | None = None
    """weights to start from: a run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face folder"""
    steps: int = 1000
    """updates of the whole run"""
    batch: int = 4
    """images per update, over all processes"""
    micro: int = 4
    """images that pass through the encoder at once; a batch is accumulated exactly from such groups"""
    masks_at_once: int = 64
    """masks that pass through the decoder at once; gradients do not depend on it, memory does"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto is bf16 on a GPU and fp32 on a CPU"""
    device: str = "auto"
    """auto is cuda when there is one"""
    seed: int = 0
    """names all chance of the run: weights, order, masks, prompts"""
    save_every: int = 500
    """updates between checkpoints"""
    keep: int = 2
    """checkpoints kept, the newest ones"""
    log_every: int = 10
    """updates between lines in metrics.jsonl"""
    max_bad_share: float = 0.01
    """share of unreadable samples above which training stops"""
    model: SamSpec = field(default_factory=SamSpec)
    loading: Loading = field(default_factory=Loading)
    sampler: Sampler = field(default_factory=Uniform)
    policy: Policy = field(default_factory=InteractiveSchedule)
    objective: Objective = field(default_factory=MaskObjective)
    optimizer: AdamW = field(default_factory=AdamW)
    schedule: Schedule = field(default_factory=WarmupDrops)

    def check(self) -> Run:
        """Returns the run itself when its numbers can be trained with; raises `Fault` otherwise."""
        for name, least in (("steps", 1), ("batch", 1), ("micro", 1), ("masks_at_once", 1), ("save_every", 1), ("keep", 1), ("log_every", 1)):
            _at_least(f"--{name.replace('_', '-')}", getattr(self, name), least)
        _at_least("--loading.max-masks", self.loading.max_masks, 1)
        _at_least("--loading.workers", self.loading.workers, 0)
        _at_least("--loading.read-ahead-mb", self.loading.read_ahead_mb, 0)
        self.sampler.check(self.batch, processes=1, nodes=1)
        if not self.data:
            raise Fault("--data is empty, training needs tars; name a tar, a folder of tars or an index, or make some: gigamask synth DIR")
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise Fault(f"--device is {self.device!r}, known are auto, cpu, cuda and cuda:N; leave it out to take a GPU when there is one")
        return self

    @property
    def begun(self) -> bool:
        """Whether its folder holds a checkpoint already."""
        return any(Path(self.out).glob("checkpoints/step_*"))

    @property
    def assembly(self) -> Assembly:
        """How the loader makes samples for this model: an area-averaged target is cut from masks at the input's resolution."""
        side, loading = self.model.input_side, self.loading
        return Assembly(
            side=side,
            grid=side if loading.target == "area" else self.model.grid,
            max_masks=loading.max_masks,
            filters=loading.filters,
            choice=loading.choice,
            augment=loading.augment,
            colour=loading.colour,
            half_scale=loading.half_scale,
            mask_store=loading.mask_store,
        )


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise Fault(f"{flag} is {value}, it must be at least {least}")


def leaves(record: Any, prefix: str = "") -> dict[str, Any]:
    """Returns a configuration as `{"section.leaf": value}`, flag names without the dashes."""
    flat: dict[str, Any] = {}
    for each in fields(record):
        name, value = prefix + each.name.replace("_", "-"), getattr(record, each.name)
        flat |= leaves(value, name + ".") if is_dataclass(value) else {name: value}
    return flat


def kinds(record: Any, prefix: str = "") -> dict[str, str]:
    """Returns what each part of a configuration is, as `{"section.part": class}`."""
    found: dict[str, str] = {}
    for each in fields(record):
        name, value = prefix + each.name.replace("_", "-"), getattr(record, each.name)
        if is_dataclass(value):
            found |= {name: f"{type(value).__module__}.{type(value).__qualname__}"} | kinds(value, name + ".")
    return found


def differences(ours: Run, theirs: Run) -> dict[str, tuple[Any, Any]]:
    """Returns the leaves in which two runs differ, with both values; a part of another kind is one, too."""
    a, b = ({**kinds(run), **leaves(run)} for run in (ours, theirs))
    return {name: (a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)}


# Changing one of these on resume changes the shapes of the weights, or what the samples are and which comes when; everything else may be changed
# between two stops. Processes and reading ahead change no sample, nor does a mask store, whose samples are those of the json bit for bit.
SHAPES = ("model.",)
DATA_ORDER = ("data", "batch", "seed", "sampler", "loading.", "policy")
SAME_SAMPLES = ("loading.workers", "loading.read-ahead-mb", "loading.mask-store")


def check_resume(saved: Run, wanted: Run, allow_other_order: bool) -> dict[str, tuple[Any, Any]]:
    """Returns what differs between the saved run and the one asked for; raises `Fault` where the difference makes a resume meaningless."""
    changed = differences(saved, wanted)
    for name, (before, now) in changed.items():
        if name.startswith(SHAPES):
            raise Fault(f"--{name} was {before} in {saved.out} and is {now} now: weights of another shape cannot be resumed; give another --out")
        if name.startswith(DATA_ORDER) and name not in SAME_SAMPLES and not allow_other_order:
            raise Fault(
                f"--{name} was {before} in {saved.out} and is {now} now, which changes the data or its order; "
                "give --allow-other-order, or another --out"
            )
    return changed
