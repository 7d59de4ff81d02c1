"""`gigamask.distill`."""

from typing import Any

from gigamask import recipes
from gigamask.errors import GigamaskError
from gigamask.plugins.distill.config import DistillTrainConfig
from gigamask.workflows.train import Run, train


def distill(
    config: str | DistillTrainConfig, *, allow_data_change: bool = False, **changes: Any
) -> Run:
    """Distill a student from a teacher, phase by phase; otherwise like `gigamask.train`.

    Args:
        config: Name of a recipe, or a configuration, such as `recipes.make("edge_sam")`.
        allow_data_change: Resume even if the data or their order have changed.
        **changes: Values of fields, such as `teacher="sam_vit_h_4b8939.pth", data="sa1b/"`.

    Returns:
        The run of the last phase.

    Raises:
        GigamaskError: The configuration is not a `DistillTrainConfig`, or cannot be used.
    """
    made = recipes.make(config)
    if not isinstance(made, DistillTrainConfig):
        raise GigamaskError(f"distill needs a DistillTrainConfig, got {type(made).__name__}")
    return train(made, allow_data_change=allow_data_change, **changes)
