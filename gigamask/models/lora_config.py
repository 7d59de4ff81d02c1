"""Settings of low-rank adapters (LoRA).

Imports no torch, so that `--help` is fast.
"""

from dataclasses import dataclass

from gigamask.errors import GigamaskError, check_positive, check_range


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on the linear layers of frozen modules (Hu et al. 2021, arXiv 2106.09685).

    They also freeze the image encoder.
    """

    rank: int = 0
    """rank of the adapters; 0 trains without; also --lora"""
    alpha: float | None = None
    """adapters are scaled by alpha / rank; default: the rank, a scale of 1"""
    on: tuple[str, ...] = ("attention",)
    """layers with adapters: attention (its projections), all (every linear layer with as many
    channels as the rank), q, k or v (projections, also within a fused qkv), or names of layers such
    as lin1"""
    last: int | None = None
    """number of the last encoder blocks that have adapters; default: all"""

    def __post_init__(self) -> None:
        if self.rank < 0 or not self.on:
            raise GigamaskError(
                f"--lora needs a rank of at least 0 and layers in --lora.on (got {self.rank} and "
                f"{' '.join(self.on) or 'none'})"
            )
        check_positive("--lora.alpha", self.alpha)
        check_range("--lora.last", self.last, 0)

    @property
    def scale(self) -> float:
        """Factor of what an adapter adds to a weight."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
