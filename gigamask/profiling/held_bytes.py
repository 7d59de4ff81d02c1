"""Bytes that a value holds."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor


def held_bytes(value: Any) -> int:
    """Return the bytes of all tensors, arrays and byte strings in a value."""
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, tuple | list):
        return sum(map(held_bytes, value))
    if is_dataclass(value):
        return sum(held_bytes(getattr(value, field.name)) for field in fields(value))
    return 0
