"""Figures of predicted masks: a row per mask with the annotation and the predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path

import cv2
import numpy as np
import torch

from gigamask.data.image import write_png
from gigamask.evaluation.clicks import ClickProtocol, ClickResult, MaskScore
from gigamask.evaluation.embedded_images import (
    EmbeddedImage,
    ImageSource,
    annotated_images,
    embed_image,
)
from gigamask.models.promptable import PromptableModel
from gigamask.pixels import to_rgb
from gigamask.types import PromptRound, Prompts

PANEL_PX, LABEL_PX, GAP_PX = 200, 20, 4
WHITE = (255, 255, 255)
# RGB colors that people with any color vision can tell apart (Okabe and Ito).
TRUTH, PREDICTED, FOREGROUND, BACKGROUND = (
    (240, 228, 66),
    (0, 114, 178),
    (0, 158, 115),
    (213, 94, 0),
)


@dataclass(frozen=True)
class FigurePanel:
    """A filled mask and prompts to draw on an image, with a label below."""

    label: str
    mask: np.ndarray
    color: tuple[int, int, int]
    points_xy: np.ndarray
    point_labels: np.ndarray


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


def write_figure(
    model: PromptableModel,
    images: ImageSource,
    scores: list[MaskScore],
    protocol: ClickProtocol,
    path: Path,
) -> None:
    """Write a figure with one row per mask.

    Args:
        model: Model that predicts the masks again.
        images: Index of the images, or the images.
        scores: Scores of the masks.
        protocol: Protocol of the scores.
        path: PNG file.
    """
    write_png(path, stack_rows(draw_rows(model, images, scores, protocol)))


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
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for row, masks in groupby(sorted(unique), key=itemgetter(0)):
            image = embed_image(model, dataset, row)
            for mask in masks:
                rows[mask] = draw_row(model, image, unique[mask], protocol)
    model.train(was_training)
    return [rows[mask] for mask in masks_of]


def stack_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Stack rows of any widths vertically into RGB pixels."""
    width = max(row.shape[1] for row in rows)
    return np.concatenate([_pad(row, GAP_PX, width - row.shape[1]) for row in rows])


def draw_row(
    model: PromptableModel, image: EmbeddedImage, score: MaskScore, protocol: ClickProtocol
) -> np.ndarray:
    """Draw one mask's row: the annotation, and predictions for 1, 3, 9, 20 clicks and a box.

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
    no_points = np.zeros((0, 2), np.float32), np.zeros(0, np.int64)
    name = f"truth ({score.mask_index}) {image.annotation.name.rpartition(':')[2]}"
    panels = [FigurePanel(name, truth, TRUTH, *no_points)]
    drawn_clicks = [n for n in protocol.clicks if n in (1, 3, 9, 20)] or [protocol.clicks[0]]
    of_mask = score.row, [score.mask_index]
    for prompt_round in protocol.rounds(decode, targets, *of_mask, max(drawn_clicks)):
        count = prompt_round.index + 1
        if count in drawn_clicks:
            label = f"{count} click{'s' if count > 1 else ''}: {score.clicks[count]:.2f}"
            panels.append(_round_panel(image, prompt_round, label))
    label = f"box: {score.box:.2f}"
    panels.append(_round_panel(image, protocol.box_round(decode, targets), label))
    rgb = to_rgb(image.pixels)
    drawn = [draw_panel(rgb, truth, panel) for panel in panels]
    return np.concatenate([_pad(pixels, 0, GAP_PX) for pixels in drawn], axis=1)


def _round_panel(image: EmbeddedImage, prompt_round: PromptRound, label: str) -> FigurePanel:
    mask = prompt_round.pred_mask[0].cpu().numpy()
    return FigurePanel(label, mask, PREDICTED, *original_points(image, prompt_round.prompts))


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


def draw_panel(pixels: np.ndarray, truth: np.ndarray, panel: FigurePanel) -> np.ndarray:
    """Draw a mask, the annotation's outline and the prompts on an image, with a label below.

    Args:
        pixels: `(H, W, 3)` RGB pixels of the stored image.
        truth: `(H, W)` annotated mask.
        panel: What to draw on the image.

    Returns:
        RGB pixels, `PANEL_PX` + `LABEL_PX` high.
    """
    scale = PANEL_PX / pixels.shape[0]
    size = (max(1, round(pixels.shape[1] * scale)), PANEL_PX)
    canvas = cv2.resize(
        pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    )
    mask = _resize_mask(panel.mask, size).astype(bool)
    canvas[mask] = (0.45 * canvas[mask] + 0.55 * np.array(panel.color)).astype(np.uint8)
    outline, _ = cv2.findContours(_resize_mask(truth, size), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(canvas, outline, -1, TRUTH, 1)
    points = np.round((panel.points_xy + 0.5) * scale).astype(int)
    labels = panel.point_labels
    if (labels >= 2).any():
        top_left, bottom_right = points[labels == 2][0], points[labels == 3][0]
        cv2.rectangle(canvas, top_left.tolist(), bottom_right.tolist(), WHITE, 2)
    for (x, y), label in zip(points.tolist(), labels.tolist(), strict=True):
        if label < 2:
            color = FOREGROUND if label == 1 else BACKGROUND
            cv2.circle(canvas, (x, y), 5, WHITE, -1, cv2.LINE_AA)
            cv2.circle(canvas, (x, y), 4, color, -1, cv2.LINE_AA)
    strip = np.full((LABEL_PX, size[0], 3), 255, np.uint8)
    origin, font = (2, LABEL_PX - 6), cv2.FONT_HERSHEY_SIMPLEX
    cv2.putText(strip, panel.label, origin, font, 0.45, (0, 0, 0), 1, cv2.LINE_AA)
    return np.concatenate([canvas, strip])


def _resize_mask(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return cv2.resize(mask.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST)


def _pad(pixels: np.ndarray, bottom: int, right: int) -> np.ndarray:
    return cv2.copyMakeBorder(pixels, 0, bottom, 0, right, cv2.BORDER_CONSTANT, value=WHITE)
