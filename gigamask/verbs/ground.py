"""`gigamask ground`: trains what finds masks by words (`ground train`), and scores it (`ground evaluate`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from gigamask import parser
from gigamask.faults import Fault

if TYPE_CHECKING:
    from gigamask.grounding.run import Grounding

USAGE = """usage: gigamask ground train RECIPE --segmenter WEIGHTS --data PATH... --queries FILE... --out RUN [--section.leaf value ...]
       gigamask ground train --resume RUN
       gigamask ground evaluate RUN [--data PATH... --queries FILE...] [--calibrate]"""


@dataclass(frozen=True)
class Verb:
    """trains what finds masks by words (ground train), and scores it beside rules that do not look (ground evaluate)"""

    weights: Positional[Annotated[str, arg(metavar="RUN")]]
    """the folder of a 'ground train', or one of its checkpoints"""
    data: tuple[str, ...] = ()
    """tars, folders of tars, globs, or an index; by default the images that the training held out or was evaluated on"""
    queries: tuple[str, ...] = ()
    """JSONL files of queries about them"""
    calibrate: bool = False
    """keep the confidence that is fitted to these queries in the run folder, where 'gigamask ask' finds it"""
    segmenter: str | None = None
    """where the segmenter's weights are now, if they have moved"""
    device: str = "auto"
    """auto is cuda when there is one"""
    json: str | None = None
    """file for the scores, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.grounding import asking, progress, scores
        from gigamask.grounding.items import open_queries
        from gigamask.grounding.run import Watching
        from gigamask.verbs.progress import bar

        if bool(self.data) != bool(self.queries):
            raise Fault("--data and --queries belong together; give both, or neither for what the training held out")
        folder, run = opened_run(self.weights, self.segmenter, self.device)
        if not isinstance(run.evaluation, Watching):  # one of the user's own, during training alone
            run = replace(run, evaluation=Watching())
        if self.data:
            run = replace(run, evaluation=replace(run.evaluation, data=self.data, queries=self.queries))
        elif not run.evaluation.data and not run.hold_out:
            raise Fault(f"{folder}: its training held nothing out; name tars and their queries: --data PATH... --queries FILE...")
        model = asking.load(run, self.weights)
        index, catalogue = progress.held_out(run)
        asked = progress.questioner(run, index, catalogue)
        with bar("ask") as shown:
            answers, bad = scores.ask(model, asked, shown)
        trained = progress.trained_on(run)
        prior = scores.Prior.of(open_queries(trained[0], trained[1], run.seed), trained[0]) if trained else None
        result = scores.judge(answers, catalogue, index, prior, bad)
        named = run.evaluation if run.evaluation.data else run
        told = {"data": list(named.data), "query_files": list(named.queries), "hold_out": 0.0 if run.evaluation.data else run.hold_out}
        summary = result.summary() | {"weights": self.weights, "run": folder, "segmenter": run.segmenter, **told}
        print(scores.table(summary))
        for reason in bad:
            print(f"  left out {reason}")
        if self.calibrate:
            print(asking.save_confidence(folder, result.confidence))
        return summary


def opened_run(path: str, segmenter: str | None, device: str) -> tuple[str, Grounding]:
    """Returns the folder and the configuration of the run that a path means, itself or by one of its checkpoints."""
    from pathlib import Path

    from gigamask import arguments
    from gigamask.grounding.run import Grounding

    folder = next((each for each in (Path(path), Path(path).parent.parent) if (each / arguments.CONFIG).is_file()), Path(path))
    run = arguments.load_run(str(folder))
    if not isinstance(run, Grounding):
        raise Fault(f"{path}: was trained by 'gigamask train' and knows no words; give the folder of a 'gigamask ground train'")
    return str(folder), replace(run, out=str(folder), segmenter=segmenter or run.segmenter, device=device)


def parse(words: Sequence[str]) -> Verb:
    """Returns the verb that the words describe; training is a matter of `gigamask.training`."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{Verb.__doc__}\n\n'gigamask ground train --help' lists recipes, 'gigamask ground evaluate --help' flags.")
        raise SystemExit(0)
    if words[0] != "evaluate":
        raise Fault(f"ground {words[0]!r} is not known, it is train or evaluate; see 'gigamask ground --help'")
    return parser.parse(Verb, words[1:], "gigamask ground evaluate")
