"""What is looked at while a relevance network trains: the scores of a fixed few queries that it does not train on.

Enters: a `Grounding` run. Leaves: a value that the training loop asks every so many updates.

Not here: the scores themselves (`grounding.scores`), which checkpoint is kept (`train.checkpoint`).
"""

from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from gigamask.data import index as indexes
from gigamask.data.index import Index
from gigamask.data.queries import Query
from gigamask.draws import draw
from gigamask.faults import Fault
from gigamask.grounding import scores
from gigamask.grounding.items import Catalogue, open_queries
from gigamask.grounding.questions import Questioner
from gigamask.grounding.run import Grounding
from gigamask.model.relevance import Relevance
from gigamask.parallel.ranges import marked
from gigamask.parallel.world import World
from gigamask.seams import Verdict

SHOWN = {"top 1": "top_1", "top 3": "top_3", "IoU": "iou", "absent": "absent", "answered": "answered"}
"""What is said of a training, and its name among the scores."""


@dataclass(frozen=True)
class Progress:
    """Scores of a fixed subset of held-out queries, which the first process asks."""

    questioner: Questioner
    best_by: str
    world: World

    @classmethod
    def of(cls, run: Grounding, world: World | None = None) -> "Progress | None":
        """Returns the evaluator of a run, None where it has nothing to evaluate on; tars without an index are indexed once, into the run folder."""
        asked = run.evaluation
        if not asked.data and not run.hold_out:
            return None
        index, catalogue = held_out(run)
        some = draw(0, "evaluation").permutation(len(catalogue.queries))[: asked.count]
        if len(some) < len(catalogue.queries):
            catalogue = open_queries(index, [catalogue.queries[number] for number in sorted(some.tolist())], run.seed)
        return cls(questioner(run, index, catalogue), asked.best_by, world or World())

    @marked("evaluation")
    def run(self, model: Relevance) -> Verdict:
        """Returns the scores as shares of 1; a worry where images cannot be read."""
        found = self.world.each(lambda: self._verdict(model) if self.world.first else None)
        return next(part for part in self.world.gather(found) if part is not None)

    def _verdict(self, model: Relevance) -> Verdict:
        asked, catalogue = self.questioner, self.questioner.catalogue
        answers, bad = scores.ask(model, asked)
        found = scores.judge(answers, catalogue, asked.index, rejected=bad).summary()
        told = {name: found[key] for name, key in SHOWN.items() if found[key] is not None}
        worries = (f"{len(bad)} images cannot be read: {bad[0]}",) if bad else ()
        told_of = blake2b(repr(catalogue.queries).encode(), digest_size=8).hexdigest()
        subject = f"{self.best_by} of {len(catalogue.queries)} queries {told_of} on {asked.index.digest}"
        return Verdict(told, self.best_by if self.best_by in told else "answered", worries, subject)


def held_out(run: Grounding) -> tuple[Index, Catalogue]:
    """Returns the queries that a run is evaluated on, and the index that they are about: those it names, else those of the images held out.

    Raises `Fault` where no image is held out.
    """
    asked = run.evaluation
    if asked.data:
        index = indexes.open_or_build(asked.data, f"{run.out}/evaluation")
        return index, open_queries(index, asked.asked, run.seed)
    index = indexes.open_or_build(run.data, run.out)
    kept, out = run.split(run.asked, index)
    if not out:
        raise Fault(f"--hold-out {run.hold_out} holds out none of the images of {len(kept)} queries; hold out more, or name --evaluation.data")
    return index, open_queries(index, out, run.seed)


def trained_on(run: Grounding) -> tuple[Index, list[Query]] | None:
    """Returns the index and the queries that a run trained on, None where its data are not here any more."""
    with suppress(Fault):
        index = indexes.open_or_build(run.data, run.out)
        return index, run.split(run.asked, index)[0]
    return None


def questioner(run: Grounding, index: Index, catalogue: Catalogue) -> Questioner:
    """Returns what asks queries about all masks of their images."""
    most = int(index.images["masks"].max()) if len(index) else 1
    return run.senses.questioner(catalogue, index, max(most, 1))
