"""A model small enough to learn on a laptop's CPU in minutes."""

from gigamask.data.augment import Flip
from gigamask.losses.objective import MaskObjective
from gigamask.model import sizes
from gigamask.prompts.policy import InteractiveSchedule
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
        recipe="tiny",
        model=sizes.tiny(),
        steps=1000,
        batch=4,
        micro=4,
        loading=Loading(max_masks=8, augment=Flip(), workers=1),
        policy=InteractiveSchedule(clicks=1, pauses=False, box_noise_limit_px=2.5),
        objective=MaskObjective(focal_weight=2.0, alpha=0.5, gamma=0.0, iou_weight=2.0, iou_supervise="all"),
        optimizer=MuonAdamW(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, encoder_factor=0.5, muon_lr=0.03),
        schedule=WarmupCosine(warmup=50, final=0.01),
        save_every=300,
    )
