"""Train Segment Anything (SAM) from scratch: SA-1B's tars in, a promptable segmenter out.

`load_model` reads weights; `SamPredictor` and `SamAutomaticMaskGenerator` take the model, and have
the arguments of Meta's classes. `train`, `pretrain` and `distill` train one of `recipes` and return
a `Run`; `DataLoader` yields their batches. `evaluate`, `benchmark`, `segment` and `plan` do what
the commands do. Errors that you can fix are `GigamaskError`.

The public names, listed in `__init__.pyi`, and those that plugins add are imported when they are
first used, so that `import gigamask` takes milliseconds.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_core, _core_names, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _core(name)
    except AttributeError:
        if name.startswith("_") or find_spec(f"{__name__}.{name}"):  # a module
            raise
        plugin = import_module("gigamask.plugin")
        if name not in (functions := plugin.merged("functions")):
            raise
        return plugin.load(functions[name])


def __dir__() -> list[str]:
    return [*_core_names(), *import_module("gigamask.plugin").merged("functions")]
