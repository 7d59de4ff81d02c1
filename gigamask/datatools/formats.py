"""The formats of people's annotations that are read and written; plugins add others.

Imports nothing that reads or writes them, so that trainings on tars and `--help` stay fast.
"""

from dataclasses import dataclass, replace

from gigamask import plugin
from gigamask.data.sample_config import MaskOptions
from gigamask.errors import GigamaskError, check_range
from gigamask.plugin import References

READERS: References = {
    "COCO": "gigamask.datatools.convert_coco:CocoSource",
    "label images": "gigamask.datatools.convert_labels:LabelImageSource",
}
"""The `sources.Source` of each format, in the order in which they are asked."""
WRITERS: References = {
    "coco": "gigamask.datatools.export_formats:write_coco",
    "labels": "gigamask.datatools.export_formats:write_labels",
    "shards": "gigamask.datatools.export_formats:write_shards",
}
"""The `export_formats.Writer` of each format by the name that a user types."""
OF_PLUGIN = ("LabelMe", "YOLO", "parquet")
"""Formats that gigamask's plugin `formats` reads, which may have been deleted."""
MISSING_PLUGIN = plugin.MISSING.format("formats")
LABEL_FLAGS = "--split-components, --ignore, --binary and --nearest-value"
"""Flags of label images."""


def readers() -> References:
    """Return the `sources.Source` of each format that is read, those of plugins last."""
    return {**READERS, **plugin.merged("readers", READERS)}


def writers() -> References:
    """Return the `export_formats.Writer` of each format that is written, those of plugins last."""
    return {**WRITERS, **plugin.merged("writers", WRITERS)}


def describe_readers() -> str:
    """Return what may be given for annotations, and what it takes to read more."""
    added = plugin.merged("readers", READERS)
    known = f"a folder of label images, COCO's instances json, or files of {', '.join(added)}"
    if not (names := absent()):
        return known
    known = known if added else "a folder of label images or COCO's instances json"
    return f"{known}; {', '.join(names)} need {MISSING_PLUGIN}"


def absent() -> list[str]:
    """Return the formats whose plugin is not installed."""
    return [name for name in OF_PLUGIN if name not in plugin.merged("readers")]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(MaskOptions):
    """What counts as a mask: crowds, and values in label images."""

    split_components: bool = False
    """label images: make each connected component a mask of its own"""

    def __post_init__(self) -> None:
        check_range("--binary", self.binary, 1)

    @property
    def has_labels(self) -> bool:
        """Whether an option applies only to label images."""
        return replace(self, keep_crowds=False) != ConvertOptions()

    def refuse_labels(self, source: object) -> None:
        """Raise `GigamaskError` if an option applies only to label images.

        Args:
            source: The annotations, which are none.
        """
        if self.has_labels:
            raise GigamaskError(
                f"{source}: is not a folder of label images; drop {LABEL_FLAGS}, which apply only "
                "to those"
            )

    def refuse_crowds(self, source: object) -> None:
        """Raise `GigamaskError` if crowds are to be kept.

        Args:
            source: The folder of annotations, which have none.
        """
        if self.keep_crowds:
            raise GigamaskError(
                f"{source}: is a folder, whose files have no crowds; drop --keep-crowds"
            )
