"""`gigamask ask`: which masks of an image a text means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, arg

from gigamask.faults import Fault
from gigamask.predict.settings import Settings

if TYPE_CHECKING:
    import numpy as np

    from gigamask.geometry.runs import Runs
    from gigamask.model.sam import Sam


@dataclass(frozen=True)
class Verb:
    """finds what a text means in an image: masks with confidences, or that nothing there fits"""

    weights: Positional[Annotated[str, arg(metavar="RUN")]]
    """the folder of a 'ground train', or one of its checkpoints"""
    image: Positional[Annotated[str, arg(metavar="IMAGE")]]
    """a picture, all of which is segmented first; or TAR:IMAGE, whose own masks are chosen from"""
    texts: Positional[Annotated[tuple[str, ...], arg(metavar="TEXT ...")]]
    """what to look for, each in quotes"""
    annotation: str | None = None
    """a json in SA-1B's form with the masks to choose from, as 'gigamask segment' writes it"""
    top: int = 3
    """the most masks to name for a text"""
    pictures: str | None = None
    """folder for a picture of each text's answers"""
    segmenter: str | None = None
    """where the segmenter's weights are now, if they have moved"""
    device: str = "auto"
    """auto is cuda when there is one"""
    masks: Annotated[Settings, OmitArgPrefixes] = field(default_factory=Settings)
    """of a picture without masks, what is asked and which masks stay; names and defaults are those of SamAutomaticMaskGenerator"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from pathlib import Path

        import cv2

        from gigamask.grounding import asking
        from gigamask.verbs.ground import opened_run

        if self.top < 1:
            raise Fault(f"--top is {self.top}, at least one mask can be named; give 1 or more")
        if not self.texts:
            raise Fault('no text was given; say what to look for: gigamask ask RUN IMAGE "the red box"')
        folder, run = opened_run(self.weights, self.segmenter, self.device)
        pixels, masks = self._opened()
        asker = asking.Asker(run, asking.load(run, self.weights), asking.load_confidence(folder))
        masks = self._candidates(asker.gallery.model, pixels) if masks is None else masks
        found = asker.ask(pixels, masks, self.texts)
        told = []
        for number, each in enumerate(found):
            shown = [self._told(masks, each, rank) for rank in range(min(self.top, len(masks)))]
            print(f"{each.text}: " + ("nothing here fits" if not each.fitting else f"{each.fitting} of {len(masks)} masks fit"))
            for one in shown[: max(each.fitting, 1)]:
                place = "x {} to {}, y {} to {}".format(*(one["box"][i] for i in (0, 2, 1, 3)))
                print(f"  {'' if each.fitting else 'best is '}mask {one['mask']}: {100 * one['confidence']:.0f} % sure, {place}")
            told.append({"text": each.text, "fitting": each.fitting, "candidates": len(masks), "best": shown})
            if self.pictures:
                path = Path(self.pictures) / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), asking.drawn(pixels, masks, each, self.top)[..., ::-1])
                print(f"  {path}")
        return {"image": self.image, "answers": told}

    def _told(self, masks: Runs, found: Any, rank: int) -> dict[str, Any]:
        number = int(found.order[rank])
        one = masks[number : number + 1]
        return {"mask": number, "confidence": float(found.confidence[rank]), "box": one.boxes()[0].tolist(), "area": int(one.areas()[0])}

    def _opened(self) -> tuple[np.ndarray, Runs | None]:
        """Returns the picture and the masks to choose from: those given, or its own in its tar; None where there are neither."""
        from pathlib import Path

        from gigamask.data.dataset import RawSample, Sa1bDataset
        from gigamask.verbs.opening import opened_sample

        path, json = Path(self.image), None
        if path.is_file():
            jpg = path.read_bytes()
        elif ":" in self.image:
            with opened_sample(self.image) as (index, row):
                _, jpg, json = Sa1bDataset(index).read(row)
        else:
            raise Fault(f"{self.image}: no such file; give a picture, or TAR:IMAGE")
        if self.annotation:
            if not Path(self.annotation).is_file():
                raise Fault(f"--annotation {self.annotation}: no such file; give a json in SA-1B's form, or leave it out")
            json = Path(self.annotation).read_bytes()
        if json is None:
            return RawSample(self.image, jpg, None).pixels(), None
        entry = RawSample(self.annotation or self.image, jpg, json).annotation()
        if not len(entry.masks):
            raise Fault(f"{self.annotation or self.image}: there is no mask to choose from; give another, or leave it out")
        return RawSample(self.image, jpg, json).pixels(entry.size), entry.masks

    def _candidates(self, model: Sam, pixels: np.ndarray) -> Runs:
        """Returns all masks that the segmenter finds; an untrained one's may be empty, which nobody means."""
        import numpy as np

        from gigamask.predict.automatic import AutomaticMasks

        found = AutomaticMasks(model, **self.masks.told()).find(pixels).masks
        masks = found[np.flatnonzero(found.areas())]
        if not len(masks):
            raise Fault(f"{self.image}: there is no mask to choose from; lower --pred-iou-thresh and --stability-score-thresh")
        return masks
