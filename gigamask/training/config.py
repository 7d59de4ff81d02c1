"""A run: the whole configuration of one training, frozen. Recipes return one; flags and files change its leaves; parts of it are handed down.

Imports no torch, so that `--help` answers at once.

Not here: what SAM's and MAE's trainings add (`train.segmentation`, `train.pretraining`), how flags become a run (`arguments`), what the parts do
(their own modules).
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from gigamask.data.augment import Augment, NoAugment
from gigamask.data.color_jitter import ColorJitter
from gigamask.errors import GigamaskError
from gigamask.interfaces import Evaluator, LRSchedule, NoEvaluation, Optimizer, Sampler, Task
from gigamask.samplers.random import Random
from gigamask.training.optim import AdamW
from gigamask.training.schedule import WarmupMultiStep

if TYPE_CHECKING:
    import torch

    from gigamask.data.index import Index
    from gigamask.data.sample_config import SampleConfig
    from gigamask.models.state_dict import Model
    from gigamask.training.data_source import DataSource
    from gigamask.training.planning_view import PlanningView
    from gigamask.types import RandomSpec

Kind = TypeVar("Kind", bound="TrainConfig")

DATA = "data.json"
"""In the run folder: what the run's data were when it began."""


@dataclass(frozen=True)
class LoaderConfig:
    """How images become samples."""

    attributes: str | None = None
    """CSV file of what else is known of images or tars, for samplers (docs/samplers.md)"""
    augment: Augment = field(default_factory=NoAugment)
    color_jitter: ColorJitter = field(default_factory=ColorJitter)
    half_scale: bool = False
    """decode large JPEGs at half scale: 1.3x faster, about 42 dB from the exact route"""
    workers: int = 2
    """loader processes; 0 loads in the training process; also --num-workers"""
    read_ahead_mb: int = 0
    """size of the blocks that remote tars are fetched in, of which each process holds two x --micro-batch-size; for --sampler streamed"""

    def __post_init__(self) -> None:
        check_at_least(
            0, **{"loader.workers": self.workers, "loader.read_ahead_mb": self.read_ahead_mb}
        )


