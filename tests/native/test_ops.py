"""The C++ and Python tables of ops match."""

import inspect

import pytest
import torch

from lightning_zero.native import load
from lightning_zero.native.ops import NAMESPACE, OPS, Op, find_op


def schemas() -> dict[str, torch._C.FunctionSchema]:
    load()
    found = {schema.name.removeprefix(f"{NAMESPACE}::"): schema for schema in torch._C._jit_get_all_schemas()}
    ours = {name: schema for name, schema in found.items() if schema.name.startswith(f"{NAMESPACE}::")}
    # Live executors register ops for their callbacks.
    return {name: schema for name, schema in ours.items() if not name.startswith("on_")}


def test_every_op_has_a_row_in_both_tables() -> None:
    assert set(schemas()) == set(OPS)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_row_fits_the_schema(op: Op) -> None:
    schema = schemas()[op.name]
    names = [argument.name for argument in schema.arguments]
    assert names[op.shards] in ("shard", "shards")
    assert find_op(op.overload) is op
    if not schema.returns:
        assert op.has_effect, "nobody would read its result"
    parameters = inspect.signature(op.fake).parameters.values()
    if all(parameter.kind is not inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        assert [parameter.name for parameter in parameters][: len(names)] == names
        assert schema.returns
    if op.copies_grads:
        assert names[0] in ("grad", "grads")


def test_what_is_not_ours_has_no_row() -> None:
    assert find_op(torch.ops.aten.add.Tensor) is None
    assert find_op(torch.add) is None
    assert find_op("output") is None
