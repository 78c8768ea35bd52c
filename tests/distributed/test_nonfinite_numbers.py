"""A NaN or an infinity in one gradient element of any rank decides on every rank, as in a single process."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

import lightning_zero
from lightning_zero.integrations.processes import reduce_in_place
from tests.helpers.models import Batch, Case, build
from tests.helpers.oracle import shard_batch
from tests.helpers.sharded import EAGER, engine_for, whole_all, whole_grads, whole_params
from tests.ranks.pool import Ranks

NAN, INF = math.nan, math.inf
ORDERS: tuple[Any, ...] = (1, 2, "3.5", "inf")
MATRIX, VECTOR = (13, 17), 5
WORLD = 3
NUMEL = 13 * 17
# Two shards and three: first, last and inner elements, and neighbours of a boundary and of padding.
PLACES = (0, 95, 96, 127, 128, NUMEL - 1, NUMEL, NUMEL + VECTOR - 1)


class Linear(Case):
    """A model whose gradient is the mean of the samples in a batch."""

    empty_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(MATRIX))
        self.vector = nn.Parameter(torch.randn(VECTOR))

    def loss(self, batch: Batch, call: Any = None) -> Tensor:
        flat = torch.cat([self.matrix.reshape(-1), self.vector])
        return (batch[0] * flat).sum(1).mean()


def samples(world: int, rank: int = 0, place: int | None = None, value: float = NAN) -> Batch:
    """One sample for each rank; that of ``rank`` holds ``value`` at ``place``."""
    drawn = torch.randn(world, NUMEL + VECTOR, generator=torch.Generator().manual_seed(1))
    if place is not None:
        drawn[rank, place] = value
    return (drawn,)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda t: t.max(),
    "aminmax": lambda t: torch.stack(t.aminmax()),
    "largest magnitude": lambda t: t.abs().amax(),
    "sum": lambda t: t.sum(),
    "norm inf": lambda t: torch.linalg.vector_norm(t, INF),
    "norm -inf": lambda t: t.norm(-INF),
    "foreach norm": lambda t: torch._foreach_norm([t], INF)[0],
    "all finite": lambda t: t.isfinite().all(),
}


def compare(what: str, actual: Any, expected: Any) -> Iterator[str]:
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True, check_dtype=False)
    except AssertionError as error:
        yield f"{what}: {actual} instead of {expected} ({error})"[:300]


def differences(backend: str = EAGER, **options: Any) -> list[str]:
    found: list[str] = []
    model = build(Linear)
    with engine_for(model, backend, **options) as engine:
        world, optimizer = engine.world_size, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cases = [(rank, place, NAN) for rank in range(world) for place in PLACES]
        cases += [(rank, place, INF) for rank in range(world) for place in (0, NUMEL - 1)]
        for number, (rank, place, value) in enumerate(cases):
            what = f"{value} at {place} of rank {rank}"
            plain = build(Linear)
            plain.loss(samples(world, rank, place, value)).backward()
            train(engine, model, samples(world, rank, place, value))
            for order in ORDERS:
                found += compare(f"{what}, {order}", lightning_zero.grad_norm(model, order), grad_norm(plain, order))
            own = dict(plain.named_parameters())
            for name, reduce in REDUCTIONS.items() if number % 3 == 0 else ():
                for key, param in model.named_parameters():
                    found += compare(f"{what}, {key}, {name}", reduce(param.grad), reduce(own[key].grad))
            if number % 2:
                norm = engine.optimizers.stepper(optimizer).clip_norm(0.5)
                found += compare(f"{what}, clipped", norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
            else:
                engine.optimizers.stepper(optimizer).clip_value(0.5)
                nn.utils.clip_grad_value_(plain.parameters(), 0.5)
            shards = {key: (param, param.grad) for key, param in model.named_parameters()}
            for key, grad in whole_all(engine, shards, any_padding=True).items():
                found += compare(f"{what}, {key}, clipped", grad, own[key].grad)
            if number % 5 == 2:  # the user steps all the same, and goes back to older weights
                with engine.optimizers.stepping(optimizer, clip=0.5):
                    optimizer.step()
                model.load_state_dict(build(Linear).state_dict())
                optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).state_dict())
            optimizer.zero_grad()
            if number % 5 in (1, 2):
                plain.zero_grad()
                plain.loss(samples(world)).backward()
                train(engine, model, samples(world))
                found += compare(f"{what}, next", lightning_zero.grad_norm(model, 2), grad_norm(plain, 2))
                whole_grads(engine, model)  # checks that padding is zero
                whole_params(engine, model)
                optimizer.zero_grad()
    return found


def train(engine: Any, model: Any, batch: Batch) -> None:
    with engine.train_step():
        loss = model.loss(shard_batch(batch, engine.rank, engine.world_size))
    loss.backward()
    engine.cycle.finalize_gradients()


TRANSPORTS: dict[str, tuple[int, dict[str, Any]]] = {
    "collectives": (2, {"gather_transport": "collective", "reduce_transport": "collective"}),
    "copies": (3, {"gather_transport": "copy", "reduce_transport": "copy"}),
    "hosts": (2, {"ranks_per_host": 1}),
    "replicas": (2, {"ranks_per_host": 1, "replicate_over": "hosts"}),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_norms_clipping_and_extrema_equal_a_single_processs(ranks: Ranks, transport: str) -> None:
    world, options = TRANSPORTS[transport]
    for found in ranks.run(world, differences, **options):
        assert found == []


def logged() -> list[float]:
    """Values as self.log(..., sync_dist=True, reduce_fx=...) and fabric.all_reduce() reduce them."""
    found: list[float] = []
    for op in ("max", "min", dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        for rank in range(dist.get_world_size()):
            for place in range(3):
                value = torch.tensor([1.0, 2.0, 3.0]) + dist.get_rank()
                if dist.get_rank() == rank:
                    value[place] = NAN
                found += reduce_in_place(value, None, op).tolist()
    return found + reduce_in_place(torch.tensor([dist.get_rank()]), None, "max").tolist()


def test_logged_extrema_keep_a_nan_of_any_rank(ranks: Ranks) -> None:
    expected = [
        NAN if place == at else at + 1.0 + (WORLD - 1 if largest else 0)
        for largest in (True, False, True, False)
        for _ in range(WORLD)
        for place in range(3)
        for at in range(3)
    ]
    for found in ranks.run(WORLD, logged):
        assert found == pytest.approx([*expected, WORLD - 1], nan_ok=True)


def refused() -> list[str]:
    model = build(Linear)
    messages = []
    with engine_for(model, EAGER) as engine:
        train(engine, model, samples(engine.world_size))
        for order in (0, -1, "-inf", NAN):
            with pytest.raises(ValueError, match="norm_type") as error:
                lightning_zero.grad_norm(model, order)
            messages.append(str(error.value))
    return messages


def test_orders_that_are_no_norm_are_refused(ranks: Ranks) -> None:
    assert all(len(messages) == 4 for messages in ranks.run(1, refused))
