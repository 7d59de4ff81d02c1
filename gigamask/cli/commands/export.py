"""`gigamask export`: write weights in other formats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class ExportCommand:
    """write weights as Meta's .pth, Hugging Face, .safetensors, ONNX or peft, and verify them"""

    weights: Positional[Annotated[str, arg(metavar="WEIGHTS")]]
    """a run folder, a checkpoint, a .pth, a .safetensors, a Hugging Face folder or id, or starter,
    the small model in this package"""
    to: Literal["official", "huggingface", "safetensors", "onnx", "peft"]
    """output format"""
    out: str
    """output file (official: .pth, safetensors) or folder (huggingface, onnx, peft)"""
    trust: bool = False
    """run code that a run folder names, such as file.py:Class, and that is not built in"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Write the weights, read them back, and return the files and the largest difference."""
        from gigamask import config_files
        from gigamask.errors import GigamaskError
        from gigamask.export import huggingface, official, onnx, peft
        from gigamask.training.checkpoint import load_model

        out = Path(self.out)
        if not out.absolute().parent.is_dir():
            raise GigamaskError(
                f"--out {out}: the folder {out.parent} does not exist; create it, or choose another"
            )
        config_of = partial(config_files.config_of_weights, trust=self.trust)
        model = load_model(self.weights, "cpu", config_of)
        writers = {
            "official": official.write_pth,
            "safetensors": official.write_safetensors,
            "huggingface": huggingface.write_huggingface,
            "onnx": onnx.write_onnx,
            "peft": partial(peft.write_peft, weights=self.weights, base=self._base),
        }
        result = writers[self.to](model, out)
        for path in result["files"]:
            print(f"{path}: {Path(path).stat().st_size / 1e6:,.1f} MB")
        if result["difference"]:
            print(f"read back: outputs differ by at most {result['difference']:.1g} (relative)")
        else:
            print("read back: all outputs are equal")
        return {"weights": self.weights, "to": self.to} | result

    @property
    def _base(self) -> str | None:
        """The weights that a run started from."""
        from gigamask import config_files

        folder = config_files.run_folder_of(self.weights)
        return None if folder is None else config_files.read_run_config(str(folder)).get("init")
