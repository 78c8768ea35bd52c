"""Places that unpickle, each with its trusted source: a pickle may run code. Checked on the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_zero"

# Any process that can connect to a rank's sockets can send to it, as in every program that uses torch.distributed.
RANKS = "other ranks, over the sockets of a process group"
PIPE = "a process that this one has started, or that has started this one, over a pipe"
NOTHING = "nothing: weights_only=True, or an unpickler that knows a few classes"
USER = "the user, who passed weights_only=False, or --trust, for this file"
LIGHTNING = "as torch.load(weights_only=...) and Lightning: an http(s) checkpoint is trusted by default"

TRUSTED = {
    ("mesh.py", "all_gather_object"): RANKS,
    ("sharding/construction.py", "broadcast_object_list"): RANKS,
    ("integrations/processes.py", "broadcast_object_list"): RANKS,
    ("checkpoint/async_save/writer_process.py", "pickle.load"): PIPE,
    ("checkpoint/sharded/metadata.py", "_Unpickler"): NOTHING,
    ("checkpoint/sharded/reader.py", "torch.load"): USER,
    ("cli/checkpoint.py", "torch.load"): USER,
    ("integrations/checkpoint_files.py", "torch.load"): LIGHTNING,
}
MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle")
READS = ("load", "loads", "open")
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "recv_object_list")


def found(source: str) -> set[str]:
    """Return the names of unpickling functions, wherever they are mentioned."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in OBJECTS or node.attr in ("Unpickler", "_Unpickler"):
                names.add(node.attr)
            elif (owner in MODULES and node.attr in READS) or (owner == "torch" and node.attr == "load"):
                names.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name in OBJECTS or (
                    node.module in (*MODULES, "torch") and alias.name in (*READS, "Unpickler")
                ):
                    names.add(f"from {node.module} import {alias.name}")
    return names


def test_what_unpickles_is_listed_with_what_it_trusts() -> None:
    places = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in found(path.read_text())
    }
    assert places == set(TRUSTED), "list each place with what it trusts, or read JSON in its place"


def test_what_trusts_nothing_says_so_to_torch() -> None:
    for (file, name), trusts in TRUSTED.items():
        if name != "torch.load":
            continue
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = [word.value for word in node.keywords if word.arg == "weights_only"]
                assert given, f"{file}: torch.load() without weights_only"
                if trusts == NOTHING:
                    assert ast.unparse(given[0]) == "True", file


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("from pickle import loads", "from pickle import loads"),
        ("import torch\nread = torch.load", "torch.load"),
        ("dist.all_gather_object([], 1)", "all_gather_object"),
        ("class Own(pickle.Unpickler): ...", "Unpickler"),
        ("json.loads(text)", None),
    ],
)
def test_finds(source: str, name: str | None) -> None:
    assert found(source) == ({name} if name else set())
