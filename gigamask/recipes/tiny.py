"""A model small enough to learn on a laptop's CPU in minutes."""

from gigamask.data.augment import Flip
from gigamask.losses.objective import MaskObjective
from gigamask.model import sizes
from gigamask.prompts.policy import InteractiveSchedule
from gigamask.train.optim import AdamW
from gigamask.train.run import Loading, Run
from gigamask.train.schedule import WarmupCosine


def tiny() -> Run:
    """A 128-pixel SAM on synthetic scenes: `gigamask train tiny --data runs/demo/train --out runs/tiny`.

    Two CPU cores, about four minutes. Numbers: our own measurements (docs/measurements.md); fewer rounds than SAM's eleven, because early
    in training the first rounds teach the most for their cost.
    """
    return Run(
        recipe="tiny",
        model=sizes.tiny(),
        steps=900,
        batch=4,
        micro=4,
        loading=Loading(max_masks=6, augment=Flip(), workers=1),
        policy=InteractiveSchedule(clicks=2, pauses=False, box_noise_limit_px=2.5),
        objective=MaskObjective(iou_supervise="all"),
        optimizer=AdamW(lr=1e-3, betas=(0.9, 0.98)),
        schedule=WarmupCosine(warmup=50, final=0.01),
        save_every=300,
    )
