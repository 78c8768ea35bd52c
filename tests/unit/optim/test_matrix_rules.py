"""Rules of matrices: torch's own results, shapes that are matrices, and the work of each rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero import MatrixRule, register_matrix_rule
from lightning_zero.errors import UnsupportedError
from lightning_zero.optim import matrix_rules, newton_schulz
from lightning_zero.optim.flat_runs import make_flat_runs
from lightning_zero.optim.matrix_exchange import (
    MatrixExchange,
    MatrixGroup,
    even_out,
    make_buckets,
    make_exchanges,
    update_memory,
)
from lightning_zero.optim.matrix_rules import as_matrices, as_one_matrix, muon
from lightning_zero.optim.newton_schulz import iterate_in_half
from lightning_zero.optim.step_kernel import StepKernel
from lightning_zero.optim.support import check_optimizer
from lightning_zero.optim.update_rules import adamw, needs_matrices, rule_for
from lightning_zero.planning.memory_counter import MemoryCounter
from lightning_zero.sharding.layout import ShardLayout
from tests.helpers.muon import orthogonalize

DEFAULTS = (3.4445, -4.7750, 2.0315), 5, 1e-7


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


@pytest.mark.parametrize("matrices", [as_matrices, as_one_matrix])
def test_a_vector_is_refused_with_the_line_to_write(matrices: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"shape \(7,\).*p\.ndim >= 2.*AdamW"):
        matrices(torch.Size([7]))


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


class WithAdam(torch.optim.Optimizer):
    pass


def test_a_class_of_both_kinds_of_groups_takes_rules_of_torch() -> None:
    register_matrix_rule(WithAdam, lambda group: muon(group) if group["use_muon"] else adamw(group))
    of_muon = {"params": [nn.Parameter(torch.zeros(2, 2))], "use_muon": True, "lr": 0.02, "momentum": 0.95}
    of_adam = {"params": [nn.Parameter(torch.zeros(2))], "use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95)}
    optimizer = WithAdam([of_muon, of_adam], {"weight_decay": 0.1})
    matrices, others = (rule_for(optimizer, group) for group in optimizer.param_groups)
    check_optimizer(optimizer)
    torchs = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]), torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    assert [matrices, others] == [rule_for(own, own.param_groups[0]) for own in torchs]


# -- buckets and owners

LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
RULE = muon({"nesterov": True, "ns_coefficients": DEFAULTS[0], "ns_steps": 5, "eps": 1e-7, "adjust_lr_fn": None})


def run_of(shapes: list[tuple[int, ...]], world: int) -> Any:
    layouts = [ShardLayout.from_shape(torch.Size(shape), torch.float32, world) for shape in shapes]
    return SimpleNamespace(members=[SimpleNamespace(layout=layout) for layout in layouts], shared=[])


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_work_is_balanced_within_five_percent(world: int) -> None:
    loads = [0.0] * world
    buckets = make_buckets(run_of(LLAMA * 32, world), RULE, 1 << 28, loads)
    assert len(buckets) > 5
    buckets = even_out(buckets, [RULE] * len(buckets), loads)
    found = [0.0] * world
    for bucket in buckets:
        for layout, owner in zip(bucket.layouts, bucket.owners, strict=True):
            found[owner] += RULE.flops(*layout.shape)
    assert found == pytest.approx(loads)
    assert max(found) < 1.05 * min(found)


def test_buckets_cover_a_run_and_keep_the_limit() -> None:
    run = run_of([(70, 70)] * 5 + [(300, 70)] + [(70, 70)] * 2, 2)
    buckets = make_buckets(run, RULE, 25_000, [0.0, 0.0])
    assert [len(bucket.layouts) for bucket in buckets] == [2, 2, 1, 1, 2]  # one matrix alone is larger than the limit
    ends = [bucket.end for bucket in buckets]
    assert [bucket.begin for bucket in buckets] == [0, *ends[:-1]]
    assert ends[-1] == sum(record.layout.shard_numel for record in run.members)


class Mail:
    """Delivers the collectives of emulated ranks when all have started, after the senders' next work."""

    def __init__(self, ranks: int) -> None:
        self._started: list[list[Any]] = [[] for _ in range(ranks)]
        self._delivered = 0

    def start(self, rank: int, out: Any, sent: Any, out_sizes: list[int], sizes: list[int]) -> Any:
        number = len(self._started[rank])
        self._started[rank].append((out, sent, sizes))
        return lambda: self._deliver(number)

    def _deliver(self, number: int) -> None:
        while self._delivered <= number:
            works = [started[self._delivered] for started in self._started]
            parts = [list(sent.clone().split(sizes)) for _, sent, sizes in works]
            for rank, (out, _, _) in enumerate(works):
                out.copy_(torch.cat([part[rank] for part in parts]))
            self._delivered += 1


