"""`gigamask ask`: find the masks of an image that texts describe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, arg

from gigamask.errors import GigamaskError
from gigamask.inference.amg_config import AutomaticMaskConfig

if TYPE_CHECKING:
    import numpy as np

    from gigamask.grounding.inference import GroundingResult
    from gigamask.masks.rle import RLEMasks
    from gigamask.models.sam.sam import Sam


@dataclass(frozen=True)
class AskCommand:
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
    masks: Annotated[AutomaticMaskConfig, OmitArgPrefixes] = field(
        default_factory=AutomaticMaskConfig
    )
    """of a picture without masks, what is asked and which masks stay; names and defaults are those of SamAutomaticMaskGenerator"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from pathlib import Path

        import cv2

        from gigamask.cli.commands.ground import load_config
        from gigamask.grounding.inference import GroundingPredictor, draw_result

        if self.top < 1:
            raise GigamaskError(f"--top must be >= 1, got {self.top}")
        if not self.texts:
            raise GigamaskError('TEXT is required, e.g. gigamask ask RUN IMAGE "the red box"')
        config = load_config(self.weights, self.segmenter, self.device)
        pixels, masks = self._load_image()
        predictor = GroundingPredictor.from_checkpoint(config, self.weights)
        masks = self._candidates(predictor.mask_features.model, pixels) if masks is None else masks
        answers = []
        for number, result in enumerate(predictor.predict(pixels, masks, self.texts)):
            best = [self._summary(masks, result, rank) for rank in range(min(self.top, len(masks)))]
            outcome = (
                f"{result.fitting} of {len(masks)} masks fit" if result.fitting else "no mask fits"
            )
            print(f"{result.text}: {outcome}")
            for mask in best[: max(result.fitting, 1)]:
                x0, y0, x1, y1 = mask["box"]
                prefix = "" if result.fitting else "best: "
                confidence = f"{100 * mask['confidence']:.0f} % confidence"
                print(
                    f"  {prefix}mask {mask['mask']}: {confidence}, x {x0} to {x1}, y {y0} to {y1}"
                )
            answers.append(
                {
                    "text": result.text,
                    "fitting": result.fitting,
                    "candidates": len(masks),
                    "best": best,
                }
            )
            if self.pictures:
                path = Path(self.pictures) / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), draw_result(pixels, masks, result, self.top)[..., ::-1])
                print(f"  {path}")
        return {"image": self.image, "answers": answers}

    def _summary(self, masks: RLEMasks, result: GroundingResult, rank: int) -> dict[str, Any]:
        number = int(result.order[rank])
        mask = masks[number : number + 1]
        return {
            "mask": number,
            "confidence": float(result.confidence[rank]),
            "box": mask.boxes()[0].tolist(),
            "area": int(mask.areas()[0]),
        }

    def _load_image(self) -> tuple[np.ndarray, RLEMasks | None]:
        """Return the image and its candidate masks, from --annotation or from its tar, None if there are none."""
        from pathlib import Path

        from gigamask.cli.commands.opening import opened_sample
        from gigamask.data.dataset import RawSample, Sa1bDataset

        path, json = Path(self.image), None
        if path.is_file():
            jpg = path.read_bytes()
        elif ":" in self.image:
            with opened_sample(self.image) as (index, row):
                _, jpg, json = Sa1bDataset(index).read(row)
        else:
            raise GigamaskError(f"{self.image}: no such file; pass an image file or TAR:IMAGE")
        if self.annotation:
            if not Path(self.annotation).is_file():
                raise GigamaskError(
                    f"--annotation {self.annotation}: no such file; pass a json in SA-1B's format"
                )
            json = Path(self.annotation).read_bytes()
        if json is None:
            return RawSample(self.image, jpg, None).pixels(), None
        entry = RawSample(self.annotation or self.image, jpg, json).annotation()
        if not len(entry.masks):
            raise GigamaskError(
                f"{self.annotation or self.image}: there is no mask to choose from; give another, or leave it out"
            )
        return RawSample(self.image, jpg, json).pixels(entry.size), entry.masks

    def _candidates(self, model: Sam, pixels: np.ndarray) -> RLEMasks:
        """Return the masks that the segmenter generates, without empty ones."""
        import numpy as np

        from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator

        masks = SamAutomaticMaskGenerator(model, **self.masks.told()).find(pixels).masks
        masks = masks[np.flatnonzero(masks.areas())]
        if not len(masks):
            raise GigamaskError(
                f"{self.image}: the segmenter finds no mask; lower --pred-iou-thresh and --stability-score-thresh"
            )
        return masks
