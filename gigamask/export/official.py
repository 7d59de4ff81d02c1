"""Meta's own format: a state dict by `torch.save`, which `segment_anything.sam_model_registry` loads, and whatever is built on that.

Not here: names of tensors, which are Meta's here as well (`model.weights`).
"""

from pathlib import Path

import torch

from gigamask.errors import GigamaskError
from gigamask.models import state_dict
from gigamask.models.sam.sam import Sam


def write_pth(model: Sam, out: Path) -> dict:
    """Writes a `.pth` and reads it back, as weights alone; every tensor must be the model's to the last bit."""
    if out.suffix != ".pth":
        raise GigamaskError(f"--out {out}: Meta's format is a file that ends in .pth; give one")
    state = state_dict.to_official(model)
    state_dict.write_atomically(out, lambda path: save(state, path))
    return held_against(state, out)


def save(state: state_dict.State, path: Path) -> None:
    """Writes a state dict by `torch.save`, through a file of Python's: one that torch opens itself does not say why it cannot be written."""
    with open(path, "wb") as file:
        torch.save(state, file)


def write_safetensors(model: Sam, out: Path) -> dict:
    """Writes a `.safetensors` under Meta's names, with the model's sizes in its header, and reads it back likewise."""
    if out.suffix != ".safetensors":
        raise GigamaskError(f"--out {out}: give a file that ends in .safetensors")
    state = state_dict.to_official(model)
    state_dict.save_weights(state, model.config, out)
    return held_against(state, out)


def held_against(state: state_dict.State, out: Path) -> dict:
    """Returns how many tensors and bytes a file holds; raises `GigamaskError` naming the first that is not the one that was written."""
    found, _ = state_dict.read_weights(out)
    odd = [
        name
        for name in state.keys() | found.keys()
        if name not in found or name not in state or not torch.equal(state[name], found[name])
    ]
    if odd:
        raise GigamaskError(
            f"{out}: {min(odd)} is not what was written; the disk may be failing, write it again elsewhere"
        )
    return {"files": [str(out)], "tensors": len(state), "difference": 0.0}
