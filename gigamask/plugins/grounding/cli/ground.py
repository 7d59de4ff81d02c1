"""`gigamask ground`: evaluate a grounding model, and parse its other commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from gigamask import parser
from gigamask.errors import GigamaskError
from gigamask.parser import Positional

if TYPE_CHECKING:
    from gigamask.plugins.grounding.config import GroundingTrainConfig
    from gigamask.plugins.grounding.inference import GroundingPredictor

USAGE = """usage: gigamask ground train RECIPE --segmenter WEIGHTS --data PATH... --queries FILE...
                             --out RUN [--section.field value ...]
       gigamask ground train --resume RUN
       gigamask ground evaluate RUN [--data PATH... --queries FILE...] [--calibrate]
       gigamask ground synth FOLDER [--images N]
       gigamask ground memory [--language MODEL]"""


class GroundCommand:
    """find masks by text: train a model (ground train), evaluate it, write scenes, plan memory"""


@dataclass(frozen=True)
class GroundEvaluateCommand:
    """score a grounding model on queries, beside baselines that do not look at the image"""

    weights: Annotated[str, Positional("RUN")]
    """run folder of 'gigamask ground train', or one of its checkpoints"""
    data: tuple[str, ...] = ()
    """tars, folders of tars, globs, or an index; default: the run's evaluation data or held-out
    images"""
    queries: tuple[str, ...] = ()
    """JSONL files of queries about the images of --data"""
    calibrate: bool = False
    """save the confidence fitted to these queries in the run folder, for 'gigamask ask' and later
    evaluations, which otherwise score the saved one"""
    segmenter: str | None = None
    """new path of the segmenter's weights if they have moved"""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto uses cuda if available"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Evaluate, print the metrics with those of the baselines, and return them."""
        if bool(self.data) != bool(self.queries):
            raise GigamaskError(
                "--data and --queries must be passed together; "
                "pass both, or neither for the held-out images"
            )
        config = load_config(self.weights, self.segmenter, self.device, self.trust)
        from gigamask.plugins.grounding.calibration import Confidence
        from gigamask.plugins.grounding.config import (
            GroundingEvalConfig,
            evaluation_set,
            training_set,
        )
        from gigamask.plugins.grounding.evaluation import (
            evaluate,
            format_table,
            nonsense_dataset,
            score_queries,
        )
        from gigamask.plugins.grounding.inference import load_model
        from gigamask.plugins.grounding.metrics import PositionPrior
        from gigamask.progress import progress_bar

        if not isinstance(config.evaluation, GroundingEvalConfig):  # a user-defined evaluator
            config = replace(config, evaluation=GroundingEvalConfig())
        if self.data:
            evaluation = replace(config.evaluation, data=self.data, queries=self.queries)
            config = replace(config, evaluation=evaluation)
        elif not config.evaluation.data and not config.val_split:
            raise GigamaskError(
                f"{config.out}: the training held out no images; "
                "pass --data PATH... --queries FILE..."
            )
        model = load_model(config, self.weights)
        index, dataset = evaluation_set(config)
        with progress_bar("score queries") as progress:
            results, skipped = score_queries(model, config.query_loader(dataset, index), progress)
            unknown = nonsense_dataset(dataset, index, config.seed)
            nonsense, _ = score_queries(model, config.query_loader(unknown, index))
        training = training_set(config)
        prior = PositionPrior.fit(training[1], training[0]) if training else None
        saved = None if self.calibrate else Confidence.find(config.out)
        report = evaluate(results, dataset, index, prior, skipped, nonsense, saved)
        source = config.evaluation if config.evaluation.data else config
        summary = report.summary() | {
            "weights": self.weights,
            "run": config.out,
            "segmenter": config.segmenter,
            "data": list(source.data),
            "query_files": list(source.queries),
            "val_split": 0.0 if config.evaluation.data else config.val_split,
        }
        print(format_table(summary))
        for reason in skipped:
            print(f"  skipped {reason}")
        if self.calibrate:
            path = report.confidence.save(config.out)
            print(f"{path}: how confident 'gigamask ask' is, and when it prints that no mask fits")
            if not report.confidence.threshold:
                print("  its threshold stays 0: no other does better in cross-validation")
        return summary


def load_config(
    path: str, segmenter: str | None, device: str, trust: bool = False
) -> GroundingTrainConfig:
    """Load the config of a grounding run.

    Args:
        path: Run folder or one of its checkpoints.
        segmenter: New path of the segmenter's weights; None keeps the saved one.
        device: Device to run on.
        trust: Whether to import components that are not built in.

    Returns:
        The config, whose `out` is the run folder.

    Raises:
        GigamaskError: The path is not that of a grounding run.
    """
    from gigamask import config_files
    from gigamask.plugins.grounding.config import GroundingTrainConfig

    folder = str(config_files.run_folder_of(path) or path)
    config = config_files.load_config(folder, trust)
    if not isinstance(config, GroundingTrainConfig):
        raise GigamaskError(
            f"{path}: not a grounding run; pass the folder of a 'gigamask ground train'"
        )
    return replace(config, out=folder, segmenter=segmenter or config.segmenter, device=device)


def open_predictor(run: str, device: str, trust: bool = False) -> GroundingPredictor:
    """Open a grounding run, to find masks by text.

    Args:
        run: Run folder or one of its checkpoints.
        device: Device to run on.
        trust: Whether to import components that are not built in.

    Raises:
        GigamaskError: The path is not that of a grounding run, or has no checkpoint.
    """
    from gigamask.plugins.grounding.inference import GroundingPredictor

    return GroundingPredictor.from_checkpoint(load_config(run, None, device, trust), run)


def parse(arguments: Sequence[str]) -> Any:
    """Parse the flags of `ground evaluate`, `synth` and `memory`; `ground train` is a training."""
    from gigamask.plugins.grounding.cli.memory import GroundMemoryCommand
    from gigamask.plugins.grounding.cli.synth import GroundSynthCommand

    known = {
        "evaluate": GroundEvaluateCommand,
        "synth": GroundSynthCommand,
        "memory": GroundMemoryCommand,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{GroundCommand.__doc__}\n\nEach has its own --help.")
        raise SystemExit(0)
    name, *rest = arguments
    if name not in known:
        raise GigamaskError(
            f"unknown command 'ground {name}'; choose train, {', '.join(known)}; "
            "see 'gigamask ground --help'"
        )
    return parser.parse(known[name], rest, f"gigamask ground {name}")