@pytest.mark.parametrize("limit", [1 << 30, 2 * 40 * 40 * 4])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_exchanges_transform_each_whole_matrix_once(order: tuple[int, int], limit: int) -> None:
    """Two emulated ranks, also where ranks hold shards in another order, as several hosts do.

    Collectives move values as late as possible, so that a buffer that is used too early has wrong values.
    """
    torch.manual_seed(0)
    shapes = [(40, 33), (40, 33), (7, 9), (33, 40), (40, 40), (20, 40), (39, 3)]
    rule = MatrixRule((), (), lambda *a: {}, lambda *a: a, lambda x: 2 * x + 1, lambda *a: a[0], dtype=torch.float32)
    run = run_of(shapes, 2)
    buckets = make_buckets(run, rule, limit, [0.0, 0.0])
    assert len(buckets) == (1 if limit == 1 << 30 else 3)
    values = iter([torch.randn(shape) for shape in shapes])
    of_bucket = [[next(values) for _ in bucket.layouts] for bucket in buckets]
    mail = Mail(2)
    ranks = []
    for rank in range(2):
        group = MatrixGroup(None, rank, order, lambda *args: None)
        object.__setattr__(group, "start_all_to_all", lambda *args, rank=rank: mail.start(rank, *args))
        ranks.append(make_exchanges(buckets, [rule] * len(buckets), group, torch.device("cpu"), {}))

    def both(number: int, name: str) -> None:
        for exchanges in ranks:
            getattr(exchanges[number], name)()

    def prepare(number: int) -> None:
        for rank, exchanges in enumerate(ranks):
            bucket = buckets[number]
            for layout, (begin, end), value in zip(bucket.layouts, bucket.ranges, of_bucket[number], strict=True):
                layout.write(exchanges[number].update[begin:end], value, order[rank])
        both(number, "pack")
        both(number, "start_send")

    def finish(number: int) -> None:
        both(number, "finish_return")
        both(number, "unpack")
        for rank, exchanges in enumerate(ranks):
            bucket = buckets[number]
            for layout, (begin, end), value in zip(bucket.layouts, bucket.ranges, of_bucket[number], strict=True):
                found = exchanges[number].update[begin:end]
                first, last = layout.shard_range(order[rank])
                assert torch.equal(found[: last - first], (2 * value + 1).reshape(-1)[first:last])
                assert not found[last - first :].any()  # padding stays zero

    # The order of StepKernel.
    prepare(0)
    for number in range(len(buckets)):
        both(number, "finish_send")
        if number + 1 < len(buckets):
            prepare(number + 1)
        both(number, "transform")
        if number:
            finish(number - 1)
        both(number, "start_return")
    finish(len(buckets) - 1)


