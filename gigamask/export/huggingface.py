"""Export to a folder for Hugging Face's `SamModel.from_pretrained`.

The layer norms of its decoder have an epsilon of 1e-6 instead of Meta's 1e-5, so outputs differ in
the sixth digit.
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
from gigamask.models.configs import SamConfig
from gigamask.models.sam.sam import PIXEL_MEAN, PIXEL_STD, Sam, preprocess


def write_huggingface(model: Sam, out: Path) -> dict:
    """Write a model as a Hugging Face folder, load it with transformers, and compare the outputs.

    Args:
        model: Model to export.
        out: Folder to write.

    Returns:
        `files`, the number of `tensors`, and the largest `difference` of an output, relative to the
        model's largest value.

    Raises:
        GigamaskError: Transformers is not installed, `out` is a file, or outputs differ.
    """
    if importlib.util.find_spec("transformers") is None:
        raise GigamaskError(
            "--to huggingface needs transformers, which is not installed: "
            "run pip install 'gigamask[hf]'"
        )
    if out.exists() and not out.is_dir():
        raise GigamaskError(f"--out {out}: must be a folder for Hugging Face, but is a file")
    from transformers import SamModel

    with torch.device("meta"):
        hf_model = SamModel(huggingface_config(model.config))
    weights = convert.to_huggingface(state_dict.to_official(model))
    hf_model.load_state_dict(weights, assign=True)
    with state_dict.report_write_errors(out):
        hf_model.save_pretrained(out)
    processor = json.dumps(processor_config(model.config), indent=2)
    (out / "preprocessor_config.json").write_text(processor)
    loaded, probe = SamModel.from_pretrained(out).eval(), Probe.of(model.config)
    pairs = zip(probe.outputs(model), huggingface_outputs(loaded, model, probe), strict=True)
    difference = max(
        compare(expected, actual, f"{out}: transformers' SamModel") for expected, actual in pairs
    )
    return {
        "files": sorted(str(path) for path in out.iterdir()),
        "tensors": len(hf_model.state_dict()),
        "difference": difference,
    }


def huggingface_config(config: SamConfig) -> Any:
    """Return transformers' `SamConfig` for a model's configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import SamConfig as HuggingFaceSamConfig
        from transformers import SamMaskDecoderConfig, SamPromptEncoderConfig, SamVisionConfig

    vision = SamVisionConfig(
        hidden_size=config.embed_dim,
        output_channels=config.embedding_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        image_size=config.image_size,
        patch_size=config.patch_size,
        window_size=config.window_size,
        global_attn_indexes=list(config.global_attn_indexes),
        num_pos_feats=config.embedding_dim // 2,
        mlp_dim=4 * config.embed_dim,
    )
    prompts = SamPromptEncoderConfig(
        hidden_size=config.embedding_dim, image_size=config.image_size, patch_size=config.patch_size
    )
    decoder = SamMaskDecoderConfig(
        hidden_size=config.embedding_dim,
        mlp_dim=config.decoder_mlp,
        num_attention_heads=config.decoder_num_heads,
        iou_head_hidden_dim=config.iou_hidden,
    )
    return HuggingFaceSamConfig(
        vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder
    )


def processor_config(config: SamConfig) -> dict:
    """Return the settings of `SamImageProcessor`: resize the long side, pad the rest."""
    side, mask_size = config.image_size, config.mask_size
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
        "mask_size": {"longest_edge": mask_size},
        "mask_pad_size": {"height": mask_size, "width": mask_size},
    }


@torch.no_grad()
def huggingface_outputs(hf_model: Any, model: Sam, probe: Probe) -> list[dict[str, Tensor]]:
    """Return the outputs of transformers' `SamModel`, in the form of `Probe.outputs`.

    Args:
        hf_model: Transformers' `SamModel`.
        model: Model whose pixel mean and standard deviation are used.
        probe: Image and prompts.
    """
    embedding = hf_model.get_image_embeddings(
        preprocess(probe.pixels, probe.valid, model.pixel_mean, model.pixel_std)
    )
    outputs = [{"embedding": embedding}]
    for prompts in probe.prompts:
        if (prompts.labels == 2).any():
            arguments = {"input_boxes": prompts.points_xy_input.reshape(1, 1, 4)}
        else:  # SamModel appends the padding token itself
            arguments = {
                "input_points": prompts.points_xy_input[:, None, :-1],
                "input_labels": prompts.labels[:, None, :-1],
            }
        prediction = hf_model(
            image_embeddings=embedding,
            input_masks=None if prompts.masks is None else prompts.masks[:, None],
            multimask_output=prompts.multimask_output,
            **arguments,
        )
        logits, iou = prediction.pred_masks[:, 0], prediction.iou_scores[:, 0]
        outputs.append({"logits": logits, "predicted IoU": iou})
    return outputs
