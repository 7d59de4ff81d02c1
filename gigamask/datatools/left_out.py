"""What a conversion leaves out, and what it changes to read a source: one record for all readers.

A reader raises `CorruptSampleError(reason, kind)` for an image, lists broken masks as
`LeftOutEntry`, and counts what it reads otherwise than it is written, such as a dropped ring, in
`notes`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from gigamask.errors import CorruptSampleError, GigamaskError, counted

CROWD = "crowd"
"""Kind of annotations marked iscrowd."""
BY_RULE = (CROWD, "ignored")
"""Kinds that are left out by a rule of the format or a flag: not unusable, which stops a conversion
if more than half are."""


@dataclass(frozen=True)
class LeftOutEntry:
    """An image or a mask that is left out: its name, the reason, and a few words to count it by."""

    name: str
    reason: str
    kind: str = "unreadable"

    @classmethod
    def of(cls, name: str, error: Exception, prefix: str = "") -> "LeftOutEntry":
        """Return what an error says of an image or a mask.

        Args:
            name: The image or mask.
            error: Why it is left out; other errors than `CorruptSampleError` are "unreadable".
            prefix: What the reason starts with.
        """
        kind = error.kind if isinstance(error, CorruptSampleError) else cls.kind
        return cls(name, f"{prefix}{error}", kind)


@dataclass
class LeftOutRecord:
    """Everything left out: images and masks; `notes` are counts of what was changed or assumed."""

    images: list[LeftOutEntry] = field(default_factory=list)
    masks: list[LeftOutEntry] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_counts(cls, counts: Mapping[str, Any]) -> "LeftOutRecord":
        """Return the record in the result of a conversion.

        Args:
            counts: The result, or its JSON.

        Raises:
            KeyError: A part is missing.
            msgspec.ValidationError: A part is of another type.
        """
        images, masks = (
            msgspec.convert(counts[f"skipped_{kind}"], list[LeftOutEntry])
            for kind in ("images", "masks")
        )
        return cls(images, masks, msgspec.convert(counts["notes"], dict[str, int]))

    def add(self, other: "LeftOutRecord") -> None:
        """Add another record to this one."""
        self.images += other.images
        self.masks += other.masks
        self.notes = dict(Counter(self.notes) + Counter(other.notes))

    def note(self, text: str, number: int = 1) -> None:
        """Count something that was read otherwise than it is written.

        Args:
            text: What, in the plural, as it is printed before the number.
            number: How often.
        """
        if number:
            self.notes[text] = self.notes.get(text, 0) + number

    def __len__(self) -> int:
        return len(self.images) + len(self.masks)

    def lines(self, listed_in: str = "") -> Iterator[str]:
        """Yield the lines that are printed: counts by kind with the first reason, then the notes.

        Args:
            listed_in: Where all reasons are.
        """
        where = f" (listed in {listed_in})" if listed_in else ""
        for what, left_out in (("images", self.images), ("masks", self.masks)):
            if left_out:
                yield f"  {what} left out: {len(left_out):,}{where}"
            for kind, number in by_kind(left_out).items():
                reason = example([each for each in left_out if each.kind == kind])
                yield f"    {kind}: {number:,}{', such as' if number > 1 else ';'} {reason}"
        for text, number in self.notes.items():
            yield f"  {text}: {number:,}"

    def check_half(self, source: object, images: int, masks: float = math.inf) -> None:
        """Raise an error if more than half of the images or of the masks are unusable.

        Args:
            source: What is converted.
            images: Number of usable images.
            masks: Number of usable masks; before they are read, they are not checked.

        Raises:
            GigamaskError: More than half are unusable.
        """
        for what, left_out, usable in (
            ("images", self.images, images),
            ("masks", self.masks, masks),
        ):
            unusable = [each for each in left_out if each.kind not in BY_RULE]
            if len(unusable) > usable:
                raise GigamaskError(
                    f"{source}: {len(unusable)} of its {len(unusable) + usable} {what} are "
                    f"unusable ({summary(unusable)}), but at most half may be; repair them first "
                    f"(such as: {example(unusable)})"
                )

    def check_masks(self, source: object, images: int, masks: int) -> None:
        """Raise an error, which says what took how many, if no mask is left.

        Args:
            source: What is converted.
            images: Number of usable images.
            masks: Number of masks.

        Raises:
            GigamaskError: There is no mask.
        """
        if masks:
            return
        took = summary(self.masks) or "no mask is annotated"
        reason = f"; such as: {example(self.masks)}" if self.masks else ""
        raise GigamaskError(
            f"{source}: none of its {counted(images, 'image')} has a usable mask ({took}); give "
            f"annotations with masks{reason}"
        )

    def as_counts(self) -> dict[str, Any]:
        """Return counts by kind, the notes, and everything with its reason, for JSON."""
        return {
            "left_out": {"images": by_kind(self.images), "masks": by_kind(self.masks)},
            "notes": self.notes,
            "skipped_images": [asdict(each) for each in self.images],
            "skipped_masks": [asdict(each) for each in self.masks],
        }


def by_kind(left_out: Sequence[LeftOutEntry]) -> dict[str, int]:
    """Return how many were left out by kind, the most frequent first.

    Args:
        left_out: Images, or masks.
    """
    return dict(Counter(each.kind for each in left_out).most_common())


def example(left_out: Sequence[LeftOutEntry]) -> str:
    """Return the first reason of the most frequent kind.

    Args:
        left_out: Images, or masks, at least one.
    """
    most_frequent = next(iter(by_kind(left_out)))
    return next(each.reason for each in left_out if each.kind == most_frequent)


def summary(left_out: Sequence[LeftOutEntry]) -> str:
    """Return the counts by kind as text, such as "crowd: 4, rectangle: 1"; "" if there are none.

    Args:
        left_out: Images, or masks.
    """
    return ", ".join(f"{kind}: {number:,}" for kind, number in by_kind(left_out).items())
