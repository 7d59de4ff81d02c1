"""Sum of gradients over all processes in buckets, while the rest of the backward pass runs."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn

from gigamask.distributed.world import World

BUCKET_BYTES = 25 * 2**20
"""Size of a bucket, as in torch's DistributedDataParallel; a larger gradient has its own."""


class GradientExchange:
    """Sums the gradients of the encoder, like the reducer of torch's DistributedDataParallel.

    The gradients become views of the buckets. In the last backward pass of a step, a bucket is sent
    once all of its gradients have arrived and the buckets before it have been sent, so processes
    exchange the same buckets in the same order even where one has no masks or drops a branch.
    Unlike torch's, buckets are never rebuilt, so a resumed run adds in the same order.

    Args:
        parameters: Parameters with gradients, in the order of the forward pass.
        world: The processes of the run.
        dtype: Dtype in which they are sent and summed; None keeps theirs.

    Attributes:
        arrived: The parameters that have had a gradient in this process, in any step so far.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world: World,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.arrived: set[Tensor] = set()
        self._world, self._dtype = world, dtype
        self._buckets: list[Tensor] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._missing: list[int] = []
        self._sent: list[tuple[distributed.Work, Tensor]] = []
        self._is_open = False
        for group in bucket_groups(self.parameters[::-1]):
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            assert len(gradients) == len(group), "a parameter has no gradient"
            bucket = torch.cat([gradient.reshape(-1) for gradient in gradients])
            views = bucket.split([gradient.numel() for gradient in gradients])
            for parameter, view in zip(group, views, strict=True):
                parameter.grad = view.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(self._count)
                self._bucket_of[parameter] = len(self._buckets)
            self._buckets.append(bucket)

    def start(self) -> None:
        """Send gradients as they arrive: the next backward pass is the last one of a step."""
        self._missing = [0] * len(self._buckets)
        for bucket in self._bucket_of.values():
            self._missing[bucket] += 1
        self._is_open = True

    def _count(self, parameter: Tensor) -> None:
        """Note that a gradient is there, and send each bucket whose turn it is."""
        self.arrived.add(parameter)
        if self._is_open:
            self._missing[self._bucket_of[parameter]] -= 1
            while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
                self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        sent = bucket.to(self._dtype or bucket.dtype)
        with self._world.explain_failure():
            work = distributed.all_reduce(sent, async_op=True)
        assert work is not None
        self._sent.append((work, sent))

    def finish(self) -> None:
        """Send the remaining buckets, and wait until all are summed.

        Raises:
            GigamaskError: Another process has ended or did not answer in time.
        """
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (work, sent) in zip(self._buckets, self._sent, strict=True):
            with self._world.explain_failure():
                work.wait()
            if sent is not bucket:
                bucket.copy_(sent)
        self._sent, self._is_open = [], False


def bucket_groups(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in the same order, in groups of one dtype and at most `BUCKET_BYTES`."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        if not groups or size > BUCKET_BYTES or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            size = parameter.nbytes
        groups[-1].append(parameter)
    return groups
