"""Images with a file of shapes each, as LabelMe's and YOLO's are: what all such files share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gigamask.data.annotation import MAX_BYTES
from gigamask.datatools.coco_json import AnnotationRow, Id, StatedId, extra_fields
from gigamask.datatools.image_files import fit
from gigamask.datatools.left_out import LeftOutEntry
from gigamask.datatools.objects import Objects, SourceImage
from gigamask.datatools.outlines import MaskLimitError, Outlines
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.serialization import JSON_ERRORS, read_limited


@dataclass
class ShapeObject:
    """One object: polygons and masks that form it, its class, and its name in error messages.

    `error` says why it is left out.
    """

    name: str
    category: StatedId | None = None
    rings: list[Sequence[float | None]] = field(default_factory=list)
    masks: list[RLEMasks] = field(default_factory=list)
    error: Exception | None = None


@dataclass(frozen=True)
class PolygonImage(SourceImage):
    """One image, its file of shapes, and the names of classes by number."""

    file: Path
    names: Mapping[Id, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[Path, ...]:
        """The image, and its file of shapes."""
        return self.path, self.file

    @abstractmethod
    def parse(self, raw: bytes) -> Any:
        """Return the content of a file.

        Args:
            raw: The bytes of the file.

        Raises:
            GigamaskError: The file is not of this format.
        """

    @abstractmethod
    def shapes(self, content: Any, size: tuple[int, int]) -> list[ShapeObject]:
        """Return the objects of a file.

        Args:
            content: What `parse` returned.
            size: Height and width of the image in pixels.

        Raises:
            MaskLimitError: There are more than are read.
        """

    def stated_size(self, content: Any) -> tuple[int, int] | None:
        """Return height and width of the image as a file states them; None if it does not.

        Args:
            content: What `parse` returned.
        """
        return None

    def objects(self, stored: bytes) -> Objects:
        """Draw the polygons; broken ones are left out and listed with their reasons."""
        try:
            content = self.parse(read_limited(self.file, MAX_BYTES))
        except CorruptSampleError:
            raise
        except GigamaskError as error:
            raise CorruptSampleError(f"{self.source}: {error}") from None
        stated = self.stated_size(content)
        size = fit(stored, stated, self.source).size
        outlines = Outlines(size, self.source)
        skipped, drawn = [], []
        for each in self.shapes(content, size):
            try:
                if each.error is not None:
                    raise each.error
                outlines.add_parts(each.rings, each.masks)
                drawn.append(each)
            except MaskLimitError:
                raise
            except (*JSON_ERRORS, GigamaskError) as error:
                skipped.append(LeftOutEntry.of(self.source, error, f"{each.name}: "))
        extras = [self.fields_of(each) for each in drawn]
        objects = Objects(outlines.draw(), extras, skipped, outlines.notes, stated is not None)
        return objects.without_empty([each.name for each in drawn])

    def fields_of(self, shape: ShapeObject) -> dict[str, Any]:
        """Return the fields of an object besides its mask.

        Args:
            shape: The object.
        """
        return extra_fields(AnnotationRow(category_id=shape.category), self.names)
