"""A serverless function of CVAT (Nuclio) that runs the ONNX files beside it on points and a box.

`gigamask export --to cvat` copies this file as `main.py`; it imports nothing of gigamask.
"""

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

FOLDER = Path(__file__).parent


def init_context(context: Any) -> None:
    """Load the model, once per worker."""
    from onnxruntime import InferenceSession

    context.user_data.model = [
        InferenceSession(str(FOLDER / name), providers=["CPUExecutionProvider"])
        for name in ("encoder.onnx", "decoder.onnx")
    ]


def handler(context: Any, event: Any) -> Any:
    """Answer a request of CVAT with the mask, and its largest outline.

    Args:
        context: Nuclio's context, with the model.
        event: The request: an image in base64, points, and a box or None.
    """
    data = event.body
    image = Image.open(io.BytesIO(base64.b64decode(data["image"]))).convert("RGB")
    box = data.get("obj_bbox")
    mask = segment(
        context.user_data.model,
        image,
        data["pos_points"],
        data["neg_points"],
        np.reshape(box, (2, 2)) if box is not None and len(box) else np.zeros((0, 2)),
    )
    outlines = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)[0]
    largest = max(outlines, key=cv2.contourArea, default=np.zeros((0, 1, 2), int))
    body = {"points": largest[:, 0].tolist(), "mask": mask.tolist()}
    return context.Response(
        body=json.dumps(body), headers={}, content_type="application/json", status_code=200
    )


def segment(model: Any, image: Any, positive: Any, negative: Any, box: Any) -> Any:
    """Return the mask of a prompt, 255 inside of the object.

    Args:
        model: The sessions of the encoder and the decoder.
        image: The image.
        positive: x and y of points on the object.
        negative: x and y of points outside of it.
        box: The first and the last corner; none: no box.
    """
    encoder, decoder = model
    side = encoder.get_inputs()[0].shape[-1]
    longest = max(image.size)
    width, height = (int(length * side / longest + 0.5) for length in image.size)
    if os.environ.get("STRETCH") == "1":
        width = height = side
    pixels = np.zeros((1, 3, side, side), np.float32)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels[0, :, :height, :width] = np.asarray(resized).transpose(2, 0, 1)
    valid = np.array([[height, width]], np.int64)
    (embedding,) = encoder.run(None, {"image": pixels, "input_size": valid})
    labels = [1] * len(positive) + [0] * len(negative) + ([2, 3] if len(box) else [-1])
    parts = [positive, negative, box if len(box) else [[0, 0]]]
    points = np.concatenate([np.reshape(np.asarray(part, float), (-1, 2)) for part in parts])
    scale = np.array([width / image.width, height / image.height])
    mask_side = decoder.get_inputs()[3].shape[-1]
    inputs = {
        "image_embeddings": embedding,
        "point_coords": (points * scale)[None].astype(np.float32),
        "point_labels": np.array([labels], np.float32),
        "mask_input": np.zeros((1, 1, mask_side, mask_side), np.float32),
        "has_mask_input": np.zeros(1, np.float32),
        "orig_im_size": np.array([image.height, image.width], np.float32),
    }
    masks, scores = decoder.run(["masks", "iou_predictions"], inputs)
    # One click may mean a part or the whole: the best of three masks; else the single mask.
    best = 1 + int(scores[0, 1:].argmax()) if len(labels) == 2 and not len(box) else 0
    return np.where(masks[0, best] > 0, 255, 0).astype(np.uint8)
