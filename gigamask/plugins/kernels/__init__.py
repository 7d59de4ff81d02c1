"""Fused Triton kernels for SAM's rounds and its encoder's attention: `--kernels triton`."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="kernels",
    components={"kernels": {"triton": "gigamask.plugins.kernels.config:TritonKernels"}},
)
