"""Memory and peak FLOP/s of GPUs, by name.

Memory is the total capacity that torch reports (the lowest value seen for a GPU), which is less
than the nominal one. Peaks are those of the data sheets for dense matrices, with float32
accumulation for bf16 and fp16, and without TF32 for float32, since torch does not use TF32 for
matrix products by default (`torch.backends.cuda.matmul`).
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gigamask.errors import GigamaskError


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; `tflops` has the peak of each precision it supports."""

    name: str
    gib: float
    tflops: Mapping[str, float]
    source: str

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of a precision.

        Raises:
            GigamaskError: The GPU does not support it.
        """
        if precision not in self.tflops:
            raise GigamaskError(
                f"--gpu {self.name} has no units for {precision}; give --precision"
                f" {' or '.join(self.tflops)}"
            )
        return self.tflops[precision] * 1e12


@dataclass(frozen=True)
class Cluster:
    """Machines with the same number of GPUs each, and one process for every GPU."""

    nodes: int
    gpus_per_node: int

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.nodes * self.gpus_per_node

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Parse `32x8` (nodes x GPUs per node), or `256` for one machine."""
        found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", text)
        if found is None:
            raise GigamaskError(
                f"--world must be NODESxGPUS, such as 32x8, or a number of GPUs, got {text!r}"
            )
        return cls(int(found[1] or 1), int(found[2]))


def _gpu(name: str, gib: float, half: float, single: float, source: str) -> Gpu:
    return Gpu(name, gib, {"bf16": half, "fp16": half, "fp32": single}, source)


GPUS = (
    _gpu("b200", 178.3, 2250.0, 75.0, "HGX B200 data sheet"),
    _gpu("h200", 139.7, 989.0, 67.0, "H200 data sheet, SXM"),
    _gpu("h100", 79.1, 989.0, 67.0, "H100 data sheet, SXM, 80 GB"),
    _gpu("a100", 79.1, 312.0, 19.5, "A100 data sheet, 80 GB"),
    _gpu("a100-40", 39.3, 312.0, 19.5, "A100 data sheet, 40 GB"),
    _gpu("l40s", 44.3, 362.0, 91.6, "L40S data sheet"),
    _gpu("a10", 21.9, 125.0, 31.2, "A10 data sheet"),
    _gpu("rtx5090", 31.3, 209.5, 104.8, "RTX Blackwell architecture paper"),
    _gpu("rtx4090", 23.5, 165.2, 82.6, "Ada architecture paper"),
    _gpu("rtx3090", 23.6, 71.0, 35.6, "GA102 architecture paper"),
    Gpu("v100", 31.7, {"fp16": 125.0, "fp32": 15.7}, "V100 data sheet, SXM2, 32 GB"),
    Gpu("v100-16", 15.7, {"fp16": 125.0, "fp32": 15.7}, "V100 data sheet, SXM2, 16 GB"),
    Gpu("t4", 14.5, {"fp16": 65.0, "fp32": 8.1}, "T4 data sheet"),
)


def find(name: str) -> Gpu:
    """Return the GPU with a name, or the one that `NAME=GIB,TFLOPS` describes.

    TFLOPS is the peak in the precision used.
    """
    known = {gpu.name: gpu for gpu in GPUS}
    own, equals, numbers = name.partition("=")
    if equals:
        try:
            gib, tflops = map(float, numbers.split(","))
        except ValueError:
            raise GigamaskError(
                f"--gpu {name}: expected NAME=GIB,TFLOPS, such as {own}=24,165"
            ) from None
        if not (0 < gib < math.inf and 0 < tflops < math.inf):
            raise GigamaskError(
                f"--gpu {name}: GiB and TFLOP/s must be above 0, such as {own}=24,165"
            )
        return _gpu(own, gib, tflops, tflops, "as given")
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        more = f"; perhaps you meant {near[0]}" if near else ""
        raise GigamaskError(
            f"no GPU is called {name!r}; known are {', '.join(known)}, and NAME=GIB,TFLOPS for your"
            f" own{more}"
        )
    return known[name.lower()]
