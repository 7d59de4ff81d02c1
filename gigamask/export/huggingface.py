"""A folder for Hugging Face's `SamModel.from_pretrained`: configuration, weights, and the numbers of its image processor.

Its decoder's layer norms have another epsilon than Meta's (1e-6 for 1e-5), so answers differ in the sixth digit.

Not here: names of tensors (`model.weights`).
"""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.export.probe import Probe, compare
from gigamask.models import convert, state_dict
from gigamask.models.configs import SamConfig as SamSpec
from gigamask.models.sam.sam import PIXEL_MEAN, PIXEL_STD, Sam, preprocess


def write_folder(model: Sam, out: Path) -> dict:
    """Writes the folder, loads it as its users do, and asks both models the same; raises `GigamaskError` where transformers is missing or answers differ."""
    if importlib.util.find_spec("transformers") is None:
        raise GigamaskError(
            "--to huggingface wants transformers, which is not installed; run pip install 'gigamask[hf]'"
        )
    if out.exists() and not out.is_dir():
        raise GigamaskError(f"--out {out}: is a file, Hugging Face wants a folder; give another")
    from transformers import SamModel

    with torch.device("meta"):
        theirs = SamModel(config_of(model.config))
    theirs.load_state_dict(convert.to_huggingface(state_dict.to_official(model)), assign=True)
    with state_dict.report_write_errors(out):
        theirs.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps(processor_of(model.config), indent=2))
    loaded, probe = SamModel.from_pretrained(out).eval(), Probe.of(model.config)
    pairs = zip(probe.answers(model), answers(loaded, model, probe), strict=True)
    difference = max(
        compare(mine, other, f"{out}: transformers' SamModel") for mine, other in pairs
    )
    return {
        "files": sorted(str(path) for path in out.iterdir()),
        "tensors": len(theirs.state_dict()),
        "difference": difference,
    }


def config_of(spec: SamSpec) -> Any:
    """Returns a model's sizes as a `SamConfig`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import (
            SamConfig,
            SamMaskDecoderConfig,
            SamPromptEncoderConfig,
            SamVisionConfig,
        )

    vision = SamVisionConfig(
        hidden_size=spec.embed_dim,
        output_channels=spec.embedding_dim,
        num_hidden_layers=spec.depth,
        num_attention_heads=spec.num_heads,
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        window_size=spec.window_size,
        global_attn_indexes=list(spec.global_attn_indexes),
        num_pos_feats=spec.embedding_dim // 2,
        mlp_dim=4 * spec.embed_dim,
    )
    prompts = SamPromptEncoderConfig(
        hidden_size=spec.embedding_dim, image_size=spec.image_size, patch_size=spec.patch_size
    )
    decoder = SamMaskDecoderConfig(
        hidden_size=spec.embedding_dim,
        mlp_dim=spec.decoder_mlp,
        num_attention_heads=spec.decoder_num_heads,
        iou_head_hidden_dim=spec.iou_hidden,
    )
    return SamConfig(
        vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder
    )


def processor_of(spec: SamSpec) -> dict:
    """Returns what `SamImageProcessor` reads: the long side becomes the model's, and the rest is padding."""
    side, grid = spec.image_size, spec.mask_size
    return {
        "image_processor_type": "SamImageProcessor",
        "processor_class": "SamProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "do_convert_rgb": True,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "image_mean": [round(value / 255, 6) for value in PIXEL_MEAN],
        "image_std": [round(value / 255, 6) for value in PIXEL_STD],
        "size": {"longest_edge": side},
        "pad_size": {"height": side, "width": side},
        "mask_size": {"longest_edge": grid},
        "mask_pad_size": {"height": grid, "width": grid},
    }


@torch.no_grad()
def answers(theirs: Any, model: Sam, probe: Probe) -> list[dict[str, Tensor]]:
    """Returns what a `SamModel` answers, as `Probe.answers` does for ours."""
    embedding = theirs.get_image_embeddings(
        preprocess(probe.pixels, probe.valid, model.pixel_mean, model.pixel_std)
    )
    found = [{"embedding": embedding}]
    for prompts in probe.prompts:
        if (prompts.labels == 2).any():
            given = {"input_boxes": prompts.points_xy_input.reshape(1, 1, 4)}
        else:  # whose last token it adds by itself
            given = {
                "input_points": prompts.points_xy_input[:, None, :-1],
                "input_labels": prompts.labels[:, None, :-1],
            }
        masks = None if prompts.masks is None else prompts.masks[:, None]
        told = theirs(
            image_embeddings=embedding,
            input_masks=masks,
            multimask_output=prompts.multimask_output,
            **given,
        )
        found.append({"logits": told.pred_masks[:, 0], "predicted IoU": told.iou_scores[:, 0]})
    return found
