"""Export for annotation tools: X-AnyLabeling and CVAT."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="annotation_tools",
    exporters={
        "x-anylabeling": "gigamask.plugins.annotation_tools.formats:XANYLABELING",
        "cvat": "gigamask.plugins.annotation_tools.formats:CVAT",
    },
)
