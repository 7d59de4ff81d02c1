"""Picture sheets of predictions beside the truth: one row for each mask, one column for each question.

Enters what `evaluate.interactive` scored; the same rounds are played again for the few masks that are drawn.

Not here: scores (`evaluate.interactive`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch

from gigamask.data.dataset import Sa1bDataset
from gigamask.data.index import Index
from gigamask.evaluation.clicks import ClickProtocol, ClickResult, MaskScore
from gigamask.evaluation.embedded_images import EmbeddedImage, embed_image
from gigamask.models.sam.sam import Sam
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import BoxPrompt, CenterClicks
from gigamask.types import Prompts

PANEL_PX, LABEL_PX, GAP_PX = 200, 20, 4
# RGB, chosen to be told apart by people with any colour vision (Okabe and Ito).
TRUTH, ANSWER, HIT, MISS = (240, 228, 66), (0, 114, 178), (0, 158, 115), (213, 94, 0)


@dataclass(frozen=True)
class FigurePanel:
    """One picture of a row: an image with a filled mask, an outline and the prompts that were given."""

    label: str
    filled: np.ndarray
    fill_rgb: tuple[int, int, int]
    points_xy: np.ndarray
    labels: np.ndarray


def write_sheets(
    model: Sam, index: Index, result: ClickResult, folder: Path, count: int = 10
) -> list[Path]:
    """Writes `best.png`, `worst.png` (by the mean IoU over clicks) and `typical.png` (evenly over that order) and returns their paths."""
    order = sorted(result.scores, key=lambda score: -float(np.mean(list(score.clicks.values()))))
    evenly = np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))
    chosen = {
        "best": order[:count],
        "worst": order[::-1][:count],
        "typical": [order[i] for i in evenly],
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, scores in chosen.items():
        paths.append(folder / f"{name}.png")
        write_sheet(model, index, scores, result.protocol, paths[-1])
    return paths


def write_sheet(
    model: Sam, index: Index, scores: list[MaskScore], protocol: ClickProtocol, path: Path
) -> None:
    """Draws one row for each score: the truth, the answers after some clicks, and the answer to the box."""
    dataset = Sa1bDataset(index)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        rows = [
            draw_row(model, embed_image(model, dataset, score.row), score, protocol)
            for score in scores
        ]
    model.train(was_training)
    cv2.imwrite(str(path), cv2.cvtColor(sheet(rows), cv2.COLOR_RGB2BGR))


def sheet(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns rows below each other as RGB pixels."""
    width = max(row.shape[1] for row in rows)
    padded = [
        cv2.copyMakeBorder(
            row, 0, GAP_PX, 0, width - row.shape[1], cv2.BORDER_CONSTANT, value=(255, 255, 255)
        )
        for row in rows
    ]
    return np.concatenate(padded)


def draw_row(
    model: Sam, scene: EmbeddedImage, score: MaskScore, protocol: ClickProtocol
) -> np.ndarray:
    """Returns one row of panels as RGB pixels."""
    truth, decode = scene.truth(np.array([score.number])), scene.decoder(model)
    truth_mask = truth.foreground[0].cpu().numpy()
    nothing = np.zeros((0, 2), np.float32), np.zeros(0, np.int64)
    panels = [FigurePanel(f"truth ({score.number})", truth_mask, TRUTH, *nothing)]
    shown = [n for n in protocol.clicks if n in (1, 3, 9)] or [protocol.clicks[0]]
    for played in run_rounds(
        decode, truth, CenterClicks(max(shown), protocol.feed_mask), None, 0.0
    ):
        if played.index + 1 in shown:
            label = f"{played.index + 1} click{'s' if played.index else ''}: {score.clicks[played.index + 1]:.2f}"
            panels.append(
                FigurePanel(
                    label, played.pred_mask[0].cpu().numpy(), ANSWER, *given(scene, played.prompts)
                )
            )
    (boxed,) = run_rounds(decode, truth, BoxPrompt(), None, 0.0)
    panels.append(
        FigurePanel(
            f"box: {score.box:.2f}",
            boxed.pred_mask[0].cpu().numpy(),
            ANSWER,
            *given(scene, boxed.prompts),
        )
    )
    drawn = [draw_panel(scene.pixels, truth_mask, panel) for panel in panels]
    return np.concatenate(
        [
            cv2.copyMakeBorder(each, 0, 0, 0, GAP_PX, cv2.BORDER_CONSTANT, value=(255, 255, 255))
            for each in drawn
        ],
        axis=1,
    )


def given(scene: EmbeddedImage, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """Returns the prompts of the only mask in original pixels, with their labels; padding is left out."""
    labels = prompts.labels[0].cpu().numpy()
    points = scene.transform.points_to_original(prompts.points_xy_input[0].cpu().numpy())
    return points[labels >= 0], labels[labels >= 0]


def draw_panel(pixels: np.ndarray, truth: np.ndarray, panel: FigurePanel) -> np.ndarray:
    """Returns the image with the panel's mask laid over it, the truth's outline, the prompts and a label below; `PANEL_PX` high."""
    scale = PANEL_PX / pixels.shape[0]
    size = (max(1, round(pixels.shape[1] * scale)), PANEL_PX)
    canvas = cv2.resize(
        pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    )
    filled = cv2.resize(
        panel.filled.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST
    ).astype(bool)
    canvas[filled] = (0.45 * canvas[filled] + 0.55 * np.array(panel.fill_rgb)).astype(np.uint8)
    outline, _ = cv2.findContours(
        cv2.resize(truth.astype(np.uint8), size, interpolation=cv2.INTER_NEAREST),
        cv2.RETR_LIST,
        cv2.CHAIN_APPROX_NONE,
    )
    cv2.drawContours(canvas, outline, -1, TRUTH, 1)
    spots = np.round((panel.points_xy + 0.5) * scale).astype(int)
    if (panel.labels >= 2).any():
        top_left, bottom_right = spots[panel.labels == 2][0], spots[panel.labels == 3][0]
        cv2.rectangle(canvas, top_left.tolist(), bottom_right.tolist(), (255, 255, 255), 2)
    for (x, y), label in zip(spots.tolist(), panel.labels.tolist(), strict=True):
        if label < 2:
            cv2.circle(canvas, (x, y), 5, (255, 255, 255), -1, cv2.LINE_AA)
            cv2.circle(canvas, (x, y), 4, HIT if label == 1 else MISS, -1, cv2.LINE_AA)
    strip = np.full((LABEL_PX, size[0], 3), 255, np.uint8)
    cv2.putText(
        strip,
        panel.label,
        (2, LABEL_PX - 6),
        cv2.FONT_HERSHEY_SIMPLEX,
        0.45,
        (0, 0, 0),
        1,
        cv2.LINE_AA,
    )
    return np.concatenate([canvas, strip])
