"""Where weights lie: files, run folders, checkpoints, models of the Hugging Face Hub, `starter`.

Imports no torch, so that a command finds a wrong path at once.
"""

import os
from difflib import get_close_matches
from pathlib import Path
from shlex import quote

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.models import manifest
from gigamask.models.hub import download, parse_hub_id

PASS_WEIGHTS = (
    "pass a run folder, a checkpoint, a .pth, a .safetensors, a Hugging Face folder or id, "
    "or starter"
)
"""What to do if there are no weights, for error messages."""
PROCESSORS = "preprocessor_config.json", "processor_config.json"
"""What an image processor of transformers is saved as, until version 4 and since version 5."""
STARTER = "starter"
"""Name of the weights in this package: the model `compact`, trained on synthetic scenes alone."""
STARTER_FILE = Path(__file__).parent / "starter.safetensors"


def find_weights(path: Path | str) -> Path:
    """Return the file of weights that a path or id names.

    Args:
        path: As for `read_weights`.

    Raises:
        GigamaskError: There is no such file.
    """
    folder = Path(path)
    if hub := parse_hub_id(path):
        folder = download(hub[0], ("config.json", manifest.MODEL), PROCESSORS, hub[1])
    if str(path) == STARTER and not os.path.lexists(folder):
        return STARTER_FILE
    if folder.is_dir():
        folder = manifest.newest(folder) or folder
        if not (folder / manifest.MODEL).is_file():
            runs = sorted(str(each.parent) for each in folder.glob("*/checkpoints"))
            act = f"one of its runs: {', '.join(runs)}" if runs else "a folder that does, or a file"
            raise GigamaskError(f"{path}: holds no {manifest.MODEL}; give {act}")
        return folder / manifest.MODEL
    if not folder.is_file():
        check_weights_exist(str(path))
        raise GigamaskError(f"{path}: not a regular file; {PASS_WEIGHTS}")
    return folder


def check_weights_exist(path: str, given: str = "") -> None:
    """Raise an error if there are no weights of a path.

    Args:
        path: As for `read_weights`.
        given: What the user gave if it is more than the path, such as "--init mae:PATH".

    Raises:
        GigamaskError: There is no such file or folder.
    """
    if not may_be_weights(path):
        where = files.relative_to(path)
        near = f"perhaps you meant {STARTER}; " * bool(get_close_matches(path, [STARTER]))
        raise GigamaskError(f"{given or path}: no such file or folder{where}; {near}{PASS_WEIGHTS}")


def check_order(weights: str, images: str, command: str) -> None:
    """Raise `GigamaskError` if weights were given for images, and images for weights.

    Args:
        weights: What was given as weights.
        images: What was given as images.
        command: The command as it should be, with `{}` for weights and images.
    """
    folder = Path(images)
    is_run = (folder / "checkpoints").is_dir() or folder.suffix in (".pth", ".safetensors")
    is_weights = is_run or (not folder.exists() and may_be_weights(images))
    if is_weights and os.path.isdir(weights) and not os.path.isdir(f"{weights}/checkpoints"):
        raise GigamaskError(
            f"{images}: weights, not images; perhaps you meant "
            f"'{command.format(quote(images), quote(weights))}', with the weights first"
        )


def may_be_weights(path: Path | str) -> bool:
    """Return whether a path exists, or is an id of the Hub or `starter`.

    Args:
        path: What a user gave as weights.
    """
    return Path(path).exists() or str(path) == STARTER or bool(parse_hub_id(path))
