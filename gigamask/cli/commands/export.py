"""`gigamask export`: weights in the formats of others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class ExportCommand:
    """writes weights as Meta's .pth, a Hugging Face folder, a .safetensors, or two ONNX files, reads them back and compares"""

    weights: Positional[Annotated[str, arg(metavar="WEIGHTS")]]
    """a run folder, a checkpoint, an official .pth, a .safetensors, or a Hugging Face folder"""
    to: Literal["official", "huggingface", "safetensors", "onnx"]
    """the format"""
    out: str
    """the file (official: .pth, safetensors) or the folder (huggingface, onnx)"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        """Writes and verifies."""
        from gigamask import config_files
        from gigamask.export import huggingface, official, onnx
        from gigamask.training.checkpoint import load_model

        model, out = load_model(self.weights, "cpu", config_files.config_of_weights), Path(self.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        ways = {
            "official": official.write_pth,
            "safetensors": official.write_safetensors,
            "huggingface": huggingface.write_folder,
            "onnx": onnx.write_pair,
        }
        done = ways[self.to](model, out)
        for path in done["files"]:
            print(f"{path}: {Path(path).stat().st_size / 1e6:,.1f} MB")
        exact = (
            "every tensor is the model's"
            if not done["difference"]
            else f"answers differ by {done['difference']:.1g} of the largest number at most"
        )
        print(f"read back: {exact}")
        return {"weights": self.weights, "to": self.to} | done
