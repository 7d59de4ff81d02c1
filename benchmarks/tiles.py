"""Tiles against the whole image, on a mosaic of micrographs in which each cell is small.

`python -m benchmarks.tiles` prints, for masks found with the same spacing of points, their number
and the best IoU of a mask with each cell.
"""

import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

import gigamask
from gigamask.masks.rle import RLEMasks
from gigamask.parser import parse
from gigamask.synthetic.cells import compose_cells


@dataclass
class Arguments:
    weights: str = "starter"
    side: int = 128
    """longer side of a micrograph in pixels, and side of the tiles"""
    across: int = 5
    """micrographs along each side of the mosaic"""
    points_per_side: int = 8
    """points along each side of a tile; the whole image has `across` times as many"""
    seed: int = 5


def mosaic(arguments: Arguments) -> tuple[np.ndarray, RLEMasks]:
    """Return pixels and the masks of all cells."""
    length = arguments.side * arguments.across
    pixels, labels = np.zeros((length, length, 3), np.uint8), np.zeros((length, length), np.int32)
    cells = 0
    for number in range(arguments.across**2):
        scene = compose_cells(arguments.seed, number, (arguments.side, arguments.side))
        row, column = np.array(divmod(number, arguments.across)) * arguments.side
        height, width = scene.masks.size
        place = slice(row, row + height), slice(column, column + width)
        pixels[place] = scene.pixels
        for mask in scene.masks.to_dense():
            cells += 1
            labels[place][mask] = cells
    return pixels, RLEMasks.from_dense(np.stack([labels == i for i in range(1, cells + 1)]))


def main(arguments: Arguments) -> None:
    torch.set_num_threads(1)
    pixels, cells = mosaic(arguments)
    model = gigamask.load_model(arguments.weights)
    ways = {
        "whole": {"points_per_side": arguments.points_per_side * arguments.across},
        "tiles": {"points_per_side": arguments.points_per_side, "tile": arguments.side},
    }
    print(f"{pixels.shape[0]} x {pixels.shape[1]} pixels, {len(cells)} cells")
    for name, options in ways.items():
        start = time.process_time()
        found = gigamask.SamAutomaticMaskGenerator(model, **options).generate_proposals(pixels)
        best = cells.iou(found.masks).max(1, initial=0)
        print(
            f"{name}: {len(found.masks)} masks, mean best IoU {best.mean():.3f}, "
            f"{(best >= 0.5).mean():.1%} of the cells at 0.5 or more, "
            f"{time.process_time() - start:.0f} s of CPU",
            flush=True,
        )


if __name__ == "__main__":
    main(parse(Arguments, sys.argv[1:], "python -m benchmarks.tiles"))
