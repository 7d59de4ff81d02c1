"""Checks of sampler fields, and access to the item columns that samplers read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Shaped

    from gigamask.interfaces import Sampler, SampleTable


UNREAD = "the sampler names no column of it, as multi_attribute does by --sampler.attributes"
"""Why a table of attributes has no effect."""


def reads_attributes(sampler: Sampler) -> bool:
    """Return whether a sampler reads a table of attributes, as one that is not built in may.

    Args:
        sampler: The sampler.
    """
    given = vars(sampler)
    names = {given.get("attribute"), given.get("column"), *given.get("attributes", ())}
    is_own = not type(sampler).__module__.startswith("gigamask.")
    return is_own or bool(names - {None, "granularity", "tar", "source"})


def check(sampler: Sampler, name: str, valid: bool, requirement: str) -> None:
    """Raise an error that names the field and its value, unless `valid`.

    Args:
        sampler: Sampler whose field is checked.
        name: Name of the field.
        valid: Whether the value meets the requirement.
        requirement: What the value must be, as in "at least 1".

    Raises:
        GigamaskError: The value is not valid.
    """
    if not valid:
        value = getattr(sampler, name)
        raise GigamaskError(f"{type(sampler).__name__}.{name} must be {requirement} (got {value})")


def column(table: SampleTable, name: str, sampler: Sampler) -> Shaped[np.ndarray, "count"]:
    """Return a column of the items.

    Args:
        table: Items to sample.
        name: Name of the column.
        sampler: Sampler that needs the column; its class is named in the error.

    Raises:
        GigamaskError: The items have no such column.
    """
    try:
        return table.columns[name]
    except KeyError:
        known = ", ".join(table.columns) or "none"
        raise GigamaskError(
            f"{type(sampler).__name__} needs the column '{name}', but the items have {known}; "
            "choose one of these, or add it to the table of attributes"
        ) from None
