"""A run small enough for tests, over a dozen synthetic scenes."""

from pathlib import Path

from gigamask.data.augment import Flip
from gigamask.evaluate.click_evaluation import ClickEvaluation
from gigamask.model.sizes import SamSpec
from gigamask.prompts.policy import InteractiveSchedule
from gigamask.train.optim import AdamW
from gigamask.train.schedule import WarmupCosine
from gigamask.train.segmentation import Loading, Segmentation

SPEC = SamSpec(
    input_side=64,
    patch=8,
    dim=16,
    depth=2,
    heads=2,
    window=4,
    global_blocks=(1,),
    drop_path=0.1,
    embedding_dim=16,
    decoder_heads=2,
    decoder_mlp=32,
    iou_hidden=16,
)


def little() -> Segmentation:
    """A model of a few thousand parameters, two rounds, one process."""
    return Segmentation(
        evaluation=ClickEvaluation(),
        recipe=f"{Path(__file__).resolve()}:little",
        model=SPEC,
        steps=4,
        batch_size=3,
        micro_batch_size=2,
        masks_per_chunk=5,
        loading=Loading(max_masks=4, augment=Flip(), workers=0),
        policy=InteractiveSchedule(clicks=1, pauses=True),
        optimizer=AdamW(lr=1e-3, layer_decay=0.9),
        schedule=WarmupCosine(warmup=2),
        save_every=2,
        log_every=1,
        device="cpu",
    )
