"""Files of the Hugging Face Hub, downloaded unless they are cached."""

import re
from collections.abc import Sequence
from pathlib import Path

from gigamask.errors import GigamaskError, first_line

PREFIX = "hf:"
"""Prefix of an id of the Hub, which is then never taken for a path."""
_ID = r"\w[\w.-]*/\w[\w.-]*"


def is_hub_id(path: Path | str) -> bool:
    """Return whether a path is an id of the Hugging Face Hub, `ORGANIZATION/NAME`.

    A path below an existing folder is not, so that a misspelled run folder is never looked up.

    Args:
        path: What a user gave as weights or as a model.
    """
    local = Path(path)
    is_file_name = local.suffix in (".pth", ".pt", ".bin", ".safetensors")
    return bool(re.fullmatch(_ID, str(path))) and not (is_file_name or local.parent.exists())


def parse_hub_id(path: Path | str) -> tuple[str, str | None] | None:
    """Return the model and revision that `ORG/NAME`, `ORG/NAME@REV` or `hf:ORG/NAME@REV` names.

    Args:
        path: What a user gave as weights.

    Returns:
        The id and the commit, branch or tag, None for the main branch; None for a path.

    Raises:
        GigamaskError: `hf:` does not precede an id.
    """
    text = str(path)
    hub_id, at, revision = text.removeprefix(PREFIX).partition("@")
    is_id = bool(re.fullmatch(_ID, hub_id)) and (
        not at or bool(re.fullmatch(r"[\w./-]+", revision))
    )
    if text.startswith(PREFIX) and not is_id:
        raise GigamaskError(
            f"{text[:120]}: expected hf:ORGANIZATION/NAME, with @REVISION if you want one, such as "
            "hf:facebook/sam-vit-base"
        )
    if is_id and (text.startswith(PREFIX) or (is_hub_id(hub_id) and not Path(text).exists())):
        return hub_id, revision or None
    return None


def upload(folder: Path, hub_id: str, written: Sequence[str]) -> str:
    """Send files of a folder to the Hub, as a new model or a new commit of one.

    Args:
        folder: The folder.
        hub_id: The model's id.
        written: The files, in the folder.

    Returns:
        The address of the commit.

    Raises:
        GigamaskError: The Hub cannot be reached or refuses, or huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise GigamaskError(
            f"--push {hub_id} needs huggingface_hub, which is not installed: "
            "run pip install 'gigamask[hf]'"
        ) from None
    try:
        HfApi().create_repo(hub_id, exist_ok=True)
        names = [Path(path).relative_to(folder).as_posix() for path in written]
        return str(HfApi().upload_folder(repo_id=hub_id, folder_path=folder, allow_patterns=names))
    except Exception as error:  # the HTTP library's, and those of the Hub
        raise GigamaskError(
            f"--push {hub_id}: not sent ({first_line(error)}); the folder {folder} is written: log "
            "in with hf auth login, and give the command again"
        ) from None


def has_file(hub_id: str, name: str, revision: str | None = None) -> bool:
    """Return whether a model of the Hub has a file, which is then downloaded.

    Args:
        hub_id: The model's id.
        name: The file.
        revision: Commit, branch or tag; None means its main branch.
    """
    try:
        download(hub_id, (name,), revision=revision)
    except GigamaskError:
        return False
    return True


def download(
    hub_id: str, required: Sequence[str], optional: Sequence[str] = (), revision: str | None = None
) -> Path:
    """Return the folder with files of a model of the Hub, downloaded unless they are cached.

    Args:
        hub_id: The model's id.
        required: Files of the model.
        optional: Files that it may lack.
        revision: Commit, branch or tag; None means its main branch.

    Raises:
        GigamaskError: There is no such model or file, or it can neither be reached nor is cached.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
    except ImportError:
        raise GigamaskError(
            f"{hub_id}: no such file or folder; for a model of the Hugging Face Hub, run "
            "pip install 'gigamask[hf]'"
        ) from None
    is_offline = False
    try:
        try:
            HfApi().model_info(hub_id, revision=revision)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # the HTTP library's; a download would retry for a minute
            is_offline = True
        paths = [
            hf_hub_download(hub_id, name, revision=revision, local_files_only=is_offline)
            for name in required
        ]
        for name in optional:
            try:
                hf_hub_download(hub_id, name, revision=revision, local_files_only=is_offline)
            except EntryNotFoundError:
                continue
        return Path(paths[0]).parent
    except (HfHubHTTPError, HFValidationError, EntryNotFoundError) as error:
        reason = "it cannot be reached" if is_offline else str(error).strip().splitlines()[0]
        name = f"{hub_id}@{revision}" if revision else hub_id
        raise GigamaskError(
            f"{name}: no such file or folder, and no model that can be downloaded from the "
            f"Hugging Face Hub ({reason})"
        ) from None
