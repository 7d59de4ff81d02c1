"""The image models of SAM 2.1: fine-tuning, prediction, and their weights in others' files."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="sam2",
    recipes={
        "train": {
            "sam2_tiny": "gigamask.plugins.sam2.recipes:sam2_tiny",
            "sam2_small": "gigamask.plugins.sam2.recipes:sam2_small",
            "sam2_base_plus": "gigamask.plugins.sam2.recipes:sam2_base_plus",
            "sam2_large": "gigamask.plugins.sam2.recipes:sam2_large",
        }
    },
    components={
        "model.encoder": {"hiera": "gigamask.plugins.sam2.configs:Hiera"},
        "model.decoder": {"sam2": "gigamask.plugins.sam2.configs:Sam2Decoder"},
    },
    model_families={"sam2": "gigamask.plugins.sam2.family:SAM2"},
)
