"""Replaced functions of torch exist with the expected parameters, or their feature is disabled."""

import ast
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_zero.compat import patches
from lightning_zero.compat.lookup import ABSENT, Absent, find, private
from lightning_zero.compat.patches import PATCHES, Patch, counted, failure_of_untested_torch, parameters, swap_attribute
from lightning_zero.errors import UnsupportedError
from tests.helpers.private_names import bindings, dotted

PACKAGE = Path(__file__).resolve().parents[3] / "lightning_zero"
HERE = f"{__name__}.TARGET"
TARGET = SimpleNamespace(double=lambda number: 2 * number)


@pytest.fixture(autouse=True)
def no_more_patches() -> Iterator[None]:
    before = list(PATCHES)
    yield
    PATCHES[:] = before


@pytest.mark.parametrize("patch", [pytest.param(patch, id=patch.feature) for patch in PATCHES])
def test_replaced_functions_have_the_expected_parameters(patch: Patch) -> None:
    assert patch.reason == "", (
        "look for the function's successor, or add its parameters once our own function takes them"
    )


def doubled_again(patch: Patch) -> Any:
    @patch
    @contextmanager
    def quadruple() -> Iterator[str]:
        with patch.replace({"double": lambda plain: lambda number: 2 * plain(number)}):
            yield "entered"

    return quadruple


def test_a_replacement_applies_inside_and_is_counted() -> None:
    quadruple = doubled_again(Patch("numbers grow faster", {f"{HERE}.double": "number"}))
    with counted() as calls, quadruple() as value:
        assert (value, TARGET.double(3)) == ("entered", 12)
    assert TARGET.double(3) == 6
    assert calls == {f"{HERE}.double": 1}


