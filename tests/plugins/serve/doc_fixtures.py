"""What the commands of the page's docs need, beside `tests.journeys.doc_fixtures`."""

from pathlib import Path

import cv2
import numpy as np

from gigamask.masks.rle import RLEMasks
from gigamask.plugins.serve.edits import Edit, MaskObject
from gigamask.plugins.serve.project import Project
from gigamask.plugins.serve.project_export import export


def populate(folder: Path) -> None:
    """An annotation project over the photographs, with one object an image, and its export."""
    with Project.open(folder / "annotated", folder / "photos") as project:
        for row, name in enumerate(project.names):
            height, width = cv2.imread(str(folder / "photos" / name)).shape[:2]
            square = np.zeros((1, height, width), bool)
            square[:, 20:60, 20:60] = True
            [mask] = RLEMasks.from_dense(square).to_coco()
            edit = Edit("polygon", {1: MaskObject(mask.decode(), accepted=True)})
            project.edit(row, 0, edit, (height, width))
        export(project, folder / "annotated" / "export")
