"""The command line: `gigamask VERB ...`, one frozen dataclass a verb, whose fields are its flags.

Whatever is wrong with what the user asked or gave is one line on standard error and exit code 2; a traceback is a bug.
Verbs import what they need when they run, so that `--help` answers at once.

Not here: what the verbs do (`prepare`, `train`, `evaluate`, `follow`, `demo`), how words become values (`arguments`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from gigamask.faults import Fault

if TYPE_CHECKING:
    from gigamask.data.index import Index

STOPPED = 75  # EX_TEMPFAIL: told to stop before the end; the same command continues


@dataclass(frozen=True)
class SynthVerb:
    """makes shards of synthetic scenes in SA-1B's format"""

    folder: Positional[str]
    """where the tars go"""
    images: int = 256
    """how many scenes"""
    seed: int = 0
    """names the scenes: the same seed and number give the same bytes"""
    first: int = 0
    """number of the first scene; scenes with other numbers are other scenes"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.prepare import synthetic

        paths = synthetic.write(self.folder, self.images, seed=self.seed, first=self.first)
        print(f"{self.images} scenes in {len(paths)} tars under {self.folder}")
        print(f"next: gigamask train tiny --data {self.folder} --out runs/tiny")
        return {"images": self.images, "tars": [str(path) for path in paths]}


@dataclass(frozen=True)
class IndexVerb:
    """scans tars once and writes an index of every image and mask"""

    paths: Positional[tuple[str, ...]]
    """tars, folders of tars, or globs"""
    out: str
    """the index folder to write"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from rich.console import Console
        from rich.progress import Progress

        from gigamask.data import index as indexes

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("index", total=None)
            built = indexes.build(self.paths, self.out, lambda done, total: bar.update(task, completed=done, total=total))
        report = built.report()
        print(f"{self.out}: {report['images']} images with {report['masks']} masks in {report['shards']} tars")
        for what in ("without_json", "without_jpg", "other_members"):
            if report[what]:
                print(f"  {what.replace('_', ' ')}: {report[what]}")
        for each in report["rejected"]:
            print(f"  left out {each['reason']}")
        print(f"next: gigamask stats {self.out}")
        return report


@dataclass(frozen=True)
class StatsVerb:
    """describes tars or an index: masks per image, areas, scores, sizes"""

    paths: Positional[tuple[str, ...]]
    """an index, or tars to index in passing"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.prepare import statistics

        with opened(self.paths) as index:
            stats = statistics.describe(index)
        print(statistics.table(stats))
        return stats


@dataclass(frozen=True)
class EvaluateVerb:
    """scores weights on shards: mean IoU after 1, 2, 3, 5 and 9 clicks, best of three masks, and for a box"""

    weights: Positional[str]
    """a run folder, a checkpoint, an official .pth, a .safetensors, or a Hugging Face folder"""
    data: tuple[str, ...]
    """tars, folders of tars, globs, or an index"""
    min_predicted_iou: float | None = None
    """only masks whose annotation has at least this predicted_iou"""
    images: int | None = None
    """only the first so many images"""
    feed_mask: bool = True
    """feed the previous answer back with each further click"""
    device: str = "auto"
    """auto is cuda when there is one"""
    pictures: str | None = None
    """folder for sheets of the best, worst and typical answers"""
    json: str | None = None
    """file for the scores, as data"""

    def run(self) -> dict[str, Any]:
        from rich.progress import track

        from gigamask.data.choose import Filters
        from gigamask.evaluate import interactive, pictures
        from gigamask.train.checkpoint import load_model

        model = load_model(self.weights, self.device)
        with opened(self.data) as index:
            rows = range(len(index) if self.images is None else min(self.images, len(index)))
            filters = Filters(max_area=None, min_predicted_iou=self.min_predicted_iou)
            seen = track(rows, "evaluate", transient=True)
            result = interactive.measure(model, index, filters, interactive.Protocol(feed_mask=self.feed_mask), seen)
            summary = result.summary() | {"weights": self.weights, "data": list(self.data), "rejected": result.rejected}
            print(interactive.table(summary))
            for reason in result.rejected:
                print(f"  left out {reason}")
            if self.pictures:
                for path in pictures.write_sheets(model, index, result, Path(self.pictures)):
                    print(path)
        return summary


@dataclass(frozen=True)
class FollowVerb:
    """carries one real sample through the nine doors of training and prints type, shape, time and bytes at each"""

    sample: Positional[str]
    """TAR:IMAGE, the image by name (sa_1) or by its image_id (1)"""
    recipe: str = "tiny"
    """the recipe whose model and settings are used"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask import follow, recipes

        tar, colon, name = self.sample.rpartition(":")
        if not colon:
            raise Fault(f"{self.sample!r} names no sample; write TAR:IMAGE, such as {self.sample}:0")
        with opened([tar]) as index:
            doors = follow.follow(index, index.find(f"{Path(tar).name}:{name}"), recipes.find(self.recipe)())
        return {"doors": doors}


