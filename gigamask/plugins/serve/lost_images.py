"""What of a project cannot be used: images that are gone, and annotations that are damaged.

Nothing of it is deleted. Images that were renamed are paired with their annotations by content.
"""

from pathlib import Path

from gigamask.errors import GigamaskError, counted
from gigamask.plugins.serve.photographs import (
    annotated_names,
    annotations_of,
    find_by_content,
    utf8_name,
)
from gigamask.plugins.serve.project import Project

MOST_NAMED = 3


def unused(project: Project) -> list[str]:
    """Return a line for each image whose annotations are not used, and kind that is not read."""
    lines = [
        f"{utf8_name(name)}: is not in the folder any more, so its "
        + ("annotations" if masks is None else counted(masks, "mask"))
        + " cannot be used; put it back, or pair it with its new name"
        for name, masks in list(project.missing.items())  # another may pair them now
    ]
    lines += project.unread
    lines += [not_utf8(name) for name in project.names if name != utf8_name(name)]
    damaged = [each for each in project.summary() if each["status"] == "damaged"]
    return lines + [
        f"{each['name']}: its annotations cannot be used: {each['fault']}" for each in damaged
    ]


def notice(project: Project) -> str | None:
    """Return what to print at the start if annotations cannot be used; None if all can."""
    lines = unused(project)
    if not lines:
        return None
    rest = len(lines) - MOST_NAMED
    more = [f"and {counted(rest, 'image')} more; the page lists all"] if rest > 0 else []
    return "\n".join([*lines[:MOST_NAMED], *more])


def pair_by_content(project: Project) -> dict[str, str]:
    """Give the annotations of missing images to the images without annotations that equal them.

    Returns:
        New name by old name, of those that were paired.

    Raises:
        GigamaskError: A file of annotations cannot be moved.
    """
    with project.lock:
        taken = annotated_names(project.folder)
        free = [name for name in project.names if name not in taken]
        pairs = find_by_content(project.folder, project.missing, Path(project.content.images), free)
        for old, new in pairs.items():
            source, target = (annotations_of(project.folder, name) for name in (old, new))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                source.rename(target)
            except OSError as error:
                raise GigamaskError(
                    f"{target}: cannot be written ({error.strerror}); correct the permissions, and "
                    "pair again"
                ) from None
            del project.missing[old]
            project.summaries.rows.pop(project.names.index(new), None)
        project.summary()
        return pairs


def not_utf8(name: str) -> str:
    """Return why an image is left out of exports whose file name is not UTF-8."""
    return f"{utf8_name(name)}: its name is not UTF-8, so exports leave it out; rename it"
