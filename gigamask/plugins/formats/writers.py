"""Masks of images as polygons of YOLO and LabelMe.

Neither has holes, so that the outline of a hole is joined to that of its part by a line there and
back.
"""

import json
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

from gigamask.datatools.export_formats import ExportOptions, Images, save, with_own_files
from gigamask.masks.components import join_rings, outlines


def write_yolo(images: Images, out: Path, options: ExportOptions) -> None:
    """Write YOLO's text, with `data.yaml` and, if images are written, links to them.

    Args:
        images: Returns the images.
        out: The folder.
        options: What is written.
    """
    for given in with_own_files(images):
        # YOLO takes the last folder `images` of a path for the one beside `labels`.
        folders = ["images_" if part == "images" else part for part in given.name.split("/")[:-1]]
        name = "/".join([*folders, PurePosixPath(given.name).name])
        each = replace(given, name=name)
        sides = each.masks.size[::-1]
        text = ""
        for i, told in enumerate(each.objects):
            rings = [ring for rings in outlines(each.masks[i : i + 1]) for ring in rings]
            values = (join_rings(rings) / sides).ravel()
            number = options.number_of(told["category"])
            text += " ".join([str(number), *(f"{value:.8g}" for value in values)]) + "\n"
        save(each.path(out / "yolo" / "labels", ".txt"), text.encode())
        if os.path.lexists(image := out / "images" / given.name):
            path = out / "yolo" / "images" / each.name  # YOLO finds labels beside it
            save(path, image, os.path.relpath(image, path.parent))
    quoted = [json.dumps(name, ensure_ascii=False) for name in options.numbers]
    names = "".join(f"  {key}: {name}\n" for key, name in enumerate(quoted))
    text = f"train: images\nval: images\nnames:\n{names}"
    save(out / "yolo" / "data.yaml", text.encode())


def write_labelme(images: Images, out: Path, options: ExportOptions) -> None:
    """Write LabelMe's JSON; the parts of a mask are one group.

    Args:
        images: Returns the images.
        out: The folder.
        options: What is written.
    """
    for each in with_own_files(images):
        shapes = []
        for i, told in enumerate(each.objects):
            parts = outlines(each.masks[i : i + 1])
            group = told["id"] if len(parts) > 1 else None
            shapes += [
                {
                    "label": told["category"] or "object",
                    "points": join_rings(rings).tolist(),
                    "group_id": group,
                    "shape_type": "polygon",
                    "flags": {},
                    "description": str(told.get("name", "")),
                }
                for rings in parts
            ]
        height, width = each.masks.size
        folder = each.path(out.parent / "labelme", ".json").parent
        image = each.file or (out.parent / "images" / each.name if options.images else None)
        path = os.path.relpath(image, folder) if image else PurePosixPath(each.name).name
        content = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": path}
        content |= {"imageData": None, "imageHeight": height, "imageWidth": width}
        save(each.path(out / "labelme", ".json"), json.dumps(content).encode())