@dataclass(frozen=True)
class DemoVerb:
    """makes scenes, trains the tiny model on them, evaluates it on scenes it never saw, and draws its answers"""

    out: str = "runs/demo"
    """where everything goes"""
    train_images: int = 1600
    """scenes to train on"""
    test_images: int = 60
    """held-out scenes"""
    steps: int | None = None
    """updates; the recipe's own number by default"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask import demo

        return demo.run(self.out, self.train_images, self.test_images, self.steps)


VERBS: dict[str, Any] = {
    "index": IndexVerb,
    "stats": StatsVerb,
    "synth": SynthVerb,
    "evaluate": EvaluateVerb,
    "follow": FollowVerb,
    "demo": DemoVerb,
}
TRAIN = "trains a recipe, or continues a run: train RECIPE --data PATH... --out RUN, or train --resume RUN"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 0, 2 for what the user can mend, 75 when told to stop before the end."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            return dispatch(words)
    except Fault as fault:
        print(f"gigamask: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gigamask: interrupted", file=sys.stderr)
        return 130


def show_warning(message: Warning | str, category: type, filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    """Prints a warning as one line, without the place in the code it came from."""
    print(f"gigamask: {message}", file=sys.stderr)


def dispatch(words: list[str]) -> int:
    """Runs the verb that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] == "--version":
        from gigamask import __version__

        print(f"gigamask {__version__}")
        return 0
    from gigamask import arguments

    if words[0] == "train":
        return train(words[1:])
    if words[0] not in VERBS:
        raise Fault(f"no verb is called {words[0]!r}; known are {', '.join(sorted([*VERBS, 'train']))}; see 'gigamask --help'")
    verb = arguments.parse(VERBS[words[0]], words[1:], f"gigamask {words[0]}")
    write_json(verb.json, verb.run())
    return 0


def overview() -> str:
    """Returns what `gigamask --help` prints."""
    lines = {**{name: verb.__doc__ for name, verb in VERBS.items()}, "train": TRAIN}
    order = ("synth", "index", "stats", "train", "evaluate", "follow", "demo")
    rows = "\n".join(f"  {name:9} {lines[name]}" for name in order)
    head = "usage: gigamask VERB ...\n\nTrains Segment Anything from scratch, from SA-1B's tars."
    return f"{head}\n\n{rows}\n\n'gigamask VERB --help' lists a verb's flags."


def train(words: list[str]) -> int:
    """Trains a recipe, or continues a run."""
    from gigamask import arguments

    if words and words[0] in ("-h", "--help"):
        print(training_overview())
        return 0
    flags = arguments.parse_train(words)
    run, changed = arguments.settle(flags)
    if flags.print_config:
        print(arguments.text_of(run))
        return 0
    for name, (before, now) in changed.items():
        print(f"--{name} was {before} and is {now} from here on")
    arguments.save_run(run)
    from gigamask.train.loop import train as train_run

    state = train_run(run)
    done = {"run": run.out, "step": state.step, "samples": state.cursor.samples, "steps": run.steps}
    write_json(flags.json, done)
    if state.step < run.steps:
        print(f"{run.out}: stopped and saved at step {state.step} of {run.steps}; continue with: gigamask train --resume {run.out}")
        return STOPPED
    print(f"{run.out}: {state.step} steps, {state.cursor.samples} samples\nnext: gigamask evaluate {run.out} --data PATH...")
    return 0


def training_overview() -> str:
    """Returns what `gigamask train --help` prints: the forms and the recipes."""
    from gigamask import recipes

    rows = "\n".join(f"  {recipe.__name__:10} {(recipe.__doc__ or '').strip().splitlines()[0]}" for recipe in recipes.BUILT_IN)
    return (
        "usage: gigamask train RECIPE --data PATH... --out RUN [--section.leaf value ...]\n       gigamask train --resume RUN\n\n"
        f"recipes:\n{rows}\n  file.py:function  your own, a function that returns a Run\n\n"
        "'gigamask train RECIPE --help' lists every flag and its value there."
    )


@contextmanager
def opened(paths: Sequence[str]) -> Iterator[Index]:
    """Opens the index of some paths; tars that have none are indexed into a folder that is gone afterwards."""
    from gigamask.data import index as indexes

    with tempfile.TemporaryDirectory() as folder:
        yield indexes.open_or_build(paths, folder)


def write_json(path: str | None, content: dict[str, Any]) -> None:
    """Writes what a verb printed as data, when a file was named."""
    if path:
        try:
            Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")
        except OSError as error:
            raise Fault(f"--json {path}: cannot be written ({error.strerror}); name a file in a folder that exists") from None
