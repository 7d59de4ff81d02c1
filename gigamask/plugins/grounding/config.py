"""Configuration of grounding training, free of torch so that command-line help stays fast."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import EvaluationResult, Evaluator, Mining, NoMining, Task
from gigamask.plugins.grounding.model_config import GroundingModelConfig
from gigamask.plugins.grounding.text_encoders import MINILM, TextEncoder
from gigamask.training.config import TrainConfig

if TYPE_CHECKING:
    import torch

    from gigamask.data.index import Index
    from gigamask.distributed.world import World
    from gigamask.plugins.grounding.data import QueryDataset, QueryLoader
    from gigamask.plugins.grounding.mask_features import Backbones
    from gigamask.plugins.grounding.model import GroundingModel
    from gigamask.plugins.grounding.queries import Query
    from gigamask.training.data_source import DataSource


@dataclass(frozen=True)
class GroundingEvalConfig(Evaluator):
    """Evaluation during training."""

    data: tuple[str, ...] = ()
    """tars, folders of tars, globs, or an index; empty uses the images of --val-split"""
    queries: tuple[str, ...] = ()
    """JSONL files of queries about the images of --evaluation.data"""
    interval: int = 500
    """steps between evaluations"""
    count: int = 500
    """number of queries, the same ones each time"""
    best_by: Literal["top 1", "top 3", "IoU", "answered"] = "answered"
    """score that selects the best checkpoint"""

    @cached_property
    def loaded_queries(self) -> list[Query]:
        """The queries of the files, read once."""
        from gigamask.plugins.grounding import queries

        return queries.read(self.queries)

    def check(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        super().check()
        check_range("--evaluation.count", self.count, 1)
        if bool(self.data) != bool(self.queries):
            raise GigamaskError(
                "--evaluation.data and --evaluation.queries need each other; pass both, or "
                "neither to evaluate on the images of --val-split"
            )

    def check_inputs(self) -> None:
        """Raise `GigamaskError` if the data are not tars or the queries cannot be read."""
        from gigamask.data.index import find_tars

        if self.data:
            find_tars(self.data)
        _ = self.queries and self.loaded_queries

    def open(
        self, config: GroundingTrainConfig, world: World
    ) -> Callable[[Any], EvaluationResult] | None:
        """Return the evaluation of a run, None if it has no evaluation data.

        Args:
            config: The configuration.
            world: The processes.

        Returns:
            A function of the model that evaluates a fixed subset of `count` queries.
        """
        from gigamask.plugins.grounding.data import open_queries
        from gigamask.plugins.grounding.evaluation import GroundingEvaluator
        from gigamask.rng import make_rng

        if not self.data and not config.val_split:
            return None
        index, dataset = evaluation_set(config)
        order = make_rng(0, "evaluation").permutation(len(dataset.queries))
        if self.count < len(order):
            queries = [dataset.queries[number] for number in sorted(order[: self.count])]
            dataset = open_queries(index, queries, config.seed)
        return GroundingEvaluator(config.query_loader(dataset, index), self.best_by, world).run


@dataclass(frozen=True)
class GroundingTrainConfig(TrainConfig):
    """Configuration of grounding training; samples are queries, counted by `batch_size`."""

    command: ClassVar[str] = "ground train"
    next_step: ClassVar[str] = (
        'gigamask ask {out} IMAGE "WORDS", or gigamask ground evaluate {out} --calibrate '
        "--data HELD_OUT_TARS --queries QUERIES"
    )
    required: ClassVar[str] = "--segmenter WEIGHTS --queries FILE..."

    queries: tuple[str, ...] = ()
    """JSONL files of queries about the images of --data"""
    segmenter: str = ""
    """weights of a trained segmenter: a run folder, a checkpoint, an official .pth, a .safetensors,
    or a Hugging Face folder or id"""
    val_split: float = 0.0
    """fraction of the images whose queries are held out for evaluation"""
    max_masks: int = 16
    """maximum candidate masks per query in training; evaluation uses all masks of the image"""
    nonsense_fraction: float = 0.1
    """queries of random letters, which no mask fits, to add to the training queries, relative to
    their number"""
    alignment_weight: float = 1.0
    """weight of the binary loss of each mask relative to the contrastive loss"""
    cache: str | None = None
    """folder to cache image and text features in; default: OUT/features"""
    text: TextEncoder = MINILM
    model: GroundingModelConfig = field(default_factory=GroundingModelConfig)
    mining: Mining = field(default_factory=NoMining)  # pyrefly: ignore[bad-override]
    evaluation: GroundingEvalConfig = field(default_factory=GroundingEvalConfig)

    def check(self) -> GroundingTrainConfig:
        """Return the config itself.

        Raises:
            GigamaskError: A value is invalid.
        """
        check_range("--max-masks", self.max_masks, 1)
        if not self.queries:
            raise GigamaskError(
                "--queries is required: JSONL files of texts with their target masks; make "
                "synthetic ones: gigamask ground synth DIR"
            )
        if not self.segmenter:
            raise GigamaskError("--segmenter is required: the weights of a trained segmenter")
        if not 0 <= self.val_split < 1:
            raise GigamaskError(f"--val-split must be in [0, 1), got {self.val_split}")
        check_range("--nonsense-fraction", self.nonsense_fraction, 0, 1)
        check_range("--alignment-weight", self.alignment_weight, 0)
        if self.parallel != "ddp":
            raise GigamaskError(
                f"--parallel must be ddp, got {self.parallel}: grounding trains no image encoder "
                f"that could be sharded"
            )
        return super().check()

    def build(self, device: str = "cpu") -> GroundingModel:
        """Return the untrained model, with its text model if that is trained.

        The text model is loaded on the run's device, since 4-bit and half-precision weights cannot
        be moved there from the CPU.
        """
        from gigamask.distributed.precision import choose_device
        from gigamask.models.init import materialize

        model = materialize(self.model.build, self.seed, device)
        if self.text.trainable:
            text_device = device if device == "meta" else choose_device(self.device)
            model.text = self.backbones.load_text_model(text_device)
        return model

    def task(self, device: torch.device) -> Task:
        """Return the training task."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.plugins.grounding.model import GroundingTask

        mining = None if self.mining.keeps_all else self.mining
        precision = choose_precision(self.precision, device)
        return GroundingTask(self.alignment_weight, precision, mining)

    def data_source(self, index: Index) -> DataSource:
        """Return the queries about the images that are not held out, and nonsense."""
        from gigamask.plugins.grounding import vocabulary
        from gigamask.plugins.grounding.data import open_queries
        from gigamask.rng import make_rng
        from gigamask.training.data_source import DataSource

        kept, _ = split_queries(self, self.loaded_queries, index)
        known = vocabulary.distinct_words(query.text for query in kept)
        order = make_rng(self.seed, "nonsense images").permutation(len(kept))
        count = round(self.nonsense_fraction * len(kept))
        templates = [kept[number] for number in order[:count]]
        nonsense = vocabulary.nonsense_queries(templates, known, self.seed, "nonsense")
        dataset = open_queries(index, [*kept, *nonsense], self.seed)
        loader = self.query_loader(dataset, index, self.max_masks)
        return DataSource(
            dataset.items,
            dataset.locate,
            f"queries {self.max_masks} {self.nonsense_fraction}",
            lambda pin: loader,
            {vocabulary.FILE: vocabulary.to_json(known)},
        )

    def query_loader(
        self, dataset: QueryDataset, index: Index, max_masks: int | None = None
    ) -> QueryLoader:
        """Return a loader of queries.

        Args:
            dataset: The queries.
            index: Index of their images.
            max_masks: Maximum number of candidates per query; None means all masks of its image.

        Returns:
            The loader, with the features of all texts computed.
        """
        from gigamask.plugins.grounding.data import QueryLoader

        if max_masks is None:
            max_masks = max(int(index.images["masks"].max()), 1) if len(index) else 1
        texts = [query.text for query in dataset.queries]
        return QueryLoader(
            dataset=dataset,
            index=index,
            mask_features=self.backbones.mask_features,
            text_features=self.backbones.text_features(texts),
            max_masks=max_masks,
            seed=self.seed,
        )

    def check_inputs(self, earlier: Collection[str] = ()) -> None:
        """Check that data, queries and weights exist, before images are indexed.

        Args:
            earlier: Run folders of earlier stages, which need not exist yet.

        Raises:
            GigamaskError: A file is missing or invalid.
        """
        super().check_inputs(earlier)
        _ = self.loaded_queries
        from gigamask.models.weight_paths import check_weights_exist

        check_weights_exist(self.segmenter, f"--segmenter {self.segmenter}")

    @cached_property
    def loaded_queries(self) -> list[Query]:
        """The queries of the files, read once."""
        from gigamask.plugins.grounding import queries

        return queries.read(self.queries)

    @cached_property
    def backbones(self) -> Backbones:
        """The segmenter and the text encoder, loaded once for training and evaluation."""
        from gigamask.plugins.grounding.mask_features import Backbones

        cache = Path(self.cache or Path(self.out) / "features")
        return Backbones(self.segmenter, self.text, self.model, self.device, self.seed, cache)

    @property
    def tables(self) -> tuple[str, ...]:
        """The files of queries."""
        return self.queries


