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
        ({f"{HERE}.triple": "number"}, (), "has no"),
        ({f"{HERE}.double": "number, twice"}, (), r"takes \(number\)"),
        ({f"{HERE}.double": ("a", "b, c")}, (), r"takes \(number\)"),
        ({f"{HERE}.double": "number"}, ("torch._gone.name",), "has no torch._gone.name"),
    ],
)
def test_a_disabled_feature_is_logged_once(
    names: dict[str, Any], needs: tuple[str, ...], why: str, caplog: pytest.LogCaptureFixture
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


def test_functions_of_torch_are_replaced_only_by_patches() -> None:
    """Anywhere else a newer torch could change a function with no test that sees it."""
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in undecorated(path)]
    assert not found, "\n".join(found)


def undecorated(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "unittest.mock":
            yield f"{path}:{node.lineno}: use compat.patches"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "swap_attribute" and path.stem != "patches":
            above: list[Any] = [node]
            while above[-1] in parents:
                above.append(parents[above[-1]])
            of_torch = "swap_attribute(F, " not in ast.unparse(node)  # a public function
            if of_torch and not any(map(decorated, above)):
                yield f"{path}:{node.lineno}: not decorated with a Patch"


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
    assert 5 < len(calls) <= 14  # and check_tensor_arguments()


def decorated_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.isupper()
