"""Changes to a configuration by name, for benchmarks that try them one at a time.

Such as `activation_checkpointing=1`, `optimizer=adamw8bit,precision=bf16`, or `none`.
"""

from dataclasses import replace
from typing import TypeVar

from gigamask.training.config import TrainConfig
from gigamask.training.optim import AdamW, AdamW8bit, MuonAdamW

Kind = TypeVar("Kind", bound=TrainConfig)
EACH = (
    "none",
    "activation_checkpointing=4",
    "activation_checkpointing=2",
    "activation_checkpointing=1",
    "masks_per_chunk=4",
    "micro_batch_size=1",
    "optimizer=adamw8bit",
    "precision=bf16",
    "precision=fp16",
)
OPTIMIZERS = {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": MuonAdamW}


def pulled(run: Kind, levers: str) -> Kind:
    """Returns a run with leaves changed as `name=value,name=value` says."""
    for lever in levers.split(",") if levers != "none" else ():
        name, _, word = lever.partition("=")
        value = OPTIMIZERS[word]() if name == "optimizer" else int(word) if word.isdigit() else word
        run = replace(run, **{name: value})
    return run
