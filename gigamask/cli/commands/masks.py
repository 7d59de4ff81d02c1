"""`gigamask masks`: precompute masks for training."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import Annotated, Any, ClassVar

from gigamask.launch import PartOptions
from gigamask.parser import Positional


@dataclass(frozen=True)
class MasksCommand(PartOptions):
    """precompute low-resolution masks (bit-packed, 8 KB each), so that training reads no JSON"""

    needs_flags: ClassVar = dict.fromkeys(("mask_size", "image_size", "mirrored"), "verify false")

    paths: Annotated[tuple[str, ...], Positional("PATH ...")]
    """an index, or tars, which are indexed temporarily"""
    out: str
    """output folder for the mask store (9 TB for all of SA-1B); tars that it already holds are
    skipped"""
    mask_size: int = 256
    """side of the stored masks: a quarter of --image-size, or as large for --loader.target area"""
    image_size: int = 1024
    """side of the model's square input (pixels)"""
    mirrored: bool = False
    """also store mirrored masks of portrait images, whose cells do not align when mirrored; needed
    by --loader.augment flip"""
    workers: int = 1
    """number of processes; each works on one tar at a time"""
    verify: bool = False
    """read the whole store and report errors, without building anything"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Build or verify the store, and return its size."""
        from rich.filesize import decimal

        from gigamask.data import worker_pool
        from gigamask.errors import GigamaskError, counted
        from gigamask.progress import progress_bar
        from gigamask.workflows.open_data import open_or_build_temporary

        workers = worker_pool.workers_of(self.part, self.workers)
        with open_or_build_temporary(self.paths) as index, progress_bar("masks") as progress:
            from gigamask.data import mask_store

            if self.verify:
                errors = mask_store.verify(index, self.out, workers, progress)
                for error in errors:
                    print(f"  {error}")
                if errors:
                    raise GigamaskError(f"{self.out}: {len(errors)} errors, the first: {errors[0]}")
            else:
                mask_store.build(
                    index,
                    self.out,
                    self.mask_size,
                    self.image_size,
                    self.mirrored,
                    workers,
                    progress,
                )
            store = mask_store.MaskStore.open(self.out, index)
        report = {
            "masks": index.manifest.masks,
            "tars": len(store.shard_keys),
            "bytes": store.bytes,
            "mask_size": store.manifest.mask_size,
        }
        size = decimal(report["bytes"]) + (", no errors" if self.verify else "")
        masks, tars = counted(report["masks"], "mask"), counted(report["tars"], "tar")
        print(f"{self.out}: {masks} of {tars}, {size}")
        if not self.verify:
            print(f"train with: --loader.mask-store {quote(self.out)}")
        return report
