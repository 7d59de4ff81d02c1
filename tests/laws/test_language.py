"""Docstrings, help texts and docs are plain English, and docstrings document their parameters.

`python -m tests.laws.test_language` lists the violations by file.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "gigamask").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MANNERISMS = [
    r"\benters?\b.*\bleaves?\b",
    r"\bis no (?!multiple\b)\w+ of\b",
    r"\b(?:is|are|of) so many\b|\bso many \w+ (?:as|are|is)\b",
    r"\bbehind the (?:first|last|step|save)",
    r"\bgive such\b",
    r"\b(?:tells?|told) (?:of|by|what|whether|how|in)\b",
    r"\bnames all chance\b",
    r"\btakes? leave of\b",
    r"\bpretends? to\b",
    r"\b(?:forgets|forgetful)\b",
    r"\bis borne\b|\bare borne\b",
    r"\bwhat (?:enters|leaves)\b",
]
"""Phrases to write plainly, as regular expressions; see the section English of docs/glossary.md."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, also of those below fields, which are help
    texts."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions and methods that other modules may call, without overloads."""
    bodies: list[ast.Module | ast.ClassDef] = [tree]
    for owner in bodies:
        for node in owner.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bodies.append(node)
            elif (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and not node.name.startswith("_")
                and "overload" not in map(ast.unparse, node.decorator_list)
            ):
                yield node


def mannerisms(text: str, first_line: int = 1) -> list[str]:
    """Return each mannerism of a text with its line.

    Args:
        text: Prose; code spans in backticks are passed over.
        first_line: Number of the text's first line in its file.
    """
    found = []
    for number, line in enumerate(text.splitlines(), first_line):
        prose = re.sub(r"`[^`]*`", "", line)
        found += [
            f"{number}: '{match[0]}'"
            for pattern in MANNERISMS
            if (match := re.search(pattern, prose, re.IGNORECASE))
        ]
    return found


def without_parameters(tree: ast.Module) -> list[str]:
    """Return the public functions with two parameters or more whose docstring has no section
    `Args:`."""
    found = []
    for node in public_functions(tree):
        names = [each.arg for each in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
        if len(names) - (names[:1] in (["self"], ["cls"])) >= 2 and not re.search(
            r"^\s*Args:$", ast.get_docstring(node) or "", re.MULTILINE
        ):
            found.append(f"{node.lineno}: {node.name} has no Args:")
    return found


def violations(path: Path) -> list[str]:
    """Return what a source file or a page of the docs should say otherwise."""
    if path.suffix == ".md":
        prose = "\n".join(
            "" if line.startswith("    ") else line for line in path.read_text().splitlines()
        )
        return mannerisms(prose)
    tree = ast.parse(path.read_text())
    return [
        each for line, text in docstrings(tree) for each in mannerisms(text, line)
    ] + without_parameters(tree)


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_language_is_plain(path):
    assert violations(path) == []


def test_banned_phrases_and_missing_docstring_sections_are_found():
    lines = "A frame enters, a batch leaves.\n`give such` is code.\nAt 0: give such"
    assert mannerisms(lines, 7) == [
        "7: 'enters, a batch leaves'",
        "9: 'give such'",
    ]
    text = (
        'def f(a, b):\n    """Add."""\n\n\nclass A:\n    def g(self, a, b):\n        """Add.\n\n  '
        '      Args:\n            a: One.\n        """\n'
    )
    assert without_parameters(ast.parse(text)) == ["1: f has no Args:"]
    assert (
        without_parameters(
            ast.parse("def _f(a, b): ...\ndef g(a): ...\nclass _A:\n    def h(self, a, b): ...\n")
        )
        == []
    )


if __name__ == "__main__":
    for each in [*SOURCES, *PAGES]:
        for violation in violations(each):
            print(f"{each.relative_to(ROOT)}:{violation}")
