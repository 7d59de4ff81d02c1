"""Statistics of what a sampler visits over its epochs, as data and as a table.

The sequence of visited items is cut into pieces of equal length, and each piece is compared with
the data. A sampler that learns from losses is run as at the start of training, when no loss is
known. `datatools.plots` draws the same as a picture.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import GRANULARITIES, LossSnapshot, Sampler, SampleTable
from gigamask.samplers.batch_sampler import items_at, order_of

QUANTILES = {"10%": 0.1, "median": 0.5, "90%": 0.9}


def describe(
    items: SampleTable, sampler: Sampler, epochs: int = 1, pieces: int = 50
) -> dict[str, Any]:
    """Describe what a sampler visits, compared with the data.

    Args:
        items: Everything that can be sampled, with the columns granularity, difficulty and tar.
        sampler: The sampler.
        epochs: Number of epochs, at least 1.
        pieces: Number of pieces into which the whole sequence is cut.

    Returns:
        Numbers of the whole sequence, of the data, and of each piece, ready for JSON.

    Raises:
        GigamaskError: There is nothing to visit.
    """
    check_range("--epochs", epochs, 1)
    if not items.count:
        raise GigamaskError(
            "there are no items to sample: no image has a mask that passes; give tars with masks"
        )
    granularity, difficulty = items.columns["granularity"], items.columns["difficulty"]
    tar = items.columns["tar"]
    all_tars = np.bincount(tar) > 0
    order_seconds: list[float] = []
    visits, tars_seen = np.zeros(items.count, np.int64), np.zeros(len(all_tars), bool)
    rows: list[dict[str, Any]] = []
    end = 0
    for visited in _pieces(items, sampler, epochs, pieces, order_seconds):
        np.add.at(visits, visited, 1)
        end += len(visited)
        tars_here = np.bincount(tar[visited], minlength=len(all_tars)) > 0
        tars_seen |= tars_here
        rows.append(
            {
                "end": end,
                "granularity": _shares(granularity[visited]),
                "difficulty": _quantiles(difficulty[visited]),
                "tars_seen": int(tars_seen.sum()),
                "tars_here": int(tars_here.sum()),
            }
        )
    return {
        "items": items.count,
        "epochs": epochs,
        "positions": end // epochs,
        "order_seconds": max(order_seconds),
        "visits": {
            "never": int((visits == 0).sum()),
            "once": int((visits == 1).sum()),
            "more": int((visits > 1).sum()),
            "most": int(visits.max()),
        },
        "data": {
            "granularity": _shares(granularity),
            "difficulty": _quantiles(difficulty),
            "tars": int(all_tars.sum()),
        },
        "pieces": rows,
    }


def _pieces(
    items: SampleTable, sampler: Sampler, epochs: int, pieces: int, order_seconds: list[float]
) -> Iterator[Int64[np.ndarray, "n"]]:
    """Yield the items of each piece; append the seconds that each epoch's order took.

    One epoch's order is held at a time, and a piece may extend over several epochs.
    """
    history = LossSnapshot.empty(items.count) if sampler.decay is not None else None
    rest: list[np.ndarray] = []
    ends: list[int] = []
    length = 0
    for epoch in range(epochs):
        start_s = time.perf_counter()
        order = order_of(sampler, items, epoch, history, length if epoch else None)
        if not epoch:
            length = len(order)
            if not length:
                raise GigamaskError("the sampler's order has no positions; loosen the sampler")
            count = min(pieces, length * epochs)
            ends = np.linspace(0, length * epochs, count + 1).round().astype(int).tolist()[1:]
        # A lazy order is evaluated here.
        sequence = items_at(order, np.arange(length), sampler, items)
        order_seconds.append(time.perf_counter() - start_s)
        at = 0
        while ends and ends[0] <= (epoch + 1) * length:
            stop = ends.pop(0) - epoch * length
            yield np.concatenate([*rest, sequence[at:stop]])
            rest, at = [], stop
        rest.append(sequence[at:])


def _shares(granularity: Int[np.ndarray, "n"]) -> dict[str, float]:
    shares = np.bincount(granularity, minlength=3) / len(granularity)
    return dict(zip(GRANULARITIES, shares.tolist(), strict=True))


def _quantiles(difficulty: Float[np.ndarray, "n"]) -> dict[str, float]:
    values = np.quantile(difficulty, list(QUANTILES.values()))
    return dict(zip(QUANTILES, values.tolist(), strict=True))


def table(stats: dict[str, Any]) -> str:
    """Format the result of `describe`: the data and the first, middle and last piece."""
    visits, pieces, data = stats["visits"], stats["pieces"], stats["data"]
    rows = {
        "data": data,
        "first piece": pieces[0],
        "middle piece": pieces[len(pieces) // 2],
        "last piece": pieces[-1],
    }
    lines = [
        f"{stats['items']:,} items, {stats['positions']:,} positions an epoch;"
        f" {epochs_text(stats)}; an order is made in {stats['order_seconds']:.2g} s",
        f"items visited: {visits['never']:,} never, {visits['once']:,} once,"
        f" {visits['more']:,} more often, the most visited {visits['most']:,} x",
        f"tars visited: {pieces[-1]['tars_seen']:,} of {data['tars']:,},"
        f" at most {max(piece['tars_here'] for piece in pieces):,}"
        f" in one of {len(pieces)} pieces of about {pieces[0]['end']:,}",
        "",
        " " * 16 + "".join(f"{name:>12}" for name in (*GRANULARITIES, "difficulty:", *QUANTILES)),
    ]
    for name, row in rows.items():
        shares = "".join(f"{row['granularity'][key]:>12.1%}" for key in GRANULARITIES)
        quantiles = "".join(f"{row['difficulty'][key]:>12.3f}" for key in QUANTILES)
        lines.append(f"{name:16}{shares}{'':12}{quantiles}")
    return "\n".join(lines)


def epochs_text(stats: dict[str, Any]) -> str:
    """Return the number of epochs in words."""
    return "one epoch" if stats["epochs"] == 1 else f"{stats['epochs']:,} epochs"