def product_without_temporaries(x: torch.Tensor, *args: Any, out: torch.Tensor | None = None, **k: Any) -> torch.Tensor:
    return x.new_zeros(len(x), x.size(1), x.size(1)) if out is None else out.zero_()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("limit", [30_000, 1 << 30])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_memory_of_updates_is_known_before_a_step(
    ranks: int, limit: int, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As allocated by the exchanges of all ranks, and by transforms with their gathered updates."""
    if half:  # as on GPUs, with a kernel that needs no temporary memory
        monkeypatch.setattr(matrix_rules, "newton_schulz_of_batches", iterate_in_half)
        monkeypatch.setattr(newton_schulz, "symmetric_product", product_without_temporaries)
    shapes = [(70, 70)] * 3 + [(60, 130), (130, 60)] + [(3, 35, 70)]
    layouts = [record.layout for record in run_of(shapes, ranks).members]
    expected = update_memory([(RULE, layouts)], ranks, limit)
    buffers, workspace = [], []
    for rank in range(ranks):
        group = MatrixGroup(None, rank, tuple(range(ranks)), lambda *args: None)
        memory: dict[torch.dtype, list[torch.Tensor]] = {}
        loads = [0.0] * ranks
        buckets = make_buckets(run_of(shapes, ranks), RULE, limit, loads)
        buckets = even_out(buckets, [RULE] * len(buckets), loads)
        for exchange in make_exchanges(buckets, [RULE] * len(buckets), group, torch.device("cpu"), memory):
            for kept in memory.values():
                for tensor in kept:
                    tensor.fill_(1)
            counter = MemoryCounter()
            with counter:
                torch._dynamo.run(exchange.transform)()  # Dynamo evaluates frames: callers hold arguments until the end
            workspace.append(counter.peak)
            assert counter.peak <= 1.05 * exchange.workspace_bytes + 1024
        buffers.append(sum(tensor.nbytes for kept in memory.values() for tensor in kept))
    assert max(buffers) == expected.buffers
    assert max(workspace) < 1.05 * expected.workspace + 1024
    assert not half or max(workspace) > 0.8 * expected.workspace


def exchanges_of(
    shapes: list[tuple[int, ...]], memory: dict[torch.dtype, list[torch.Tensor]], rule: MatrixRule = RULE
) -> list[MatrixExchange]:
    """On one rank."""
    group = MatrixGroup(None, 0, (0,), lambda *args: None)
    buckets = make_buckets(run_of(shapes, 1), rule, 1 << 30, [0.0])
    return make_exchanges(buckets, [rule] * len(buckets), group, torch.device("cpu"), memory)


@pytest.mark.parametrize("flatten", [False, True])
def test_a_3d_weight_is_a_batch_of_matrices_or_one_matrix_if_the_group_says_so(flatten: bool) -> None:
    group = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).param_groups[0] | {"flatten": flatten}
    rule = muon(group)
    (exchange,) = exchanges_of([(8, 4, 3)], {}, rule)
    torch.manual_seed(0)
    update = torch.randn(8, 4, 3)
    exchange.update[:96].copy_(update.view(-1))
    exchange.transform()
    matrices = update.view(1, 8, 12) if flatten else update
    expected = torch.stack([orthogonalize(matrix, *DEFAULTS) for matrix in matrices]).view(-1)
    assert (exchange.result[:96].float() - expected).norm() < 0.1 * expected.norm()
    assert rule.factor(torch.Size([8, 2, 2])) == (2**0.5 if flatten else 1.0)  # max(1, rows / columns) ** 0.5


def test_a_matrix_without_elements_stays_so() -> None:
    (exchange,) = exchanges_of([(0, 5), (4, 4), (0, 5)], {})
    exchange.update.zero_()
    exchange.transform()
    assert not exchange.result.any()


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
    run: Any = SimpleNamespace(group=0, state=state, counts=counts, rounds=False, keys_of=list)
    assert StepKernel.supports(optimizer, optimizer.param_groups, [run]) == expected


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral_unclamped"])
def test_parts_of_a_fused_weight_are_transformed_as_if_they_were_parameters(adjust: str) -> None:
    """Queries, keys and values in one weight, of unequal sizes."""
    sizes = (24, 8, 8)
    group = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).param_groups[0] | {"adjust_lr_fn": adjust}
    fused, single = muon(group | {"split_sizes": [*sizes]}), muon(group)
    torch.manual_seed(0)
    update = torch.randn(2, 40, 16).bfloat16()
    found = fused.transform(update.clone()) * fused.factor(torch.Size((40, 16)))
    parts = update.split(sizes, dim=1)
    expected = torch.cat([single.transform(part) * single.factor(part.shape[1:]) for part in parts], 1)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert fused.flops(40, 16) == sum(single.flops(size, 16) for size in sizes)
    assert fused is muon(group | {"split_sizes": sizes})


def test_parts_that_are_not_the_rows_of_a_weight_are_refused() -> None:
    group = torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).param_groups[0] | {"split_sizes": (24, 8)}
    with pytest.raises(UnsupportedError, match=r"split_sizes=\(24, 8\).*40 rows.*add up to 40"):
        muon(group).matrices(torch.Size((40, 16)))
