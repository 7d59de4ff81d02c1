"""Train a round of a project, and compare its model with the one before.

`rounds` starts it as a process of its own.

Run: python -m gigamask.plugins.serve.training_round FOLDER
"""

import json
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from jaxtyping import Float64, Int64

from gigamask import files
from gigamask.data.mask_sampling import MaskFilters
from gigamask.datatools.export_formats import COCO
from gigamask.distributed.precision import choose_device
from gigamask.errors import GigamaskError, TrainingInterruptedError
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.evaluation.clicks import evaluate_clicks
from gigamask.evaluation.noc import EVERY_CLICK, iou_curves, number_of_clicks
from gigamask.files import exclusive_lock
from gigamask.models.configs import WindowDecoder
from gigamask.models.promptable import PromptableModel
from gigamask.pixels import PixelConfig
from gigamask.plugins.serve.project import TrainingRound
from gigamask.recipes.photographs import compact
from gigamask.recipes.sam import finetune_laptop
from gigamask.serialization import read_json
from gigamask.training.checkpoint import load_model
from gigamask.training.sam_config import SamTrainConfig
from gigamask.workflows.open_data import open_or_build_temporary
from gigamask.workflows.step_time import measure_step
from gigamask.workflows.train import count_processes, train

TARGET_IOU = 0.9
MEASURED_STEPS = 5
MAX_STEPS = 2000


@dataclass(frozen=True)
class RoundSettings:
    """The settings of a round, in round.json.

    Attributes:
        init: Weights to start from.
        minutes: How long to train.
        device: Device to train on.
        weights: Path of the run within the project.
        steps: Steps to train; None until they are measured.
        pixels: How images of more than 8 bits are read; None if there are none.
    """

    init: str
    minutes: float
    device: str
    weights: str
    steps: int | None = None
    pixels: PixelConfig | None = None

    def load_model(self, weights: str, device: str) -> PromptableModel:
        """Return a model that reads the images as the page did.

        Args:
            weights: The weights.
            device: Device of the model.
        """
        model = load_model(weights, device)
        if self.pixels is not None:
            model.config = replace(model.config, pixels=self.pixels)
        return model


def make_config(folder: Path, settings: RoundSettings) -> SamTrainConfig:
    """Return the training of a round: the decoder of the model, on the round's images.

    It trains the classes too if there are two categories or more, or the model has classes.

    Args:
        folder: Folder of the round.
        settings: Its settings.
    """
    model = settings.load_model(settings.init, "cpu").config
    listed = read_json(folder / "train" / COCO, dict)["categories"]
    if len(listed) > 1 or model.class_names:
        model = replace(model, class_names=tuple(each["name"] for each in listed))
    is_compact = model.model == WindowDecoder.model
    config = (compact() if is_compact else finetune_laptop()).with_(
        model=model,
        data=(str(folder / "train" / "shards"),),
        out=str(folder / "run"),
        init=settings.init,
        device=settings.device,
        steps=settings.steps or MEASURED_STEPS,
        save_every=20,
        log_every=1,
        loader__workers=0,
        loader__filters=MaskFilters(max_area=None),  # a person accepted them
        schedule__min_lr_ratio=0.01,
        **({} if is_compact else {"embedding_cache": str(folder / "embeddings")}),
    )
    held_out = ClickEvaluation(data=(str(folder / "held_out" / "shards"),), interval=25)
    return config.with_(evaluation=held_out, freeze=("image_encoder",))


@dataclass(frozen=True)
class Score:
    """How well a model answers clicks on the held-out masks.

    Attributes:
        clicks: Of each mask, the number of clicks to an IoU of 0.9, at most 20.
        images: Row of the image of each mask.
        accuracy: Class accuracy after one click; None without classes.
    """

    clicks: Float64[np.ndarray, "n"]
    images: Int64[np.ndarray, "n"]
    accuracy: float | None


def score(model: PromptableModel, data: Path) -> Score:
    """Return how well a model answers clicks.

    Args:
        model: The model.
        data: Folder of shards.
    """
    with open_or_build_temporary(data) as index:
        result = evaluate_clicks(model, index, MaskFilters(max_area=None), EVERY_CLICK)
    clicks, _ = number_of_clicks(iou_curves(result), TARGET_IOU)
    accuracy = result.summary().get("class_accuracy", {}).get("1")
    images = np.array([each.row for each in result.scores], np.int64)
    return Score(clicks.astype(np.float64), images, accuracy)


def standard_error(
    differences: Float64[np.ndarray, "n"], images: Int64[np.ndarray, "n"]
) -> float | None:
    """Return the standard error of the mean of differences; None if all are of one image.

    Masks of an image resemble each other, so that images count as draws, not masks.

    Args:
        differences: A number of each mask.
        images: The image of each mask.
    """
    _, image = np.unique(images, return_inverse=True)
    sums = np.bincount(image, differences - differences.mean())
    if len(sums) < 2:
        return None
    return math.sqrt(len(sums) / (len(sums) - 1) * np.square(sums).sum()) / len(differences)


def run_round(folder: Path) -> TrainingRound | None:
    """Train a round, or continue it, and compare its model with the one before.

    Args:
        folder: Folder of the round.

    Returns:
        The result, which is also written; None if the training was interrupted, and saved.
    """
    settings = read_json(folder / "round.json", RoundSettings)
    if settings.steps is None:
        config = make_config(folder, settings)
        on_cpu = choose_device(config.device).type == "cpu"
        step_cpu_s = measure_step(config, MEASURED_STEPS) if on_cpu else 0.1
        processes = count_processes(config, choose_device(config.device), os.environ)
        steps = min(max(1, round(60 * settings.minutes * processes / step_cpu_s)), MAX_STEPS)
        settings = replace(settings, steps=steps)
        files.write_bytes(folder / "round.json", msgspec.json.encode(settings))
    run = train(make_config(folder, settings))
    if not run.finished:
        return None
    data = folder / "held_out" / "shards"
    before = score(settings.load_model(settings.init, settings.device), data)
    after = score(settings.load_model(str(folder / "run"), settings.device), data)
    error = standard_error(before.clicks - after.clicks, before.images)
    result = TrainingRound(
        settings.weights,
        round(float(before.clicks.mean()), 3),
        round(float(after.clicks.mean()), 3),
        len(before.clicks),
        after.accuracy,
        len(np.unique(before.images)),
        None if error is None else round(error, 3),
    )
    files.write_text(folder / "result.json", json.dumps(vars(result)))
    return result


def main() -> int:
    """Run the round in the folder that the command line names; return the exit code."""
    folder = Path(sys.argv[1])
    try:
        with exclusive_lock(folder / ".lock", f"{folder}: is being trained by another process"):
            return 75 if run_round(folder) is None else 0
    except TrainingInterruptedError as error:
        print(error, flush=True)
        return 75
    except GigamaskError as error:
        print(error, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
