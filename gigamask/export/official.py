"""Export to Meta's formats: a `.pth` for `segment_anything.sam_model_registry`, or safetensors.

Tensors have Meta's names. A file of SAM 2 also has those of the memory and of videos, as they were
in Meta's file that the model comes from; without that, Meta's code loads it with `strict=False`.
"""

from pathlib import Path

from gigamask import plugin
from gigamask.export.probe import keep_if_equal, read_back
from gigamask.models import convert, state_dict, weight_files
from gigamask.models.promptable import PromptableModel


@keep_if_equal(".pth")
def write_pth(
    model: PromptableModel, out: Path, weights: str | None = None, base: str | None = None
) -> dict:
    """Write a model as Meta's `.pth`, load it from there, and compare the outputs.

    Args:
        model: Model to export.
        out: File that ends in .pth.
        weights: Where the model was loaded from.
        base: What its training started from.

    Returns:
        `files`, the number of `tensors`, and the largest `difference` of an output, relative to the
        model's largest value.

    Raises:
        GigamaskError: The file has another suffix, the format cannot describe the model, or the
            outputs differ.
    """
    state = state_dict.to_official(model)
    convert.check_is_published(model.config, "Meta's format")
    family = plugin.load(model.config.decoder.family)
    state = family.to_meta(state)
    for source in (weights, base):
        if source and source.endswith((".pt", ".pth")) and Path(source).is_file():
            state = family.other_tensors(Path(source)) | state
    weight_files.write_pth(state, model.config, out, family.meta_key)
    return {"files": [str(out)], "tensors": len(state), "difference": read_back(model, out)}


@keep_if_equal(".safetensors")
def write_safetensors(model: PromptableModel, out: Path) -> dict:
    """Write a model as `.safetensors` with its configuration in the header; compare the outputs.

    Args:
        model: Model to export.
        out: File that ends in .safetensors.

    Returns:
        `files`, the number of `tensors`, and the largest `difference` of an output, relative to the
        model's largest value.

    Raises:
        GigamaskError: The file has another suffix, or the outputs differ.
    """
    state = state_dict.to_official(model)
    state_dict.save_weights(state, model.config, out)
    return {"files": [str(out)], "tensors": len(state), "difference": read_back(model, out)}
