"""`gigamask benchmark`: number of clicks on a benchmark, beside published scores."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.parser import Positional
from gigamask.plugins.benchmarks.benchmark import BenchmarkOptions, find


@dataclass(frozen=True)
class BenchmarkCommand(BenchmarkOptions):
    """score weights on a benchmark of the literature, such as clicks to an IoU of 0.9 on GrabCut"""

    name: Annotated[str | None, Positional("NAME")] = None
    """grabcut, berkeley, sbd, davis, pascalvoc, coco_mval, coco, lvis, sa1k, or bsds"""
    weights: Annotated[str | None, Positional("WEIGHTS")] = None
    """a run folder, a checkpoint, a .pth, a .safetensors, a Hugging Face folder or id, or starter,
    the small model in this package"""
    data: tuple[str, ...] = ()
    """the folder that the benchmark was unpacked in, for coco and lvis the one that holds val2017;
    for sa1k and bsds: tars, folders of tars,
    globs, or an index"""
    reproduce: str | None = None
    """also compare with what a recipe's paper published, and what was reached before; without NAME,
    only print these"""
    pictures: str | None = None
    """folder for a figure of the masks that need most clicks"""
    json: str | None = None
    """write the scores to this JSON file, with the IoU of every mask after every click"""

    def check(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        BenchmarkOptions.check(self)
        if self.name is None and self.reproduce is None:
            raise GigamaskError(
                "name a benchmark and weights: gigamask benchmark grabcut WEIGHTS --data GrabCut"
            )
        if self.name is not None:
            find(self.name)
        if self.name is not None and (self.weights is None or not self.data):
            raise GigamaskError(
                f"benchmark {self.name} needs weights and --data: "
                f"gigamask benchmark {self.name} WEIGHTS --data DIR"
            )

    def run(self) -> dict[str, Any]:
        """Score the weights; print and return the scores."""
        from gigamask.plugins.benchmarks import benchmark, reproductions

        self.check()
        known = {}
        if self.reproduce is not None:
            known["reproduce"] = reproductions.describe(self.reproduce)
        if self.name is None or self.weights is None:
            summary = None
        else:
            with ExitStack() as stack:
                summary = self._score(self.name, self.weights, stack)
        if self.reproduce is not None:
            print(benchmark.reproduction_text(self.reproduce, summary))
        return {**(summary or {}), **known}

    def _score(self, name: str, weights: str, stack: ExitStack) -> dict[str, Any]:
        """Score the weights, and print the table and what is wrong with the worst masks."""
        from gigamask.cli.commands.output import print_skipped
        from gigamask.models.weight_paths import check_weights_exist
        from gigamask.plugins.benchmarks import benchmark

        check_weights_exist(weights)
        if self.pictures:
            files.check_out(self.pictures, "pictures", lambda entry: True)
        done = benchmark.run(name, weights, self.data, self, stack)
        from gigamask.distributed.precision import autocast
        from gigamask.evaluation import figures, noc

        print(benchmark.table(done.summary))
        for answer, scores in done.summary["answers"].items():
            if "seconds_per_prompt" in scores:
                print(f"{answer}: {1000 * scores['seconds_per_prompt']:.0f} ms per prompt")
        if benchmark.find(name).instances and not any(
            "AP" in scores for scores in done.summary["answers"].values()
        ):
            print(f"no mask AP: {benchmark.NO_BOXES}")
        first = self.answers[0]
        if "failed" in done.summary["answers"].get(first, {}):
            for line in noc.worst_lines(done.summary["answers"][first]):
                print(line)
        print_skipped("images", done.summary["skipped"])
        if self.pictures:
            with autocast(done.summary["precision"], done.model.device):
                folder = Path(self.pictures)
                if benchmark.find(name).instances:
                    shown = done.model, done.images, done.results["confident"], folder
                    print("\n".join(map(str, figures.write_figures(*shown))))
                else:
                    print(noc.write_worst(done.model, done.images, done.results[first], folder))
        return done.summary
