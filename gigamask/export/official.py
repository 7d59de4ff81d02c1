"""Export to Meta's formats: a `.pth` for `segment_anything.sam_model_registry`, or safetensors.

Tensors have Meta's names.
"""

from pathlib import Path

import torch

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.models import convert, state_dict
from gigamask.models.sam.sam import Sam


def write_pth(model: Sam, out: Path) -> dict:
    """Write a model as Meta's `.pth`, and read it back as weights only.

    Args:
        model: Model to export.
        out: File that ends in .pth.

    Returns:
        `files`, the number of `tensors`, and their `difference`, 0.

    Raises:
        GigamaskError: The file has another suffix, or a tensor does not read back as written.
    """
    if out.suffix != ".pth":
        raise GigamaskError(f"--out {out}: Meta's format requires a file that ends in .pth")
    state = state_dict.to_official(model)
    files.write_atomically(out, lambda path: _save(state, path))
    return _verify(state, out)


def write_safetensors(model: Sam, out: Path) -> dict:
    """Write a model as `.safetensors` with its configuration in the header, and read it back.

    Args:
        model: Model to export.
        out: File that ends in .safetensors.

    Returns:
        `files`, the number of `tensors`, and their `difference`, 0.

    Raises:
        GigamaskError: The file has another suffix, or a tensor does not read back as written.
    """
    if out.suffix != ".safetensors":
        raise GigamaskError(f"--out {out}: requires a file that ends in .safetensors")
    state = state_dict.to_official(model)
    state_dict.save_weights(state, model.config, out)
    return _verify(state, out)


def _save(state: convert.State, path: Path) -> None:
    """Write a state dict to a Python file, whose errors say why writing fails."""
    with open(path, "wb") as file:
        torch.save(state, file)


def _verify(state: convert.State, out: Path) -> dict:
    """Check that a file holds exactly this state, and describe it."""
    actual, _ = state_dict.read_weights(out)
    different = [
        name
        for name in state.keys() | actual.keys()
        if name not in actual or name not in state or not torch.equal(state[name], actual[name])
    ]
    if different:
        raise GigamaskError(
            f"{out}: {min(different)} does not read back as it was written; the disk may be "
            "failing; write to another one"
        )
    return {"files": [str(out)], "tensors": len(state), "difference": 0.0}
