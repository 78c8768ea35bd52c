"""How much a file, a class and a function may hold. Checked on the source, so nothing is imported.

Whoever reaches a limit has found a second idea in the room: it gets a file, or an object, of its own.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE, NATIVE = "lightning_zero", "csrc"
SUFFIXES = {".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
MOST_LINES, MEDIAN_LINES = 400, 150
MOST_METHODS, MOST_ATTRIBUTES, MOST_PARAMETERS = 20, 15, 7
FEWER_LINES = {f"{PACKAGE}/engine.py": 250, f"{NATIVE}/executor.h": 250}  # they compose, and do nothing themselves
# Signatures that somebody else has set.
LIGHTNINGS = {
    "ZeroStrategy.__init__": "Lightning hands five of these over, by name",
    "ProcessStrategy.__init__": "likewise",
}

# What users choose from, each of it one attribute; the groups stand in the class.
LISTS = {"Tuning"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> list[Path]:
    return sorted(p for folder in (PACKAGE, NATIVE) for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)


def length(path: Path) -> int:
    return len(path.read_text().splitlines())


def check_lengths(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        name, lines = str(path.relative_to(root)), length(path)
        most = FEWER_LINES.get(name, MOST_LINES)
        if lines > most:
            found.append(f"{name}: {lines} lines, at most {most}")
    return found


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield inside + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        else:
            yield from functions(node, inside)


def parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def attributes(cls: ast.ClassDef) -> set[str]:
    """What the class assigns to ``self``, or declares."""
    assigned = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    declared = {ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)}
    return assigned | declared


def check_definitions(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        if path.suffix != ".py":
            continue
        where, tree = path.relative_to(root), ast.parse(path.read_text(), str(path))
        for name, function in functions(tree):
            count = parameters(function)
            if count > MOST_PARAMETERS and name not in LIGHTNINGS:
                found.append(f"{where}:{function.lineno}: {name} takes {count} parameters, at most {MOST_PARAMETERS}")
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            methods = {node.name for node in cls.body if isinstance(node, Function) and not node.name.startswith("_")}
            if len(methods) > MOST_METHODS:
                found.append(
                    f"{where}:{cls.lineno}: {cls.name} has {len(methods)} public methods, at most {MOST_METHODS}"
                )
            if len(attributes(cls)) > MOST_ATTRIBUTES and cls.name not in LISTS:
                found.append(
                    f"{where}:{cls.lineno}: {cls.name} has {len(attributes(cls))} attributes, at most {MOST_ATTRIBUTES}"
                )
    return found


def test_files_are_short() -> None:
    assert {path.suffix for path in sources(REPO)} >= {".py", ".cpp", ".h"}, "nothing to check"
    found = check_lengths(REPO)
    assert not found, "\n".join(found)
    assert median(map(length, sources(REPO))) <= MEDIAN_LINES


def test_classes_and_functions_are_small() -> None:
    found = check_definitions(REPO)
    assert not found, "\n".join(found)


def plant(root: Path, path: str, source: str) -> Path:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source)
    return root


def methods(count: int) -> str:
    return "class A:\n" + "".join(f"    def m{i}(self): pass\n" for i in range(count))


def assigned(count: int) -> str:
    return "class A:\n    def __init__(self):\n" + "".join(f"        self.a{i}: int = {i}\n" for i in range(count))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(a, b, c, d, e, f, *, g, h): pass", ":1: f takes 8 parameters"),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h): pass", ":2: A.f takes 8 parameters"),
        ("class A:\n    def f(self):\n        def g(a, b, c, d, e, f, g, h): pass", ":3: A.g takes 8 parameters"),
        (methods(21), ":1: A has 21 public methods"),
        (assigned(16), ":1: A has 16 attributes"),
        ("class A:\n" + "".join(f"    a{i}: int\n" for i in range(16)), ":1: A has 16 attributes"),
    ],
)
def test_checker_catches(tmp_path: Path, source: str, words: str) -> None:
    [complaint] = check_definitions(plant(tmp_path, f"{PACKAGE}/x/y.py", source))
    assert complaint.startswith(f"{PACKAGE}/x/y.py{words}")


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b, c, d, e, f, *args, g, **kwargs): pass",
        "class A:\n    def f(self, a, b, c, d, e, f, g): pass",
        methods(20) + "    def _hidden(self): pass\n",
        assigned(15),
        "class ZeroStrategy:\n    def __init__(self, a, b, c, d, e, f, g, h): pass",
    ],
)
def test_checker_lets_pass(tmp_path: Path, source: str) -> None:
    assert check_definitions(plant(tmp_path, f"{PACKAGE}/x/y.py", source)) == []


@pytest.mark.parametrize(
    ("path", "most"), [(f"{PACKAGE}/x.py", 400), (f"{PACKAGE}/engine.py", 250), (f"{NATIVE}/a/x.cpp", 400)]
)
def test_checker_catches_long_files(tmp_path: Path, path: str, most: int) -> None:
    assert check_lengths(plant(tmp_path, path, "#\n" * most)) == []
    assert check_lengths(plant(tmp_path, path, "#\n" * (most + 1))) == [f"{path}: {most + 1} lines, at most {most}"]
