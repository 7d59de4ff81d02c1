"""Draw the pictures of README.md and docs/pictures.md: `python -m docs.pictures [RUN]`.

RUN is the folder of a finished `gigamask demo`, whose learning curve is drawn; without it, that
picture stays.

The photographs come with scikit-image and are free to show: the coffee is by Rachel Michetti
(CC0), the rocket by SpaceX and the astronaut by NASA (public domain).
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from skimage import data

from gigamask import SamPredictor, load_model, plugin
from gigamask.cli.commands.synth import KINDS, takes
from gigamask.data.image import write_png
from gigamask.errors import counted
from gigamask.evaluation.figures import FigurePanel, draw_panel, join_panels
from gigamask.report import history
from gigamask.workflows.segment import draw_masks

FOLDER = Path(__file__).parent / "images"
PROMPTS = {
    "coffee": ([(300, 150)], [(300, 150), (300, 100)], (175, 15, 410, 250), (320, 230, 405, 330)),
    "rocket": ([(320, 200)], [(320, 200), (320, 330)], (302, 95, 342, 385), [(320, 120)]),
    "astronaut": ([(225, 120)], [(220, 60)], [(150, 350)], (170, 10, 290, 190)),
}
"""Prompts of each photograph: clicks on the object, x and y, or the corners of a box."""


def photograph_row(predictor: SamPredictor, name: str) -> np.ndarray:
    """Return a row of panels of a photograph, one for each prompt, with the answer."""
    pixels = getattr(data, name)()
    nothing, window = np.zeros(pixels.shape[:2], bool), (0, 0, *pixels.shape[1::-1])
    predictor.set_image(pixels)
    row = []
    for prompt in PROMPTS[name]:
        if isinstance(prompt, tuple):
            masks, scores, _ = predictor.predict(box=np.array(prompt), multimask_output=False)
            label, points, labels = "a box", np.reshape(prompt, (2, 2)), np.array([2, 3])
        else:
            points, labels, logits = np.array(prompt), np.ones(len(prompt), int), None
            for count in range(1, len(prompt) + 1):  # as one clicks on the page
                masks, scores, low = predictor.predict(
                    points[:count], labels[:count], mask_input=logits, multimask_output=count == 1
                )
                logits = low[scores.argmax()][None]
            label = counted(len(prompt), "click")
        best = scores.argmax()
        panel = FigurePanel(
            f"{label}, predicted IoU {scores[best]:.3f}", masks[best], points.astype(float), labels
        )
        row.append(draw_panel(pixels, nothing, panel, window))
    return join_panels(row)


def scene_rows() -> list[np.ndarray]:
    """Return a row for each kind of scene without photographs: three, their masks drawn."""
    rows = []
    for name, where in KINDS.items():
        if takes(name, "data"):
            continue
        row = []
        for number in range(3):
            scene = plugin.load(where)(seed=0, number=number)
            height, width = scene.pixels.shape[:2]
            empty = np.zeros((height, width), bool)
            panel = FigurePanel(f"--kind {name}", empty)
            drawn = draw_masks(scene.pixels, scene.masks) if number else scene.pixels
            row.append(draw_panel(drawn, empty, panel, (0, 0, width, height)))
        rows.append(join_panels(row))
    return rows


def draw_curve(run: Path) -> None:
    """Draw the IoU in training and on held-out scenes over the steps of a run.

    Args:
        run: The run folder.
    """
    read = history.read(run)
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(read.records["step"], read.records["iou"], color="0.7", label="in training")
    for name in ("3 clicks", "box", "1 click"):
        scores = [(each["step"], each["scores"][name]) for each in read.evaluations]
        axes.plot(*zip(*scores, strict=True), marker="o", label=f"held out, {name}")
    axes.set(xlabel="step", ylabel="mean IoU", ylim=(0.5, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(FOLDER / "demo_curve.svg", metadata={"Date": None})


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        draw_curve(Path(argument))
    model = load_model("starter")
    rows = [photograph_row(SamPredictor(model), name) for name in PROMPTS]
    write_png(FOLDER / "photographs.png", np.concatenate(rows))
    write_png(FOLDER / "scenes.png", np.concatenate(scene_rows()))
