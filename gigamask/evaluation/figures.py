"""Figures of predicted masks: a row per mask with the annotation and the predictions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path

import cv2
import numpy as np
import torch

from gigamask.data.image import write_png
from gigamask.errors import counted
from gigamask.evaluation.clicks import ClickProtocol, ClickResult, MaskScore
from gigamask.evaluation.embedded_images import (
    EmbeddedImage,
    ImageSource,
    annotated_images,
    embed_image,
)
from gigamask.models.promptable import PromptableModel, evaluated
from gigamask.pixels import to_rgb
from gigamask.types import PromptRound, Prompts

PANEL_SIZE = 300, 200
LABEL_PX, GAP_PX = 20, 4
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
# RGB colors that people with any color vision can tell apart (Okabe and Ito).
TRUTH, PREDICTED, FOREGROUND, BACKGROUND = (
    (240, 228, 66),
    (86, 180, 233),
    (0, 158, 115),
    (213, 94, 0),
)
LEGEND = (
    "yellow: annotation   blue: prediction   green, orange: clicks inside, outside   white: box"
)


@dataclass(frozen=True)
class FigurePanel:
    """A predicted mask and its prompts to draw on an image, with a label below."""

    label: str
    mask: np.ndarray
    points_xy: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    point_labels: np.ndarray = field(default_factory=lambda: np.zeros(0))


def write_figures(
    model: PromptableModel, images: ImageSource, result: ClickResult, folder: Path, count: int = 10
) -> list[Path]:
    """Write figures of the best, the worst and typical masks, by mean IoU over clicks.

    Args:
        model: Model that predicts the masks again.
        images: Index of the images, or the images.
        result: Scores of the masks.
        folder: Folder for `best.png`, `worst.png` and `typical.png`.
        count: Masks per file.

    Returns:
        The files.
    """
    order = sorted(result.scores, key=lambda score: -float(np.mean(list(score.clicks.values()))))
    evenly = np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))
    chosen = {
        "best": order[:count],
        "worst": order[::-1][:count],
        "typical": [order[i] for i in evenly],
    }
    folder.mkdir(parents=True, exist_ok=True)
    rows = iter(draw_rows(model, images, list(chain(*chosen.values())), result.protocol))
    paths = []
    for name, scores in chosen.items():
        paths.append(folder / f"{name}.png")
        write_png(paths[-1], stack_rows(list(islice(rows, len(scores)))))
    return paths


def draw_rows(
    model: PromptableModel,
    images: ImageSource,
    scores: Sequence[MaskScore],
    protocol: ClickProtocol,
) -> list[np.ndarray]:
    """Draw the row of each mask once; each image is embedded once for all its masks.

    Args:
        model: Model that predicts the masks again.
        images: Index of the images, or the images.
        scores: Scores of the masks, of which some may be the same.
        protocol: Protocol of the scores.

    Returns:
        RGB pixels of the row of each score.
    """
    dataset = annotated_images(images, model.config.pixels)
    masks_of = [(score.row, score.mask_index) for score in scores]
    unique = dict(zip(masks_of, scores, strict=True))
    rows = {}
    with evaluated(model), torch.inference_mode():
        for row, masks in groupby(sorted(unique), key=itemgetter(0)):
            image = embed_image(model, dataset, row)
            for mask in masks:
                rows[mask] = draw_row(model, image, unique[mask], protocol)
    return [rows[mask] for mask in masks_of]


def stack_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack rows of any widths vertically into RGB pixels, with a legend above."""
    width = max(row.shape[1] for row in rows)
    legend = _caption(LEGEND, width)
    return np.concatenate([legend, *(_pad(row, GAP_PX, width - row.shape[1]) for row in rows)])


def draw_row(
    model: PromptableModel, image: EmbeddedImage, score: MaskScore, protocol: ClickProtocol
) -> np.ndarray:
    """Draw one mask's row: the whole image, and predictions for 1, 3, 9, 20 clicks and a box.

    The predictions are shown in the part of the image that holds the mask, them and the clicks.

    Args:
        model: Model that predicts the mask again.
        image: Image of the mask.
        score: Scores of the mask.
        protocol: Protocol of the scores; of its numbers of clicks, 1, 3, 9 and 20 are drawn.

    Returns:
        RGB pixels.
    """
    targets = image.targets(np.array([score.mask_index]), protocol.annotated_box)
    decode = image.decoder(model, protocol)
    truth = targets.foreground[0].cpu().numpy()
    panels = []
    drawn_clicks = [n for n in protocol.clicks if n in (1, 3, 9, 20)] or [protocol.clicks[0]]
    of_mask = score.row, [score.mask_index]
    for prompt_round in protocol.rounds(decode, targets, *of_mask, max(drawn_clicks)):
        count = prompt_round.index + 1
        if count in drawn_clicks:
            label = f"{counted(count, 'click')}: IoU {score.clicks[count]:.3f}"
            panels.append(_round_panel(image, prompt_round, label))
    label = f"box: IoU {score.box:.3f}"
    panels.append(_round_panel(image, protocol.box_round(model, image, targets), label))
    name = score.name.rpartition(":")[2][-16:]
    share = f"{truth.mean():.2%} of the image"
    rgb = to_rgb(image.pixels)
    everything = 0, 0, *truth.shape[::-1]
    window = _window(truth, panels)
    whole = FigurePanel(f"{name}, mask {score.mask_index}, {share}", np.zeros_like(truth))
    if window != everything:
        corners = np.reshape(window, (2, 2)) - 0.5
        whole = replace(whole, points_xy=corners, point_labels=np.array([2, 3]))
    drawn = [draw_panel(rgb, truth, whole, everything)]
    drawn += [draw_panel(rgb, truth, panel, window) for panel in panels]
    return join_panels(drawn)


