"""Benchmarks of the literature: readers of their archives, and recipes of published experiments."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="benchmarks",
    commands={"benchmark": "gigamask.plugins.benchmarks.command:BenchmarkCommand"},
    recipes={
        "train": {
            "sbd_vit_b": "gigamask.plugins.benchmarks.recipes:sbd_vit_b",
            "data_curve": "gigamask.plugins.benchmarks.recipes:data_curve",
        }
    },
    functions={"benchmark": "gigamask.plugins.benchmarks.benchmark:benchmark"},
)
