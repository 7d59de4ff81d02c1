"""Check shapes and types of calls into gigamask while pytest runs, with jaxtyping and beartype.

In each test, the first `CALLS` calls of each function that takes or returns an array; pyrefly
checks the types of all others. A check is built when its function is first called.
"""

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping
from jaxtyping import _import_hook

CALLS = 50
checker = beartype.beartype
"""The type checker. jaxtyping caches bytecode by its name, so modules compiled for another one are
never reused.
"""
build_check = jaxtyping.jaxtyped
test = 0
"""Number of the test that runs."""


class Transformer(_import_hook.JaxtypingTransformer):
    """Also import what is imported for annotations only, so that beartype can resolve them."""

    def visit_If(self, node: ast.If) -> None:  # noqa: N802
        """Run what stands under `if TYPE_CHECKING:`, then what stands under its `else:`."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.test = ast.copy_location(ast.Constant(True), node.test)
            node.body, node.orelse = node.body + node.orelse, []
        self.generic_visit(node)


def install() -> None:
    """Check each module of gigamask that is imported from now on."""
    _import_hook.JaxtypingTransformer = Transformer
    jaxtyping.jaxtyped = lambda typechecker: checked
    _import_hook.install_import_hook("gigamask", f"{__name__}.checker")


def next_test() -> None:
    """Check the first calls of each function again."""
    global test
    test += 1


def checked(part: Any) -> Any:
    """Return a function whose first calls are checked, or a class whose `__init__` is so if it is a
    dataclass.

    Args:
        part: The function or class.
    """
    if not inspect.isclass(part):
        return first_calls_checked(part)
    if dataclasses.is_dataclass(part) and not hasattr(part.__init__, "first_calls_are_checked"):
        part.__init__ = first_calls_checked(part.__init__)
    return part


def first_calls_checked(function: Callable) -> Callable:
    """Return the function with checks.

    Args:
        function: The function.
    """
    check, seen, left = None, -1, 0

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        nonlocal check, seen, left
        if seen != test:
            seen, left = test, CALLS
        if left == 0 or jaxtyping.config.jaxtyping_disable:
            return function(*given, **named)
        left -= 1
        if check is None:
            shaped = has_arrays(function)
            check = build_check(function, typechecker=checker) if shaped else function
        return check(*given, **named)

    call.first_calls_are_checked = True
    return call


def has_arrays(function: Callable) -> bool:
    """Return whether an annotation of a function names an array of jaxtyping, or a type made of it.

    Args:
        function: The function.
    """
    annotations = " ".join(map(str, function.__annotations__.values()))
    named = (function.__globals__.get(word) for word in set(re.findall(r"\w+", annotations)))
    return "jaxtyping" in annotations or any("jaxtyping" in repr(each) for each in named)