def join_panels(panels: Sequence[np.ndarray]) -> np.ndarray:
    """Return RGB pixels of a row of panels of the same height."""
    return np.concatenate([_pad(pixels, 0, GAP_PX) for pixels in panels], axis=1)


def _window(truth: np.ndarray, panels: Sequence[FigurePanel]) -> tuple[int, int, int, int]:
    """Return the edges of the part of an image that holds the masks and points, with a margin.

    It is the whole image where they cover most of it.
    """
    height, width = truth.shape
    y, x = np.nonzero(np.any([truth, *(panel.mask for panel in panels)], axis=0))
    points = np.concatenate([np.stack([x, y], 1), *(panel.points_xy for panel in panels)])
    low, high = points.min(0), points.max(0) + 1
    side = np.maximum(1.3 * (high - low), 48)
    side = np.maximum(side, side[::-1] * np.array(PANEL_SIZE) / PANEL_SIZE[::-1])
    if 2 * np.prod(np.minimum(side, (width, height))) > width * height:
        return 0, 0, width, height
    start = np.clip((low + high - side) / 2, 0, np.maximum((width, height) - side, 0)).astype(int)
    end = np.minimum(start + side.astype(int), (width, height))
    return int(start[0]), int(start[1]), int(end[0]), int(end[1])


def _round_panel(image: EmbeddedImage, prompt_round: PromptRound, label: str) -> FigurePanel:
    mask = prompt_round.pred_mask[0].cpu().numpy()
    return FigurePanel(label, mask, *original_points(image, prompt_round.prompts))


def original_points(image: EmbeddedImage, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """Return the points and box corners of a single mask's prompts, without padding.

    Args:
        image: Image of the prompts.
        prompts: Prompts of one mask.

    Returns:
        x and y in pixels of the stored image, and the labels.
    """
    labels = prompts.labels[0].cpu().numpy()
    points = image.transform.points_to_original(prompts.points_xy_input[0].cpu().numpy())
    return points[labels >= 0], labels[labels >= 0]


def draw_panel(
    pixels: np.ndarray, truth: np.ndarray, panel: FigurePanel, window: tuple[int, int, int, int]
) -> np.ndarray:
    """Draw a mask, the annotation's outline and the prompts on an image, with a label below.

    Args:
        pixels: `(H, W, 3)` RGB pixels of the stored image.
        truth: `(H, W)` annotated mask.
        panel: What to draw on the image.
        window: Edges x0, y0, x1, y1 of the part of the image to show.

    Returns:
        RGB pixels, `PANEL_SIZE` and `LABEL_PX` more in height.
    """
    x0, y0, x1, y1 = window
    scale = min(PANEL_SIZE[0] / (x1 - x0), PANEL_SIZE[1] / (y1 - y0))
    size = max(1, round((x1 - x0) * scale)), max(1, round((y1 - y0) * scale))

    def resized(part: np.ndarray) -> np.ndarray:
        method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
        return cv2.resize(part[y0:y1, x0:x1], size, interpolation=method)

    canvas = resized(pixels)
    mask, target = (resized(each.astype(np.float32)) >= 0.5 for each in (panel.mask, truth))
    canvas[mask] = (0.6 * canvas[mask] + 0.4 * np.array(PREDICTED)).astype(np.uint8)
    for each, color in ((mask, PREDICTED), (target, TRUTH)):
        filled = each.astype(np.uint8)
        contours, _ = cv2.findContours(filled, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, contours, -1, BLACK, 5, cv2.LINE_AA)
        cv2.drawContours(canvas, contours, -1, color, 2, cv2.LINE_AA)
    points = np.round((panel.points_xy + 0.5 - (x0, y0)) * scale).astype(int)
    labels = panel.point_labels
    if (labels >= 2).any():
        start, end = points[labels >= 2].tolist()
        cv2.rectangle(canvas, start, end, BLACK, 5)
        cv2.rectangle(canvas, start, end, WHITE, 2)
    for (x, y), label in zip(points.tolist(), labels.tolist(), strict=True):
        if label < 2:
            color = FOREGROUND if label == 1 else BACKGROUND
            for radius, shade in ((6, BLACK), (5, WHITE), (4, color)):
                cv2.circle(canvas, (x, y), radius, shade, -1, cv2.LINE_AA)
    canvas = _pad(canvas, PANEL_SIZE[1] - size[1], PANEL_SIZE[0] - size[0])
    return np.concatenate([canvas, _caption(panel.label, PANEL_SIZE[0])])


def _caption(text: str, width: int) -> np.ndarray:
    strip = np.full((LABEL_PX, width, 3), 255, np.uint8)
    origin, font = (2, LABEL_PX - 6), cv2.FONT_HERSHEY_SIMPLEX
    return cv2.putText(strip, text, origin, font, 0.45, BLACK, 1, cv2.LINE_AA)


def _pad(pixels: np.ndarray, bottom: int, right: int) -> np.ndarray:
    return cv2.copyMakeBorder(pixels, 0, bottom, 0, right, cv2.BORDER_CONSTANT, value=WHITE)
