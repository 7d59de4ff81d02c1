"""Pairing of files by name: annotations with images, `file_name` of a JSON with a file.

Names are the same if their bytes are; failing that, if their composed forms (Unicode's NFC) are,
because macOS writes "é" as two characters and other systems as one; failing that, in any case of
letters. A file is paired once.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

NO_FILE = "no file has its name"
"""Result for a name that no file has."""

MAX_LIST_BYTES = 2**26
"""Largest text file of names."""


def compose(name: str) -> str:
    """Return a name in Unicode's composed form, which is the same on all systems."""
    return unicodedata.normalize("NFC", name)


def pair_names(
    wanted: Sequence[Sequence[str]],
    available: Sequence[str],
    stems: Sequence[str] = (),
    can_repeat: bool = False,
) -> list[int | str]:
    """Find the file that each of several names means.

    The first candidate that a file has counts, by its bytes rather than by its composed form; if no
    file has one, the first that a file has in other letters' cases, as Windows knows no others. If
    several names claim a file, the best claim wins, or none.

    Args:
        wanted: The names that may be meant, the likeliest first, for each item.
        available: Names of the files; several files may have the same name.
        stems: The name of each item without suffix, which decides between equal claims.
        can_repeat: Whether several items may name one file by its exact bytes.

    Returns:
        For each item, the index of its file, or what is wrong.
    """
    exact, composed, folded = defaultdict(list), defaultdict(list), defaultdict(list)
    for i, name in enumerate(available):
        exact[name].append(i)
        composed[shown := compose(name)].append(i)
        folded[shown.casefold()].append(i)
    claims: dict[int, list[tuple[tuple[bool, int, bool], int]]] = defaultdict(list)
    results: list[int | str] = [NO_FILE] * len(wanted)
    for item, names in enumerate(wanted):
        candidates = [exact.get(name) or composed.get(compose(name), []) for name in names]
        candidates += [folded.get(compose(name).casefold(), []) for name in names]
        for rank, found in enumerate(candidates):
            if len(found) > 1:
                results[item] = f"{len(found)} files have its name"
            elif found:
                path = PurePosixPath(available[found[0]])
                is_other_stem = bool(stems) and compose(stems[item]) != compose(path.stem)
                is_composed = names[rank % len(names)] not in exact
                claims[found[0]].append(((is_composed, rank, is_other_stem), item))
            if found:
                break
    for file, ranked in claims.items():
        ranked.sort()
        best = [item for rank, item in ranked if rank == ranked[0][0]]
        is_clear = len(best) == 1 or (can_repeat and ranked[0][0][:2] == (False, 0))
        for _, item in ranked:
            is_best = item in best and is_clear
            results[item] = file if is_best else f"{len(ranked)} names mean {available[file]}"
    return results


def names_within(name: str, folder: Path, subfolder: str = "") -> list[str]:
    r"""Return the paths below a folder that a name in a file of annotations may mean.

    The name may be an absolute path or one of Windows (`..\images\x.jpg`), on a machine where the
    folder was elsewhere: leading folders are dropped one after the other.

    Args:
        name: The name.
        folder: The folder of images.
        subfolder: Subfolder of it that the name may be relative to.

    Returns:
        Paths below the folder, as written first; none leads out of it.
    """
    if not name or "\0" in name:
        return []
    candidates = []
    written = [PurePosixPath(name), *([PureWindowsPath(name)] if "\\" in name else [])]
    for path in written:
        parts = path.parts
        if path.is_absolute() and isinstance(path, PurePosixPath):
            for root in (folder.absolute(), folder.resolve()):
                if path.is_relative_to(root):
                    parts = path.relative_to(root).parts
        if path.anchor:
            parts = tuple(part for part in parts if part != path.anchor)
        if ".." in parts:
            parts = parts[len(parts) - parts[::-1].index("..") :]
        if subfolder:
            candidates.append("/".join((*PurePosixPath(subfolder).parts, *parts)))
        candidates += ["/".join(parts[start:]) for start in range(len(parts))]
    return list(dict.fromkeys(filter(None, candidates)))
