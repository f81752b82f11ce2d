"""conformance/adapters: an adapter renames and reshapes; it never computes, and says so."""

import ast

import pytest

from tests.concepts.test_copying import ROOT

ADAPTERS = sorted((ROOT / "conformance" / "adapters").glob("*.py"))
ARITHMETIC = (ast.Div, ast.Pow, ast.MatMult, ast.Sub, ast.Mult)
# numbers made of numbers: what an adapter must leave to the project
COMPUTES = {"exp", "expm1", "log", "log1p", "sqrt", "softmax", "log_softmax", "logsumexp", "mean",
            "std", "var", "clamp", "minimum", "maximum", "float", "double"}
ALLOWED = {"trl.py": {"mask.shape[1] - max(lengths)"}}  # how much padding is needed


def computations(source):
    """The pieces of a file that compute. A list may be repeated: [1] * n."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
            if not isinstance(node.left, ast.List):
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in COMPUTES:
                yield ast.unparse(node)


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_computes_nothing(path):
    found = set(computations(path.read_text()))
    assert found == ALLOWED.get(path.name, set())
