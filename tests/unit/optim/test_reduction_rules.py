"""Rules with sums over parameters: parts of rows and columns, the choice of a rule, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zero import Reduction, ReductionRule, register_matrix_rule
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim.adafactor import adafactor
from lightning_zero.optim.parameter_sums import ParameterPart, sum_shape
from lightning_zero.optim.reduction_rules import check_rows, column_shape, row_shape, shared_bytes
from lightning_zero.optim.support import check_offload, check_optimizer
from lightning_zero.optim.update_rules import needs_matrices, rule_for, state_names
from lightning_zero.sharding.layout import ShardLayout
from tests.helpers.reference_optimizers import LARS, Lamb

SHAPES = [(40, 33), (3, 35, 70), (2, 3, 5, 7), (1, 100), (100, 1), (0, 5), (3, 1)]


def parts_of(shape: tuple[int, ...], ranks: int, chunk: int = 50) -> list[tuple[ParameterPart, int, int]]:
    """Return all parts of a parameter, in chunks, and the range of each in the parameter and its padding."""
    layout = ShardLayout.from_shape(torch.Size(shape), torch.float32, ranks)
    numel = layout.shard_numel
    return [
        (ParameterPart.from_layout(layout, rank, begin, end), rank * numel + begin, rank * numel + end)
        for rank in range(ranks)
        for begin, end in ((b, min(b + chunk, numel)) for b in range(0, numel, chunk))
    ]


@pytest.mark.parametrize("over", [None, "rows", "columns"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_add_up_to_the_sums_of_a_whole_parameter(shape: tuple[int, ...], ranks: int, over: str | None) -> None:
    torch.manual_seed(0)
    full = torch.randn(shape)
    flat = torch.cat([full.reshape(-1), torch.full((10_000,), torch.nan)])  # padding must not count
    total = sum(part.add_up(flat[begin:end], over) for part, begin, end in parts_of(shape, ranks))
    expected = full.sum() if over is None else full.sum(-1 if over == "rows" else -2, keepdim=True)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("shape_of", [row_shape, column_shape])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_per_row_or_column_is_expanded_to_elements(shape: tuple[int, ...], shape_of: Any) -> None:
    value = torch.randn(shape_of(torch.Size(shape)))
    full = torch.cat([value.expand(shape).reshape(-1), torch.zeros(10_000)])
    for part, begin, end in parts_of(shape, 3):
        assert torch.equal(part.expand(value), full[begin:end])


def test_a_value_of_another_shape_is_refused() -> None:
    part = ParameterPart(torch.Size((4, 8)), 0, 32, 32)
    assert part.expand(torch.ones(())).dim() == 0
    with pytest.raises(ValueError, match=r"shape \(4,\).*one per row of shape \(4, 1\)"):
        part.expand(torch.ones(4))
    with pytest.raises(ValueError, match="over 'all'. Use 'rows' or 'columns'"):
        sum_shape(torch.Size((4, 8)), "all")


def test_rows_need_two_dimensions_in_the_usual_order() -> None:
    check_rows(ShardLayout.from_shape(torch.Size((4,)), torch.float32, 1), {}, "bias")
    with pytest.raises(UnsupportedError, match=r"'bias'.*shape is \(4,\).*by_parameter"):
        check_rows(ShardLayout.from_shape(torch.Size((4,)), torch.float32, 1), {"row": "rows"}, "bias")
    with pytest.raises(UnsupportedError, match="'conv'.*channels_last"):
        layout = ShardLayout.from_shape(torch.Size((4, 3, 2, 2)), torch.float32, 1, (0, 2, 3, 1))
        check_rows(layout, {"row": "rows"}, "conv")


# -- the choice of a rule


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))]


def only_rule(optimizer: torch.optim.Optimizer) -> ReductionRule:
    rule = rule_for(optimizer, optimizer.param_groups[0])
    assert isinstance(rule, ReductionRule)
    return rule


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Lamb, LARS])
def test_optimizers_of_torch_and_of_a_library_have_rules(make: Any) -> None:
    optimizer = make(params())
    check_optimizer(optimizer)
    assert needs_matrices(optimizer)
    assert only_rule(optimizer) is only_rule(make(params()))


def test_a_subclass_of_a_librarys_optimizer_is_refused() -> None:
    class Lamb2(Lamb):
        pass

    Lamb2.__name__ = "Lamb"
    with pytest.raises(UnsupportedError, match="Lamb scales by the norm of full parameters.*register_matrix_rule"):
        check_optimizer(Lamb2(params()))
    register_matrix_rule(Lamb2, lambda group: only_rule(Lamb(params())))
    check_optimizer(Lamb2(params()))


@pytest.mark.parametrize("options", [{"rectify": True}, {"weight_decouple": False, "weight_decay": 0.1}])
def test_options_without_a_rule_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=f"Lamb has {next(iter(options))}="):
        check_optimizer(Lamb(params(), **options))


def test_vectors_and_matrices_of_one_group_have_state_of_their_own() -> None:
    rule = adafactor()
    matrix, vector = torch.Size((30, 40)), torch.Size((30,))
    assert rule.of(matrix, torch.float32) is rule.of(torch.Size((5, 6, 7)), torch.float32)
    assert (rule.of(matrix, torch.float32).state, rule.of(vector, torch.float32).state) == ((), ("variance",))
    assert rule.of(vector, torch.bfloat16) is not rule.of(vector, torch.float32)  # whose resolution bounds the root
    assert shared_bytes(rule.of(matrix, torch.float32), matrix, torch.float32) == 4 * 70
    optimizer = torch.optim.Adafactor(params())
    names = state_names(optimizer, optimizer.param_groups[0])
    found = [names.elementwise(name) for name in ("variance", "row_var", "col_var", "step")]
    assert found == [True, False, False, False]


def test_state_on_the_host_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Adafactor reads it several times"):
        check_offload(torch.optim.Adafactor(params()))


def test_a_rule_of_a_users_own_is_found() -> None:
    class Normalized(torch.optim.SGD):
        pass

    def terms(param: Tensor, grad: Tensor, state: Any, s: Any, values: Any) -> dict[str, Tensor]:
        return {"gradient": grad.square()}

    rule = ReductionRule(
        ("lr",),
        (),
        lambda setting, step: {"lr": setting["lr"]},
        (Reduction(("gradient",), terms, lambda sums, shared, s, shape: ({"norm": sums["gradient"].sqrt()}, {})),),
        lambda param, grad, state, s, values: (param - grad * s["lr"] / values["norm"], {}),
    )
    register_matrix_rule(Normalized, lambda group: rule)
    assert rule_for(Normalized(params()), {}) is rule
