"""The estimate of a batch's memory that is often written: masks decoded to float32 at the image's own size, and activations of twice the weights.

Here it stands to be compared: the formula is the write-ups' own, its figures enter, a table beside what is planned leaves. No part of it is used.

Not here: what a training holds (`memory.planner`), what a sample costs (`memory.sample`).
"""

from collections.abc import Mapping
from typing import Any

from gigamask.memory.sample import decoded

ROWS = ("batch data", "weights", "activations", "gradients", "optimizer")
GB = 1e9


def written(images: int, size: tuple[int, int], masks: int, weights_gb: float) -> dict[str, float]:
    """Returns the estimate in bytes: samples as float32, weights as given, activations twice the weights an image, Adam's two moments."""
    sample, weights = decoded(size, masks), weights_gb * GB
    batch = float(images * (sample["image_uint8"] + sample["masks_float32"] + sample["annotations"]))
    kinds = {"batch data": batch, "weights": weights, "activations": 2 * weights * images, "gradients": weights, "optimizer": 2 * weights}
    return kinds | {"in all": sum(kinds.values())}


def beside(written: Mapping[str, float], phases: Mapping[str, Mapping[str, int]], phase: str) -> dict[str, Any]:
    """Returns the estimate with what is planned, in the phase that holds most, kind by kind."""
    planned = {"batch data": phases[phase]["batch"], **{kind: held for kind, held in phases[phase].items() if kind != "batch"}}
    return {"written": dict(written), "planned": planned | {"in all": sum(planned.values())}}


def table(found: Mapping[str, Any]) -> str:
    """Returns what `beside` found as plain text, in GB."""
    lines = [f"{'GB':14}{'as written':>12}{'planned here':>14}"]
    for kind in (*ROWS, "at work", "in all"):
        cells = [f"{found[column][kind] / GB:.2f}" if kind in found[column] else "" for column in ("written", "planned")]
        lines.append(f"{kind:14}{cells[0]:>12}{cells[1]:>14}")
    return "\n".join(lines)
