"""The run that trains a relevance network over a trained segmenter: what it has beside every run's.

Imports no torch, so that `--help` answers at once.

Not here: what a step computes (`grounding.fit`), batches (`grounding.questions`), scores (`grounding.scores`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gigamask.faults import Fault
from gigamask.grounding.text import MiniLm, TextEncoder
from gigamask.losses.mining import EveryMask
from gigamask.model.sizes import RelevanceSpec
from gigamask.seams import Evaluator, Mining, Task, Verdict
from gigamask.train.run import Run, at_least

if TYPE_CHECKING:
    import torch

    from gigamask.data.index import Index
    from gigamask.data.queries import Query
    from gigamask.grounding.senses import Senses
    from gigamask.model.relevance import Relevance
    from gigamask.parallel.world import World
    from gigamask.train.supply import Supply


@dataclass(frozen=True)
class Watching(Evaluator):
    """How a training is watched on queries it does not train on; see `grounding.progress`."""

    data: tuple[str, ...] = ()
    """tars, folders of tars, globs, or an index; none: the images that are held out, if any"""
    queries: tuple[str, ...] = ()
    """JSONL files of queries about them"""
    every: int = 500
    """updates between evaluations"""
    count: int = 500
    """queries that are asked, always the same"""
    best_by: Literal["top 1", "top 3", "IoU", "answered"] = "answered"
    """the score of which the best checkpoint is kept, too"""

    @cached_property
    def asked(self) -> list[Query]:
        """The queries of its files, read once."""
        from gigamask.data import queries

        return queries.read(self.queries)

    def check(self) -> None:
        super().check()
        at_least(1, **{"evaluation.count": self.count})
        if bool(self.data) != bool(self.queries):
            raise Fault("--evaluation.data and --evaluation.queries belong together; give both, or neither to evaluate on what is held out")

    def look_ahead(self) -> None:
        """Raise `Fault` where the data are not tars or the queries cannot be read."""
        from gigamask.data.index import tars

        if self.data:
            tars(self.data)
        _ = self.queries and self.asked

    def open(self, run: Grounding, world: World) -> Callable[[Any], Verdict] | None:
        """Return the evaluation of a run, None where it has no queries to evaluate on."""
        from gigamask.grounding.progress import Progress

        progress = Progress.of(run, world)
        return None if progress is None else progress.run


@dataclass(frozen=True)
class Grounding(Run):
    """Everything that decides what the training of a relevance network does; its samples are queries, and `batch` and `micro` count these."""

    verb: ClassVar[str] = "ground train"
    next_step: ClassVar[str] = 'gigamask ask {out} IMAGE "WORDS", or gigamask ground evaluate {out}'

    queries: tuple[str, ...] = ()
    """JSONL files of queries about the data's images"""
    segmenter: str = ""
    """the trained segmenter, which stays as it is: a run folder, a checkpoint, an official .pth, a .safetensors, or a Hugging Face folder"""
    hold_out: float = 0.0
    """share of the images whose queries are not trained on but evaluated, chosen by the seed"""
    max_masks: int = 16
    """masks of an image that a query chooses from in training, all right ones among them; evaluation takes all"""
    alignment_weight: float = 1.0
    """what the loss of each mask against none counts beside that of masks against each other"""
    cache: str | None = None
    """folder for what is computed once of images and texts; None: the folder features of --out"""
    text: TextEncoder = field(default_factory=MiniLm)
    model: RelevanceSpec = field(default_factory=RelevanceSpec)
    mining: Mining = field(default_factory=EveryMask)
    evaluation: Watching = field(default_factory=Watching)

    def check(self) -> Grounding:
        """Returns the run itself when its numbers can be trained with; raises `Fault` otherwise."""
        at_least(1, max_masks=self.max_masks)
        if not self.queries:
            raise Fault(
                "--queries is empty, training needs texts with their right masks; name a JSONL file, or make one: gigamask synth DIR --queries"
            )
        if not self.segmenter:
            raise Fault("--segmenter is missing, it sees what texts are about; name the weights of a trained segmenter")
        if not 0 <= self.hold_out < 1:
            raise Fault(f"--hold-out is {self.hold_out}, a share of the images below 1; give such")
        if not self.alignment_weight >= 0:
            raise Fault(f"--alignment-weight is {self.alignment_weight}, it must be at least 0")
        if self.parallel != "ddp":
            raise Fault(f"--parallel {self.parallel} shares out an image encoder, here none is trained; leave it out")
        return super().check()

    def build(self, device: str = "cpu") -> Relevance:
        """Returns the network that the seed names, not yet trained, with the text model where that learns along.

        A text model is opened where the run computes: in 4 bits, or in half the width, it cannot be on a CPU first.
        """
        from gigamask.model.start import build
        from gigamask.parallel.precision import choose_device

        model = build(self.model, self.seed, device)
        if self.text.learns:
            model.text = self.senses.open_text(device if device == "meta" else choose_device(self.device))
        return model

    def task(self, device: torch.device) -> Task:
        """Returns what a step computes: the scores of each query's masks."""
        from gigamask.grounding.fit import RelevanceTask
        from gigamask.parallel.precision import choose_precision

        mining = None if isinstance(self.mining, EveryMask) else self.mining
        return RelevanceTask(self.alignment_weight, choose_precision(self.precision, device), mining)

    def supply(self, index: Index) -> Supply:
        """Returns what is trained on: the queries about images that are not held out."""
        from gigamask.grounding.items import open_queries
        from gigamask.train.supply import Supply

        kept, _ = self.split(self.asked, index)
        catalogue = open_queries(index, kept, self.seed)
        questioner = self.senses.questioner(catalogue, index, self.max_masks)
        return Supply(catalogue.items, catalogue.locate, f"queries {self.max_masks}", lambda pin: questioner)

    def look_ahead(self, earlier: Collection[str] = ()) -> None:
        """Check, before anything is trained, that data, queries and the segmenter exist."""
        super().look_ahead(earlier)
        _ = self.asked
        if not Path(self.segmenter).exists():
            act = "give a run folder, a checkpoint, a .pth, a .safetensors, or a Hugging Face folder"
            raise Fault(f"--segmenter {self.segmenter}: no such file or folder; {act}")

    @cached_property
    def asked(self) -> list[Query]:
        """The queries of its files, read once."""
        from gigamask.data import queries

        return queries.read(self.queries)

    @cached_property
    def senses(self) -> Senses:
        """What it sees and reads with, loaded once for training and evaluation alike."""
        from gigamask.grounding.senses import Senses

        kept = Path(self.cache or Path(self.out) / "features")
        return Senses(self.segmenter, self.text, self.model, self.device, self.seed, kept)

    @property
    def tables(self) -> tuple[str, ...]:
        """The files of queries."""
        return self.queries

    @property
    def strata(self) -> bool:
        """Whether mining looks within the sampler's strata."""
        return self.mining.by_sampler

    def split(self, queries: list[Query], index: Index) -> tuple[list[Query], list[Query]]:
        """Returns the queries that are trained on and those about images that are held out, which are chosen by name, whatever else is indexed."""
        from gigamask.data.queries import locate
        from gigamask.draws import draw

        if not self.hold_out:
            return queries, []
        names = [index.entry_name(int(row)).rpartition("/")[2] for row in locate(queries, index)]
        drawn = {name: float(draw(self.seed, f"hold out {name}").random()) for name in set(names)}
        out = [drawn[name] < self.hold_out for name in names]
        parts = tuple([query for query, held in zip(queries, out, strict=True) if held == wanted] for wanted in (False, True))
        if not parts[0]:
            raise Fault(f"--hold-out {self.hold_out} leaves no query to train on; hold out less, or give more --queries")
        return parts[0], parts[1]
