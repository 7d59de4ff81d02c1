"""What is compiled, when, and what an error says; whole steps: tests/laws/test_compilation.py."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from gigamask.distributed.compilation import compile_function, compile_methods, compiled_modules
from gigamask.errors import GigamaskError
from tests.errors import error_line


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Doubling(nn.Module):
    """Tells whether it was compiled."""

    compiled_methods: ClassVar[tuple[str, ...]] = ("double",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.traced = []

    def double(self, x):
        self.traced.append(torch.compiler.is_compiling())
        return x * self.weight

    def forward(self, x):
        return self.double(x)


@dataclass(frozen=True)
class Adding:
    number: float
    compiled_methods: ClassVar[tuple[str, ...]] = ("add",)

    def add(self, x):
        return x + self.number + 10 * torch.compiler.is_compiling()


@pytest.mark.slow
def test_methods_are_compiled_in_training_and_within_the_context_alone():
    model = nn.Sequential(Doubling(), nn.ReLU())
    inner, x, keys = model[0], torch.ones(3), list(model.state_dict())
    assert torch.equal(model.train()(x), torch.full((3,), 2.0))
    with compiled_modules(model, "eager"):
        assert torch.equal(model(x), torch.full((3,), 2.0))
        assert inner.traced[-1]
        model.eval()(x)
        assert not inner.traced[-1]
        assert list(model.state_dict()) == keys
        model.train()
    assert "double" not in vars(inner)
    model(x)
    assert not inner.traced[-1]


@pytest.mark.slow
def test_a_frozen_value_is_copied():
    plain = Adding(1.0)
    compiled = compile_methods(plain, "eager")
    assert compiled == plain
    assert plain.add(torch.zeros(())) == 1
    assert compiled.add(torch.zeros(())) == 11


@pytest.mark.slow
def test_a_function_of_several_graphs_is_refused_in_one_line():
    def reads(x):
        return x + 1 if x.sum().item() > 0 else x - 1

    with error_line(r"^--compile: torch .* cannot compile .*reads") as error:
        compile_function(reads, "eager")(torch.ones(2))
    assert str(error.value).endswith("leave the flag out")


@pytest.mark.slow
def test_an_error_of_the_function_itself_is_raised_as_it_is():
    def fails(x):
        raise GigamaskError("masks must be square")

    with error_line(r"^masks must be square$"):
        compile_function(fails, "eager")(torch.ones(2))


def test_a_missing_compiler_is_named():
    def broken(graph, inputs):
        raise OSError("no C++ compiler")

    with error_line("no C\\+\\+ compiler"):
        compile_function(lambda x: x + 1, broken)(torch.ones(2))
