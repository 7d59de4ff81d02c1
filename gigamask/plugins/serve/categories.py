"""Change a category of a project: rename it, merge it with another, give it another color."""

from dataclasses import replace

import msgspec

from gigamask.errors import GigamaskError
from gigamask.plugins.serve.edits import Edit, ImageEdits
from gigamask.plugins.serve.photographs import annotated_names, annotations_of
from gigamask.plugins.serve.project import ObjectCategory, Project, read_edits, write


def change_category(project: Project, name: str, new: ObjectCategory) -> dict[str, int]:
    """Rename a category in all edits, also those that were undone, and set its color.

    Killed meanwhile, it leaves both categories, and can be repeated.

    Args:
        project: The project.
        name: The name of the category.
        new: Its new name and color; the name of another category merges both, which keep the color
            of that.

    Returns:
        The number of objects it changed, and of their images.

    Raises:
        GigamaskError: There is no such category, or a file cannot be written.
    """
    with project.lock:
        before = project.content.categories
        names = [each.name for each in before]
        if name not in names:
            raise GigamaskError(f"there is no category {name}; there are {', '.join(names)}")
        kept = [each for each in before if each.name != name]
        if new.name not in names or new.name == name:
            kept.insert(names.index(name), new)
        counts = {"objects": 0, "images": 0}
        if new.name != name:
            project.update(categories=(*before, *(each for each in kept if each not in before)))
            rows = {image: row for row, image in enumerate(project.names)}
            for image in sorted(annotated_names(project.folder)):
                changed = _rename(project, image, rows.get(image), (name, new.name))
                counts["objects"] += changed
                counts["images"] += changed > 0
        known = project.content.renamed | {name: name}
        renamed = {old: new.name if now == name else now for old, now in known.items()}
        project.update(categories=tuple(kept), renamed=renamed)
    return counts


def _rename(project: Project, image: str, row: int | None, names: tuple[str, str]) -> int:
    """Rename a category in the edits of an image; return how many of its objects have it.

    The image has no row if it is missing.
    """
    path = annotations_of(project.folder, image)
    try:
        found = read_edits(path)
    except GigamaskError:  # the page names it
        return 0
    old, _ = names
    count = sum(each.category == old for each in found.objects.values())
    if not any(
        one and one.category == old for each in found.edits for one in each.changes.values()
    ):
        return count
    if row is not None:
        project.change(row, found.version, lambda edits: _renamed(edits, names))
        return count
    changed = replace(_renamed(found, names), version=found.version + 1)
    write(path, msgspec.json.encode(changed))
    return count


def _renamed(found: ImageEdits, names: tuple[str, str]) -> ImageEdits:
    old, new = names

    def renamed(edit: Edit) -> Edit:
        changes = {
            key: replace(one, category=new) if one and one.category == old else one
            for key, one in edit.changes.items()
        }
        return replace(edit, changes=changes)

    return replace(found, edits=tuple(map(renamed, found.edits)))
