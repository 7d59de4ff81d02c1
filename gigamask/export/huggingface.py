"""Export to a folder for Hugging Face's `SamModel.from_pretrained`, or that of `Sam2Model`.

The layer norms of the decoder of `SamModel` have an epsilon of 1e-6 instead of Meta's 1e-5, so
outputs differ in the sixth digit.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.export.probe import Probe, compare, keep_if_equal, read_back
from gigamask.models.promptable import PromptableModel, preprocess


@keep_if_equal()
def write_huggingface(model: PromptableModel, out: Path) -> dict:
    """Write a model as a Hugging Face folder, load it, and compare the outputs.

    It is loaded with transformers, and as every command of gigamask does.

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
    import transformers

    model.save_pretrained(out)
    read_back(model, out)
    name: str = plugin.load(model.config.decoder.family).huggingface
    kind = getattr(transformers, f"{name}Model")
    loaded, probe = kind.from_pretrained(out).eval(), Probe.from_model(model)
    pairs = zip(probe.outputs(model), huggingface_outputs(loaded, model, probe), strict=True)
    difference = max(
        compare(expected, actual, f"{out}: transformers' {kind.__name__}")
        for expected, actual in pairs
    )
    return {
        "files": sorted(str(path) for path in out.iterdir()),
        "tensors": len(loaded.state_dict()),
        "difference": difference,
    }


@torch.no_grad()
def huggingface_outputs(
    hf_model: Any, model: PromptableModel, probe: Probe
) -> list[dict[str, Tensor]]:
    """Return the outputs of transformers' model, in the form of `Probe.outputs`.

    Args:
        hf_model: Transformers' `SamModel` or `Sam2Model`.
        model: Model whose pixel mean and standard deviation are used.
        probe: Image and prompts.
    """
    embedding = hf_model.get_image_embeddings(
        preprocess(probe.pixels, probe.valid, model.pixel_mean, model.pixel_std)
    )
    joined = embedding
    if isinstance(embedding, list):  # of strides 4, 8 and 16
        four, twice, coarse = embedding
        finer = functional.pixel_unshuffle(twice, 2), functional.pixel_unshuffle(four, 4)
        joined = torch.cat([coarse, *finer], 1)
    outputs = [{"embedding": joined}]
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
