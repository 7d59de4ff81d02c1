"""The formats that weights are exported in; plugins add others. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gigamask import plugin
from gigamask.errors import GigamaskError

SAME_PIXELS = "they must map pixels to 0..255 as the run's model.pixels says"


@dataclass(frozen=True)
class ExportFormat:
    """A format that weights are exported in.

    Attributes:
        writer: Reference of a function that writes a model into a file or folder, reads it back,
            and returns its "files" and the largest "difference" of the outputs.
        options: Keyword arguments of the function, among `precision`, `return_single_mask`,
            `weights` and `base`.
        library: Library that loads it, as the Hugging Face Hub names it; "" for a single file.
        loading: How to load it, for the model card; with fields such as {name}.
        without_window: What other programs must do, because the format does not state how pixels
            of more than 8 bits are read; "" if it does.
    """

    writer: str
    options: tuple[str, ...] = ()
    library: str = ""
    loading: str = ""
    without_window: str = ""

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, which has a model card."""
        return bool(self.library)

    def write(self, model: Any, out: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """Write a model, and return the files and the largest difference.

        Args:
            model: The model.
            out: File or folder to write.
            options: Values of all possible options.
        """
        chosen = {name: options[name] for name in self.options}
        result = plugin.expect(plugin.load(self.writer)(model, out, **chosen), dict, self.writer)
        if missing := {"files", "difference"} - result.keys():
            raise GigamaskError(f"{self.writer}: its dict lacks {' and '.join(sorted(missing))}")
        return result


FORMATS = {
    "official": ExportFormat(
        "gigamask.export.official:write_pth", ("weights", "base"), without_window=SAME_PIXELS
    ),
    "huggingface": ExportFormat(
        "gigamask.export.huggingface:write_huggingface",
        library="transformers",
        loading="""```python
from transformers import {kind}, {processor}

model, processor = {kind}.from_pretrained("{name}"), {processor}.from_pretrained("{name}")
```
""",
        without_window=SAME_PIXELS,
    ),
    "safetensors": ExportFormat("gigamask.export.official:write_safetensors"),
    "onnx": ExportFormat(
        "gigamask.export.onnx:write_onnx",
        ("precision", "return_single_mask"),
        library="onnx",
        loading="`encoder.onnx` and `decoder.onnx` run with ONNX Runtime.\n",
    ),
}


def names() -> tuple[str, ...]:
    """Return the names of all formats, those of plugins last."""
    return (*FORMATS, *plugin.merged("exporters", FORMATS))


def folders() -> list[str]:
    """Return the names of the formats that are folders."""
    return [name for name in names() if find(name).is_folder]


def find(name: str) -> ExportFormat:
    """Return a format by name, which must be one of `names()`."""
    return FORMATS.get(name) or plugin.load(plugin.merged("exporters")[name])
