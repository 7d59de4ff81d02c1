"""Train what people would write or pick instead, for the same CPU time on the same photographs.

Three ways, each in our own code, from random weights, in one process:

- unet: a U-Net whose input is the image with maps of the clicks, the box and the previous mask; a
  box, or one to three clicks; cross-entropy and dice.
- ritm: a small HRNet trained as RITM is (Sofiiuk et al. 2021): up to three clicks are simulated
  without gradients, each with the previous mask, the next one is learned from; normalized focal
  loss; three of four masks are shown in a crop around them. From the second click on, it looks at
  a crop around the previous mask. It takes no boxes.
- sam: SAM's modules at the sizes of the recipe `tiny`, trained on one round, a box or a click.

All are scored as `gigamask evaluate` scores, by the plain loop of `benchmarks.evaluate`. Prints a
Markdown table, with the standard deviation over seeds.

Run: python -m benchmarks.peers_learning --data bsds_train coco128 --test bsds_val [--seconds 600]
    [--seeds 3] [--ways unet ritm sam] [--images 30] [--weights RUN]
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator

import cv2
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.evaluate import COLUMNS, next_click, plainly
from benchmarks.plain_loops import loss_of
from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.data.index import Index
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.embedded_images import scored_masks
from gigamask.inference.predictor import SamPredictor
from gigamask.inference.resize_longest_side import ResizeLongestSide
from gigamask.models.init import build_model
from gigamask.recipes import find
from gigamask.synthetic import scenes
from gigamask.training.checkpoint import load_model

SIDE = 256
RADIUS = 5
"""Radius of a click's disc in pixels of the input, as in RITM."""
MASKS = 8
"""Masks of an image in a step."""
ZOOM = 1.4
"""Side of the crop around the previous mask, relative to the mask's, as in RITM."""
CROPPED, WIDEST = 0.75, 4.0
"""Share of RITM's masks that are shown in a crop, and its largest side, relative to the mask's."""


