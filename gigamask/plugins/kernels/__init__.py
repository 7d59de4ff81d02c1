"""Fused Triton kernels for the rounds of SAM's decoder: `--kernels triton`."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="kernels",
    components={"kernels": {"triton": "gigamask.plugins.kernels.config:TritonKernels"}},
)
