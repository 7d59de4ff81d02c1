"""Training configuration: frozen dataclasses that recipes return and flags change.

Imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

import msgspec

from gigamask.data.augment import Augment, ColorJitter, NoAugment
from gigamask.errors import GigamaskError, abridged, check_positive, check_range
from gigamask.interfaces import (
    Evaluator,
    Kernels,
    LRSchedule,
    NoEvaluation,
    NoMining,
    Optimizer,
    Sampler,
    Task,
)
from gigamask.models.manifest import list_checkpoints
from gigamask.samplers.random import Random
from gigamask.training.optim import (
    BELOW_ONE,
    NO_ADAPTERS,
    AdamW,
    WarmupMultiStep,
    check_frozen,
    select_trained,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gigamask.data.index import Index
    from gigamask.data.sample_config import SampleConfig
    from gigamask.models.model import Model
    from gigamask.training.data_source import DataSource
    from gigamask.training.planning_view import PlanningView
    from gigamask.types import RandomSpec

Config = TypeVar("Config", bound="TrainConfig")

MAX_WARMUP_SHARE = 0.25
"""Longest warm-up, as a fraction of its steps, of a training with fewer steps than its recipe."""
ALL_MASKS: Any = NoMining()
"""The mining of a configuration without this field."""
TORCH_KERNELS: Any = Kernels()
"""The kernels of a configuration without this field."""
DATA = "data.json"
"""File in the run folder that describes the data at the start of the run."""


@dataclass(frozen=True)
class LoaderConfig:
    """Loading and augmentation of images."""

    attributes: str | None = None
    """CSV file with attributes of images or tars for samplers (docs/samplers.md)"""
    augment: Augment = field(default_factory=NoAugment)
    color_jitter: ColorJitter = field(default_factory=ColorJitter)
    half_scale: bool = False
    """decode large JPEGs at half scale: 1.3x faster, about 42 dB PSNR to exact decoding"""
    workers: int | None = None
    """loader processes of each training process; 0 loads in the training process; default:
    1 on a CPU; on a GPU, all cores but one, at most 24; also --num-workers"""
    read_ahead_mb: int = 0
    """size of the blocks in which remote tars are fetched (MB), for --sampler streamed; each loader
    process holds 2 x --micro-batch-size of them; 0 fetches each image separately"""

    def __post_init__(self) -> None:
        check_range("--loader.workers", self.workers, 0)
        check_range("--loader.read-ahead-mb", self.read_ahead_mb, 0)


@dataclass(frozen=True)
class TrainConfig(ABC):
    """Base configuration of any kind of training."""

    command: ClassVar[str] = "train"
    """the command that runs this training, such as `gigamask train` or `pretrain`"""

    next_step: ClassVar[str] = "gigamask evaluate {out} --data HELD_OUT_TARS"
    """the command to suggest once the model in the run folder `out` is trained"""

    required: ClassVar[str] = ""
    """flags to name in the usage, besides --data and --out"""

    recipe: str = ""
    """recipe that the configuration started from"""
    data: tuple[str, ...] = ()
    """training data: tars, folders of tars or images, globs, or an index"""
    out: str = "runs/run"
    """run folder for configuration, metrics and checkpoints"""
    init: str | None = None
    """initial weights: a run folder, a checkpoint, an official .pth, a .safetensors, a Hugging Face
    folder, or starter, the small model in this package; mae:PATH loads the image encoder of a
    masked autoencoder, decoder:PATH the prompt encoder and mask decoder of a SAM"""
    freeze: tuple[str, ...] = ()
    """modules or parameters to freeze, such as image_encoder"""
    unfreeze: tuple[str, ...] = ()
    """what to train within frozen modules: norms, biases, or modules or parameters by name"""
    steps: int = 1000
    """number of training steps (optimizer updates); see also --epochs"""
    batch_size: int = 4
    """images per step over all processes (global batch size)"""
    micro_batch_size: int | None = None
    """images per forward pass of a process; gradients are accumulated exactly up to --batch-size;
    default: on a GPU as many as fit, by the plan; 1 on a CPU"""
    ema: float = 0.0
    """decay of a running average of the weights, which evaluation and exports use; 0 disables"""
    precision: Literal["auto", "fastest", "fp32", "bf16", "fp16"] = "auto"
    """precision of the forward pass; auto is bf16 on a GPU and fp32 on a CPU; fastest is bf16 also
    on CPUs that multiply it in hardware (AMX); fp16, with loss scaling, is for GPUs without bf16"""
    tf32: bool = False
    """multiply float32 matrices with 10 bits of mantissa, which GPUs do several times as fast; for
    --precision fp32"""
    device: str = "auto"
    """device to train on: cpu, cuda or cuda:N; auto is cuda if there is a GPU, else cpu"""
    processes: int | None = None
    """number of processes that train on a CPU without torchrun; default: one per core for a small
    model, at most 8 and each with the same number of images; 1 for a larger model, whose operations
    use all cores, and if OMP_NUM_THREADS is set"""
    seed: int = 0
    """random seed (initialization, sample order, mask choice, prompts)"""
    save_every: int = 500
    """steps between checkpoints"""
    keep: int = 2
    """number of newest checkpoints to keep, besides the best by each evaluation and the one resumed
    from"""
    log_every: int = 10
    """steps between records in metrics.jsonl"""
    wandb: str | None = None
    """Weights & Biases project to log to as well; set WANDB_MODE=offline to log into the run
    folder"""
    max_bad_fraction: float = 0.01
    """largest fraction of different samples that may be unreadable; training stops if more are, and
    at least 10 (0: stops at the first)"""
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """data parallelism of several processes: ddp replicates the model, fsdp shards the encoder
    blocks over all processes, hsdp over the processes of each machine"""
    reduce_precision: Literal["fp32", "bf16"] = "fp32"
    """precision in which the encoder's gradients are sent and summed over processes; bf16 halves
    what is sent, and rounds (docs/cluster.md)"""
    timeout_s: float = 600.0
    """seconds to wait for another process in a collective operation before failing, so that
    torchrun restarts the group"""
    sampler: Sampler = field(default_factory=Random)
    optimizer: Optimizer = field(default_factory=AdamW)
    schedule: LRSchedule = field(default_factory=WarmupMultiStep)
    evaluation: Evaluator = field(default_factory=NoEvaluation)

    lora = NO_ADAPTERS  # a field where the model can have adapters
    mining = ALL_MASKS  # a field where masks can be left out
    kernels = TORCH_KERNELS  # a field where a SAM is trained
    data_weights: ClassVar[tuple[int, ...]] = ()  # a field where samples are images or masks
    is_finding_classes = False  # a property where masks can have classes
    unused: ClassVar[Mapping[str, str]] = MappingProxyType({})  # a property where values may be

    @abstractmethod
    def build(self, device: str = "cpu") -> Model:
        """Build the model and initialize it from the seed; on the meta device, without storage."""

    @abstractmethod
    def task(self, device: torch.device) -> Task:
        """Return the task that computes the losses of a step."""

    @abstractmethod
    def data_source(self, index: Index) -> DataSource:
        """Return the samples of indexed tars and the loader of their batches."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Paths of files besides the tars that training depends on."""
        return ()

    def with_(self: Config, **changes: Any) -> Config:
        """Return a copy with some fields changed.

        Args:
            **changes: Values by field name; fields of a section are written `section__field`, as
                in `with_(data="scenes/", steps=500, optimizer__lr=1e-4)`, or passed as
                `**{"optimizer.lr": 1e-4}`. Fewer steps also limit the warm-up, as `limit_warmup`
                says, unless a field of the schedule is changed too, and more steps later do not
                lift the limit; `optimizer.lr` alone also changes `optimizer.muon_lr`, in
                proportion.

        Raises:
            GigamaskError: There is no such field, or the value is of another type.
        """
        paths = {name.replace("__", ".").replace("-", "_"): changes[name] for name in changes}
        config = scale_rates(with_fields(self, paths), self, list(paths))
        if any(path.startswith("schedule") for path in paths):
            return config
        return limit_warmup(config, self.steps)

    def phases(self: Config) -> list[Config]:
        """Return the trainings to run one after another, such as those of a distillation.

        Returns:
            The configuration itself, unless a subclass has several phases; each but the last in a
            folder of its own.
        """
        return [self]

    def check(self: Config) -> Config:
        """Check the values and return the configuration itself.

        Raises:
            GigamaskError: A value is invalid.
        """
        counts = "steps batch-size micro-batch-size save-every keep log-every processes"
        for flag in counts.split():
            check_range(f"--{flag}", getattr(self, flag.replace("-", "_")), 1)
        check_range("--max-bad-fraction", self.max_bad_fraction, 0, 1)
        check_range("--ema", self.ema, 0, BELOW_ONE)
        self.evaluation.check()
        check_positive("--timeout-s", self.timeout_s)
        if self.parallel != "ddp" and not self.optimizer.supports_sharding:
            raise GigamaskError(
                f"--parallel {self.parallel} shards parameters, which "
                f"{type(self.optimizer).__name__} does not support; "
                "use --parallel ddp or --optimizer adamw"
            )
        item_sampler(self).check(self.batch_size, world_size=1, nodes=1)
        if not self.data:
            raise GigamaskError(
                "--data is required: a tar, a folder of tars or an index; "
                "make synthetic data with: gigamask synth DIR"
            )
        if self.device not in ("auto", "cpu") and not self.device.startswith("cuda"):
            raise GigamaskError(
                f"--device must be auto, cpu, cuda or cuda:N (got {self.device!r}); "
                "leave it out to use a GPU if there is one"
            )
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise GigamaskError(
                f"--wandb {self.wandb}: the package wandb is not installed; "
                "run pip install 'gigamask[wandb]', or leave the flag out"
            )
        return self

    def check_inputs(self, earlier: Collection[str] = ()) -> None:
        """Check, before training starts, that data, weights and frozen modules exist.

        Args:
            earlier: Run folders of earlier stages, which `init` may name before they exist.

        Raises:
            GigamaskError: Something is missing.
        """
        check_init(self.init or "", earlier)
        self.check_data()
        self.evaluation.check_inputs()
        self.kernels.check_device(self.device)

    def check_data(self) -> None:
        """Raise `GigamaskError` if the data do not exist or have the wrong form."""
        from gigamask.data.index import find_tars

        find_tars(self.data)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run folder holds a checkpoint."""
        return bool(list_checkpoints(Path(self.out) / "checkpoints"))


@dataclass(frozen=True)
class ImageTrainConfig(TrainConfig):
    """Configuration of training on images, or on single masks of images."""

    loader: LoaderConfig = field(default_factory=LoaderConfig)
    data_weights: tuple[int, ...] = ()  # pyrefly: ignore[bad-override]
    """how often samples of each path of --data are drawn: 3 1 draws three of four from the first;
    default: as often as it has some"""

    @property
    @abstractmethod
    def items(self) -> Literal["image", "mask"]:
        """Unit of sampling: images, or single masks."""

    @property
    @abstractmethod
    def random_spec(self) -> RandomSpec:
        """How many random numbers a sample carries."""

    @property
    @abstractmethod
    def sample_config(self) -> SampleConfig:
        """How the loader builds samples."""

    @property
    def planning(self) -> PlanningView:
        """The configuration as `gigamask plan` sees it."""
        from gigamask.training.planning_view import PlanningView

        return PlanningView(self)

    def check_inputs(self, earlier: Collection[str] = ()) -> None:
        """Check, before training starts, that data, weights and frozen modules exist.

        Args:
            earlier: Run folders of earlier stages, which `init` may name before they exist.

        Raises:
            GigamaskError: Something is missing.
        """
        if self.freeze or self.unfreeze or self.lora.rank:
            model = self.build("meta")
            select_trained(model, self.freeze, self.unfreeze, self.lora)
            if not self.init:
                check_frozen(model, (), None)
        super().check_inputs(earlier)

    def check_data(self) -> None:
        """Raise `GigamaskError` if the data do not exist; masks require tars."""
        from gigamask.data.index import find_shards, find_tars

        (find_tars if self.sample_config.with_masks else find_shards)(self.data)

    def data_source(self, index: Index) -> DataSource:
        """Return a source of masks that pass the filters, images that have one, or all images.

        Args:
            index: Index of the training data.

        Raises:
            GigamaskError: There are no samples.
        """
        from gigamask.data import loader
        from gigamask.data.dataset import check_pixels
        from gigamask.data.sample_table import open_sample_table
        from gigamask.training.data_source import DataSource, loader_processes

        settings, sample_config = self.loader, self.sample_config
        check_pixels(index, sample_config.pixels, sample_config.pixels.has_window)
        table = None
        if settings.attributes:
            from gigamask.data import attributes

            table = attributes.read(settings.attributes, index)
        if self.data_weights:
            from gigamask.data.attributes import source_of_images

            table = {**(table or {}), "source": source_of_images(index, self.data)}
        samples = open_sample_table(
            index, sample_config.filters, self.items, table, self.seed, sample_config.with_masks
        )
        if not samples.items.count:
            raise GigamaskError(
                f"--data {abridged(self.data)}: none of {len(index)} images has a mask"
                + (
                    " that passes the filters; loosen --loader.filters"
                    if index.manifest.masks
                    else "; annotated images are required"
                )
            )
        if sample_config.mask_store:
            from gigamask.data.mask_store import MaskStore

            MaskStore.open(sample_config.mask_store, index).check(sample_config)
        # A worker reads the samples of one micro-batch at a time; each may span two blocks.
        read_ahead = settings.read_ahead_mb * 2**20
        source = loader.SampleSource(
            str(index.folder),
            sample_config,
            self.random_spec,
            read_ahead,
            2 * (self.micro_batch_size or 1),
        )
        return DataSource(
            samples.items,
            samples.locate,
            f"{self.items} {sample_config.filters!r}",
            lambda pin: loader.Loader(source, loader_processes(settings.workers, pin), pin),
        )

    @property
    def other_weights(self) -> tuple[str, ...]:
        """Weights that it needs besides `init`, such as those of a teacher."""
        return ()

    @property
    def tables(self) -> tuple[str, ...]:
        """Paths of the attribute table, if there is one, and of the other weights."""
        paths = tuple(filter(None, [self.loader.attributes]))
        if self.other_weights:
            from gigamask.models.weight_paths import find_weights

            paths += tuple(str(find_weights(each)) for each in self.other_weights)
        return paths

    def check_plan(self, model: nn.Module) -> list[str]:
        """Check what only this kind of training needs, apart from files that are not here yet.

        Args:
            model: Its model on the meta device.

        Returns:
            The errors of training that are set aside: those of missing files and weights.

        Raises:
            GigamaskError: Training would refuse a value, or a file that is here.
        """
        return []


def item_sampler(config: TrainConfig) -> Sampler:
    """Return what orders the items: the sampler, or one that weights the paths of the data.

    Args:
        config: The configuration.

    Raises:
        GigamaskError: The weights do not fit the paths or the sampler.
    """
    weights = config.data_weights
    if not weights:
        return config.sampler
    from gigamask.samplers.stratified import InterleavedStrata

    check_range("--data-weights", min(weights), 1)
    if len(weights) != len(config.data):
        raise GigamaskError(
            f"--data-weights needs a number for each of {len(config.data)} paths of --data "
            f"(got {' '.join(map(str, weights))})"
        )
    if config.sampler != Random():
        raise GigamaskError("--data-weights draws the samples itself; leave out --sampler")
    return InterleavedStrata(weights, attribute="source")


def check_init(init: str, earlier: Collection[str]) -> str:
    """Check that initial weights exist, or may be downloaded.

    Args:
        init: As `TrainConfig.init`; empty if there are none.
        earlier: Run folders of earlier stages, which need not exist yet.

    Returns:
        Their path or id, without a prefix.

    Raises:
        GigamaskError: There is no such file or folder.
    """
    from gigamask.models.configs import DECODER_PREFIX, MAE_PREFIX

    path = init.removeprefix(MAE_PREFIX).removeprefix(DECODER_PREFIX)
    if path and path not in earlier:
        from gigamask.models.weight_paths import check_weights_exist

        check_weights_exist(path, f"--init {init}")
    return path


def limit_warmup(config: Config, full_steps: int) -> Config:
    """Limit the warm-up of the learning rate to a share of the steps of a shortened training.

    Args:
        config: The training.
        full_steps: Steps that its schedule was written for; nothing changes if there are as many.
    """
    if config.steps >= full_steps:
        return config
    return replace(config, schedule=config.schedule.shortened(int(config.steps * MAX_WARMUP_SHARE)))


def scale_rates(config: Config, before: Config, changed: Collection[str]) -> Config:
    """Return a training whose `muon_lr` keeps its ratio to `lr` if only that was changed.

    Args:
        config: The training.
        before: The training that it was.
        changed: Names of what was changed, such as "optimizer.lr".
    """
    old, new = before.optimizer, config.optimizer
    given = {name.replace("-", "_") for name in changed}
    if "optimizer.lr" not in given or "optimizer.muon_lr" in given:
        return config
    old = old if type(new) is type(old) else type(new)()
    scaled: dict[str, Any] = {
        name: rate * new.lr / old.lr for name, rate in vars(old).items() if name == "muon_lr"
    }
    return replace(config, optimizer=replace(new, **scaled))


def with_fields(config: Any, changes: Mapping[str, Any], section: str = "") -> Any:
    """Return a copy of a dataclass with all changes made at once; file paths become str.

    Args:
        config: The dataclass.
        changes: New values by field, such as "steps", or by path, such as "model.num_heads".
        section: Where the dataclass is, such as "model__".

    Raises:
        GigamaskError: There is no such field, or the value is of another type.
    """
    if not is_dataclass(config):
        raise GigamaskError(
            f"{section.removesuffix('__')} has no fields (got {section}{next(iter(changes))})"
        )
    known = {leaf.name: getattr(config, leaf.name) for leaf in fields(config)}
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        field_name, _, rest = path.partition(".")
        _check_field(config, known, field_name, section + path.replace(".", "__"))
        if rest:
            parts.setdefault(field_name, {})[rest] = value
        else:
            values[field_name] = _of_type(config, field_name, value, section + field_name)
    for field_name, part in parts.items():
        before = values.get(field_name, known[field_name])
        values[field_name] = with_fields(before, part, f"{section}{field_name}__")
    return replace(config, **values)


def _check_field(config: Any, known: Mapping[str, Any], field_name: str, name: str) -> None:
    """Check that a dataclass has a field.

    Args:
        config: The dataclass.
        known: Its values by field.
        field_name: The field.
        name: The field as given.
    """
    if field_name in known:
        return
    near = [
        f"{section}__{field_name}"
        for section, part in known.items()
        if is_dataclass(part) and field_name in (leaf.name for leaf in fields(part))
    ]
    near += difflib.get_close_matches(field_name, known, 1) or ["steps"] * (name == "epochs")
    hint = f"; perhaps you meant {near[0]}" if near else f"; it has {', '.join(known)}"
    raise GigamaskError(f"{type(config).__name__} has no field {name!r}{hint}")


def _of_type(config: Any, field_name: str, value: Any, name: str) -> Any:
    """Return a field's new value; raise `GigamaskError` if it is of another type.

    Args:
        config: The dataclass.
        field_name: The field.
        value: The value; one path or text stands for a list of one, and 1e4 for a whole number.
        name: The field as given.
    """
    before = getattr(config, field_name)
    if is_dataclass(before) and is_dataclass(value):
        return value
    if is_dataclass(before):
        raise GigamaskError(
            f"{name} must be an object, such as {type(before).__name__}(), or {name}__FIELD one of "
            f"its fields (got {value!r})"
        )
    kind = get_type_hints(type(config))[field_name]
    try:
        if isinstance(before, tuple):
            value = (value,) if isinstance(value, str | Path) else tuple(value)
        plain = msgspec.to_builtins(  # of paths, and of NumPy's numbers
            value, enc_hook=lambda each: each.item() if hasattr(each, "item") else os.fspath(each)
        )
        return msgspec.convert(plain, kind, strict=False)
    except (msgspec.ValidationError, TypeError):
        wanted = getattr(kind, "__name__", kind)
        if wanted == "Literal":
            wanted = f"one of {', '.join(get_args(kind))}"
        raise GigamaskError(f"{name} must be {wanted} (got {value!r})") from None


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration, and the class of each section or component.

    Args:
        config: A configuration or a component of one.
        prefix: Prepended to each name.

    Returns:
        The values by flag without dashes, such as "section.leaf".
    """
    flat: dict[str, Any] = {}
    for leaf in fields(config):
        name, value = prefix + leaf.name.replace("_", "-"), getattr(config, leaf.name)
        flat[name] = value
        if is_dataclass(value):
            flat[name] = f"{type(value).__module__}.{type(value).__qualname__}"
            flat |= flatten_config(value, f"{name}.")
    return flat


