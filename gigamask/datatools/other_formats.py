"""Files of annotations in formats that are not read: what they are, and what to export instead."""

import re
from codecs import BOM_UTF8
from pathlib import Path

MAX_BEGINNING_BYTES = 1 << 16
"""How much of a file is looked at."""
_EXPORT = "export COCO's instances json from it"
_FORMATS = {
    r'.*"images"\s*:': "",  # COCO's, but broken
    r"PK": "a zip archive; unpack it",
    r"\xff\xd8": "a JPEG, which does not keep the values of labels; if these are masks, save them "
    "as PNG, and convert them with --binary 128 (one mask: values from 128) or --nearest-value",
    r"GIF8": "a GIF; if these are masks, save them as PNG",
    r"\s*<": f"XML, as CVAT and Pascal VOC write; {_EXPORT} ('COCO 1.0' in CVAT)",
    r'.*"(_via_\w+|shape_attributes)"': f"JSON of VIA (VGG); {_EXPORT} ('COCO format')",
    r'.*"(original_width|(polygon|brush)labels)"': "JSON of Label Studio; export 'COCO' from it "
    "for polygons, or 'Brush labels to PNG'",
    r'.*"type"\s*:\s*"Feature': "GeoJSON, as QuPath writes; export label images from it",
    r'.*"geometryType"\s*:': f"JSON of Supervisely; {_EXPORT}",
    r'.*"imgHeight"\s*:': "JSON of Cityscapes; give its label images, named as the images",
    r'.*"data_row"\s*:': f"JSON of Labelbox; {_EXPORT}",
    r'.*"schema_ref"\s*:': f"JSON of Darwin (V7); {_EXPORT}",
    r'.*"items"\s*:\s*\[': f"JSON of Datumaro; {_EXPORT}",
    r'.*"shapes"\s*:': "JSON of LabelMe; give the folder of all its files",
}
"""What a file is, and what to do, by how it begins; the first that matches counts."""


def describe(path: Path) -> str:
    """Return what a file is that is not read as annotations, and what to do; "" if unknown.

    Args:
        path: The file.
    """
    with open(path, "rb") as file:
        text = file.read(MAX_BEGINNING_BYTES).removeprefix(BOM_UTF8).decode("latin-1")
    found = (told for begins, told in _FORMATS.items() if re.match(begins, text, re.DOTALL))
    return next(found, "")