@dataclass(frozen=True)
class TrainConfig(ABC):
    """Everything that decides what a training does, whatever it trains."""

    verb: ClassVar[str] = "train"
    """the command that trains such a run: `gigamask train`, `pretrain` or `ground train`"""

    next_step: ClassVar[str] = "gigamask evaluate {out} --data HELD_OUT_TARS"
    """the command for the trained model in the run folder `out`"""

    recipe: str = ""
    """the recipe this run was made from"""
    data: tuple[str, ...] = ()
    """tars, folders of tars or of images, globs, or an index"""
    out: str = "runs/run"
    """the run folder: configuration, metrics, checkpoints"""
    init: str | None = None
    """weights to start from: a run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face folder; mae:PATH for an encoder alone"""
    freeze: tuple[str, ...] = ()
    """parts of the model that stay as they are, such as image_encoder; no gradient of theirs is computed"""
    steps: int = 1000
    """updates of the whole run"""
    batch_size: int = 4
    """images per update, over all processes"""
    micro_batch_size: int = 4
    """images that pass through the encoder at once; a batch is accumulated exactly from such groups"""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto is bf16 on a GPU and fp32 on a CPU; fp16, whose loss is scaled, is for GPUs without bf16"""
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
    wandb: str | None = None
    """project of Weights & Biases that shows the numbers, too; WANDB_MODE=offline keeps them in the run folder"""
    max_bad_share: float = 0.01
    """share of unreadable samples above which training stops"""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """of several processes: ddp keeps the model whole in each, fsdp shares the encoder's blocks out over all, hsdp over those of a machine"""
    timeout_s: float = 600.0
    """of several processes: seconds that they wait for one in an exchange before they give up, so that torchrun restarts them"""
    sampler: Sampler = field(default_factory=Random)
    optimizer: Optimizer = field(default_factory=AdamW)
    schedule: LRSchedule = field(default_factory=WarmupMultiStep)
    evaluation: Evaluator = field(default_factory=NoEvaluation)

    @abstractmethod
    def build(self, device: str = "cpu") -> Model:
        """Returns the model that the seed names, not yet trained; on the meta device one without numbers."""

    @abstractmethod
    def task(self, device: torch.device) -> Task:
        """Returns what a step computes."""

    @abstractmethod
    def data_source(self, index: Index) -> DataSource:
        """Returns what is trained on of indexed tars: the items, and what makes batches of them."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Files besides the tars that say what the samples are."""
        return ()

    @property
    def strata(self) -> bool:
        """Whether samples tell which of the sampler's strata they are of."""
        return False

    def check(self: Kind) -> Kind:
        """Returns the run itself when its numbers can be trained with; raises `GigamaskError` otherwise."""
        check_at_least(
            1,
            steps=self.steps,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            save_every=self.save_every,
            keep=self.keep,
            log_every=self.log_every,
        )
        self.evaluation.check()
        if not 0 < self.timeout_s < math.inf:
            raise GigamaskError(
                f"--timeout-s is {self.timeout_s}, processes wait for each other for some seconds; give more than the longest step takes"
            )
        if self.parallel != "ddp" and not self.optimizer.supports_sharding:
            name = type(self.optimizer).__name__
            raise GigamaskError(
                f"--parallel {self.parallel} shares parameters out, {name} wants whole ones; give --parallel ddp, or --optimizer adamw"
            )
        self.sampler.check(self.batch_size, processes=1, nodes=1)
        if not self.data:
            raise GigamaskError(
                "--data is empty, training needs tars; name a tar, a folder of tars or an index, or make some: gigamask synth DIR"
            )
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise GigamaskError(
                f"--device is {self.device!r}, known are auto, cpu, cuda and cuda:N; leave it out to take a GPU when there is one"
            )
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise GigamaskError(
                f"--wandb {self.wandb}: the package wandb is not installed; pip install 'gigamask[wandb]', or leave it out"
            )
        return self

    def look_ahead(self, earlier: Collection[str] = ()) -> None:
        """Check, before anything is trained, that the data, weights and frozen parts exist.

        Args:
            earlier: run folders that will have been trained by then, for `init`.

        Raises:
            Fault: where something is missing.
        """
        from gigamask.models.state_dict import MAE_PREFIX

        path = (self.init or "").removeprefix(MAE_PREFIX)
        if path and path not in earlier and not Path(path).exists():
            act = (
                "give a run folder, a checkpoint, a .pth, a .safetensors, or a Hugging Face folder"
            )
            raise GigamaskError(f"--init {self.init}: no such file or folder; {act}")
        self.find_data()
        self.evaluation.look_ahead()

    def find_data(self) -> None:
        """Raise `GigamaskError` where the data are not there or not of the right form."""
        from gigamask.data.index import find_tars

        find_tars(self.data)

    @property
    def has_checkpoint(self) -> bool:
        """Whether its folder holds a checkpoint already."""
        return any(Path(self.out).glob("checkpoints/step_*"))


@dataclass(frozen=True)
class ImageTrainConfig(TrainConfig):
    """A run whose samples are images, or single masks of them."""

    loader: LoaderConfig = field(default_factory=LoaderConfig)

    @property
    @abstractmethod
    def items(self) -> Literal["image", "mask"]:
        """What is sampled: images, or single masks."""

    @property
    @abstractmethod
    def random_spec(self) -> RandomSpec:
        """How many random numbers a sample carries."""

    @property
    @abstractmethod
    def sample_config(self) -> SampleConfig:
        """How the loader makes samples."""

    @property
    def planning(self) -> PlanningView:
        """What `plan` has to know of the run besides its step."""
        from gigamask.training.planning_view import PlanningView

        return PlanningView(self)

    def look_ahead(self, earlier: Collection[str] = ()) -> None:
        """Check, before anything is trained, that the data, weights and frozen parts exist."""
        if self.freeze:
            from gigamask.training.state import freeze

            freeze(self.build("meta"), self.freeze)
        super().look_ahead(earlier)

    def find_data(self) -> None:
        """Raise `GigamaskError` where the data are not there; annotations stand in tars alone."""
        from gigamask.data.index import find_shards, find_tars

        (find_tars if self.sample_config.masks else find_shards)(self.data)

    def data_source(self, index: Index) -> DataSource:
        """Return the images or masks to train on; raise Fault when there are none.

        These are the masks that pass the filters, or the images with such a mask; without masks,
        every image.
        """
        from gigamask.data import attributes, loader
        from gigamask.data.mask_store import MaskStore
        from gigamask.data.sample_table import open_sample_table
        from gigamask.training.data_source import DataSource

        loading, assembly = self.loader, self.sample_config
        table = attributes.read(loading.attributes, index) if loading.attributes else None
        found = open_sample_table(
            index, assembly.filters, self.items, table, self.seed, assembly.masks
        )
        if not found.items.count:
            raise GigamaskError(
                f"{' '.join(self.data)}: none of {len(index)} images has a mask"
                + (
                    " that passes the filters; loosen --loader.filters"
                    if index.manifest.masks
                    else "; give annotated images"
                )
            )
        if assembly.mask_store:
            MaskStore.open(assembly.mask_store, index).check(assembly)
        # A worker reads as many samples as a micro-batch has at a time; each may span two blocks.
        read_ahead = loading.read_ahead_mb * 2**20
        source = loader.SampleSource(
            str(index.folder), assembly, self.random_spec, read_ahead, 2 * self.micro_batch_size
        )
        told = f"{self.items} {assembly.filters!r}"
        return DataSource(
            found.items, found.locate, told, lambda pin: loader.Loader(source, loading.workers, pin)
        )

    @property
    def tables(self) -> tuple[str, ...]:
        """The table of attributes."""
        return (self.loader.attributes,) if self.loader.attributes else ()


