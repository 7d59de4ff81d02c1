"""Pages as a browser reads them: every tag that is opened is closed, and nothing is fetched."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

EMPTY = ("meta", "img", "br", "input")
"""What stands alone."""


class Page(HTMLParser):
    """Notes what is open, all text, all tags with their attributes, and the rows of all tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.data: dict = {}
        self.scripts: list[str] = []
        self._cell = False
        self.feed(text)
        self.close()
        assert self.open == []
        for tag, told in self.tags:
            assert tag not in ("link", "iframe"), "it needs nothing else"
            assert not any(name.startswith("on") for name in told), (
                "all script is in the script element"
            )
            for name in ("src", "href"):
                assert (told.get(name) or "#").startswith(("#", "data:")), "it needs nothing else"
        allowed = [
            base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
            for each in self.scripts
        ]
        assert all(f"script-src 'sha256-{digest}'" in text for digest in allowed), (
            "the policy lets our script run"
        )
        assert len(self.scripts) <= 1
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", "".join(self.scripts)), (
            "it needs nothing else"
        )

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self._cell = False

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            if dict(self.tags[-1][1]).get("type") == "application/json":
                self.data = json.loads(data)
            else:
                self.scripts.append(data)
            return
        self.text.append(data)
        if self._cell:
            self.rows[-1][-1] += data

    def count(self, tag: str) -> int:
        """How many there are of a tag."""
        return sum(each == tag for each, _ in self.tags)

    def row(self, name: str) -> list[str]:
        """The first row of a table that begins with a name."""
        return next(row for row in self.rows if row[0] == name)


def read(text: str) -> list[str]:
    """Returns all text of a page."""
    return Page(text).text
