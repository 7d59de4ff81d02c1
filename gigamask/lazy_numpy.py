"""NumPy, imported on its first use: `from gigamask.lazy_numpy import np`.

Configurations and recipes load without it, which halves the time of `gigamask train --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
else:

    class LazyNumpy:
        """Stands for the package, and takes each of its attributes once."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)
            return value

    np = LazyNumpy()