def check_at_least(least: int, **numbers: int) -> None:
    """Raises `GigamaskError` where one of these leaves is smaller."""
    for name, value in numbers.items():
        if value < least:
            raise GigamaskError(
                f"--{name.replace('_', '-')} is {value}, it must be at least {least}"
            )


def flatten_config(record: Any, prefix: str = "") -> dict[str, Any]:
    """Returns a configuration as `{"section.leaf": value}`, flag names without the dashes."""
    flat: dict[str, Any] = {}
    for each in fields(record):
        name, value = prefix + each.name.replace("_", "-"), getattr(record, each.name)
        flat |= flatten_config(value, name + ".") if is_dataclass(value) else {name: value}
    return flat


def component_types(record: Any, prefix: str = "") -> dict[str, str]:
    """Returns what each part of a configuration is, as `{"section.part": class}`."""
    found: dict[str, str] = {}
    for each in fields(record):
        name, value = prefix + each.name.replace("_", "-"), getattr(record, each.name)
        if is_dataclass(value):
            found |= {
                name: f"{type(value).__module__}.{type(value).__qualname__}"
            } | component_types(value, name + ".")
    return found


def differences(ours: TrainConfig, theirs: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the leaves in which two runs differ, with both values; a part of another kind is one, too."""
    a, b = ({**component_types(run), **flatten_config(run)} for run in (ours, theirs))
    return {
        name: (a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    }


# Changing one of these on resume changes the shapes of the weights, what the optimizer has to hold, or what the samples are and which comes when;
# everything else may be changed between two stops. Processes and reading ahead change no sample, nor does a mask store, whose samples are those of
# the json bit for bit.
SHAPES = ("model.",)
OPTIMIZER_STATE = ("freeze", "optimizer")
DATA_ORDER = (
    "data",
    "queries",
    "segmenter",
    "text",
    "val-split",
    "max-masks",
    "batch-size",
    "seed",
    "sampler",
    "loading.",
    "policy",
)
SAME_SAMPLES = ("loader.workers", "loader.read-ahead-mb", "loader.mask-store")


def check_resume(
    saved: TrainConfig, wanted: TrainConfig, allow_data_change: bool
) -> dict[str, tuple[Any, Any]]:
    """Returns what differs between the saved run and the one asked for; raises `GigamaskError` where the difference makes a resume meaningless."""
    changed = differences(saved, wanted)
    for name, (before, now) in changed.items():
        if name.startswith(SHAPES):
            raise GigamaskError(
                f"--{name} was {before} in {saved.out} and is {now} now: weights of another shape cannot be resumed; give another --out"
            )
        if name in OPTIMIZER_STATE:
            raise GigamaskError(
                f"--{name} was {before} in {saved.out} and is {now} now, which the optimizer's state does not fit; "
                f"start anew from its weights: --init {saved.out} and another --out"
            )
        if name.startswith(DATA_ORDER) and name not in SAME_SAMPLES and not allow_data_change:
            raise GigamaskError(
                f"--{name} was {before} in {saved.out} and is {now} now, which changes the data or its order; "
                "give --allow-data-change, or another --out"
            )
    return changed
