"""Private names of torch and Lightning in our sources: those that ``lightning_zero/compat`` lists, and uses of others.

Checked on the source, so that a torch that lacks one name can still be asked for all others.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PRIVATE = re.compile(r"_[A-Za-z]\w*")
OURS = "_zero_"  # prefix of our attributes on objects of torch and Lightning
FOREIGN = {"torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning"}
FORM = re.compile(r".{10,} \((torch|lightning) \d+\.\d+\+\)")
COMPAT = "compat"
META = "torch.fx.Node.meta."  # before texts that graphs.py names


@dataclass(frozen=True)
class Entry:
    """A private name as ``compat`` lists it.

    Attributes:
        module: the file's name.
        alias: its name there; None for an attribute of objects.
        name: dotted, from torch's or Lightning's root.
        comment: the comment above it.
        line: where.
    """

    module: str
    alias: str | None
    name: str
    comment: str
    line: int


def is_private(name: str) -> bool:
    return PRIVATE.fullmatch(name) is not None and name != "_"


def entries(package: Path) -> list[Entry]:
    return [entry for path in sorted((package / COMPAT).glob("*.py")) for entry in _entries(path)]


def _entries(path: Path) -> Iterator[Entry]:
    source = path.read_text()
    tree, lines = ast.parse(source, str(path)), source.splitlines()
    bound = dict(bindings(tree))
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(target, ast.Name) or value is None:
            continue
        if target.id == "ATTRIBUTES":
            assert isinstance(value, ast.Set), f"{path}:{node.lineno}: a set"
            for element in value.elts:
                assert isinstance(element, ast.Constant)
                comment = _comment_above(lines, element.lineno)
                yield Entry(path.stem, None, str(element.value), comment, element.lineno)
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            if path.stem != "graphs":
                continue
            name = f"torch.fx.Node.meta.{value.value}"
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "private":
            assert isinstance(value.args[0], ast.Constant)
            name = str(value.args[0].value)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "getattr":
            owner, last = value.args[0], value.args[1]  # getattr(torch._C, "_name", None)
            assert isinstance(last, ast.Constant)
            name = f"{dotted(owner, bound)}.{last.value}"
        else:
            name = dotted(value, bound)
        if name:
            yield Entry(path.stem, target.id, name, _comment_above(lines, node.lineno), node.lineno)


def _comment_above(lines: list[str], line: int) -> str:
    found: list[str] = []
    for text in reversed(lines[: line - 1]):
        if not text.strip().startswith("#"):
            break
        found.insert(0, text.strip().removeprefix("#").strip())
    return " ".join(found)


def bindings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Return the names that imports bind, and their meaning."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def dotted(node: ast.expr, bound: dict[str, str]) -> str:
    """``a.b.c`` with ``a`` as it was imported; empty for other expressions."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, bound)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


@dataclass
class _Own:
    """Private names that a source defines: functions, classes, variables, and attributes of ``self``."""

    names: Counter[str] = field(default_factory=Counter)

    def read(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                self.names[node.name] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] += 1
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                self.names[node.attr] += 1


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def check_package(package: Path, listed: Iterable[Entry]) -> list[str]:
    """Complaints about private names of others outside of ``compat``."""
    listed = list(listed)
    attributes = {entry.name.rpartition(".")[2] for entry in listed if entry.alias is None}
    keys = {entry.name.removeprefix(META) for entry in listed if entry.name.startswith(META)}
    trees = {
        path: ast.parse(path.read_text(), str(path))
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).parts[0] != COMPAT
    }
    everywhere = _Own()
    for tree in trees.values():
        everywhere.read(tree)
    found = []
    for path, tree in trees.items():
        for line, what in _Check(tree, everywhere.names, attributes, keys).complaints():
            found.append(f"{path.relative_to(package.parent)}:{line}: {what}; list it in {package.name}/{COMPAT}")
    return found


class _Check:
    """One module.

    - Imported from torch or Lightning: nothing private.
    - An attribute of a module of theirs: nothing private.
    - An attribute of ``self`` or ``super()``: ours, anywhere in the package, or listed.
    - An attribute of something else: ours, in the same module, or listed.
    - A text that is a private name, as ``getattr`` and ``__dict__`` take it, and a keyword: as for ``self``.
    - A text that is a key of graphs' meta data, which has a name in ``compat``: never.
    - A method with ``@override``: ours, anywhere else in the package, or listed.
    """

    def __init__(self, tree: ast.Module, everywhere: Counter[str], attributes: set[str], keys: set[str]) -> None:
        self._tree = tree
        self._everywhere = everywhere
        self._attributes = attributes
        self._keys = keys
        own = _Own()
        own.read(tree)
        self._here = own.names
        self._bound = dict(bindings(tree))
        self._parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}

    def complaints(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self._tree):
            yield from ((node.lineno, what) for what in self._of(node))  # type: ignore[attr-defined]

    def _of(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if _is_foreign_and_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (f"imports {name}" for name in names if _is_foreign_and_private(name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield from self._attribute(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in self._parts:
            name = node.value.removesuffix(".")
            unknown = is_private(name) and not self._is_known(name, self._everywhere)
            if unknown or node.value in self._keys:
                yield f"says {node.value!r}"
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            if not self._is_known(node.arg, self._everywhere):
                yield f"says {node.arg}="
        elif isinstance(node, ast.FunctionDef) and is_private(node.name) and _overrides(node):
            elsewhere = self._everywhere[node.name] > 1
            if node.name not in self._attributes and not elsewhere:
                yield f"overrides {node.name}"

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        name = dotted(node, self._bound)
        root = name.split(".")[0]
        if root in sys.stdlib_module_names:
            return
        if root in FOREIGN:
            yield f"uses {name}"
        elif _is_self(node.value) or _is_super(node.value):
            if not self._is_known(node.attr, self._everywhere):
                yield f"uses {ast.unparse(node)}"
        elif not self._is_known(node.attr, self._here):
            yield f"uses {ast.unparse(node)}"

    def _is_known(self, name: str, own: Counter[str]) -> bool:
        return name.startswith(OURS) or name in own or name in self._attributes


def _is_foreign_and_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first in FOREIGN and any(map(is_private, rest))


def _overrides(node: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "override" for decorator in node.decorator_list)
