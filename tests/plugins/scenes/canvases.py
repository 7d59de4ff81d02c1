"""The canvases that scenes are drawn on."""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TypeVar

import numpy as np
import pytest

from gigamask.plugins.scenes.clutter import ClutterCanvas
from gigamask.synthetic.scenes import Canvas, SyntheticScene

Kind = TypeVar("Kind", bound=ClutterCanvas)


def blank(kind: type[Kind], size: tuple[int, int], generator: np.random.Generator) -> Kind:
    """Return an empty canvas without a sun.

    Args:
        kind: The canvas.
        size: Height and width in pixels.
        generator: Random numbers.
    """
    return kind(
        np.zeros(size, np.uint8),
        np.ones(size, np.float32),
        np.zeros(size, np.float32),
        colors=[np.full(3, 100.0)],
        seconds=[np.full(3, 150.0)],
        generator=generator,
        sun=np.zeros(2),
    )


def drawn(
    module: ModuleType, compose: Callable[..., SyntheticScene], numbers: Iterable[int]
) -> list[tuple[SyntheticScene, Canvas]]:
    """Return scenes with their canvases.

    Args:
        module: Where the scenes are composed.
        compose: Draws a scene.
        numbers: Their numbers, of seed 3.
    """
    canvases = []
    photograph = module.photograph

    def kept(generator, canvas, *given):
        canvases.append(canvas)
        return photograph(generator, canvas, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "photograph", kept)
        scenes = [compose(3, number) for number in numbers]
    return list(zip(scenes, canvases, strict=True))
