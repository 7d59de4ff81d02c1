"""Annotations of LabelMe, YOLO and parquet files."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="formats",
    readers={
        "LabelMe": "gigamask.plugins.formats.polygon_source:PolygonSource",
        "YOLO": "gigamask.plugins.formats.polygon_source:PolygonSource",
        "parquet": "gigamask.plugins.formats.parquet:ParquetFiles",
    },
    writers={
        "yolo": "gigamask.plugins.formats.writers:write_yolo",
        "labelme": "gigamask.plugins.formats.writers:write_labelme",
    },
)
