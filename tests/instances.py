"""A little COCO data set whose masks a model finds: it predicted them, then they were moved."""

import json
from pathlib import Path

import numpy as np

from gigamask.data import image
from gigamask.inference.predictor import SamPredictor
from gigamask.masks.rle import RLEMasks
from gigamask.models.sam.sam import Sam

SIZES = ((48, 64), (64, 40), (56, 56))
CATEGORIES = (3, 5, 9, 12)
"""Ids of the categories; there is no object of the last, and nobody looked for it."""


def write(folder: Path, model: Sam, lvis: bool = False) -> None:
    """Write `instances.json`, `photos` and `boxes.json`, a detector's boxes.

    The first object of the last image is a crowd, the second has no pixel, and a third is broken;
    LVIS has none of these, and states URLs, frequencies and what was looked for.
    """
    random = np.random.default_rng(6)
    predictor = SamPredictor(model)
    photos = folder / "photos" / ("val2017" if lvis else "")
    photos.mkdir(parents=True)
    images, annotations, boxes = [], [], []
    for number, (height, width) in enumerate(SIZES, 11):
        pixels = random.integers(0, 255, (height, width, 3), dtype=np.uint8)
        (photos / f"{number}.jpg").write_bytes(image.encode_jpeg(pixels, 95))
        predictor.set_image(image.decode((photos / f"{number}.jpg").read_bytes(), ""))
        names = {"file_name": f"{number}.jpg"}
        if lvis:
            names = {
                "coco_url": f"http://images.cocodataset.org/val2017/{number}.jpg",
                "neg_category_ids": [CATEGORIES[number % 3]],
                "not_exhaustive_category_ids": [CATEGORIES[(number + 1) % 3]],
            }
        images.append({"id": number, "height": height, "width": width, **names})
        for i in range(5):
            corner = random.uniform(0, (width - 16, height - 16))
            x, y, w, h = *corner, *random.uniform(8, 16, 2)
            box = np.array([x, y, x + w, y + h])
            masks, scores, logits = predictor.predict(box=box, multimask_output=i % 3 != 1)
            mask = masks[scores.argmax()]
            if i % 3 == 2:
                best = logits[scores.argmax()][None]
                mask = predictor.predict(box=box, mask_input=best, multimask_output=False)[0][0]
            moved = np.roll(mask, random.integers(-1, 2, 2), (0, 1))
            rle = RLEMasks.from_dense(moved[None])
            category = int(random.choice(CATEGORIES[:3]))
            annotation = {
                "id": len(annotations) + 1,
                "image_id": number,
                "category_id": category,
                "segmentation": {"size": [height, width], "counts": rle.to_coco()[0].decode()},
                "area": float(moved.sum()) + 0.25,
                "bbox": [x, y, w, h],
                "iscrowd": 0,
            }
            annotations.append(annotation)
            for shift in (0, 1.5):
                detected = [x + shift, y, w, h]
                found = CATEGORIES[-1] if i == 3 and shift else category
                score = round(float(random.random()), 2)
                row = {"image_id": number, "category_id": found, "bbox": detected, "score": score}
                boxes.append(row)
    if not lvis:
        annotations[-5]["iscrowd"] = 1
        annotations[-4]["segmentation"]["counts"] = [height * width]
        broken = {"id": 99, "image_id": number, "category_id": 3, "segmentation": [[1, 2]]}
        annotations.append(broken | {"area": 1, "iscrowd": 1, "bbox": [1, 2, 0, 0]})
    categories = [
        {"id": each, "name": str(each), "frequency": letter}
        for each, letter in zip(CATEGORIES, "rcff", strict=True)
    ]
    if not lvis:
        categories = [{"id": each["id"], "name": each["name"]} for each in categories]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(content))
    (folder / "boxes.json").write_text(json.dumps(boxes))
