"""How strongly brightness changes at boundaries of masks, and elsewhere."""

import cv2
import numpy as np

from gigamask.synthetic.scenes import SyntheticScene


def steps(scene: SyntheticScene) -> tuple[float, float]:
    """Return the mean step of brightness at boundaries of masks, and elsewhere.

    Args:
        scene: The scene.
    """
    gray = cv2.cvtColor(scene.pixels, cv2.COLOR_RGB2GRAY).astype(float)
    step = np.abs(np.diff(gray, axis=1))
    masks = scene.masks.to_dense()
    crossed = (masks[:, :, 1:] != masks[:, :, :-1]).any(0)
    return step[crossed].mean(), step[~crossed].mean()
