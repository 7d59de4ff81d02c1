"""Recipes beside SAM's own: another mix of prompts, one GPU, and weights that are there already. docs/recipes.md tells the source of each number."""

from dataclasses import replace

from gigamask.data.augment import Flip, ResizedCrop
from gigamask.data.colour import ColourJitter
from gigamask.evaluate.click_evaluation import ClickEvaluation
from gigamask.losses.objective import MaskObjective
from gigamask.model import sizes
from gigamask.prompts.mixed import MixedPrompts
from gigamask.recipes.sam import sam_vit_h
from gigamask.train.optim import AdamW, AdamW8bit
from gigamask.train.schedule import WarmupCosine
from gigamask.train.segmentation import Loading, Segmentation


def mixed_prompts() -> Segmentation:
    """SAM ViT-H by one round of mixed prompts: `gigamask train mixed_prompts --stages mae,decoder,joint --data /sa1b --out runs/mixed`.

    256 GPUs with one image each, as `sam_vit_h`, whose optimizer and length it shares; a cosine instead of drops, light augmentation. Some
    write-ups tell it as SAM's. They train the decoder alone for 5 of 95 "epochs", which the stages do. Hours: not measured.
    """
    loading = Loading(augment=ResizedCrop(), colour=ColourJitter(0.2, 0.2, 0.2))
    return replace(sam_vit_h(), recipe="mixed_prompts", policy=MixedPrompts(), schedule=WarmupCosine(warmup=250), loading=loading)


def one_gpu() -> Segmentation:
    """SAM ViT-B on one GPU, even a small one: `gigamask train one_gpu --data /sa1b/sa_0000*.tar --init mae:MAE_WEIGHTS --out runs/one`.

    Batches of 16 in eight parts, at most 32 masks an image, every encoder block recomputed, 8-bit AdamW (`pip install 'gigamask[quant]'`), focal loss
    with alpha .8. Its length is our choice: 1.44 million images, since the paper finds a million nearly as good as all (section 7.6). Memory is
    planned, hours are not measured: docs/recipes.md.
    """
    return Segmentation(
        evaluation=ClickEvaluation(),
        recipe="one_gpu",
        model=replace(sizes.vit_b(), drop_path=0.1),
        steps=90_000,
        batch_size=16,
        micro_batch_size=2,
        masks_per_chunk=32,
        recompute=1,
        loading=Loading(max_masks=32, workers=4),
        objective=MaskObjective(alpha=0.8),
        optimizer=AdamW8bit(lr=1e-4, layer_decay=0.8),
        save_every=1000,
    )


def finetune() -> Segmentation:
    """Official ViT-B weights on one's own masks: `gigamask train finetune --data TARS --init sam_vit_b_01ec64.pth --out runs/mine`.

    One GPU, hours not measured; the encoder stays as it is unless `--freeze` says otherwise. `--model.input-side 512` interpolates its positions.
    """
    return _finetune("finetune", sizes.vit_b())


def finetune_vit_l() -> Segmentation:
    """Official ViT-L weights on one's own masks: `gigamask train finetune_vit_l --data TARS --init sam_vit_l_0b3195.pth --out runs/mine`."""
    return _finetune("finetune_vit_l", sizes.vit_l())


def finetune_vit_h() -> Segmentation:
    """Official ViT-H weights on one's own masks: `gigamask train finetune_vit_h --data TARS --init sam_vit_h_4b8939.pth --out runs/mine`."""
    return _finetune("finetune_vit_h", sizes.vit_h())


def _finetune(name: str, model: sizes.SamSpec) -> Segmentation:
    """The numbers the three share are ours: a tenth of SAM's learning rate for B and H, the encoder frozen, flips."""
    return Segmentation(
        evaluation=ClickEvaluation(),
        recipe=name,
        freeze=("image_encoder",),
        model=model,
        steps=5000,
        batch_size=8,
        micro_batch_size=1,
        loading=Loading(max_masks=32, augment=Flip()),
        optimizer=AdamW(lr=8e-5),
        schedule=WarmupCosine(warmup=250, final=0.01),
    )