def block(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    """Returns two convolutions with group norm, as the masks of a step share an image."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
        nn.GroupNorm(8, outside),
        nn.ReLU(),
        nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
        nn.GroupNorm(8, outside),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Five levels, skip connections, one map of logits."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(map(block, [7, *widths], widths))
        self.up = nn.ModuleList(
            block(deep + flat, flat) for flat, deep in itertools.pairwise(widths)
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, skip in zip(reversed(self.up), reversed(kept[:-1]), strict=True):
            grown = functional.interpolate(x, scale_factor=2, mode="bilinear")
            x = up(torch.cat([grown, skip], 1))
        return self.head(x)


class HRNet(nn.Module):
    """Four resolutions side by side, each fed by all others after its convolutions; a quarter of
    the input at the finest."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.image, self.prompts = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(4, 32, 3, 2, 1)
        self.stem = block(32, width, 2)
        self.starts = nn.ModuleList(
            block(above, below, 2) for above, below in itertools.pairwise(widths)
        )
        self.stages = nn.ModuleList(
            nn.ModuleList(block(each, each) for each in widths[:count]) for count in (2, 3, 4, 4)
        )
        self.fuses = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(sum(widths[:count]), each, 1) for each in widths[:count])
            for count in (2, 3, 4, 4)
        )
        self.head = nn.Sequential(block(sum(widths), 4 * width), nn.Conv2d(4 * width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.stem(functional.relu(self.image(x[:, :3]) + self.prompts(x[:, 3:])))]
        for stage, fuse in zip(self.stages, self.fuses, strict=True):
            if len(branches) < len(stage):
                branches.append(self.starts[len(branches) - 1](branches[-1]))
            branches = [x + part(x) for part, x in zip(stage, branches, strict=True)]
            branches = [
                functional.relu(mix(stacked(branches, each.shape[-2:])) + each)
                for mix, each in zip(fuse, branches, strict=True)
            ]
        return functional.interpolate(
            self.head(stacked(branches, branches[0].shape[-2:])), scale_factor=4, mode="bilinear"
        )


def stacked(branches: list[Tensor], size: torch.Size) -> Tensor:
    """Returns all maps at one size, their channels one after another."""
    return torch.cat([functional.interpolate(each, size, mode="bilinear") for each in branches], 1)


def to_input(image: np.ndarray) -> np.ndarray:
    """Returns an image, or maps of it, with the long side of the input, padded to a square."""
    height, width = image.shape[:2]
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    margins = [(0, SIDE - small.shape[0]), (0, SIDE - small.shape[1]), (0, 0)]
    return np.pad(small, margins[: small.ndim])


def maps_of(
    points: np.ndarray, labels: np.ndarray, box: np.ndarray | None, previous: np.ndarray | None
) -> np.ndarray:
    """Returns maps of positive and negative clicks, of the box, and of the previous mask's
    probability, (4, S, S); coordinates are those of the input."""
    maps = np.zeros((4, SIDE, SIDE), np.float32)
    for (x, y), label in zip(points, labels, strict=True):
        cv2.circle(maps[1 - int(label)], (round(float(x)), round(float(y))), RADIUS, 1.0, -1)
    if box is not None:
        x0, y0, x1, y1 = box.round().astype(int)
        maps[2, y0 : y1 + 1, x0 : x1 + 1] = 1
    if previous is not None:
        maps[3] = 1 / (1 + np.exp(-previous.clip(-30, 30)))
    return maps


def normal(image: np.ndarray) -> np.ndarray:
    return (image.transpose(2, 0, 1).astype(np.float32) - 118) / 58


class MapPredictor:
    """Answers as `SamPredictor` does, with a network that takes prompts as maps."""

    def __init__(self, net: nn.Module, zooms: bool = False) -> None:
        self.net, self.zooms = net.eval(), zooms
        self.image = np.zeros((1, 1, 3), np.uint8)

    def set_image(self, image: np.ndarray) -> None:
        self.image = image

    @torch.no_grad()
    def predict(
        self,
        points: np.ndarray | None = None,
        labels: np.ndarray | None = None,
        box: np.ndarray | None = None,
        mask_input: np.ndarray | None = None,
        multimask_output: bool = True,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns one mask at the image's size, its IoU, which is not predicted, and its logits
        at the image's size, which are the next `mask_input`."""
        height, width = self.image.shape[:2]
        points = np.zeros((0, 2)) if points is None else points
        labels = np.zeros(0) if labels is None else labels
        previous = None if mask_input is None else mask_input[0]
        top, left, bottom, right = 0, 0, height, width
        if self.zooms and previous is not None and (previous > 0).any():
            top, left, bottom, right = around(previous > 0, points)
        crop = self.image[top:bottom, left:right]
        scale = SIDE / max(crop.shape[:2])
        inside = None if box is None else box * scale
        before = None if previous is None else to_input(previous[top:bottom, left:right])
        maps = maps_of((points - (left, top)) * scale, labels, inside, before)
        x = np.concatenate([normal(to_input(crop)), maps])
        logits = self.net(torch.from_numpy(x)[None])[0, 0].numpy()
        rows, columns = (max(1, round(side * scale)) for side in crop.shape[:2])
        found = cv2.resize(logits[:rows, :columns], crop.shape[1::-1])
        whole = np.full((height, width), -10, np.float32)
        whole[top:bottom, left:right] = found
        return (whole > 0)[None], np.ones(1), whole[None]


def around(mask: np.ndarray, points: np.ndarray) -> tuple[int, int, int, int]:
    """Returns top, left, bottom and right of a crop around a mask and all clicks."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    low = np.minimum((columns[0], rows[0]), points.min(0))
    high = np.maximum((columns[-1], rows[-1]), points.max(0))
    half = np.maximum((high - low + 1) * ZOOM / 2, 16)
    height, width = mask.shape
    left, top = np.maximum((low + high) / 2 - half, 0).astype(int)
    right, bottom = np.minimum((low + high) / 2 + half + 1, (width, height)).astype(int)
    return int(top), int(left), int(bottom), int(right)


def whole(mask: np.ndarray) -> tuple[slice, slice]:
    return slice(0, mask.shape[0]), slice(0, mask.shape[1])


def around_object(mask: np.ndarray, generator: np.random.Generator) -> tuple[slice, slice]:
    """Returns the rows and columns of a random crop that holds the mask, or of the whole."""
    if generator.random() > CROPPED:
        return whole(mask)
    x0, y0, x1, y1 = box_of(mask).astype(int)
    side = max(max(x1 - x0, y1 - y0) * generator.uniform(ZOOM, WIDEST), 32)
    starts = generator.uniform(np.array([y1, x1]) - side, np.array([y0, x0]) + 1)
    low = np.maximum(starts, 0).astype(int)
    high = np.minimum(np.maximum(starts + side + 1, (y1 + 1, x1 + 1)), mask.shape).astype(int)
    return slice(low[0], high[0]), slice(low[1], high[1])


def visits(
    index: Index, filters: MaskFilters, generator: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields images (H, W, 3) with some of their masks (m, H, W), each other one mirrored."""
    dataset = Sa1bDataset(index)
    while True:
        row = int(generator.integers(len(index)))
        numbers = scored_masks(index, row, filters)
        if len(numbers):
            image, entry = dataset[row]
            chosen = generator.permutation(numbers)[:MASKS]
            step = int(generator.choice([1, -1]))
            yield image[:, ::step], entry.masks[chosen].to_dense()[:, :, ::step]


def box_of(mask: np.ndarray) -> np.ndarray:
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    return np.array([columns[0], rows[0], columns[-1], rows[-1]], np.float64)


def train_maps(
    net: nn.Module, data: Iterator, seconds: float, generator: np.random.Generator, boxes: float
) -> None:
    """Trains a network that takes prompts as maps; `boxes` is the share of masks that get one."""
    loss_of_maps = cross_entropy_and_dice if boxes else normalized_focal
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for optimizer_step, (image, masks) in until(optimizer, data, seconds):
        crops = [whole(mask) if boxes else around_object(mask, generator) for mask in masks]
        truths = [
            to_input(mask[crop].astype(np.float32)) > 0.5
            for mask, crop in zip(masks, crops, strict=True)
        ]
        crops = [crop for crop, truth in zip(crops, truths, strict=True) if truth.any()]
        truths = [truth for truth in truths if truth.any()]
        if not truths:
            continue
        shown = {str(crop): normal(to_input(image[crop])) for crop in crops}
        x = torch.from_numpy(np.stack([shown[str(crop)] for crop in crops]))
        boxed = [generator.random() < boxes for _ in truths]
        points = [np.zeros((0, 2)) for _ in truths]
        labels = [np.zeros(0, int) for _ in truths]
        previous: list[np.ndarray | None] = [None] * len(truths)
        for last in range(int(generator.integers(1, 5 if not boxes else 4)), 0, -1):
            for i, truth in enumerate(truths):
                if not boxed[i]:
                    guess = np.zeros_like(truth) if previous[i] is None else previous[i] > 0
                    *place, label = next_click(truth, guess, points[i])
                    points[i] = np.concatenate([points[i], [place]])
                    labels[i] = np.append(labels[i], label)
            maps = [
                maps_of(points[i], labels[i], box_of(truth) if boxed[i] else None, previous[i])
                for i, truth in enumerate(truths)
            ]
            stack = torch.cat([x, torch.from_numpy(np.stack(maps))], 1)
            with torch.set_grad_enabled(last == 1):
                logits = net(stack)[:, 0]
            previous = list(logits.detach().numpy())
        optimizer_step(loss_of_maps(logits, torch.from_numpy(np.stack(truths)).float()))


def until(
    optimizer: torch.optim.Optimizer, data: Iterator, seconds: float
) -> Iterator[tuple[Callable[[Tensor], None], tuple[np.ndarray, np.ndarray]]]:
    """Yields visits and what updates the weights, until the CPU seconds are over; the rate falls
    to zero by a cosine."""
    rate, begin = optimizer.param_groups[0]["lr"], time.process_time()

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for visit in data:
        passed = (time.process_time() - begin) / seconds
        if passed >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + np.cos(np.pi * passed))
        yield update, visit


def cross_entropy_and_dice(logits: Tensor, truth: Tensor) -> Tensor:
    chance = logits.sigmoid()
    shared, both = (chance * truth).sum((1, 2)), (chance + truth).sum((1, 2))
    dice = (1 - (2 * shared + 1) / (both + 1)).mean()
    return functional.binary_cross_entropy_with_logits(logits, truth) + dice


def normalized_focal(logits: Tensor, truth: Tensor) -> Tensor:
    """Focal loss over the sum of its weights, as in RITM."""
    cross = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    weight = (1 - torch.exp(-cross)).square()
    return ((weight * cross).sum((1, 2)) / weight.detach().sum((1, 2)).clamp(min=1e-6)).mean()


def train_sam(net: nn.Module, data: Iterator, seconds: float, generator: np.random.Generator):
    """Trains SAM's modules with a box or a random click of each mask, three answers, one round."""
    side, grid = net.config.image_size, net.config.mask_size
    resize = ResizeLongestSide(side)
    optimizer = torch.optim.AdamW(net.parameters(), 8e-4)
    for optimizer_step, (image, masks) in until(optimizer, data, seconds):
        small = torch.from_numpy(resize.apply_image(np.ascontiguousarray(image)))
        points, boxes = [], [box_of(mask) for mask in masks]
        for mask in masks:
            places = np.argwhere(mask)
            points.append(places[generator.integers(len(places))][::-1])
        scaled = (
            torch.as_tensor(resize.apply_coords(np.array(each), image.shape[:2])).float()
            for each in (points, np.reshape(boxes, (-1, 2, 2)))
        )
        clicks, corners = (each.reshape(len(masks), -1) for each in scaled)
        truth = torch.stack(
            [
                torch.from_numpy(cv2.resize(to_square(mask), (grid, grid), interpolation=3)) > 0.5
                for mask in masks
            ]
        ).float()
        record = {"image": small.permute(2, 0, 1), "original_size": image.shape[:2]}
        if generator.random() < 0.5:
            record["boxes"] = corners
        else:
            record |= {"point_coords": clicks[:, None], "point_labels": torch.ones(len(masks), 1)}
        (told,) = net([record], multimask_output=True)
        loss, _ = loss_of(told["low_res_logits"], told["iou_predictions"], truth)
        optimizer_step(loss / len(masks))


def to_square(mask: np.ndarray) -> np.ndarray:
    height, width = mask.shape
    side = max(height, width)
    return np.pad(mask.astype(np.float32), [(0, side - height), (0, side - width)])


def trained(way: str, data: Iterator, seconds: float, seed: int):
    """Returns what answers as `SamPredictor` does, after its training."""
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    if way == "sam":
        net = build_model(find("tiny")().model, seed)
        train_sam(net, data, seconds, generator)
        return SamPredictor(net.eval())
    net = UNet() if way == "unet" else HRNet()
    train_maps(net, data, seconds, generator, boxes=0.4 if way == "unet" else 0)
    return MapPredictor(net, zooms=way == "ritm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", help="tars to train on; default: synthetic scenes")
    parser.add_argument("--test", nargs="+", help="tars to score on; default: synthetic scenes")
    parser.add_argument("--seconds", type=float, default=600, help="CPU seconds of each training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=["unet", "ritm", "sam"])
    parser.add_argument("--images", type=int, default=30, help="images to score")
    parser.add_argument("--weights", nargs="*", default=[], help="also score these, as they are")
    asked = parser.parse_args()
    filters = [MaskFilters(max_area=None, min_predicted_iou=least) for least in (0.7, 0.75)]
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in (("data", 0), ("test", 1)):
            if not getattr(asked, name):
                scenes.write(f"{folder}/{name}", 20, seed=seed)
        train, test = (
            indexes.open_or_build(paths or [f"{folder}/{name}"], f"{folder}/{name}_index")
            for name, paths in (("data", asked.data), ("test", asked.test))
        )
        rows = range(min(asked.images, len(test)))
        print(f"{asked.seconds:.0f} CPU seconds each, {len(rows)} images scored\n")
        print("| | " + " | ".join(COLUMNS) + " |\n" + "|---" * (1 + len(COLUMNS)) + "|")
        ways: dict[str, list[Callable]] = {
            path: [lambda path=path: SamPredictor(load_model(path, "cpu"))]
            for path in asked.weights
        }
        for way in asked.ways:
            ways[way] = [
                lambda way=way, seed=seed: trained(
                    way,
                    visits(train, filters[0], np.random.default_rng([seed, 1])),
                    asked.seconds,
                    seed,
                )
                for seed in range(asked.seeds)
            ]
        for name, starts in ways.items():
            means = []
            for start in starts:
                found = plainly(start(), test, filters[1], rows)
                means.append([np.mean([score[column] for score in found]) for column in COLUMNS])
            middle, spread = np.mean(means, 0), np.std(means, 0)
            cells = [
                f"{value:.3f}" + (f" ± {error:.3f}" if len(means) > 1 else "")
                for value, error in zip(middle, spread, strict=True)
            ]
            cells[-1] = "" if name == "ritm" else cells[-1]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
