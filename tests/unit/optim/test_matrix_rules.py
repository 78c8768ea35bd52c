"""Rules of matrices: torch's own results, shapes that are matrices, and the work of each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import MatrixRule, register_matrix_rule
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim import matrix_rules
from lightning_zero.optim.flat_runs import make_flat_runs
from lightning_zero.optim.matrix_exchange import (
    MatrixExchange,
    MatrixGroup,
    make_buckets,
    make_exchanges,
    update_memory,
)
from lightning_zero.optim.matrix_rules import as_matrices, muon, newton_schulz
from lightning_zero.optim.step_kernel import StepKernel
from lightning_zero.optim.support import check_optimizer
from lightning_zero.optim.update_rules import needs_matrices, rule_for
from lightning_zero.planning.memory_counter import MemoryCounter
from lightning_zero.sharding.layout import ShardLayout
from tests.helpers.muon import orthogonalize

DEFAULTS = (3.4445, -4.7750, 2.0315), 5, 1e-7


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16), (1, 8)])
def test_a_batch_equals_single_matrices(shape: tuple[int, int], fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the first term in the polynomial, as with the kernel for symmetric products."""
    monkeypatch.setattr(matrix_rules, "has_kernel", lambda x: fused)
    torch.manual_seed(0)
    updates = torch.randn(3, *shape)
    expected = torch.stack([orthogonalize(update, *DEFAULTS) for update in updates])
    torch.testing.assert_close(newton_schulz(updates.clone(), *DEFAULTS), expected, rtol=1e-4, atol=1e-5)


def test_singular_values_are_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(1, 30, 50), *DEFAULTS)[0])
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_zeros_stay_zeros() -> None:
    assert not newton_schulz(torch.zeros(2, 5, 3), *DEFAULTS).any()


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral_unclamped"])
def test_the_factor_is_torchs(shape: tuple[int, int], adjust: str) -> None:
    """One step from zero momentum with a known update shows the factor."""
    param = nn.Parameter(torch.zeros(shape))
    try:
        optimizer = torch.optim.Muon([param], lr=1.0, weight_decay=0.0, adjust_lr_fn=adjust)
    except ValueError:
        pytest.skip(f"this torch has no {adjust}")
    torch.manual_seed(0)
    param.grad = torch.randn(shape)
    rule = rule_for(optimizer, optimizer.param_groups[0])
    assert isinstance(rule, MatrixRule)
    optimizer.step()
    # With momentum 0.95 the first update is the gradient times 0.05 + 0.05 * 0.95, and its scale does not matter.
    update = rule.transform(param.grad.bfloat16()[None])[0].float() * rule.factor(torch.Size(shape))
    torch.testing.assert_close(param.detach(), -update, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("shape", "expected"), [((3, 4), (1, 3, 4)), ((2, 3, 4), (2, 3, 4)), ((5, 2, 3, 3), (1, 5, 18))]
)
def test_shapes_as_matrices(shape: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    assert as_matrices(torch.Size(shape)) == expected


def test_a_vector_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(UnsupportedError, match=r"shape \(7,\).*p\.ndim >= 2.*AdamW"):
        as_matrices(torch.Size([7]))


def test_groups_with_equal_settings_share_a_rule() -> None:
    optimizer = torch.optim.Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "lr": lr} for lr in (0.1, 0.2)])
    first, second = (rule_for(optimizer, group) for group in optimizer.param_groups)
    assert first is second
    assert needs_matrices(optimizer)
    optimizer.param_groups[0]["ns_steps"] = 3
    assert rule_for(optimizer, optimizer.param_groups[0]) is not second


class Own(torch.optim.Muon):
    pass


