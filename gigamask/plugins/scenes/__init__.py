"""Scenes that resemble photographs: dead leaves, clutter, and photographs pasted together."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="scenes",
    scenes={
        "dead_leaves": "gigamask.plugins.scenes.dead_leaves:compose_leaves",
        "clutter": "gigamask.plugins.scenes.clutter:compose_clutter",
        "composites": "gigamask.plugins.scenes.composites:compose_composites",
        "pasted": "gigamask.plugins.scenes.pasted:compose_pasted",
    },
)
