"""What the commands of the docs of encoders need, beside `tests.journeys.doc_fixtures`."""

import warnings
from pathlib import Path


def populate(folder: Path) -> None:
    """A backbone of transformers with random weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoBackbone, ConvNextConfig

    backbone = ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
    AutoBackbone.from_config(backbone).save_pretrained(folder / "backbones/convnext")