def differences(*configs: TrainConfig | Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the flags, and the classes of components, in which configurations differ.

    Args:
        configs: Configurations, or their values by flag name.

    Returns:
        The value in each configuration by flag name; None if there is none.
    """
    flat = [each if isinstance(each, Mapping) else flatten_config(each) for each in configs]
    names = sorted({name for each in flat for name in each})
    values = {name: tuple(each.get(name) for each in flat) for name in names}
    return {name: each for name, each in values.items() if any(one != each[0] for one in each)}


# On resume, changing these would change the shapes of weights, the optimizer's state, or the
# samples and their order; anything else may change. The number of workers, reading ahead and a mask
# store change no sample: a mask store holds exactly the masks of the JSON.
SHAPES = ("model.",)
OPTIMIZER_STATE = (
    *("freeze", "unfreeze", "lora.rank", "lora.alpha", "lora.on", "lora.last"),
    *("phase", "optimizer", "optimizer.muon-kernels"),
)
DATA_ORDER = (
    "data",
    "queries",
    "segmenter",
    "text",
    "val-split",
    "max-masks",
    "nonsense-fraction",
    "batch-size",
    "seed",
    "sampler",
    "loader.",
    "prompts",
)
SAME_SAMPLES = ("loader.workers", "loader.read-ahead-mb", "loader.mask-store")


def check_resume(
    saved: TrainConfig, wanted: TrainConfig, allow_data_change: bool
) -> dict[str, tuple[Any, Any]]:
    """Check that a run can be resumed with a changed configuration.

    Args:
        saved: Configuration in the run folder.
        wanted: Configuration to resume with.
        allow_data_change: Whether the data and their order may change.

    Returns:
        What differs, as `differences` returns it.

    Raises:
        GigamaskError: The changes do not fit the checkpoint.
    """
    changed = differences(saved, wanted)
    for name, (before, now) in changed.items():
        lists = [v if isinstance(v, tuple) else (v,) for v in (before, now)]
        was, new = (" ".join(str(each).rstrip("/") for each in v) or "empty" for v in lists)
        same_files = name == "data" and len({tuple(map(os.path.realpath, v)) for v in lists}) == 1
        if was == new or same_files:  # but for how paths are written
            continue
        change = f"--{name} was {was} in {wanted.out} and is now {new}"
        if name.startswith(SHAPES):
            raise GigamaskError(
                f"{change}: weights of another shape cannot be resumed; use another --out"
            )
        if name in OPTIMIZER_STATE:
            raise GigamaskError(
                f"{change}: the optimizer state does not fit; start a new run from its weights: "
                f"--init {wanted.out} and another --out"
            )
        if name == "ema" and not (before and now):
            raise GigamaskError(
                f"{change}: weights are averaged from the first step on or not at all; start a new "
                f"run from its weights: --init {wanted.out} and another --out"
            )
        if name.startswith(DATA_ORDER) and name not in SAME_SAMPLES and not allow_data_change:
            raise GigamaskError(
                f"{change}, which changes the data or their order; "
                "add --allow-data-change, or use another --out"
            )
    return changed
