"""The formats of annotation tools: ONNX files with what each tool needs beside them."""

from gigamask.export.formats import ExportFormat

XANYLABELING = ExportFormat(
    "gigamask.plugins.annotation_tools.exporters:write_xanylabeling",
    library="onnx",
    loading="X-AnyLabeling loads the YAML file as a custom model.\n",
)
CVAT = ExportFormat(
    "gigamask.plugins.annotation_tools.exporters:write_cvat",
    library="onnx",
    loading="`nuctl deploy --project-name cvat --path FOLDER` adds the interactor to CVAT.\n",
)
