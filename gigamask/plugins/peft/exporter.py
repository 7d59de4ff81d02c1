"""Export of adapters in the format of peft, which merges them into Hugging Face's `SamModel`."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.export.probe import compare, keep_if_equal
from gigamask.models import convert, lora, state_dict, weight_files, weight_paths
from gigamask.models.promptable import PromptableModel
from gigamask.plugins.peft import folders


@keep_if_equal()
def write_peft(model: PromptableModel, out: Path, weights: str, base: str | None) -> dict[str, Any]:
    """Write the adapters of a run as a folder of peft, read it back, and compare the weights.

    Args:
        model: The model with merged adapters.
        out: Folder to write.
        weights: Run folder or checkpoint that holds the adapters.
        base: Id or path of the weights that they were trained on.

    Returns:
        `files`, the number of `tensors`, and the largest `difference` of a weight, relative to the
        largest value of its tensor.

    Raises:
        GigamaskError: There are no adapters, the format cannot describe them, or `out` is a file.
    """
    convert.check_is_published(model.config, "peft's format, as gigamask writes it,")
    file = weight_paths.find_weights(weights)
    trained = weight_files.read_safetensors(file)[0] if file.suffix == ".safetensors" else {}
    if not lora.has_adapters(trained) or base is None:
        raise GigamaskError(
            f"--to peft: {weights} holds no adapters; give a run that was trained with --lora, or "
            "use --to huggingface"
        )
    tensors, config = folders.to_peft(trained, str(file))
    local = Path(base).absolute()
    config["base_model_name_or_path"] = str(local) if local.exists() else base
    out.mkdir(parents=True, exist_ok=True)
    files.write_atomically(
        out / folders.WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"})
    )
    files.write_text(out / folders.CONFIG, json.dumps(config, indent=2))
    own, (read, _) = state_dict.to_official(model), state_dict.read_weights(out)
    reader = f"--to peft (use --to huggingface): {base} with the adapters"
    difference = compare(own, read, reader, 1e-5)
    written = [str(out / name) for name in (folders.CONFIG, folders.WEIGHTS)]
    return {"files": written, "tensors": len(tensors), "difference": difference}
