"""The architecture: who may import whom. Checked on the source, so nothing is imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_zero"
FLOORS = {
    "subprocess_main": 0,
    "task_progress": 0,
    "compat": 0,
    "config": 0,
    "errors": 0,
    "mesh": 0,
    "version": 0,
    "native": 1,
    "sharding": 2,
    "offload": 3,
    "profiling": 3,
    "memory_planner": 4,
    "optim": 5,
    "compile": 5,
    "checkpoint": 6,
    "step": 6,
    "engine": 7,
    "integrations": 8,
    "planning": 8,
    "report": 8,
    "api": 8,
    "cli": 8,
    "__main__": 8,
    "__init__": 8,
}
# The one that trains in Fabric's loops and the one that trains in the Trainer's need not know of each other.
APART = {("integrations", "trainer"), ("integrations", "fabric")}
TOP = max(FLOORS.values())
# Modules that stand on another floor than their room: to import this one is to import Lightning.
MOVED = {("compat", "lightning_private"): TOP}
# Neighbours may know each other at the bottom and at the top; in between that would make one package of two.
SIDEWAYS_ALLOWED = {0, TOP}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}

Import = tuple[int, str, str | None]  # line, module, name taken from it


def module_parts(path: Path, package: Path) -> list[str]:
    """Below the package; its own __init__ is ["__init__"]."""
    parts = list(path.relative_to(package).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports(tree: ast.AST, home: list[str]) -> Iterator[Import]:
    """Every import, also inside functions and under TYPE_CHECKING; `home` is the package of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node.level, node.module or "", home)
            for alias in node.names:
                yield node.lineno, module, alias.name
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func) and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                name = target.value.lstrip(".")
                yield node.lineno, absolute(len(target.value) - len(name), name, home), None


def absolute(level: int, module: str, home: list[str]) -> str:
    base = home[: len(home) - (level - 1)] if level else []
    return ".".join([*base, *filter(None, [module])])


def _is_dynamic_import(func: ast.expr) -> bool:
    return (isinstance(func, ast.Name) and func.id in ("__import__", "import_module")) or (
        isinstance(func, ast.Attribute) and func.attr == "import_module"
    )


def top_name(module: str, taken: str | None, package: Path) -> str:
    """Return the entry of FLOORS of an import of our own package."""
    below = module.split(".")[1:]
    if below:
        return below[0]
    is_module = taken in FLOORS or (package / f"{taken}.py").exists() or (package / str(taken)).is_dir()
    return taken if taken and is_module else "__init__"  # else an attribute of __init__.py


def floor_of(room: str, module: str, taken: str | None = None) -> int:
    """Return True for an import of our own package, in a package that has a floor."""
    below = (*module.split(".")[1:], *filter(None, [taken]))
    return MOVED.get(below[:2], FLOORS[room])


def check_module(path: Path, package: Path) -> list[str]:
    parts = module_parts(path, package)
    own, where = parts[0], path.relative_to(package.parent)
    if own not in FLOORS:
        return [f"{where}: {own} has no floor; give it one in {Path(__file__).name}"]
    floor = floor_of(own, ".".join([PACKAGE, *parts]))
    is_pass = parts[:2] == ["compile", "passes"]
    tree = ast.parse(path.read_text(), str(path))
    inside = path.parent.relative_to(package.parent).parts
    found = []
    for line, module, taken in imports(tree, list(inside)):
        root = module.split(".")[0]
        if root == package.name:
            other = top_name(module, taken, package)
            if other not in FLOORS:
                found.append(f"{where}:{line}: imports {other}, which has no floor")
            elif (theirs := floor_of(other, module, taken)) > floor:
                found.append(f"{where}:{line}: imports upward, {other} (floor {theirs}) from floor {floor}")
            elif {tuple(parts[:2]), tuple(module.split(".")[1:3])} == APART:
                found.append(f"{where}:{line}: imports {module}, which stands beside it")
            elif theirs == floor and other != own and floor not in SIDEWAYS_ALLOWED:
                found.append(f"{where}:{line}: imports sideways, {other} from {own} (floor {floor})")
        elif root in LIGHTNING and floor < TOP:
            found.append(f"{where}:{line}: imports Lightning below floor {TOP}")
        full = f"{module}.{taken}" if taken else module
        if is_pass and f"{full}.".startswith("torch.distributed."):
            found.append(f"{where}:{line}: a compile pass imports torch.distributed")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{where}:{node.lineno}: global {', '.join(node.names)}")
        elif is_pass and isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.append(f"{where}:{node.lineno}: a compile pass uses torch.distributed")
    return found


def check_package(package: Path) -> list[str]:
    return [complaint for path in sorted(package.rglob("*.py")) for complaint in check_module(path, package)]


def test_imports_go_down() -> None:
    package = REPO / PACKAGE
    assert list(package.rglob("*.py")), "nothing to check"
    found = check_package(package)
    assert not found, "\n".join(found)


