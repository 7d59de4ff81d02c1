"""`gigamask plan`: predict the memory, FLOPs and hours of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from gigamask import config_files, recipes
from gigamask.errors import GigamaskError
from gigamask.parser import FLAT
from gigamask.training.config import ImageTrainConfig, TrainConfig
from gigamask.training.sam_config import SamTrainConfig

if TYPE_CHECKING:
    from gigamask.workflows.plan import DryRun

USAGE = (
    "gigamask plan RECIPE [--gpu h200] [--world 32x8] [--parallel fsdp] [--section.field value ...]"
)


@dataclass(frozen=True)
class PlanCommand:
    """plan a run without a GPU: memory by kind, FLOPs, hours, and changes that make it fit"""

    needs_flags: ClassVar = {"spare_gib": "gpu or fit"}

    run_planned: Annotated[TrainConfig, FLAT]
    gpu: str | None = None
    """GPU to plan for: a known name, or your own as NAME=GIB,TFLOPS; if omitted, neither hours nor
    whether the run fits are printed"""
    world: str = "1"
    """MACHINESxGPUS, such as 32x8, or the number of GPUs of one machine"""
    efficiency: float | None = None
    """fraction of the GPU's peak FLOP/s that training reaches; default: published values"""
    dollars_per_gpu_hour: float | None = None
    """price of one GPU for an hour"""
    spare_gib: float = 1.5
    """GiB of the GPU to keep free for the CUDA context, library workspaces and fragmentation; the
    default is a guess"""
    fit: str | None = None
    """memory of a GPU, or of the process with --device cpu, such as 8GB: chooses micro-batch, masks
    per chunk, activation checkpointing, and adapters or a frozen encoder, so that it fits"""
    strict: bool = False
    """with --images or --masks: end with exit code 2 if any image or mask is left out"""
    config: tuple[str, ...] = ()
    """YAML files of flags; the command line overrides them"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Print and return the plan."""
        from gigamask.profiling import gpus
        from gigamask.workflows.own_data import find_classes, use_own_data

        if self.gpu is not None:
            gpus.find(self.gpu)
        gpus.Cluster.parse(self.world)
        config = recipes.require_images(self.run_planned)
        if config.is_finding_classes:
            if not config.data:
                raise GigamaskError(
                    "--classes auto: the classes are those of the data, of which the plan needs "
                    "their number; give --data, or names"
                )
            config = find_classes(use_own_data(config, strict=self.strict))
        measured = None
        if self.fit is not None:
            config, measured = self._fitted(config, self.fit)
        from gigamask.progress import progress_bar

        with progress_bar("plan"):
            from gigamask.profiling import memory_plan
            from gigamask.workflows.plan import plan

            result = plan(
                config,
                gpu=self.gpu,
                world=self.world,
                efficiency=self.efficiency,
                dollars_per_gpu_hour=self.dollars_per_gpu_hour,
                spare_gib=self.spare_gib,
                measured=measured,
            )
        print(memory_plan.table(result))
        return result

    def _fitted(
        self, config: ImageTrainConfig, memory: str
    ) -> tuple[SamTrainConfig, DryRun | None]:
        """Return the configuration that fits into memory and its dry run; print what was chosen."""
        from gigamask.profiling.gpus import Cluster
        from gigamask.workflows.fit import fit_and_measure
        from gigamask.workflows.plan import Hardware

        if not isinstance(config, SamTrainConfig):
            raise GigamaskError(f"--fit {memory} is for recipes of gigamask train; leave it out")
        hardware = Hardware(cluster=Cluster.parse(self.world), spare_gib=self.spare_gib)
        named = replace(config, init=config.init or "none")
        chosen, line, measured = fit_and_measure(named, memory, hardware)
        print(line)
        return replace(chosen, init=config.init), measured


def parse(arguments: Sequence[str]) -> PlanCommand:
    """Parse a recipe, its training flags, and the flags of the plan."""
    if arguments and arguments[0] in ("-h", "--help"):
        known = recipes.format_recipes()
        print(
            f"usage: {USAGE}\n\n{PlanCommand.__doc__}\n\n"
            f"recipes:\n{known}\n  file.py:function  your own\n\n"
            "'gigamask plan RECIPE --help' lists all flags, of training and of the plan."
        )
        raise SystemExit(0)
    return config_files.parse_recipe(arguments, "plan", PlanCommand)
