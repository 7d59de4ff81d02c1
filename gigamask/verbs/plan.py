"""`gigamask plan`: what a training takes, before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import arg

from gigamask import arguments, recipes
from gigamask.faults import Fault
from gigamask.train.run import Run

USAGE = "gigamask plan RECIPE [--gpu h200] [--world 32x8] [--parallel fsdp] [--section.leaf value ...]"


@dataclass(frozen=True)
class Verb:
    """plans a training on the meta device: bytes of a process by kind, FLOPs, hours, whether it fits a GPU and what to change"""

    run_planned: Annotated[Run, arg(name="")]
    gpu: str | None = None
    """the GPU it is to run on, by name, or your own as NAME=GIB,TFLOPS; without one nothing is said of fit and hours"""
    world: str = "1"
    """machines x GPUs on each, such as 32x8, or the number of GPUs of one machine"""
    efficiency: float | None = None
    """share of the GPU's peak that the training reaches; without one, those that are known"""
    dollars_per_gpu_hour: float | None = None
    """what an hour of one GPU costs"""
    spare_gib: float = 1.5
    """GiB of the GPU to keep free for CUDA itself, its libraries, and gaps that the allocator cannot use; the default is a guess"""
    config: tuple[str, ...] = ()
    """YAML files of flags, taken before those on the command line"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        """Plans and prints."""
        from gigamask.memory import gpus, planner
        from gigamask.planning import Ask, plan

        given = {"--efficiency": self.efficiency, "--dollars-per-gpu-hour": self.dollars_per_gpu_hour}
        for flag, value in given.items():
            if value is not None and self.gpu is None:
                raise Fault(f"{flag} tells of a GPU, but none is named; give --gpu")
            if value is not None and not value > 0:
                raise Fault(f"{flag} is {value}, it must be above 0")
        if self.efficiency is not None and self.efficiency > 1:
            raise Fault(f"--efficiency is {self.efficiency}, a share of the GPU's peak; give at most 1")
        if not self.spare_gib >= 0:
            raise Fault(f"--spare-gib is {self.spare_gib}, it must be at least 0")
        gpu, fleet = gpus.find(self.gpu) if self.gpu is not None else None, planner.Fleet.parse(self.world)
        found = plan(recipes.imaged(self.run_planned), Ask(gpu, fleet, self.efficiency, self.dollars_per_gpu_hour, self.spare_gib))
        print(planner.table(found))
        return found


def parse(words: Sequence[str]) -> Verb:
    """Returns the verb that the words describe: a recipe with the flags of its training, and those of the plan."""
    if words and words[0] in ("-h", "--help"):
        known = recipes.listed(recipes.BUILT_IN)
        print(f"usage: {USAGE}\n\n{Verb.__doc__}\n\nrecipes:\n{known}\n  file.py:function  your own\n")
        print("'gigamask plan RECIPE --help' lists every flag: those of the training, and those of the plan.")
        raise SystemExit(0)
    return arguments.parse_recipe(words, "plan", Verb)
