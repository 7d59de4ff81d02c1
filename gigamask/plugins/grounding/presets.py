"""Text encoders that are another with some of its fields set."""

from gigamask.plugins.grounding import text_encoders
from gigamask.registry import Preset

_FIELDS = ("name", "revision", "precision")
MINILM = Preset(
    "gigamask.plugins.grounding.text_encoders:HuggingFace",
    {"sha256": text_encoders.MINILM.sha256},
    {name: getattr(text_encoders.MINILM, name) for name in _FIELDS},
)
"""all-MiniLM-L6-v2."""
