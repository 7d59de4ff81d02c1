"""Edges of automatic masks held against the outlines of the masks that shards hold: ODS, OIS and AP, approximately.

Enters images, one by one; leaves numbers by name. Maps are made as the SAM paper's appendix D.2 says, counts as Berkeley's benchmark makes them. The
benchmark's own truth are several people's drawings; SA-1B's format does not say who drew what (of BSDS500 in that format, neither which people drew a
mask that was merged with others), so all of an image's masks are one drawing here. Compare models by these numbers, not with published ones.

Not here: the map (`edge_maps`), matching and counting (`edges`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float32

from gigamask.evaluate import edges
from gigamask.evaluate.edge_maps import edge_map
from gigamask.evaluate.scenes import Scene
from gigamask.geometry.boundary import outline
from gigamask.geometry.boxes import suppress
from gigamask.geometry.runs import Runs
from gigamask.model.sam import Sam


@dataclass(frozen=True)
class Protocol:
    """What the numbers depend on besides the weights; written beside every result."""

    name: str = "approximate edges: automatic masks against the outlines of the shards' own masks"
    truth: str = "one drawing an image, the outlines of all masks that pass the filters laid over each other; annotators are not told apart"
    points_per_side: int = 16
    """of the grid; three masks a point, none filtered by predicted IoU or stability"""
    box_nms_thresh: float = 0.7
    """of masks whose boxes have a greater IoU the one of the highest predicted IoU stays; the paper does not tell the number"""
    longest_px: int = 481
    """larger images are scored as if they had this long side, BSDS500's: the time of matching grows with the square of the area"""
    counts: edges.Protocol = field(default_factory=edges.Protocol)
    """how maps are matched and counted"""


@dataclass(frozen=True)
class Edges:
    """The counts of the images it is shown."""

    protocol: Protocol = field(default_factory=Protocol)
    counts: list[edges.Counts] = field(default_factory=list)

    def look(self, model: Sam, scene: Scene, numbers: np.ndarray) -> None:
        """Counts one image's edges, found and drawn."""
        scene = reduced(scene, self.protocol.longest_px)
        found = edge_map(grid_masks(model, scene, self.protocol), scene.frame.original)
        self.counts.append(edges.count(found, drawn(scene.entry.masks[numbers], scene.frame.original)[None], self.protocol.counts))

    @staticmethod
    def joined(parts: "Sequence[Edges]") -> "Edges":
        """Returns all parts' in order."""
        return Edges(parts[0].protocol, [each for part in parts for each in part.counts])

    def summary(self) -> dict:
        """Returns ODS, OIS, AP and R50 of what was counted, one image at least, and the protocol."""
        return {"images": len(self.counts), **edges.summarise(self.counts, self.protocol.counts), "protocol": asdict(self.protocol)}


def reduced(scene: Scene, longest_px: int) -> Scene:
    """Returns the scene as one of an image whose long side has at most so many pixels; its annotations stay as they are."""
    longest = max(scene.frame.original)
    if longest <= longest_px:
        return scene
    height, width = (max(1, round(side * longest_px / longest)) for side in scene.frame.original)
    return replace(scene, frame=replace(scene.frame, original=(height, width), crop=(0, 0, height, width)))


def drawn(masks: Runs, size: tuple[int, int]) -> Bool[np.ndarray, "H W"]:
    """Returns the outlines of masks, brought to `size` at the nearest pixels."""
    if masks.size != size:
        rows, columns = ((2 * np.arange(new) + 1) * old // (2 * new) for old, new in zip(masks.size, size, strict=True))
        masks = masks.resample(rows, columns)
    return np.logical_or.reduce([outline(mask) for mask in masks.to_dense()])


def grid_masks(model: Sam, scene: Scene, protocol: Protocol) -> Iterator[tuple[Bool[np.ndarray, "H W"], Float32[np.ndarray, "H W"]]]:
    """Yields the masks of a grid of points, less duplicates and empty ones, and their logits; few are at the image's size at a time."""
    decode, lows, ious, boxes, there = scene.decoder(model), [], [], [], []
    for prompts in scene.grid(protocol.points_per_side):
        answer = decode(prompts)
        masks = Runs.from_dense((answer.logits.flatten(0, 1) > 0).cpu().numpy())
        lows.append(answer.low.flatten(0, 1))
        ious.append(answer.iou.float().flatten().cpu().numpy())
        boxes.append(masks.boxes())
        there.append(masks.areas() > 0)
    low, whole = torch.cat(lows), np.flatnonzero(np.concatenate(there))
    kept = whole[suppress(np.concatenate(boxes)[whole], np.concatenate(ious)[whole], protocol.box_nms_thresh)]
    for some in scene.groups(kept):
        logits = scene.frame.logits_to_original(low[torch.from_numpy(some).to(low.device)][:, None])[:, 0].cpu().numpy()
        yield from ((each > 0, each) for each in logits)


def table(result: dict) -> str:
    """Returns the numbers as a line."""
    named = ", ".join(f"{name} {result[name]:.3f}" for name in ("ODS", "OIS", "AP"))
    return f"edges of automatic masks on {result['images']} images: {named} (approximate: against the outlines of the masks there)"
