"""`gigamask plan`: memory, FLOPs and hours of a training before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from gigamask import config_files, recipes
from gigamask.errors import GigamaskError
from gigamask.training.config import TrainConfig

USAGE = (
    "gigamask plan RECIPE [--gpu h200] [--world 32x8] [--parallel fsdp] [--section.leaf value ...]"
)


@dataclass(frozen=True)
class PlanCommand:
    """plan a training without a GPU: bytes of each process by kind, FLOPs, hours, whether it fits a GPU, and what to change"""

    run_planned: Annotated[TrainConfig, arg(name="")]
    gpu: str | None = None
    """GPU to run on: a name, or your own as NAME=GIB,TFLOPS; without one neither fit nor hours are printed"""
    world: str = "1"
    """machines x GPUs on each, such as 32x8, or the number of GPUs of one machine"""
    efficiency: float | None = None
    """share of the GPU's peak FLOP/s that the training reaches; default: published values"""
    dollars_per_gpu_hour: float | None = None
    """price of one GPU for an hour"""
    spare_gib: float = 1.5
    """GiB of the GPU to keep free for the CUDA context, library workspaces and fragmentation; the default is a guess"""
    config: tuple[str, ...] = ()
    """YAML files of flags; the command line overrides them"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        """Plan and print."""
        from gigamask.profiling import gpus, memory_plan
        from gigamask.workflows.plan import Hardware, plan

        given = {
            "--efficiency": self.efficiency,
            "--dollars-per-gpu-hour": self.dollars_per_gpu_hour,
        }
        for flag, value in given.items():
            if value is not None and self.gpu is None:
                raise GigamaskError(f"{flag} needs a GPU; give --gpu")
            if value is not None and not value > 0:
                raise GigamaskError(f"{flag} must be > 0, got {value}")
        if self.efficiency is not None and self.efficiency > 1:
            raise GigamaskError(
                f"--efficiency must be at most 1, a share of the GPU's peak, got {self.efficiency}"
            )
        if not self.spare_gib >= 0:
            raise GigamaskError(f"--spare-gib must be >= 0, got {self.spare_gib}")
        gpu = gpus.find(self.gpu) if self.gpu is not None else None
        cluster = memory_plan.Cluster.parse(self.world)
        hardware = Hardware(
            gpu, cluster, self.efficiency, self.dollars_per_gpu_hour, self.spare_gib
        )
        found = plan(recipes.imaged(self.run_planned), hardware)
        print(memory_plan.table(found))
        return found


def parse(words: Sequence[str]) -> PlanCommand:
    """Parse a recipe with the flags of its training, and those of the plan."""
    if words and words[0] in ("-h", "--help"):
        known = recipes.listed(recipes.BUILT_IN)
        print(
            f"usage: {USAGE}\n\n{PlanCommand.__doc__}\n\nrecipes:\n{known}\n  file.py:function  your own\n"
        )
        print(
            "'gigamask plan RECIPE --help' lists every flag: those of the training, and those of the plan."
        )
        raise SystemExit(0)
    return config_files.parse_recipe(words, "plan", PlanCommand)
