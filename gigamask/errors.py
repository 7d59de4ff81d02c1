"""Errors that the user can fix; any other exception is a bug.

Each message is one line with the name, the value, the limit and what to do.
"""

import math
import os
import sys
from collections.abc import Iterable
from numbers import Real
from typing import Any


class GigamaskError(ValueError):
    """An error in the user's input; the command line prints one line and exits with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class CorruptSampleError(GigamaskError):
    """A broken image, json or mask; training and conversions skip it and count it by its kind."""

    def __init__(self, message: str, kind: str = "unreadable") -> None:
        super().__init__(message)
        self.kind = kind


class PixelFormatError(CorruptSampleError):
    """Pixels that are sound, but that a model cannot read as it is configured."""


class TrainingInterruptedError(GigamaskError):
    """Work that stopped early and saved its progress; the command line exits with code 75.

    Running the same command again resumes it.
    """


class EvaluationStoppedError(Exception):
    """A stop signal that has ended an evaluation in training; the next start evaluates again."""


def printable(text: str) -> str:
    """Escape line breaks, terminal sequences and bytes that are not text, as names may contain."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def abridged(words: Iterable[str]) -> str:
    """Return words as one line of at most 160 characters: a command may name thousands of files.

    Args:
        words: The words.
    """
    text = printable(" ".join(words))
    return text if len(text) <= 160 else f"{text[:156]} ..."


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, at most 200 characters, or the error's type.

    Args:
        error: The error.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as in "1 tar" or "2,000 tars".

    Args:
        number: The number.
        noun: The noun in the singular.
        plural: Its plural, if that is not the singular with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def score_text(score: float | None, error: float | None = None) -> str:
    """Return a score in [0, 1] with three digits, and its error; empty if it is unknown.

    Args:
        score: The score.
        error: Its standard error or deviation, if known.
    """
    return "" if score is None else f"{score:.3f}" + ("" if error is None else f" ± {error:.3f}")


def check_range(
    name: str, value: int | float | None, least: int | float, most: int | float | None = None
) -> None:
    """Check that a value, if it is set, lies in a range.

    Args:
        name: Flag or field, for the message.
        value: Value to check; NaN and what is no number are always out of range, None never.
        least: Smallest allowed value.
        most: Largest allowed value; None: no upper limit.

    Raises:
        GigamaskError: The value is out of range.
    """
    if not _lies(value, least, math.inf if most is None else most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise GigamaskError(f"{name} must be {limits} (got {value})")


def check_positive(name: str, value: float | None) -> None:
    """Check that a value, if it is set, is more than 0 and finite.

    Args:
        name: As for `check_range`.
        value: As for `check_range`.

    Raises:
        GigamaskError: It is not.
    """
    if not _lies(value, math.ulp(0), sys.float_info.max):
        raise GigamaskError(f"{name} must be > 0 and finite (got {value})")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Check that a value is one of those that there are.

    Args:
        name: Flag or field, for the message.
        value: Value to check.
        choices: The values that there are.

    Raises:
        GigamaskError: The value is not among them.
    """
    if value not in (known := list(choices)):
        raise GigamaskError(f"{name} must be one of {', '.join(known)} (got {value!r})")


def check_counts(config: object, *names: str) -> None:
    """Check that fields, if they are set, are at least 1, in a list each.

    Args:
        config: A configuration or a component of one.
        *names: Names of its fields.

    Raises:
        GigamaskError: A field is less than 1.
    """
    for name in names:
        value = getattr(config, name)
        for number in value if isinstance(value, tuple | list) else (value,):
            check_range(f"{type(config).__name__}.{name}", number, 1)


def check_processes(name: str, count: int, least: int = 64) -> None:
    """Check that a machine can hold the processes that a command is to start.

    Args:
        name: As for `check_range`.
        count: Their number.
        least: How many may be started on a machine of few cores, as they do for remote files.

    Raises:
        GigamaskError: There are more.
    """
    cores = os.cpu_count() or 1
    if count > (most := max(least, 4 * cores)):
        raise GigamaskError(
            f"{name} {count}: more than four for each of the {cores} cores of this machine would "
            f"fill its memory and gain no time; give at most {most}"
        )


def _lies(value: Any, least: float, most: float) -> bool:
    return value is None or (isinstance(value, Real) and least <= float(value) <= most)
