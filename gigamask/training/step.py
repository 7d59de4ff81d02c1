"""One training step: backward passes, reduction over processes, clipping and the update.

A task yields its loss in terms, each a sum over masks. Each term is back-propagated immediately,
which frees its graph before the next is computed; if terms share an expensive tensor (the image
embedding), their gradients accumulate on a detached copy and pass through the encoder once, at the
end. The gradient of the sums is divided by the sum of the counts, here and nowhere else, so
gradient accumulation is exact for micro-batches of any size. So is data parallelism: processes add
the encoder's gradients as they arrive (`GradientExchange`), and all other gradients, sums, counts
and per-sample losses in one all-reduce.

Nothing waits for a GPU: the device itself decides whether the update is skipped, and the numbers to
log arrive in one copy, which may be read after the next step has been launched.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import cast
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from gigamask.distributed import fsdp
from gigamask.distributed.gradient_exchange import GradientExchange
from gigamask.distributed.precision import LossScaler
from gigamask.distributed.profile_ranges import profile_range
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.interfaces import Task
from gigamask.training.state import TrainState
from gigamask.types import BatchProtocol, LossSums, Scalar

MAX_SUMS = 16
"""Number of logged sums that processes exchange; fixed, as a process without masks has none."""
COUNT_OF = "count of "
"""What begins the name of the count of a sum that is not divided by the count of all masks."""


@dataclass
class StepMetrics:
    """Sums and counts of a step so far, on the device; samples are those of the global batch.

    Attributes:
        losses: Loss of each sample, summed over its masks and rounds.
        counts: Number of these losses.
        weights: Weight of each sample.
        count: Sum of the counts, the divisor of the sums.
        sums: Sums to log by name, to be divided by `count`, or by the sum `COUNT_OF` + name.
    """

    losses: Float[Tensor, "batch"]
    counts: Float[Tensor, "batch"]
    weights: Float[Tensor, "batch"]
    count: Scalar
    sums: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def zero(cls, batch_size: int, like: Tensor) -> "StepMetrics":
        """Return zero sums.

        Args:
            batch_size: Samples of the global batch.
            like: A tensor with the device and type of the sums.
        """
        losses, counts, weights = (like.new_zeros(batch_size) for _ in range(3))
        return cls(losses, counts, weights, like.new_zeros(()))

    def add(self, terms: Sequence[LossSums], batch: BatchProtocol) -> None:
        """Add terms of the loss, all at once, so that the number of kernels does not grow.

        Args:
            terms: The terms.
            batch: The micro-batch that they belong to.
        """
        if not terms:
            return
        logged = [
            {"loss": term.loss, **term.parts}
            | {f"{COUNT_OF}{name}": count for name, count in term.part_counts.items()}
            for term in terms
        ]
        for name in {name: None for values in logged for name in values}:
            values = [values[name].detach() for values in logged if name in values]
            self.sums[name] = self.sums.get(name, 0.0) + torch.stack(values).sum()
        self.count += torch.stack([term.count for term in terms]).sum()
        images = [term.image for term in terms if term.image is not None]
        assert len(images) == len(terms), "a task must set the image of each loss"
        per_mask = torch.cat([term.per_mask.detach() for term in terms])
        # Summed row by row, in the same order every time even on a GPU; images are few.
        is_of_image = (
            torch.cat(images) == torch.arange(len(batch.names), device=per_mask.device)[:, None]
        )
        self.losses[batch.batch_index] += torch.where(is_of_image, per_mask, 0.0).sum(
            1, dtype=self.losses.dtype
        )
        self.counts[batch.batch_index] += is_of_image.sum(1, dtype=self.counts.dtype)

    @profile_range("all_reduce")
    def all_reduce(self, world: World, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over all processes; `sums` are those of this process until `on_host`.

        Args:
            world: The processes of the run.
            *others: Further tensors to sum.

        Returns:
            The logged sums in order of their names, padded to `MAX_SUMS`, and for each process a
            checksum of its names, for `on_host`.

        Raises:
            GigamaskError: There are too many sums to log.
        """
        if len(self.sums) > MAX_SUMS:
            raise GigamaskError(
                f"a loss may log at most {MAX_SUMS} sums (got {len(self.sums)}); "
                "return fewer LossSums.parts"
            )
        values, names = self.count.new_zeros(MAX_SUMS), sorted(self.sums)
        for index, name in enumerate(names):
            values[index] = self.sums[name]
        # A checksum of each process's names, small enough to be exact in fp32.
        name_ids = self.count.new_zeros(world.size)
        name_ids[world.rank] = crc32("\n".join(names).encode()) % 2**24
        world.all_reduce(
            [self.count, self.losses, self.counts, self.weights, values, name_ids, *others]
        )
        return values, name_ids

    def on_host(
        self, world: World, logged: tuple[Tensor, Tensor], copied: Sequence[Tensor]
    ) -> "StepMetrics":
        """Return what `all_reduce` has summed on the CPU; a collective operation.

        Args:
            world: The processes of the run.
            logged: The result of `all_reduce`, copied to the CPU.
            copied: Copies of `count`, `losses`, `counts` and `weights` on the CPU.
        """
        count, losses, counts, weights = copied
        (values, name_ids), names = logged, sorted(self.sums)
        if (name_ids != name_ids[0]).any():  # as when a process has no mask
            names = sorted({name for own in world.gather(names) for name in own})
            zero = self.count.new_zeros(())
            own = torch.stack([self.sums.get(name, zero).to(zero) for name in names])
            world.all_reduce([own])
            values = own.cpu()
        sums = {name: values[index] for index, name in enumerate(names)}
        return StepMetrics(losses, counts, weights, count, sums)

    def divisor(self) -> Scalar:
        """Return the divisor of the weighted sum's gradient, at least 1.

        Without weights, it is the count. With weights, it is the count of an average batch, since
        samples drawn by their loss may have more masks than others. If all samples have the same
        number of masks, it equals the count whatever the weights, and the estimate is unbiased;
        otherwise it is consistent.
        """
        has_loss = (self.counts > 0).to(self.weights.dtype)
        weight = (self.weights * has_loss).sum()
        average_count = (
            (self.weights * self.counts).sum()
            * has_loss.sum()
            / torch.where(weight > 0, weight, 1.0)
        )
        counts = self.counts.sum()
        corrected = self.count * (average_count / counts)
        return torch.where((counts > 0) & (weight > 0), corrected, self.count).clamp(min=1.0)

    def means(self) -> dict[str, float]:
        """Return each sum divided by its count; without those whose count is 0."""
        counts = {name: self.sums.get(f"{COUNT_OF}{name}", self.count) for name in self.sums}
        return {
            name: float(value) / float(counts[name])
            for name, value in self.sums.items()
            if counts[name] and not name.startswith(COUNT_OF)
        }


