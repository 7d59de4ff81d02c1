"""The model card of an exported model: README.md in the form of the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from gigamask import files, plugin
from gigamask.errors import GigamaskError
from gigamask.evaluation.score_names import by_prompt, score_texts
from gigamask.export.formats import ExportFormat
from gigamask.models.configs import find_part
from gigamask.models.hub import parse_hub_id
from gigamask.report.history import History
from gigamask.report.summary import differing_flags

CARD, MARK = "README.md", "exported by gigamask"
UNINFORMATIVE = re.compile(
    r"(out|recipe|data|init|device|processes|save-every|keep|log-every|wandb|timeout-s"
    r"|loader\.(workers|read-ahead-mb|mask-store)|evaluation\..*|embedding-cache)"
)
"""Flags that do not say what was trained, or that other parts of the card state."""


def check_card(out: Path) -> None:
    """Raise `GigamaskError` if a folder holds a README that no export wrote.

    Args:
        out: The folder for an exported model.
    """
    card = out / CARD
    if card.is_file() and MARK not in card.read_text(encoding="utf-8", errors="replace"):
        raise GigamaskError(
            f"--out {out}: holds a {CARD} that no export wrote; give another folder"
        )


def write_card(
    out: Path,
    export_format: ExportFormat,
    name: str,
    run: History | None,
    recipe: Mapping[str, Any] | None,
    step: int | None = None,
    license_name: str | None = None,
) -> Path:
    """Write the card into the folder of an exported model.

    Args:
        out: The folder.
        export_format: Format of the model.
        name: Id on the Hub, or the folder's name.
        run: The run that trained it; None if it is not known.
        recipe: Configuration of the run's recipe; None if it cannot be read.
        step: The exported step.
        license_name: License of the weights, as the Hub names it.

    Returns:
        The file.
    """
    base = str(run.config.get("init") or "") if run else ""
    hub = parse_hub_id(base) if base and not base.startswith(("mae:", "decoder:")) else None
    head: dict[str, Any] = {
        "library_name": export_format.library,
        "pipeline_tag": "mask-generation",
        "tags": ["segment-anything", "gigamask"],
    }
    head |= {"license": license_name} if license_name else {}
    head |= {"base_model": hub[0]} if hub else {}
    decoder = find_part("decoder", str(run.config.get("model.decoder", "sam")) if run else "sam")
    family = plugin.load(decoder.family).huggingface if decoder else "Sam"
    kinds = {"kind": f"{family}Model", "processor": f"{family}Processor"}
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {name}\n",
        f"A promptable segmenter (Segment Anything), {MARK} {metadata.version('gigamask')}.\n",
        export_format.loading.format(name=name, base=hub[0] if hub else "BASE", **kinds),
        *([] if run is None else _of_run(run, recipe, step)),
        "## License\n",
        f"{license_name or 'Not stated. Ask the author before you use the weights.'}\n",
    ]
    path = out / CARD
    files.write_text(path, "\n".join(parts))
    return path


def _of_run(run: History, recipe: Mapping[str, Any] | None, step: int | None) -> list[str]:
    """Return the parts about training, data and scores."""
    config = run.config
    changed = differing_flags(recipe, config) if recipe else {}
    flags = [
        (f"`--{flag}`", _text(values[1]))
        for flag, values in changed.items()
        if not UNINFORMATIVE.fullmatch(flag) and values[1] is not None
    ]
    data = ", ".join(_names(config.get("data")))
    length = f"{step or config.get('steps', '?')} steps of {config.get('batch-size', '?')} images"
    parts = ["## Training\n", f"Recipe `{_names(config.get('recipe'))[0]}`, {length}, on {data}."]
    if config.get("init") not in (None, "null"):
        parts[-1] += f" It started from `{_names(config['init'])[0]}`."
    parts[-1] += "\n"
    if flags:
        parts += ["What differs from the recipe:\n", _table(["flag", "value"], flags)]
    scored = [each for each in run.evaluations if each["step"] == step and each["scores"]]
    if scored:
        held_out = ", ".join(_names(config.get("evaluation.data")))
        last = scored[-1]
        found, of = last["scores"], _text(last["of"])
        scores = {name: found[name] for name in found if re.search(r"click|oracle|box", name)}
        parts += [
            "## Scores\n",
            f"Mean IoU after {step} steps, {of or 'images'} of {held_out}: clicks in the middle of "
            "the largest error, the best of three masks (oracle), and the box.\n",
            _table(list(scores), [score_texts(scores, last["standard_error"])]),
        ]
    scores = run.scores or {}
    is_other = step is not None and scores.get("step", step) != step
    return [*parts, *_of_evaluation({} if is_other else scores)]


def _of_evaluation(scores: Mapping[str, Any]) -> list[str]:
    """Return the part about the scores of `gigamask evaluate`, if the run folder has them."""
    if not scores:
        return []
    values = by_prompt(scores)
    data, protocol = ", ".join(_names(scores.get("data", []))), scores.get("protocol", {})
    return [
        "## Evaluation\n",
        f"Mean IoU, {scores.get('masks', '?')} masks on {scores.get('images', '?')} "
        f"images of {data or 'data that are not stated'}, by `gigamask evaluate`.\n",
        _table(list(values), [score_texts(values, by_prompt(scores.get("standard_error", {})))]),
        "The protocol:\n",
        "".join(f"- {_text(key)}: {_text(value)}\n" for key, value in protocol.items()),
    ]


def _names(value: Any) -> list[str]:
    """Return the last parts of paths, which say enough and nothing about a machine."""
    paths = value if isinstance(value, list | tuple) else [value]
    return [
        _text(path if parse_hub_id(path) else str(path).rstrip("/").rpartition("/")[2])
        for path in map(str, paths)
    ]


def _text(value: Any) -> str:
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return re.sub(r"[|`\n<>]", " ", words)


def _table(head: list[str], rows: list[Any]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
