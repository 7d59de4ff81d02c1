"""What samplers are given: the numbers in their fields and the columns of the items, and the faults where these will not do.

Not here: what a column holds (`data.items`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gigamask.faults import Fault, check_range

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Shaped

    from gigamask.seams import Items


def at_least_one(sampler: str, **numbers: int | None) -> None:
    """Raises `Fault` where one of a sampler's fields counts something and is below 1; None stands for a default."""
    for name, value in numbers.items():
        if value is not None:
            check_range(f"the {sampler} order's {name}", value, 1, None)


def column(items: Items, name: str, sampler: str) -> Shaped[np.ndarray, "count"]:
    """Returns the items' column of that name, which the order of that sampler reads."""
    try:
        return items.columns[name]
    except KeyError:
        raise Fault(
            f"the {sampler} order reads the column '{name}', which the items lack; choose one of {', '.join(items.columns) or 'none'}, "
            "or add it to the table of attributes"
        ) from None
