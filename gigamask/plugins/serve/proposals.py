"""Masks that the current model proposes for the images that remain, in a thread.

Each image is saved as soon as it is done, so stopping loses nothing and starting again continues.
"""

import threading
from dataclasses import replace
from typing import Any

import numpy as np

from gigamask.errors import GigamaskError
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import MaskProposals, SamAutomaticMaskGenerator
from gigamask.inference.classes import class_fields
from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.annotator import Annotator
from gigamask.plugins.serve.edits import Edit, MaskObject
from gigamask.plugins.serve.project import read_usable
from gigamask.plugins.serve.prompt_steps import PromptStep
from gigamask.plugins.serve.session import StoppedError, generate_proposals

THREAD = "proposals"
MIN_PREDICTED_IOU = 0.6
"""By default, proposals have at least this; of those below, hardly any is an object."""
MAX_OVERLAP = 0.5
"""A proposal is left out if a more certain one shares more than this with it, of the smaller."""


class Proposals:
    """Proposes masks for the images of a project, and accepts those that are certain."""

    def __init__(self, annotator: Annotator, settings: AutomaticMaskConfig | None = None) -> None:
        """Start idle.

        Args:
            annotator: The project, and the session with the model.
            settings: How masks are generated.
        """
        self.annotator, self.project = annotator, annotator.project
        self._settings = settings or AutomaticMaskConfig()
        if self._settings.pred_iou_thresh is None:
            default = annotator.session.model.config.decoder.pred_iou_thresh
            least = max(default, MIN_PREDICTED_IOU)
            self._settings = replace(self._settings, pred_iou_thresh=least)
        self.state: dict[str, Any] = {
            "running": False,
            "done": 0,
            "total": 0,
            "failed": 0,
            "fault": None,
        }
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to propose masks for all images that are not begun, or only proposed before."""
        with self._lock:
            if self.state["running"]:
                raise GigamaskError("masks are being proposed already; wait, or stop it")
            rows = self._remaining()
            if not rows:
                raise GigamaskError("no image remains: all are begun or proposed by this model")
            self.state.update(running=True, done=0, total=len(rows), failed=0, fault=None)
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(rows,), name=THREAD)
            self._thread.start()

    def accept(self, threshold: float) -> int:
        """Accept all proposals that are at least this certain; finish images without others.

        Args:
            threshold: Least certainty.

        Returns:
            The number of accepted masks.
        """
        count = 0
        for row, each in enumerate(self.project.summary()):
            if not each["open"] or max(each["open"]) < threshold:
                continue
            with self.project.lock:  # nobody changes it meanwhile
                found = read_usable(self.project, row)
                if found is None:
                    continue
                chosen = {
                    key: replace(one, accepted=True, origin="accepted in bulk")
                    for key, one in found.objects.items()
                    if one.is_open and one.certainty >= threshold
                }
                if not chosen:  # another judged them since they were listed
                    continue
                changed = found.with_edit(self.project.stamped(Edit("accept all", dict(chosen))))
                finished = replace(
                    changed, done=all(one.accepted for one in changed.objects.values())
                )
                self.project.change(row, found.version, lambda _, finished=finished: finished)
                count += len(chosen)
        return count

    def stop(self, wait: bool = False) -> None:
        """Stop; the image in progress is left as it was.

        Args:
            wait: Whether to wait until it has stopped.
        """
        self._stop.set()
        if wait and self._thread is not None:
            self._thread.join()

    def _remaining(self) -> list[int]:
        """Return the images to propose masks for."""
        model = self.project.content.model
        return [
            row
            for row, each in enumerate(self.project.summary())
            if each["status"] == "not begun"
            or (
                each["status"] == "proposed"
                and (found := read_usable(self.project, row))
                and found.proposed_by != model
            )
        ]

    def _run(self, rows: list[int]) -> None:
        model = self.project.content.model
        generator = SamAutomaticMaskGenerator(self.annotator.session.model, **vars(self._settings))
        try:
            for row in rows:
                if self._stop.is_set():
                    return
                try:
                    self._propose(row, generator, model)
                except StoppedError:
                    return
                except Exception as error:  # such as too little memory; the others may go well
                    self.state["fault"] = str(error) or repr(error)
                    self.state["failed"] += 1
                self.state["done"] += 1
        finally:
            self.state["running"] = False

    def _propose(self, row: int, generator: SamAutomaticMaskGenerator, model: int) -> None:
        """Propose masks for an image unless it was begun meanwhile."""
        key, size = self.annotator.with_key(row)
        opened = self.annotator.session.images.get(key)
        version = self.project.read(row, size).version
        stops = self._stop, self.annotator.session.stopping
        proposals = without_overlaps(generate_proposals(generator, opened, *stops))
        found = self.project.read(row, size)
        if found.version != version or found.status not in ("not begun", "proposed"):
            return
        accepted = [each.mask for each in found.objects.values() if not each.is_open]
        proposals = apart_from(proposals, RLEMasks.from_coco(accepted, found.size))
        replaced = (key for key, each in found.objects.items() if each.is_open)
        changes: dict[int, MaskObject | None] = dict.fromkeys(replaced)
        first = found.next_id
        content = self.project.content
        known, renamed = [each.name for each in content.categories], content.renamed
        classes = class_fields(proposals.class_scores, generator.model.config.class_names)
        for key, counts in enumerate(proposals.masks.to_coco(), first):
            i, mask = key - first, counts.decode()
            x, y = proposals.points_xy[i].tolist()
            named = classes[i]["category"] if classes else ""
            changes[key] = MaskObject(
                mask,
                category=named if named in known else renamed.get(named, known[0]),
                by_model=True,
                base=mask,
                steps=(PromptStep(point=(x, y)),),
                predicted_iou=round(float(proposals.predicted_iou[i]), 4),
                stability=round(float(proposals.stability_score[i]), 4),
                origin="proposed",
                model=model,
            )
        edit = self.project.stamped(Edit("propose", changes))
        self.project.change(
            row, version, lambda one: replace(one.with_edit(edit), proposed_by=model), size
        )


def apart_from(proposals: MaskProposals, masks: RLEMasks) -> MaskProposals:
    """Return the proposals that no mask mostly covers or lies within.

    Args:
        proposals: The proposals of one image.
        masks: What it has.
    """
    shared = proposals.masks.intersections(masks)
    smaller = np.minimum(proposals.masks.areas()[:, None], masks.areas())
    return proposals[np.flatnonzero((shared <= MAX_OVERLAP * smaller).all(1))]


def without_overlaps(proposals: MaskProposals) -> MaskProposals:
    """Return the proposals that no more certain one mostly covers or lies within.

    Args:
        proposals: The masks of one image.
    """
    proposals = proposals[np.argsort(-proposals.certainty, kind="stable")]
    areas = proposals.masks.areas()
    shared = proposals.masks.intersections(proposals.masks)
    kept: list[int] = []
    for i in np.flatnonzero(areas):
        smaller = np.minimum(areas[kept], areas[i])
        if not (shared[i, kept] > MAX_OVERLAP * smaller).any():
            kept.append(int(i))
    return proposals[np.array(kept, np.int64)]
