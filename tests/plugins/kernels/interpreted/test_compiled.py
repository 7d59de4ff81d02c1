"""The kernels compile for GPUs that need not be there, and fit into their registers and memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import kernels


@pytest.mark.parametrize("chip", kernels.CHIPS)
def test_nothing_is_spilled(chip):
    launches = list(kernels.launches())
    assert len(launches) == 54
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: kernels.compiled(each[1], chip, 0), launches))
    for (name, _), resources in zip(launches, found, strict=True):
        assert resources.local_bytes == 0, name
        assert resources.shared_bytes <= kernels.SHARED_BYTES[chip], name
        assert 32 * resources.warps * resources.registers <= kernels.REGISTERS, name
