"""The errors that are the user's to mend rather than ours; anything else that escapes is a bug.

A message is one line that names the thing, the value, the limit and the next act.
"""


class GigamaskError(ValueError):
    """What was asked or given cannot be used; the command line prints it as one line and exits with 2."""

    def __init__(self, message: str) -> None:
        # Names come from archives, and may hold line breaks or bytes that are no text.
        super().__init__(
            "".join(
                letter if letter.isprintable() else letter.encode("unicode_escape").decode()
                for letter in message
            )
        )


class CorruptSampleError(GigamaskError):
    """One sample of the data cannot be used (its jpg, json or a mask is broken); training leaves it out and counts it."""


class TrainingInterruptedError(GigamaskError):
    """Work was told to stop before its end and has kept what it did; the command line exits with 75, and the same command goes on."""


def check_range(
    name: str, value: int | float, least: int | float, most: int | float | None
) -> None:
    """Raises `GigamaskError` unless `least <= value <= most`."""
    if not (least <= value and (most is None or value <= most)):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise GigamaskError(f"{name} is {value}, it must be {limits}; give another value")