@dataclass(frozen=True, eq=False)
class StepResult:
    """Result of a step.

    Attributes:
        record: Values to log.
        skipped: Whether the update was skipped.
        overflow: Whether it was skipped only because of an fp16 overflow.
        losses: Mean loss of each sample of the global batch over its masks and rounds, NaN if it
            has none.
        requests: For each kind of request, whether any process made it.
    """

    record: dict[str, float]
    skipped: bool
    overflow: bool
    losses: Float64[np.ndarray, "batch"]
    requests: tuple[bool, ...]


def accumulate(
    task: Task,
    model: torch.nn.Module,
    batch: BatchProtocol,
    metrics: StepMetrics,
    scale: float = 1.0,
    exchange: GradientExchange | None = None,
) -> None:
    """Add the gradients of a micro-batch's losses to the parameters, and its sums to the metrics.

    Args:
        task: Computes the losses.
        model: The model.
        batch: The micro-batch.
        metrics: Sums of the step.
        scale: Factor of the losses.
        exchange: Sends gradients that arrive in the last backward pass, that of the last tensor
            that the task detaches; None sends none.
    """
    metrics.weights[batch.batch_index] = batch.weights.to(metrics.weights.dtype)
    detached: list[tuple[Tensor, Tensor]] = []
    terms: list[LossSums] = []

    def detach(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        detached.append((tensor, leaf))
        return leaf

    for sums in task.compute_losses(model, batch, detach):
        if sums.loss.requires_grad:  # everything that a term depends on may be frozen
            with profile_range("backward"):
                (sums.loss if scale == 1 else sums.loss * scale).backward()
        terms.append(replace(sums, loss=sums.loss.detach(), per_mask=sums.per_mask.detach()))
        del sums
    metrics.add(terms, batch)
    for number, (tensor, leaf) in enumerate(detached, 1):
        if exchange and number == len(detached):
            exchange.start()
        if leaf.grad is not None:
            with profile_range("encoder backward"):
                tensor.backward(leaf.grad)


class HostCopy:
    """Tensors on their way to the CPU, in one transfer; the device goes on meanwhile.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._flat, self._copied = flat.to("cpu", non_blocking=True), None
        if flat.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[Tensor]:
        """Return the tensors on the CPU."""
        if self._copied:
            self._copied.synchronize()
        parts = self._flat.split([shape.numel() for shape, _ in self._like])
        return [
            part.view(shape).to(dtype)
            for part, (shape, dtype) in zip(parts, self._like, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step whose work is queued on the device.

    Attributes:
        metrics: Sums of the step, on the device.
        copy: The numbers of its result, on their way to the CPU.
        world: The processes of the run.
        lr: Learning rate.
        scale: Loss scaler of fp16; None in other precisions.
    """

    metrics: StepMetrics
    copy: HostCopy
    world: World
    lr: float
    scale: LossScaler | None

    def result(self) -> StepResult:
        """Wait for the result; a collective operation, once per step and in order."""
        norm, skipped, requested, values, name_ids, mined_losses, *copied = self.copy.wait()
        metrics = self.metrics.on_host(self.world, (values, name_ids), copied)
        record = {
            **metrics.means(),
            "lr": self.lr,
            "grad_norm": float(norm),
            "skipped": float(skipped),
        }
        overflow = False
        if self.scale:
            record["loss_scale"] = self.scale.value
            is_finite = math.isfinite(record["grad_norm"])
            overflow = self.scale.value > 1 and not is_finite
            overflow = overflow and math.isfinite(record.get("loss", math.nan))
            self.scale.update(is_finite)
        losses = mined_losses if len(mined_losses) else metrics.losses / metrics.counts
        return StepResult(
            record, bool(skipped), overflow, losses.double().numpy(), tuple(map(bool, requested))
        )


def step(
    task: Task,
    state: TrainState,
    batches: Sequence[BatchProtocol],
    batch_size: int,
    lr: float,
    grad_clip: float | None,
    world: World | None = None,
    requests: tuple[bool, ...] = (),
) -> LaunchedStep:
    """Queue one update from the micro-batches of all processes.

    The update is skipped if the gradient is not finite or there is no mask. A task with mining runs
    twice, and the update uses only the chosen masks.

    Args:
        task: Computes the losses.
        state: Model and optimizers to update.
        batches: This process's micro-batches.
        batch_size: Samples of the global batch.
        lr: Learning rate, multiplied by the `lr_scale` of each parameter group.
        grad_clip: Largest global gradient norm; None disables clipping.
        world: The processes of the run; None means only this one.
        requests: What this process requests of all processes, such as to stop.

    Returns:
        The step, with the same result in all processes. With an fp16 loss scale, it must be read
        before the next step is launched.
    """
    world, mined_losses = world or World(), None
    if task.mining:
        from gigamask.training.ohem import mine_hard_masks

        batches, mined_losses = mine_hard_masks(
            task, task.mining, state.model, batches, batch_size, world
        )
    parameters = state.parameters
    exchanged = set(state.exchange.parameters) if state.exchange else set()
    _clear_gradients(parameters, exchanged)
    metrics = StepMetrics.zero(batch_size, fsdp.to_local(parameters[0]).detach())
    loss_scale = state.scale.value if state.scale else 1.0
    for number, batch in enumerate(batches, 1):
        is_last = number == len(batches)
        fsdp.exchange_across_machines(state.model, is_last)
        exchange = state.exchange if is_last else None
        accumulate(task, state.model, batch, metrics, loss_scale, exchange)
    _complete_gradients(parameters, state, exchanged)
    logged, norm, requested = _sum_over_processes(state, parameters, metrics, world, requests)
    divisor = metrics.divisor() * loss_scale
    norm = norm / divisor
    if grad_clip is not None:
        divisor = divisor * (norm / grad_clip).clamp(min=1.0)
    skipped = (~norm.isfinite() | (metrics.count == 0)).to(torch.float32)
    mined_losses = metrics.count.new_zeros(0) if mined_losses is None else mined_losses
    sums = [metrics.count, metrics.losses, metrics.counts, metrics.weights]
    copy = HostCopy([norm, skipped, requested, *logged, mined_losses, *sums])
    with state.unreached.unchanged(parameters):
        update_weights(state.optimizers, lr, skipped, divisor)
    return LaunchedStep(metrics, copy, world, lr, state.scale)


def _clear_gradients(parameters: Sequence[nn.Parameter], exchanged: Collection[Tensor]) -> None:
    """Remove all gradients, so that one is made by its first backward pass, not added to zeros.

    Those that processes sum while they arrive keep their memory.
    """
    kept = []
    for parameter in parameters:
        if parameter in exchanged or fsdp.is_sharded_tensor(parameter):
            kept.append(fsdp.to_local(cast(Tensor, parameter.grad)))
        else:
            parameter.grad = None
    if kept:
        torch._foreach_zero_(kept)


def _complete_gradients(
    parameters: Sequence[nn.Parameter], state: TrainState, exchanged: Collection[Tensor]
) -> None:
    """Note which parameters have no gradient, and give them one of zeros."""
    arrived = state.exchange.arrived if state.exchange else ()
    missing = [parameter for parameter in parameters if parameter.grad is None]
    late = [parameter for parameter in exchanged if parameter not in arrived]
    state.unreached.note({*missing, *late})
    zeros = [torch.empty_like(parameter) for parameter in missing]
    for parameter, zero in zip(missing, zeros, strict=True):
        parameter.grad = zero
    if zeros:
        torch._foreach_zero_(zeros)


def update_weights(
    optimizers: Sequence[torch.optim.Optimizer],
    lr: float,
    skipped: Scalar,
    divisor: Scalar,
) -> None:
    """Divide the gradients, and update the weights unless the step is skipped.

    Args:
        optimizers: The optimizers. Those that take `found_inf`, as fused ones of torch do for its
            `GradScaler`, decide on the device; the others wait for the decision.
        lr: Learning rate, multiplied by the `lr_scale` of each parameter group.
        skipped: 1 to skip the update, else 0.
        divisor: What the gradients, which are sums, are divided by: torch's fused AdamW does so
            while it reads them.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        scaled = {"found_inf": skipped}  # as torch's `GradScaler` sets it and `grad_scale`
        divides = type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
        if divides and divisor.dtype == torch.float32:
            scaled["grad_scale"] = divisor
        else:
            owned = (p for group in optimizer.param_groups for p in group["params"])
            torch._foreach_div_([fsdp.to_local(cast(Tensor, p.grad)) for p in owned], divisor)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            vars(optimizer).update(scaled)
            optimizer.step()
            for name in scaled:
                del vars(optimizer)[name]
        elif not skipped:
            optimizer.step()


def _sum_over_processes(
    state: TrainState,
    parameters: Sequence[nn.Parameter],
    metrics: StepMetrics,
    world: World,
    requests: tuple[bool, ...],
) -> tuple[tuple[Tensor, Tensor], Scalar, Float[Tensor, "requests"]]:
    """Sum the gradients, metrics and requests of all processes, in place.

    Args:
        state: The state, whose exchange has summed some gradients already.
        parameters: The trained parameters.
        metrics: Sums of this process; afterwards those of all.
        world: The processes of the run.
        requests: What this process requests.

    Returns:
        The result of `StepMetrics.all_reduce`, the norm of the gradient, and the number of
        processes that made each request.
    """
    exchange = state.exchange
    exchanged = set(exchange.parameters) if exchange else set()
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]  # all have one
    replicated = [(p, gradient) for p, gradient in gradients if not fsdp.is_sharded_tensor(p)]
    remaining = [gradient for p, gradient in replicated if p not in exchanged]
    square = fsdp.squared_norm((gradient for _, gradient in gradients), metrics.count)
    requested = torch.tensor(requests, dtype=metrics.count.dtype)
    requested = requested.to(metrics.count.device, non_blocking=True)
    if exchange:
        exchange.finish()
    reached = [state.unreached.flags(parameters, metrics.count)] if world.size > 1 else []
    logged = metrics.all_reduce(world, *remaining, *reached, square, requested)
    state.unreached.add_flags(*reached)
    norm = torch.nn.utils.get_total_norm([gradient for _, gradient in replicated])
    return logged, torch.hypot(norm, square.sqrt()), requested
