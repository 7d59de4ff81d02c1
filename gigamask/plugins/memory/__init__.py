"""Memory of a sample and of loader processes, measured."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="memory",
    commands={"memory": "gigamask.plugins.memory.command:MemoryCommand"},
)