def plant(root: Path, path: str, source: str) -> Path:
    package = root / PACKAGE
    target = package / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source)
    return package


@pytest.mark.parametrize(
    ("path", "source", "words"),
    [
        ("native/x.py", "from lightning_zero.sharding import a", ":1: imports upward, sharding (floor 2)"),
        ("native/x.py", "import lightning_zero.engine.step", "upward, engine"),
        ("native/x.py", "import os, lightning_zero.engine", "upward, engine"),
        ("errors.py", "from lightning_zero import native", "upward, native"),
        ("engine/x.py", "from lightning_zero import Zero3Strategy", "upward, __init__"),
        ("engine/x.py", "import lightning_zero", "upward, __init__"),
        ("optim/x.py", "from ..engine import step", "upward, engine"),
        ("optim/x.py", "from .. import engine", "upward, engine"),
        ("compile/passes/x.py", "from ...optim import step", "sideways, optim from compile"),
        ("sharding/__init__.py", "def f():\n    from lightning_zero.profiling import p", ":2: imports upward"),
        ("sharding/x.py", "if TYPE_CHECKING:\n    from lightning_zero.cli import p", "upward, cli"),
        ("sharding/x.py", "importlib.import_module('lightning_zero.engine')", "upward, engine"),
        ("sharding/x.py", "import_module('..engine', __package__)", "upward, engine"),
        ("checkpoint/x.py", "from lightning_zero.step import a", "sideways, step from checkpoint"),
        ("optim/x.py", "from lightning_zero.compat.lightning_private import a", "upward, compat (floor 8)"),
        ("engine/x.py", "import lightning_zero.compat.lightning_private", "upward, compat (floor 8)"),
        ("errors.py", "from lightning_zero.compat import lightning_private", "upward, compat (floor 8)"),
        ("compat/tensors.py", "from .lightning_private import a", "upward, compat (floor 8)"),
        ("compat/tensors.py", "import lightning", "imports Lightning below floor 8"),
        ("optim/x.py", "from lightning_zero import compile", "sideways, compile from optim"),
        ("utils.py", "", "utils has no floor"),
        ("engine/x.py", "from lightning_zero.utils import a", "imports utils, which has no floor"),
        ("engine/x.py", "import lightning.pytorch as pl", "imports Lightning below floor 8"),
        ("engine/x.py", "from lightning_fabric.utilities import a", "imports Lightning below floor 8"),
        ("config.py", "def f():\n    from pytorch_lightning import Trainer", ":2: imports Lightning"),
        ("errors.py", "def f():\n    global count, other\n    count = 1", ":2: global count, other"),
        (
            "integrations/fabric/x.py",
            "from lightning_zero.integrations.trainer.trainer_checkpoints import S",
            "imports lightning_zero.integrations.trainer.trainer_checkpoints, which stands beside it",
        ),
        ("integrations/trainer/x.py", "import lightning_zero.integrations.fabric.loop", "which stands beside it"),
        ("compile/passes/x.py", "import torch.distributed as dist", "a compile pass imports torch.distributed"),
        ("compile/passes/x.py", "from torch import distributed", "a compile pass imports"),
        ("compile/passes/x.py", "from torch.distributed.tensor import a", "a compile pass imports"),
        ("compile/passes/__init__.py", "import torch\ntorch.distributed.barrier()", ":2: a compile pass uses"),
    ],
)
def test_checker_catches(tmp_path: Path, path: str, source: str, words: str) -> None:
    [complaint] = check_package(plant(tmp_path, path, source))
    assert words in complaint
    assert complaint.startswith(f"{PACKAGE}/{path}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "engine/x.py",
            "from lightning_zero.optim import a\nfrom ..compile.passes import b\nfrom lightning_zero import native",
        ),
        (
            "compile/passes/x.py",
            "from . import a\nfrom .. import b\nfrom ...errors import E\nimport torch.distributions",
        ),
        ("compile/x.py", "import torch.distributed\nfrom lightning_zero.compile.passes import a"),
        ("config.py", "from lightning_zero.errors import E"),
        ("compat/lightning_private.py", "from lightning.fabric import a\nimport torch"),
        ("native/x.py", "from lightning_zero.compat import cuda\nfrom lightning_zero.compat.tensors import to_copy"),
        ("integrations/x.py", "from lightning_zero.compat.lightning_private import a"),
        ("integrations/fabric/x.py", "from lightning_zero.integrations.precision import P\nfrom ..fabric import y"),
        ("__init__.py", "from lightning_zero.integrations.trainer.strategy import S\nfrom .report import C"),
        (
            "integrations/x.py",
            "import lightning.pytorch\nfrom lightning_zero.integrations.trainer.precision import P\nfrom . import y",
        ),
        (
            "optim/x.py",
            "import lightning_zero_other, lightningx\ndef f():\n    n = 0\n    def g():\n        nonlocal n",
        ),
    ],
)
def test_checker_lets_pass(tmp_path: Path, path: str, source: str) -> None:
    assert check_package(plant(tmp_path, path, source)) == []
