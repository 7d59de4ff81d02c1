"""Meta's own package `segment_anything`, without torchvision, which does not load beside the CPU
build of torch.

Two functions stand in for what it needs of that: Pillow's resize, and the textbook's suppression.
Only comparisons need any of this, where the package lies on PYTHONPATH."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from PIL import Image

from gigamask.models.sam.sam import Sam
from gigamask.models.state_dict import to_official


def there() -> bool:
    """Says whether the package can be imported."""
    return importlib.util.find_spec("segment_anything") is not None


@contextmanager
def imported() -> Iterator[Any]:
    """Imports the package."""
    stand_in = {
        "torchvision": {},
        "torchvision.ops": {},
        "torchvision.ops.boxes": {"batched_nms": suppression, "box_area": area},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {
            "to_pil_image": Image.fromarray,
            "resize": lambda image, size: image.resize(size[::-1], Image.Resampling.BILINEAR),
        },
    }
    modules = {name: types.ModuleType(name) for name in stand_in}
    for name, content in stand_in.items():
        vars(modules[name]).update(content)
    sys.modules.update(modules)
    try:
        yield importlib.import_module("segment_anything")
    finally:
        for name in modules:
            del sys.modules[name]


def with_weights_of(model: Sam, package: Any) -> Any:
    """Returns Meta's model of the same size, with the same weights."""
    spec, parts = model.config, package.modeling
    side = spec.embedding_size
    theirs = parts.Sam(
        parts.ImageEncoderViT(
            img_size=spec.image_size,
            patch_size=spec.patch_size,
            embed_dim=spec.embed_dim,
            depth=spec.depth,
            num_heads=spec.num_heads,
            out_chans=spec.embedding_dim,
            norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=spec.window_size,
            global_attn_indexes=spec.global_attn_indexes,
        ),
        parts.PromptEncoder(
            spec.embedding_dim, (side, side), (spec.image_size, spec.image_size), 16
        ),
        parts.MaskDecoder(
            transformer_dim=spec.embedding_dim,
            transformer=parts.TwoWayTransformer(
                2, spec.embedding_dim, spec.decoder_num_heads, spec.decoder_mlp
            ),
            iou_head_hidden_dim=spec.iou_hidden,
        ),
    )
    theirs.load_state_dict(to_official(model), strict=True)
    return theirs.eval()


def suppression(boxes, scores, idxs, iou_threshold):
    """One box after the other, in torch, as the reference generator calls torchvision's
    `batched_nms`: all of one category."""
    kept, left = [], torch.sort(scores, descending=True, stable=True)[1]
    while len(left):
        best, left = left[0], left[1:]
        kept.append(int(best))
        low, high = (
            torch.maximum(boxes[best, :2], boxes[left, :2]),
            torch.minimum(boxes[best, 2:], boxes[left, 2:]),
        )
        shared = (high - low).clamp(min=0).prod(1)
        left = left[
            ~(
                (shared / (area(boxes[best : best + 1]) + area(boxes[left]) - shared)).double()
                > iou_threshold
            )
        ]
    return torch.tensor(kept, dtype=torch.int64)


def area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
