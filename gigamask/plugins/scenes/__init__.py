"""Synthetic scenes that resemble photographs: dead leaves and clutter."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="scenes",
    scenes={
        "dead_leaves": "gigamask.plugins.scenes.dead_leaves:compose_leaves",
        "clutter": "gigamask.plugins.scenes.clutter:compose_clutter",
    },
)
