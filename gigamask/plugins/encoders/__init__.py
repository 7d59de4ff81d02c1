"""Image encoders besides SAM's: RepViT's convolutions, and the backbones of transformers."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="encoders",
    components={
        "model.encoder": {
            "repvit": "gigamask.plugins.encoders.configs:RepViT",
            "hf": "gigamask.plugins.encoders.configs:HuggingFaceBackbone",
        }
    },
)
