"""Models small enough to learn on a laptop's CPU: from scenes in minutes, from photographs in an hour."""

from dataclasses import replace

from gigamask.data.augment import Flip, LargeScaleJitter
from gigamask.data.choose import Filters
from gigamask.data.colour import ColourJitter
from gigamask.evaluate.click_evaluation import ClickEvaluation
from gigamask.losses.objective import MaskObjective
from gigamask.model import sizes
from gigamask.prompts.policy import InteractiveSchedule
from gigamask.samplers.shards import TarSubset
from gigamask.train.optim import MuonAdamW
from gigamask.train.schedule import WarmupCosine
from gigamask.train.segmentation import Loading, Segmentation


def tiny() -> Segmentation:
    """A 128-pixel SAM on synthetic scenes: `gigamask train tiny --data runs/demo/train --out runs/tiny`.

    Two CPU cores, about four minutes. Numbers: our own measurements (docs/measurements.md): two rounds where SAM plays eleven, because early
    in training the first ones teach the most for their cost; plain cross entropy (focal with gamma 0, balanced) where SAM has focal, which
    begins more slowly; Muon; an informed start with an encoder at half the rate, without which its embedding collapses before the decoder can use it.
    """
    return Segmentation(
        evaluation=ClickEvaluation(),
        recipe="tiny",
        model=sizes.tiny(),
        steps=1000,
        batch_size=4,
        micro_batch_size=4,
        loading=Loading(max_masks=8, augment=Flip(), workers=1),
        policy=InteractiveSchedule(clicks=1, pauses=False, box_noise_limit_px=2.5),
        objective=MaskObjective(focal_weight=2.0, alpha=0.5, gamma=0.0, iou_weight=2.0, iou_supervise="all"),
        optimizer=MuonAdamW(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, encoder_factor=0.5, muon_lr=0.03),
        schedule=WarmupCosine(warmup=50, final=0.01),
        save_every=300,
    )


def photos() -> Segmentation:
    """`tiny` with tokens of four pixels, for photographs: `gigamask train photos --data PHOTOS/*.tar SCENES/*.tar --out runs/photos`.

    Two CPU cores, one process on each (`torchrun --nproc-per-node 2 --no-python gigamask train photos ...`), about an hour. Every tar is visited
    equally often, which makes the mixture: four tars of photographs and one of synthetic scenes are four to one. Numbers: our own measurements
    (docs/measurements.md), which also say how far it gets.
    """
    base = tiny()
    return replace(
        base,
        recipe="photos",
        model=replace(base.model, patch=4),
        steps=3000,
        micro_batch_size=2,
        sampler=TarSubset(per_tar=50, mixed=True),
        loading=Loading(
            filters=Filters(min_predicted_iou=0.7),
            max_masks=8,
            augment=LargeScaleJitter(low=0.8, high=1.6),
            colour=ColourJitter(0.2, 0.2, 0.2),
            workers=0,
        ),
        policy=InteractiveSchedule(clicks=1, pauses=False, box_noise_limit_px=1.5, central_share=0.8),
        schedule=WarmupCosine(warmup=100, final=0.01),
        save_every=500,
    )
