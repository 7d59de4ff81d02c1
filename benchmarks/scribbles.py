"""Scribbles as prompts: mean IoU for points taken from strokes on objects and background.

The strokes are palette images with 1 and 2 for the two kinds; the one that lies in the object is
positive. N points of each kind, each the farthest from those before, are one prompt.

Run: python -m benchmarks.scribbles WEIGHTS MASKS PHOTOGRAPHS STROKES...
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from gigamask.inference.predictor import SamPredictor
from gigamask.plugins.benchmarks.published import open_masks
from gigamask.workflows.evaluate import load_model
from gigamask.workflows.open_data import open_or_build_temporary

POINTS = (1, 2, 3, 5, 10, 20)


def spread_points(stroke: np.ndarray, count: int) -> np.ndarray:
    """Return x and y of pixels of a stroke: the one nearest its center, then the farthest ones."""
    pixels = np.argwhere(stroke)[:, ::-1].astype(np.float32)
    if not len(pixels):
        return pixels
    chosen = [int(((pixels - pixels.mean(0)) ** 2).sum(1).argmin())]
    distance = np.full(len(pixels), np.inf)
    while len(chosen) < min(count, len(pixels)):
        distance = np.minimum(distance, ((pixels - pixels[chosen[-1]]) ** 2).sum(1))
        chosen.append(int(distance.argmax()))
    return pixels[chosen]


def main() -> None:
    """Print a row of mean IoU for each folder of strokes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights")
    parser.add_argument("masks", type=Path)
    parser.add_argument("photographs")
    parser.add_argument("strokes", type=Path, nargs="+")
    options = parser.parse_args()
    predictor = SamPredictor(load_model(options.weights, "cpu"))
    with open_or_build_temporary(options.photographs) as index:
        images = open_masks("grabcut", options.masks, index)
        print(f"{len(images)} objects; IoU by points of each kind: {POINTS}")
        for folder in options.strokes:
            ious = []
            for row in range(len(images)):
                pixels, entry = images[row]
                truth = entry.masks.to_dense()[0]
                counted = (
                    np.ones_like(truth) if entry.ignore is None else ~entry.ignore.to_dense()[0]
                )
                kinds = np.array(Image.open(folder / f"{entry.name}.png"))
                strokes = sorted((kinds == 1, kinds == 2), key=lambda each: -truth[each].mean())
                predictor.set_image(pixels)
                ious.append([])
                for count in POINTS:
                    points = [spread_points(stroke, count) for stroke in strokes]
                    labels = np.repeat([1, 0], [len(each) for each in points])
                    [mask], _, _ = predictor.predict(
                        np.concatenate(points), labels, multimask_output=False
                    )
                    union = ((mask | truth) & counted).sum()
                    ious[-1].append(((mask & truth & counted).sum()) / union)
            print(folder.name, *(f"{mean:.3f}" for mean in np.mean(ious, 0)))


if __name__ == "__main__":
    main()