def test_a_subclass_needs_a_rule_of_its_own() -> None:
    optimizer = Own([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(UnsupportedError, match="Own orthogonalizes full matrices.*register_matrix_rule"):
        check_optimizer(optimizer)
    register_matrix_rule(Own, muon)
    check_optimizer(optimizer)
    with pytest.raises(ValueError, match="Own has another rule already"):
        register_matrix_rule(Own, lambda group: muon(group))
    with pytest.raises(ValueError, match="is no class of optimizers"):
        register_matrix_rule(optimizer, muon)  # type: ignore[arg-type]


# -- buckets and owners

LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
RULE = muon({"nesterov": True, "ns_coefficients": DEFAULTS[0], "ns_steps": 5, "eps": 1e-7, "adjust_lr_fn": None})


def run_of(shapes: list[tuple[int, ...]], world: int) -> Any:
    layouts = [ShardLayout.from_shape(torch.Size(shape), torch.float32, world) for shape in shapes]
    return SimpleNamespace(members=[SimpleNamespace(layout=layout) for layout in layouts])


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_work_is_balanced_within_five_percent(world: int) -> None:
    loads = [0.0] * world
    buckets = make_buckets(run_of(LLAMA * 32, world), RULE, 1 << 28, loads)
    assert len(buckets) > 5
    assert max(loads) < 1.05 * min(loads)


def test_buckets_cover_a_run_and_keep_the_limit() -> None:
    run = run_of([(70, 70)] * 5 + [(300, 70)] + [(70, 70)] * 2, 2)
    buckets = make_buckets(run, RULE, 12_500, [0.0, 0.0])
    assert [len(bucket.layouts) for bucket in buckets] == [2, 2, 1, 1, 2]  # one matrix alone is larger than the limit
    ends = [bucket.end for bucket in buckets]
    assert [bucket.begin for bucket in buckets] == [0, *ends[:-1]]
    assert ends[-1] == sum(record.layout.shard_numel for record in run.members)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_exchange_transforms_each_whole_matrix_once(order: tuple[int, int]) -> None:
    """Two emulated ranks, also where ranks hold shards in another order, as several hosts do."""
    torch.manual_seed(0)
    shapes = [(40, 33), (40, 33), (7, 9), (33, 40)]
    rule = MatrixRule((), (), lambda *a: {}, lambda *a: a, lambda x: 2 * x + 1, lambda *a: a[0], dtype=torch.float32)
    run = run_of(shapes, 2)
    layouts = [record.layout for record in run.members]
    (bucket,) = make_buckets(run, rule, 1 << 30, [0.0, 0.0])
    values = [torch.randn(shape) for shape in shapes]
    mail: dict[int, list[Any]] = {}
    exchanges = []
    for rank in range(2):
        group = MatrixGroup(None, rank, order, lambda *args: None)
        object.__setattr__(
            group, "all_to_all", lambda out, sent, out_sizes, sizes, rank=rank: mail.update({rank: [out, sent, sizes]})
        )
        (exchange,) = make_exchanges([bucket], lambda run: rule, group, torch.device("cpu"), {})
        for layout, (begin, end), value in zip(layouts, bucket.ranges, values, strict=True):
            layout.write(exchange.update[begin:end], value, order[rank])
        exchange.pack()
        exchanges.append(exchange)

    def deliver() -> None:
        parts = [list(sent.clone().split(sizes)) for _, sent, sizes in (mail[0], mail[1])]
        for rank in range(2):
            mail[rank][0].copy_(torch.cat([parts[0][rank], parts[1][rank]]))

    for exchange in exchanges:
        exchange.send()
    deliver()
    for exchange in exchanges:
        exchange.transform()
        exchange.send_back()
    deliver()
    for rank, exchange in enumerate(exchanges):
        exchange.unpack()
        for layout, (begin, end), value in zip(layouts, bucket.ranges, values, strict=True):
            found = exchange.update[begin:end]
            first, last = layout.shard_range(order[rank])
            assert torch.equal(found[: last - first], (2 * value + 1).reshape(-1)[first:last])
            assert not found[last - first :].any()  # padding stays zero


@pytest.mark.parametrize("limit", [30_000, 1 << 30])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_memory_of_updates_is_known_before_a_step(ranks: int, limit: int) -> None:
    """As allocated by the exchanges of all ranks, and by transforms with their gathered updates."""
    shapes = [(70, 70)] * 3 + [(60, 130), (130, 60)] + [(3, 35, 70)]
    layouts = [record.layout for record in run_of(shapes, ranks).members]
    expected = update_memory([(RULE, layouts)], ranks, limit)
    buffers, workspace = [], []
    for rank in range(ranks):
        group = MatrixGroup(None, rank, tuple(range(ranks)), lambda *args: None)
        memory: dict[torch.dtype, list[torch.Tensor]] = {}
        buckets = make_buckets(run_of(shapes, ranks), RULE, limit, [0.0] * ranks)
        for exchange in make_exchanges(buckets, lambda run: RULE, group, torch.device("cpu"), memory):
            for kept in memory.values():
                for tensor in kept:
                    tensor.fill_(1)
            counter = MemoryCounter()
            with counter:
                exchange.transform()
            workspace.append(counter.peak)
            assert counter.peak <= 1.05 * exchange.workspace_bytes + 1024
        buffers.append(sum(tensor.nbytes for kept in memory.values() for tensor in kept))
    assert max(buffers) == expected.buffers
    assert 0.8 * expected.workspace < max(workspace) < 1.05 * expected.workspace + 1024


def exchanges_of(shapes: list[tuple[int, ...]], memory: dict[torch.dtype, list[torch.Tensor]]) -> list[MatrixExchange]:
    """On one rank."""
    group = MatrixGroup(None, 0, (0,), lambda *args: None)
    buckets = make_buckets(run_of(shapes, 1), RULE, 1 << 30, [0.0])
    return make_exchanges(buckets, lambda run: RULE, group, torch.device("cpu"), memory)


def test_a_matrix_without_elements_stays_so() -> None:
    (exchange,) = exchanges_of([(0, 5), (4, 4), (0, 5)], {})
    exchange.update.zero_()
    exchange.transform()
    assert not exchange.update.any()


def test_layouts_of_alternating_gradients_share_the_memory_of_updates() -> None:
    memory: dict[torch.dtype, list[torch.Tensor]] = {}
    first, smaller = (exchanges_of([(40, 40)] * number, memory)[0] for number in (2, 1))
    assert smaller.update.data_ptr() == first.update.data_ptr()


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_runs_of_two_dtypes_have_one_order_wherever_their_memory_is(places: tuple[int, int]) -> None:
    """Ranks exchange matrices in the order of runs, and each dtype has memory of its own, at any address."""
    dtypes = [torch.float32, torch.float64]
    memory = torch.zeros(2, 1024, dtype=torch.uint8)
    records: list[Any] = []
    for index, (dtype, place) in enumerate(zip(dtypes, places, strict=True)):
        shard = memory[place].view(dtype)[:128]
        param = nn.Parameter(shard.view(1, -1))
        param.grad = torch.zeros_like(param)
        records.append(SimpleNamespace(index=index, param=param, shard=shard, on_host=None))
    runs = make_flat_runs([records], {}, mix_dimensions=True)
    assert [run.param.dtype for run in runs] == dtypes


@pytest.mark.parametrize(("step", "expected"), [(3, False), (torch.zeros(()), True)])
def test_a_python_number_of_steps_is_left_to_the_optimizer(step: Any, expected: bool) -> None:
    """The kernel counts in tensors, so a rule would get no step count."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2, 2))])
    state = {"exp_avg": torch.zeros(32), "exp_avg_sq": torch.zeros(32), "step": step}
    counts = {"step": step.view(1)} if isinstance(step, torch.Tensor) else {}
    run: Any = SimpleNamespace(group=0, state=state, counts=counts, bf16_state=())
    assert StepKernel.supports(optimizer, optimizer.param_groups, [run]) == expected
