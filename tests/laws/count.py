"""Print the code tokens of each package and of its tests: `python -m tests.laws.count`.

Comments, docstrings, line ends and indentation are not counted. A package's tests are those of its
folder in `tests/unit`, a plugin's all in its folder; laws, parity and journeys of the core are
counted as a whole. Imports are the other packages that a package imports.
"""

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FSTRING_START = getattr(tokenize, "FSTRING_START", -1)
FSTRING_END = getattr(tokenize, "FSTRING_END", -1)


@cache
def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Return the code tokens of a module.

    Args:
        source: Its text.
    """
    found, begins, docstring, depth = [], True, False, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # From Python 3.12 on, the parts of an f-string are tokens; before, it is one.
        begun, ended = token.type == FSTRING_START, token.type == FSTRING_END
        depth += begun - ended
        if ended or depth > begun:
            continue
        if token.type == tokenize.NEWLINE and docstring:
            found.pop()
        if token.type not in LAYOUT:
            docstring = begins and token.type == tokenize.STRING
            found.append(token)
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in LAYOUT
    return found


def imports(source: str) -> set[str]:
    """Return the packages of gigamask that a module imports, lazily or not.

    Args:
        source: Its text.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {package_of(name.split(".")[1:]) for name in names if name.startswith("gigamask.")}


def package_of(parts: Sequence[str]) -> str:
    """Return the package of a module below `gigamask`; a plugin is one.

    Args:
        parts: The parts of its name.
    """
    return "/".join(parts[: 1 + (parts[0] == "plugins")]).removesuffix(".py")


def count_source() -> Counter[str]:
    """Return the code tokens of each package of the source."""
    source = Counter()
    for path in (ROOT / "gigamask").rglob("*.py"):
        package = package_of(path.relative_to(ROOT / "gigamask").parts)
        source[package] += len(code_tokens(path.read_text()))
    return source


def count_tests() -> Counter[str]:
    """Return the code tokens of the tests of each package."""
    tests = Counter()
    for path in (ROOT / "tests").rglob("*.py"):
        parts = path.relative_to(ROOT / "tests").parts
        name = parts[1] if parts[0] == "unit" else f"tests/{parts[0]}"
        name = package_of(parts) if parts[0] == "plugins" else name
        tests[name.removeprefix("test_").removesuffix(".py")] += len(code_tokens(path.read_text()))
    return tests


def parts(counts: Counter[str]) -> Counter[str]:
    """Return the code tokens of the core and of each plugin.

    Args:
        counts: Result of `count_source` or `count_tests`.
    """
    found = Counter()
    for name, count in counts.items():
        is_plugin = name.startswith("plugins/") and (ROOT / "gigamask" / name).is_dir()
        found[name if is_plugin else "core"] += count
    return found


def main() -> None:
    """Print the table."""
    source, tests, packages = count_source(), count_tests(), defaultdict(set)
    for path in (ROOT / "gigamask").rglob("*.py"):
        package = package_of(path.relative_to(ROOT / "gigamask").parts)
        packages[package] |= imports(path.read_text()) - {package}
    print(f"{'package':24}{'source':>9}{'tests':>9}  imports")
    for name in sorted(source.keys() | tests.keys(), key=lambda name: -source[name] - tests[name]):
        row = f"{name:24}{source[name]:9,}{tests[name]:9,}  {' '.join(sorted(packages[name]))}"
        print(row.rstrip())
    tested = parts(tests)
    for name, count in parts(source).items():
        print(f"{name:24}{count:9,}{tested[name]:9,}  {tested[name] / count:.3f} times the source")
    print(f"{'plugins':24}{source.total() - parts(source)['core']:9,}")


if __name__ == "__main__":
    main()
