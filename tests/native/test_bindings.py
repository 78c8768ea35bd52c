"""The type stubs of the C++ executor's parts match the bindings."""

import inspect

import pytest
import torch

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.executor_stubs import Gradients, Graphs, Parameters, Weights
from tests.ranks.pool import Ranks

PARTS = {"parameters": Parameters, "weights": Weights, "gradients": Gradients, "graphs": Graphs}
TYPES = {"int": "int", "bool": "bool", "str": "str", "None": "NoneType", "list[int]": "List[int]"}

Methods = dict[str, tuple[list[tuple[str, bool]], str]]  # arguments with whether they have defaults, and the result


def said(part: type) -> Methods:
    found = inspect.getmembers(part, lambda member: inspect.isfunction(member) and not member.__name__.startswith("_"))
    signatures = {name: inspect.signature(method) for name, method in found}
    return {
        name: (
            [(p.name, p.default is not p.empty) for p in signature.parameters.values() if p.name != "self"],
            TYPES[str(signature.return_annotation)],
        )
        for name, signature in signatures.items()
    }


def built() -> dict[str, Methods]:
    executor = Executor(Mesh.from_world(torch.device("cpu")), EngineConfig())
    found: dict[str, Methods] = {}
    for part in PARTS:
        native: torch.ScriptObject = getattr(executor, part)
        schemas = {name: native._get_method(name).schema for name in native._method_names() if name != "__init__"}
        found[part] = {
            name: (
                [(argument.name, argument.has_default_value()) for argument in schema.arguments[1:]],
                str(schema.returns[0].type.annotation_str),
            )
            for name, schema in schemas.items()
        }
    executor.close()
    return found


@pytest.mark.usefixtures("native_library")
def test_stubs_match_the_bindings(ranks: Ranks) -> None:
    [found] = ranks.run(1, built)
    assert found == {part: said(protocol) for part, protocol in PARTS.items()}
    for part, methods in found.items():
        assert len(methods) <= 20, part
