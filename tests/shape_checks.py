"""Check shapes and types of every call into gigamask while pytest runs, with jaxtyping and
beartype.
"""

import ast

import beartype
from jaxtyping import _import_hook

checker = beartype.beartype
"""The type checker. jaxtyping caches bytecode by its name, so modules compiled for another one are
never reused.
"""


class Transformer(_import_hook.JaxtypingTransformer):
    """Also import what is imported for annotations only, so that beartype can resolve them."""

    def visit_If(self, node: ast.If) -> None:  # noqa: N802
        """Run what stands under `if TYPE_CHECKING:`, then what stands under its `else:`."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.test = ast.copy_location(ast.Constant(True), node.test)
            node.body, node.orelse = node.body + node.orelse, []
        self.generic_visit(node)


def install() -> None:
    """Check each module of gigamask that is imported from now on."""
    _import_hook.JaxtypingTransformer = Transformer
    _import_hook.install_import_hook("gigamask", f"{__name__}.checker")