def split_queries(
    config: GroundingTrainConfig, queries: list[Query], index: Index
) -> tuple[list[Query], list[Query]]:
    """Split queries by image into training and held-out ones.

    Whether an image is held out depends only on its name and the seed.

    Args:
        config: The configuration, with `val_split` and `seed`.
        queries: The queries.
        index: Index of their images.

    Returns:
        Training queries and held-out queries, in the given order.

    Raises:
        GigamaskError: No training query is left.
    """
    from gigamask.plugins.grounding.queries import locate
    from gigamask.rng import make_rng

    if not config.val_split:
        return queries, []
    rows = locate(queries, index).tolist()
    names = [index.entry_name(row).rpartition("/")[2] for row in rows]
    held_out = {
        name: float(make_rng(config.seed, f"hold out {name}").random()) < config.val_split
        for name in set(names)
    }
    pairs = list(zip(queries, names, strict=True))
    kept = [query for query, name in pairs if not held_out[name]]
    if not kept:
        raise GigamaskError(
            f"--val-split {config.val_split} leaves no training query; hold out fewer images"
        )
    return kept, [query for query, name in pairs if held_out[name]]


def evaluation_set(config: GroundingTrainConfig) -> tuple[Index, QueryDataset]:
    """Return the index and the queries to evaluate on.

    They are those of `config.evaluation`, or else the held-out ones.

    Raises:
        GigamaskError: No image is held out.
    """
    from gigamask.data import index as indexes
    from gigamask.plugins.grounding.data import open_queries

    if config.evaluation.data:
        index = indexes.open_or_build(config.evaluation.data, f"{config.out}/evaluation")
        return index, open_queries(index, config.evaluation.loaded_queries, config.seed)
    index = indexes.open_or_build(config.data, config.out)
    kept, held_out = split_queries(config, config.loaded_queries, index)
    if not held_out:
        raise GigamaskError(
            f"--val-split {config.val_split} holds out no image of {len(kept)} queries; hold out "
            f"more images, or pass --evaluation.data"
        )
    return index, open_queries(index, held_out, config.seed)


def training_set(config: GroundingTrainConfig) -> tuple[Index, QueryDataset] | None:
    """Return the index and the queries of the training, None if its data no longer exist."""
    from gigamask.data import index as indexes
    from gigamask.plugins.grounding.data import open_queries

    with suppress(GigamaskError):
        index = indexes.open_or_build(config.data, config.out)
        kept, _ = split_queries(config, config.loaded_queries, index)
        return index, open_queries(index, kept, config.seed)
    return None
