"""Folders of adapters in the format of peft: read wherever weights are, and exported."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="peft",
    exporters={"peft": "gigamask.plugins.peft.formats:PEFT"},
    weight_folders={"adapter_config.json": "gigamask.plugins.peft.folders:read"},
)
