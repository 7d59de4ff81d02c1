"""Words of queries: splitting, nonsense that no mask fits, and the words a run was trained on."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from gigamask.errors import GigamaskError
from gigamask.plugins.grounding.queries import Query, check_length
from gigamask.rng import make_rng
from gigamask.serialization import read_json

FILE = "words.json"
"""File in the run folder with the words of the training queries."""
NONSENSE = "nonsense"
"""Kind of the queries that `nonsense_queries` makes."""
MAX_NONSENSE_WORDS = 20
STOP_WORDS = frozenset(
    (
        *("a", "all", "an", "any", "each", "every", "object", "objects", "of", "one", "some"),
        *("the", "these", "this", "thing", "things", "those"),
    )
)
"""Words that say nothing about what is meant."""
VOWELS = "aeiou"
CONSONANTS = "".join(sorted(set(ascii_lowercase) - set(VOWELS)))

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


def words(text: str) -> list[str]:
    """Return the lower-case words of a text."""
    return _WORD.findall(text.lower())


def distinct_words(texts: Iterable[str]) -> frozenset[str]:
    """Return the words of texts."""
    return frozenset(word for text in texts for word in words(text))


def check_text(text: str) -> None:
    """Raise `GigamaskError` if a text has no letter, or is too long."""
    check_length(text)
    if not any(letter.isalpha() for letter in text):
        raise GigamaskError(
            f"the text must have letters, got {text!r}; describe what to find, as in 'the red box'"
        )


def nonsense_queries(
    queries: Sequence[Query], known: Collection[str], seed: int, purpose: str
) -> list[Query]:
    """Replace the words of queries by random letters, so that no mask fits.

    Args:
        queries: Queries, which give images and numbers of words.
        known: Words that random letters must not spell.
        seed: Random seed.
        purpose: What they are for, see `make_rng`.

    Returns:
        One query without a target for each of the given ones.
    """
    return [
        replace(
            query,
            text=_nonsense(make_rng(seed, purpose, number), words(query.text), known),
            mask_indices=(),
            kind=NONSENSE,
        )
        for number, query in enumerate(queries)
    ]


def _nonsense(
    generator: np.random.Generator, template: Sequence[str], known: Collection[str]
) -> str:
    """Return random words; stop words of the template stay half of the time."""
    count = int(generator.integers(1, max(len(template), 1) + 1))
    keeps_stop_words = generator.random() < 0.5
    result = []
    for word in [*template[: min(count, MAX_NONSENSE_WORDS) - 1], ""]:
        if keeps_stop_words and word in STOP_WORDS:
            result.append(word)
            continue
        while (random := _random_word(generator)) in known:
            pass
        result.append(random)
    return " ".join(result)


def _random_word(generator: np.random.Generator) -> str:
    """Return 3 to 9 letters, half of the time alternating consonants and vowels."""
    length = int(generator.integers(3, 10))
    alphabets = (CONSONANTS, VOWELS) if generator.random() < 0.5 else (ascii_lowercase,)
    letters = (alphabets[place % len(alphabets)] for place in range(length))
    return "".join(choices[int(generator.integers(len(choices)))] for choices in letters)


def to_json(known: Collection[str]) -> str:
    """Return the content of `FILE`."""
    return json.dumps(sorted(known), ensure_ascii=False)


def load(folder: str) -> frozenset[str] | None:
    """Return the words of a run's training queries, None if the run folder does not have them.

    Raises:
        GigamaskError: The file is damaged.
    """
    path = Path(folder) / FILE
    return frozenset(read_json(path, list[str])) if path.exists() else None


def describe_unknown(text: str, known: Collection[str]) -> str:
    """Return a note about the words of a text that no training query has, "" if there are none.

    Args:
        text: The text.
        known: Words of the training queries.
    """
    content = [word for word in words(text) if word not in STOP_WORDS] or words(text)
    unknown = [word for word in content if word not in known]
    if not unknown:
        return ""
    what = "no word of it is" if len(unknown) == len(content) else "not"
    return f"{what} in the training queries: {', '.join(dict.fromkeys(unknown))}"