@pytest.mark.parametrize(
    ("names", "needs", "why"),
    [
        ({f"{HERE}.triple": "number"}, {}, "has no"),
        ({f"{HERE}.double": "number, twice"}, {}, r"takes \(number\)"),
        ({f"{HERE}.double": ("a", "b, c")}, {}, r"takes \(number\)"),
        ({f"{HERE}.double": "number"}, {"torch._gone.name": None}, "has no torch._gone.name"),
        ({f"{HERE}.double": "number"}, {"torch.fx.wrap": "fn_or_name, more"}, r"torch.fx.wrap takes \(fn_or_name\)"),
    ],
)
def test_a_disabled_feature_is_logged_once(
    names: dict[str, Any], needs: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    quadruple = doubled_again(Patch("numbers grow faster", names, needs))
    with caplog.at_level(logging.WARNING, "lightning_zero.compat"):
        for _ in range(2):
            with quadruple() as value:
                assert (value, TARGET.double(3)) == (None, 6)
    [line] = caplog.messages
    assert line.startswith(f"Disabled with torch {torch.__version__}: numbers grow faster (")
    assert pytest.importorskip("re").search(why, line)


def test_an_attribute_missing_on_entry_disables_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_UNTESTED", True)
    patch = Patch("numbers grow faster", {f"{HERE}.double": "number"})

    @patch
    @contextmanager
    def asks() -> Iterator[str]:
        assert TARGET.no_such_setting
        yield "entered"

    with asks() as value:
        assert value is None
    assert "no_such_setting" in patch.reason
    with pytest.raises(KeyError, match="the body's own"), doubled_again(Patch("more", {f"{HERE}.double": "number"}))():
        raise KeyError("the body's own")


def test_swap_attribute_restores_static_and_inherited_methods() -> None:
    class Base:
        def method(self) -> str:
            return "base"

        @staticmethod
        def static() -> str:
            return "static"

    class Derived(Base):
        pass

    with (
        swap_attribute(Derived, "method", lambda self: "other"),
        swap_attribute(Base, "static", staticmethod(lambda: "other")),
    ):
        assert (Derived().method(), Base().method(), Base.static()) == ("other", "base", "other")
    assert (Derived().method(), Base().static(), vars(Derived).get("method")) == ("base", "static", None)


def test_an_absent_name_raises_when_it_is_used_and_not_before() -> None:
    gone = private("torch._dynamo.gone_class")
    try:
        assert isinstance(gone, Absent)
        assert not isinstance(1, gone)  # type: ignore[arg-type]

        class Ours(gone):  # type: ignore[misc, valid-type]
            pass

        for use in (lambda: gone(1), lambda: gone.attribute, Ours, lambda: setattr(gone, "attribute", 1)):
            with pytest.raises(
                UnsupportedError, match=r"has no torch\._dynamo\.gone_class.*pip install.*strategy='zero3'"
            ):
                use()
    finally:
        ABSENT.pop("torch._dynamo.gone_class")
    assert private("torch._dynamo.gone", "torch._dynamo.OptimizedModule") is find("torch._dynamo.OptimizedModule")


def test_an_error_while_a_newer_torch_compiles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_in_torch() -> None:
        torch._dynamo.utils.counters.no_such_method()

    def fail_here() -> None:
        raise ValueError("the user's own")

    def error_of(call: Any) -> Exception:
        with pytest.raises(Exception) as caught:  # noqa: PT011  either
            call()
        return caught.value

    raised = torch._dynamo.exc.InternalTorchDynamoError("something inside")
    assert failure_of_untested_torch(raised) is None, "this torch was tested"
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    instead = failure_of_untested_torch(raised)
    assert instead is not None
    for words in ("torch 2.99.0", "something inside", "strategy='zero3'", "pip install"):
        assert words in str(instead)
    assert failure_of_untested_torch(error_of(lambda: torch.fx.Graph().erase_node(None))) is not None  # type: ignore[arg-type]
    assert failure_of_untested_torch(error_of(lambda: torch.ones(2) @ torch.ones(3))) is None
    assert failure_of_untested_torch(error_of(fail_here)) is None
    assert failure_of_untested_torch(UnsupportedError("clear already")) is None


def test_parameters_include_stars() -> None:
    assert parameters(lambda a, *b, c, **d: 0) == "a, *b, c, **d"
    assert parameters(object()) == "unknown"


def decorated(function: ast.AST) -> bool:
    names = {ast.unparse(one) for one in getattr(function, "decorator_list", ())}
    return any(name.isupper() for name in names)  # a Patch is a constant


# Replaced for the process on import, with tests of their signatures in test_lightning.py.
OF_LIGHTNING = ("saving.pl_load", "CheckpointConnector._parse_ckpt_path")


def test_functions_of_torch_and_lightning_are_replaced_only_by_patches() -> None:
    """Anywhere else a newer torch could change a function with no test that sees it."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.stem not in ("patches", "argument_checks")  # which make the replacements of compat
        for line, what in replacements(path.read_text())
        if not what.startswith(OF_LIGHTNING)
    ]
    assert not found, "\n".join(found)


def replacements(source: str) -> Iterator[tuple[int, str]]:
    """Yield each place that replaces something of torch or Lightning without a Patch."""
    tree = ast.parse(source)
    bound = dict(bindings(tree))
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            if any(name.startswith("unittest") for name in names):
                yield node.lineno, "use compat.patches"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("swap_attribute"):
            above: list[Any] = [node]
            while above[-1] in parents:
                above.append(parents[above[-1]])
            of_torch = "swap_attribute(F, " not in ast.unparse(node)  # a public function
            if of_torch and not any(map(decorated, above)):
                yield node.lineno, f"{ast.unparse(node)} is not decorated with a Patch"
        for owner in changed_owners(node):
            name = dotted(owner, bound)
            # Settings have values and no signature.
            is_setting = name.endswith("config") or "_is_compiling_flag" in ast.unparse(node)
            if not is_setting and name.startswith(("torch", "lightning.", "torchmetrics", "lightning_zero.compat.")):
                yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def changed_owners(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the objects of which a statement or call sets or deletes attributes."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("setattr", "delattr"):
        yield node.args[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update":
        targets = [ast.Subscript(node.func.value, ast.Constant(0))]
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(one, ast.Attribute):
                yield one.value
            elif isinstance(one, ast.Subscript) and isinstance(one.value, ast.Call) and one.value.args:
                yield one.value.args[0]  # vars(owner)[name]
            elif isinstance(one, ast.Subscript) and isinstance(one.value, ast.Attribute):
                yield one.value.value  # owner.__dict__[name]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.fx.Graph.lint = len",
        "import torch\ntorch.fx.Graph.lint, x = len, 1",
        "from torch import nn\ndef f():\n    nn.Module.train = len",
        "import torch.nn.functional as F\nF.gelu: Any = len",
        "from torch.fx import Graph\nsetattr(Graph, 'lint', len)",
        "from torch.fx import Graph\ndel Graph.lint",
        "import torch\nvars(torch)['tensor'] = len",
        "import torch\ntorch.nn.__dict__.update(x=1)",
        "from lightning_zero.compat.dynamo import ModuleVariable\nModuleVariable.call_function = len",
        "from lightning_zero.compat.fast_partitioner import partitioners\nsetattr(partitioners, 'solve_min_cut', len)",
        "from lightning.pytorch import Trainer\nTrainer.fit = len",
        "from unittest import mock",
        "import unittest.mock as m",
        "from unittest.mock import patch",
        "def f():\n    with swap_attribute(Graph, 'lint', len): ...",
        "from lightning_zero.compat import patches\npatches.swap_attribute(Graph, 'lint', len)",
    ],
)
def test_a_replacement_without_a_patch_is_found(source: str) -> None:
    assert list(replacements(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.fx.Graph()\nx.lint = len",
        "from lightning_zero.compat.compiler import dynamo_config\ndynamo_config.x = False",
        "@_CUT\ndef f():\n    with swap_attribute(Graph, 'lint', len): ...",
        "self.x = 1\nself.x, y = 1, 2\nmodule.__dict__['x'] = 1",
    ],
)
def test_other_assignments_are_no_replacements(source: str) -> None:
    assert not list(replacements(source))


def test_calls_that_patch_are_few() -> None:
    """Each is work at the next version of torch."""
    calls = [
        node
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and path.stem != "patches"
        if ast.unparse(node.func) in ("swap_attribute",)
        or (isinstance(node.func, ast.Attribute) and node.func.attr == "replace" and decorated_name(node.func.value))
    ]
    assert 5 < len(calls) <= 15  # and check_tensor_arguments()


def decorated_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.isupper()
