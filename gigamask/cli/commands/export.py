"""`gigamask export`: write weights in other formats."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from gigamask.export import formats
from gigamask.parser import Positional

if TYPE_CHECKING:
    from gigamask.export.formats import ExportFormat
    from gigamask.report.history import History

    Format = str
else:
    Format = Literal[formats.names()]


@dataclass(frozen=True)
class ExportCommand:
    """write weights as Meta's .pth, Hugging Face, ONNX or others, and verify them"""

    needs_flags: ClassVar = {
        "precision": "to onnx",
        "return_single_mask": "to onnx",
        "image_size": "to official or to huggingface or to safetensors or to onnx",
        "license": " or ".join(f"to {name}" for name in formats.folders()),
    }

    weights: Annotated[str, Positional("WEIGHTS")]
    """a run folder, a checkpoint, a .pth, a .safetensors, a Hugging Face folder or id, or starter,
    the small model in this package"""
    to: Format
    """output format"""
    out: str
    """output file (official: .pth, safetensors) or folder (all others)"""
    image_size: int | None = None
    """side of the input in pixels; default: that of the weights. Small things are often answered
    better with a larger one, without training (docs/elsewhere.md)"""
    precision: Literal["fp32", "fp16"] = "fp32"
    """onnx: fp16 stores weights in half precision and multiplies in it, as autocast does"""
    return_single_mask: bool = False
    """onnx: one mask of each prompt instead of four, whose low_res_masks are the next mask_input"""
    push: str | None = None
    """send the folder to the Hugging Face Hub as this model, USER/NAME"""
    license: str | None = None
    """license of the weights for the model card, as the Hub names it, such as apache-2.0"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Write the weights, read them back, and return the files and the largest difference."""
        from rich.filesize import decimal

        from gigamask import config_files
        from gigamask.errors import GigamaskError
        from gigamask.models.hub import is_hub_id, upload
        from gigamask.models.weight_paths import check_weights_exist
        from gigamask.progress import progress_bar
        from gigamask.report.model_card import check_card

        out = Path(self.out)
        chosen = formats.find(self.to)
        if self.push is not None and not (chosen.is_folder and is_hub_id(self.push)):
            raise GigamaskError(
                f"--push {self.push}: expected USER/NAME and --to {', '.join(formats.folders())} "
                f"(got --to {self.to})"
            )
        given = {"precision": self.precision, "return_single_mask": self.return_single_mask}
        if not out.absolute().parent.is_dir():
            raise GigamaskError(
                f"--out {out}: the folder {out.parent} does not exist; create it, or choose another"
            )
        check_weights_exist(self.weights)
        if chosen.is_folder:
            check_card(out)
        with progress_bar("export"):
            from gigamask.models.pretrained import load_sam
            from gigamask.report import history
            from gigamask.training.checkpoint import load_model

            config_of = partial(config_files.config_of_weights, trust=self.trust)
            model = load_model(self.weights, "cpu", config_of)
            if self.image_size is not None:
                resized = replace(model.config, image_size=self.image_size)
                model = load_sam(self.weights, resized)
            folder, base = config_files.run_folder_of(self.weights), None
            run = history.read(folder) if folder and chosen.is_folder else None
            if folder and "base" in chosen.options:
                with suppress(GigamaskError):
                    base = config_files.read_run_config(str(folder)).get("init")
            options = given | {"weights": self.weights, "base": base}
            result = chosen.write(model, out, options)
        if chosen.is_folder:
            result["files"] = [*result["files"], str(self._write_card(chosen, out, run))]
        if model.config.pixels.has_window and chosen.without_window:
            print(f"--to {self.to} states no window for other programs: {chosen.without_window}")
        for path in result["files"]:
            print(f"{path}: {decimal(Path(path).stat().st_size)}")
        if result["difference"]:
            print(f"read back: outputs differ by at most {result['difference']:.1g} (relative)")
        else:
            print("read back: all outputs are equal")
        if self.push is not None:
            result["pushed"] = upload(out, self.push, result["files"])
            print(result["pushed"])
        return {"weights": self.weights, "to": self.to} | result

    def _write_card(self, chosen: ExportFormat, out: Path, run: History | None) -> Path:
        """Write the model card, and return its file."""
        from gigamask import config_files
        from gigamask.models import manifest
        from gigamask.models.weight_paths import find_weights
        from gigamask.report.model_card import write_card

        recipe, step = None, None
        if run is not None:
            recipe = config_files.recipe_config(run.config.get("recipe"), self.trust)
            step = manifest.step_of(find_weights(self.weights).resolve().parent)
        name = self.push or out.absolute().name
        return write_card(out, chosen, name, run, recipe, step, self.license)
