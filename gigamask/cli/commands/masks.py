"""`gigamask masks`: masks precomputed at a fixed grid."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class MasksCommand:
    """precomputes masks at a fixed grid, bit-packed (8 KB each at 256, 9 TB for all of SA-1B), for training without json"""

    paths: Positional[Annotated[tuple[str, ...], arg(metavar="PATH ...")]]
    """an index, or tars to index in passing"""
    out: str
    """the mask store's folder; what it already holds of these tars is kept"""
    grid: int = 256
    """cells of a side: a quarter of the input's pixels, or all of them for --loader.target area"""
    side: int = 1024
    """pixels of a side of the model's input square"""
    mirrored: bool = False
    """also keep the mirror images of portraits' masks, which lie between the cells; --loader.augment flip needs them"""
    workers: int = 1
    """processes; each cuts one tar at a time"""
    verify: bool = False
    """build nothing, read every byte of what is there and say what is wrong"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.cli.commands.opening import opened
        from gigamask.cli.commands.progress import bar
        from gigamask.data import mask_store
        from gigamask.errors import GigamaskError

        with opened(self.paths) as index, bar("masks") as progress:
            if self.verify:
                wrong = mask_store.verify(index, self.out, self.workers, progress)
                for line in wrong:
                    print(f"  {line}")
                if wrong:
                    raise GigamaskError(f"{self.out}: {len(wrong)} faults, the first: {wrong[0]}")
            else:
                mask_store.build(
                    index, self.out, self.grid, self.side, self.mirrored, self.workers, progress
                )
            store = mask_store.MaskStore.open(self.out, index)
        report = {
            "masks": index.manifest.masks,
            "tars": len(store.keys),
            "bytes": store.bytes,
            "grid": store.manifest.grid,
        }
        print(
            f"{self.out}: {report['masks']} masks of {report['tars']} tars, {report['bytes'] / 1e6:.1f} MB"
            + (", all sound" if self.verify else "")
        )
        if not self.verify:
            print(f"for recipes of that side and grid: --loader.mask-store {quote(self.out)}")
        return report
