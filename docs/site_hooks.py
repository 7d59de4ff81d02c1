"""What mkdocs is told by mkdocs.yml: the pages of plugins, which may be deleted.

A plugin's pages lie in `docs/plugins/NAME/`. They are listed below docs/plugins/index.md, and a
link to a page of a plugin whose folder was deleted becomes its text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\[\]]+)\]\(([\w./-]+\.(?:md|jpg))(?:#[\w-]+)?\)")


def on_config(config: Any) -> Any:
    """Add the pages of all plugins that are here to the navigation."""
    docs = Path(config["docs_dir"])
    for path in sorted((docs / "plugins").glob("*/index.md")):
        pages = sorted(path.parent.glob("*.md"), key=lambda each: (each != path, each.name))
        listed = [page.relative_to(docs).as_posix() for page in pages]
        section = next(each["Plugins"] for each in config["nav"] if "Plugins" in each)
        section.append({path.parent.name: listed} if len(listed) > 1 else listed[0])
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page without links to deleted plugins."""
    return without_deleted(markdown, page.file.src_uri, Path(config["docs_dir"]))


def without_deleted(markdown: str, page: str, docs: Path) -> str:
    """Replace links to pages of plugins that were deleted by their text.

    Args:
        markdown: A page.
        page: Its path below the folder of the docs.
        docs: The folder of the docs.
    """

    def link_or_text(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        folder, *inside = target.split("/")
        is_there = folder != "plugins" or len(inside) < 2 or (docs / folder / inside[0]).is_dir()
        return match[0] if is_there else match[1]

    return LINK.sub(link_or_text, markdown)
