"""Errors that the user can fix; any other exception that escapes is a bug.

A message is one line with the name, the value, the limit and what to do.
"""


class GigamaskError(ValueError):
    """The input cannot be used; the command line prints one line and exits with 2."""

    def __init__(self, message: str) -> None:
        # Names come from archives and may hold line breaks or bytes that are not text.
        super().__init__(
            "".join(
                letter if letter.isprintable() else letter.encode("unicode_escape").decode()
                for letter in message
            )
        )


class CorruptSampleError(GigamaskError):
    """A sample has a broken image, json or mask; training skips it and counts it."""


class TrainingInterruptedError(GigamaskError):
    """Work stopped before its end and saved its progress; the command line exits with 75.

    Running the same command again continues.
    """


def check_range(
    name: str, value: int | float, least: int | float, most: int | float | None
) -> None:
    """Check that a value lies in a range.

    Args:
        name: Flag or field, for the message.
        value: Value to check; NaN is in no range.
        least: Smallest allowed value.
        most: Largest allowed value; None: no limit.

    Raises:
        GigamaskError: The value lies outside of the range.
    """
    if not (least <= value and (most is None or value <= most)):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise GigamaskError(f"{name} is {value}, it must be {limits}; give another value")
