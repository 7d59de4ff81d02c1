"""Annotations of LabelMe, YOLO and parquet files, and annotations out of tars."""

from gigamask.plugin import Plugin

PLUGIN = Plugin(
    name="formats",
    commands={"extract": "gigamask.plugins.formats.extract:ExtractCommand"},
    functions={"extract": "gigamask.plugins.formats.extract:extract"},
    readers={
        "LabelMe": "gigamask.plugins.formats.polygon_source:PolygonSource",
        "YOLO": "gigamask.plugins.formats.polygon_source:PolygonSource",
        "Data Science Bowl": "gigamask.plugins.formats.object_files:ObjectFiles",
        "parquet": "gigamask.plugins.formats.parquet:ParquetFiles",
    },
    writers={
        "yolo": "gigamask.plugins.formats.writers:write_yolo",
        "labelme": "gigamask.plugins.formats.writers:write_labelme",
    },
)
