"""What a training is about to do, in lines: its data, its model, its device, and what is odd."""

from collections.abc import Iterator

from gigamask.data.index import Index
from gigamask.distributed.precision import choose_precision, describe_device
from gigamask.errors import counted
from gigamask.training.config import TrainConfig
from gigamask.training.state import TrainState


def lines(
    config: TrainConfig, state: TrainState, index: Index, epoch: int, processes: int
) -> Iterator[str]:
    """Yield lines about a training that begins or continues.

    Args:
        config: The configuration.
        state: Its state before the next step.
        index: Index of its data.
        epoch: Samples of an epoch.
        processes: Number of processes that train together.
    """
    found, left_out = index.manifest, index.manifest.left_out
    broken = f", {left_out.broken}" if left_out.broken else ""
    yield (
        f"  data: {counted(found.images, 'image')} with {counted(found.masks, 'mask')}, "
        f"{len(left_out.skipped) + left_out.json_without_jpg:,} left out{broken}; "
        f"{config.steps * config.batch_size / epoch:.3g} epochs of {counted(epoch, 'sample')}"
    )
    total = sum(each.numel() for each in state.model.parameters())
    trained = sum(each.numel() for each in state.parameters)
    start = "; weights are random" + " but the encoder's" * bool(state.model.pretrained_names)
    if state.step:
        start = f"; continues after step {state.step:,}"
    if state.loaded:
        start = (
            f"; {config.init} gave {state.loaded:,} of {len(state.model.state_dict()):,} tensors"
        )
    yield f"  model: {total:,} parameters, {trained:,} trained, {total - trained:,} frozen{start}"
    device = next(state.model.parameters()).device
    each = f" in each of {processes} processes" if processes > 1 else ""
    precision = choose_precision(config.precision, device)
    yield f"  device: {describe_device(device)}{each}, {precision}"
    if (idle := processes - config.batch_size) > 0:
        yield f"  {idle} processes have no sample in any step: raise --batch-size, or use fewer"
    if (warmup := getattr(config.schedule, "warmup_steps", 0)) > config.steps:
        yield f"  warm-up: {warmup:,} steps, more than --steps, so that --lr is not reached"
