"""Shards with smaller images, which load several times faster."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="repack",
    commands={"repack": "gigamask.plugins.repack.command:RepackCommand"},
)
