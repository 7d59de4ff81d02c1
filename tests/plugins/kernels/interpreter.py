"""Run tests of kernels in a process of their own, in Triton's interpreter.

Triton decides when it is imported whether it interprets, and the checks of shapes, which replace
functions, would hide the names that kernels use.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).parent / "interpreted"


def run_tests(*words: str, interpret: bool = True) -> None:
    """Run tests in another process; a failure shows what it printed.

    Args:
        words: Files in `interpreted`, and options of pytest.
        interpret: Whether kernels run in the interpreter; otherwise they can be compiled.
    """
    paths = [str(FOLDER / word) if word.endswith(".py") else word for word in words]
    command = ["-m", "pytest", "-q", "-x", "--noconftest", "-p", "no:cacheprovider", "-n", "0"]
    command.append("--hypothesis-seed=0")  # the same examples in every run
    done = subprocess.run(
        [sys.executable, *command, *paths],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def patch_once() -> None:
    """Let functions of Triton that are called by others not search for what is replaced already.

    This takes two thirds of the interpreter's time.
    """
    from triton import language
    from triton.runtime import interpreter

    def call(self: Any, *args: Any, **named: Any) -> Any:
        known = language, language.core
        modules = [each for each in self.fn.__globals__.values() if inspect.ismodule(each)]
        if any(language.core.is_builtin(each.broadcast) for each in modules if each in known):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **named)

    interpreter.InterpretedFunction.__call__ = call
