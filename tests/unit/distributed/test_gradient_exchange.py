"""Gradients are summed bucket by bucket, in one order, while others are still computed."""

import os

import pytest
import torch
from torch import distributed, nn

from gigamask.distributed import gradient_exchange
from gigamask.distributed.gradient_exchange import GradientExchange
from gigamask.distributed.world import World, destroy_world, init_world
from tests.errors import error_line
from tests.ranks import fork

LAYERS, WIDTH = 4, 8


def little_net() -> nn.Sequential:
    """Layers without biases, each in a bucket of its own, with gradients of zero."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).double()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return net


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank)).double()


def summed(kinds: list[str]) -> list[torch.Tensor]:
    """The sum of the gradients of processes that work as `backward` says."""
    nets = [little_net() for _ in kinds]
    for rank, (net, kind) in enumerate(zip(nets, kinds, strict=True)):
        backward(net, kind, rank)
    return [
        sum(each.grad for each in layer)
        for layer in zip(*(net.parameters() for net in nets), strict=True)
    ]


def backward(net: nn.Sequential, kind: str, rank: int) -> None:
    """A process has samples, none, or drops its second layer."""
    if kind == "none":
        return
    layers = [net[0], *([net[1]] if kind == "all" else []), *net[2:]]
    nn.Sequential(*layers)(inputs(rank)).square().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["all", "all"], ["all", "none"], ["drops", "all"]])
def test_buckets_are_sent_in_order_while_gradients_are_computed(kinds, monkeypatch):
    monkeypatch.setattr(gradient_exchange, "BUCKET_BYTES", WIDTH * WIDTH * 8)

    def exchange() -> None:
        world = init_world(os.environ, torch.device("cpu"))
        net, events = little_net(), []
        exchanged = GradientExchange(net.parameters(), world)
        add = distributed.all_reduce
        distributed.all_reduce = lambda *given, **named: (
            events.append("sent"),
            add(*given, **named),
        )[1]
        net[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
        for step in range(2):
            for parameter in net.parameters():
                parameter.grad.zero_()
            backward(net, kinds[world.rank], world.rank)  # another micro-batch: nothing is sent
            assert "sent" not in events, step
            exchanged.start()
            backward(net, kinds[world.rank], world.rank)
            early = events.count("sent")
            exchanged.finish()
            assert events.count("sent") == LAYERS
            # The first layer's hook is called after the exchange's own. A dropped layer holds back
            # the buckets behind its own, in which the first layer is.
            assert early == {"all": LAYERS, "drops": LAYERS - 2, "none": 0}[kinds[world.rank]]
            if kinds[world.rank] == "all":
                assert events[1] == "sent"
                assert events[-2:] == ["sent", "first layer"]
            for parameter, expected in zip(net.parameters(), summed(kinds), strict=True):
                assert torch.equal(parameter.grad, 2 * expected)
            events.clear()
        destroy_world(world)

    fork(2, exchange)


def test_a_process_that_ends_is_named_in_one_line():
    def exchange() -> None:
        world = init_world(os.environ, torch.device("cpu"), timeout_s=5.0)
        exchanged = GradientExchange(little_net().parameters(), world)
        if not world.is_main:
            os._exit(0)
        with error_line("process 0 of 2: another process ended"):
            exchanged.finish()
        os._exit(0)

    fork(2, exchange)


def test_a_bucket_has_gradients_of_one_type_up_to_its_size(monkeypatch):
    monkeypatch.setattr(gradient_exchange, "BUCKET_BYTES", 40)
    sizes = [(4, torch.float32), (6, torch.float32), (1, torch.float32), (1, torch.float64)]
    parameters = [nn.Parameter(torch.ones(count, dtype=dtype)) for count, dtype in sizes]
    parameters += [nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(2))]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, len(parameter))
    exchanged = GradientExchange(parameters, World())
    buckets = [(bucket.numel(), bucket.dtype) for bucket in exchanged._buckets]
    whole, double = torch.float32, torch.float64
    assert buckets == [(2, whole), (100, whole), (1, double), (7, whole), (4, whole)]
    for parameter in parameters:  # as before, and part of a bucket
        assert (parameter.grad == len(parameter)).all()
    exchanged._buckets[3].zero_()
    assert [float(p.grad.sum()) for p in parameters] == [16, 0, 0, 1, 10000, 4]


def test_bf16_rounds_what_is_sent_and_their_sum():
    def exchange() -> None:
        world = init_world(os.environ, torch.device("cpu"))
        net = little_net().float()
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        exchanged = GradientExchange(net.parameters(), world, torch.bfloat16)
        for parameter in net.parameters():
            parameter.grad.fill_((1 + world.rank) / 3)
        exchanged.start()
        exchanged.finish()
        expected = torch.tensor([1 / 3, 2 / 3]).bfloat16().sum(dtype=torch.bfloat16).float()
        assert all(bool((p.grad == expected).all()) for p in net.parameters())
        destroy_world(world)

    fork(2, exchange)
