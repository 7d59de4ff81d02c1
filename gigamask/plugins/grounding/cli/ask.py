"""`gigamask ask`: find masks of an image by text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from gigamask.errors import GigamaskError, check_range, counted
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.parser import FLAT, Positional

if TYPE_CHECKING:
    import numpy as np

    from gigamask.masks.rle import RLEMasks
    from gigamask.models.promptable import PromptableModel
    from gigamask.pixels import PixelConfig
    from gigamask.plugins.grounding.inference import GroundingResult


@dataclass(frozen=True)
class AskCommand:
    """find the masks of an image that fit a text, with confidences, or report that none fits"""

    weights: Annotated[str, Positional("RUN")]
    """run folder of 'gigamask ground train', or one of its checkpoints"""
    image: Annotated[str, Positional("IMAGE")]
    """image file, which is segmented first, or TAR:IMAGE, whose annotated masks are used"""
    texts: Annotated[tuple[str, ...], Positional("TEXT ...")]
    """texts to find, each in quotes"""
    annotation: str | None = None
    """JSON file in SA-1B's format with the masks to choose from, e.g. from 'gigamask segment'"""
    top: int = 3
    """maximum number of masks to print per text"""
    pictures: str | None = None
    """folder for one picture per text, with its masks"""
    segmenter: str | None = None
    """new path of the segmenter's weights if they have moved"""
    device: str = "auto"
    """cpu, cuda, cuda:N or mps; auto uses cuda if available"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""
    masks: Annotated[AutomaticMaskConfig, FLAT] = field(default_factory=AutomaticMaskConfig)
    """how masks are generated for an image without masks: the arguments of
    SamAutomaticMaskGenerator"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Print and return the masks that fit each text."""
        from pathlib import Path

        from gigamask.data import image
        from gigamask.plugins.grounding.cli.ground import load_config
        from gigamask.plugins.grounding.vocabulary import check_text

        check_range("--top", self.top, 1)
        if not self.texts:
            raise GigamaskError('TEXT is required, e.g. gigamask ask RUN IMAGE "the red box"')
        for text in self.texts:
            check_text(text)
        config = load_config(self.weights, self.segmenter, self.device, self.trust)
        from gigamask.plugins.grounding.inference import GroundingPredictor, draw_result

        predictor = GroundingPredictor.from_checkpoint(config, self.weights)
        pixels, masks = self._load_image(predictor.mask_features.model.config.pixels)
        masks = self._candidates(predictor.mask_features.model, pixels) if masks is None else masks
        answers = []
        for number, result in enumerate(predictor.predict(pixels, masks, self.texts)):
            ranks = range(min(self.top, len(masks)))
            best = [self._summary(masks, result, rank) for rank in ranks]
            self._print(result, best, len(masks))
            answer = {
                "text": result.text,
                "num_matches": result.num_matches,
                "candidates": len(masks),
                "note": result.note,
                "best": best,
            }
            answers.append(answer)
            if self.pictures:
                path = Path(self.pictures) / f"answer_{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.write_png(path, draw_result(pixels, masks, result, self.top))
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

    def _print(self, result: GroundingResult, best: list[dict[str, Any]], candidates: int) -> None:
        """Print the masks that fit a text, or the best one if none does."""
        matches = f"{result.num_matches} of {counted(candidates, 'mask')} fit"
        print(f"{result.text}: {matches if result.num_matches else 'no mask fits'}")
        if result.note:
            print(f"  {result.note}")
        prefix = "" if result.num_matches else "best: "
        for mask in best[: max(result.num_matches, 1)]:
            x0, y0, x1, y1 = mask["box"]
            print(
                f"  {prefix}mask {mask['mask']}: confidence {mask['confidence']:.3f}, "
                f"x {x0} to {x1}, y {y0} to {y1}"
            )

    def _load_image(self, pixels: PixelConfig) -> tuple[np.ndarray, RLEMasks | None]:
        """Return the image, and its masks from --annotation or the tar (None without either).

        An image file is taken upright, unless the size of its annotation is that of the stored one.

        Args:
            pixels: Channels and window of the segmenter.
        """
        from pathlib import Path

        from gigamask.data import image
        from gigamask.data.dataset import RawSample, Sa1bDataset
        from gigamask.data.orientation import turn
        from gigamask.datatools.image_files import fit
        from gigamask.workflows.open_data import open_sample

        path, json, size, masks = Path(self.image), None, None, None
        if self.image.endswith(".tar"):
            raise GigamaskError(f"{path}: is a tar; name an image in it, such as {path}:sa_1")
        if path.is_dir():
            raise GigamaskError(f"{path}: is a folder; pass one of its images, or TAR:IMAGE")
        if path.is_file():
            jpg = path.read_bytes()
        elif ":" in self.image:
            with open_sample(self.image) as (index, row):
                _, jpg, json = Sa1bDataset(index).read(row)
        else:
            raise GigamaskError(
                f"{self.image}: no such file; IMAGE, before TEXT, is an image file or TAR:IMAGE"
            )
        if self.annotation:
            if not Path(self.annotation).is_file():
                raise GigamaskError(
                    f"--annotation {self.annotation}: no such file; pass a JSON in SA-1B's format"
                )
            json = Path(self.annotation).read_bytes()
        if json is not None:
            name = self.annotation or self.image
            annotation = RawSample(name, jpg, json).annotation()
            size, masks = annotation.size, annotation.masks
            if not len(masks):
                raise GigamaskError(
                    f"{name}: the annotation has no masks; pass another --annotation"
                )
        if not path.is_file():
            return image.decode(jpg, self.image, size, pixels=pixels), masks
        turned = fit(jpg, size, self.image).turn
        return turn(image.decode(jpg, self.image, pixels=pixels), turned), masks

    def _candidates(self, model: PromptableModel, pixels: np.ndarray) -> RLEMasks:
        """Return the non-empty masks that the segmenter generates."""
        import numpy as np

        from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator

        generator = SamAutomaticMaskGenerator(model, **vars(self.masks))
        masks = generator.generate_proposals(pixels).masks
        masks = masks[np.flatnonzero(masks.areas())]
        if not len(masks):
            raise GigamaskError(
                f"{self.image}: the segmenter generates no mask; "
                "lower --pred-iou-thresh and --stability-score-thresh"
            )
        return masks
