"""``torch.autograd.grad`` and ``backward(inputs=...)``.

Gradients of some tensors must not mix with those of all weights.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import BACKENDS, EAGER, engine_for
from tests.helpers.spread import check_spread
from tests.ranks.pool import Ranks

Loss = Callable[[nn.Module, Tensor], Tensor]


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(19, 25), nn.Tanh(), nn.Linear(25, 23))


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    """Trained on inputs that were moved along their gradient."""
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
    return model((x + 0.1 * grad.sign()).detach()).square().mean()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """On the norm of the gradient by the input: differentiates twice."""
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def compare(backend: str, loss: Loss) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, plain = make(), make()
    with engine_for(model, backend) as engine:
        check_spread(engine, model)
        for step in range(3):  # the first one is eager in any case
            batch = torch.randn(world, 6, 19, generator=torch.Generator().manual_seed(step))
            with engine.train_step():
                mine = loss(model, batch[rank].clone())
            mine.backward()
            for r in range(world):
                (loss(plain, batch[r].clone()) / world).backward()
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                record = engine.sharder.find(param)
                assert record is not None
                assert (param.grad is None) == (expected.grad is None)
                if param.grad is not None and expected.grad is not None:
                    begin, end = record.layout.shard_range(rank)
                    with no_shard_dispatch():
                        own = param.grad.reshape(-1)[: end - begin]
                    assert_close_relative(own, expected.grad.reshape(-1)[begin:end], 1e-5, 1e-7, record.name)
                param.grad = expected.grad = None


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("backend", "loss"),
    [*((backend, adversarial) for backend in BACKENDS), (EAGER, penalty)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_gradients_by_the_input_leave_the_weights_alone(
    ranks: Ranks, world_size: int, backend: str, loss: Loss
) -> None:
    ranks.run(world_size, compare, backend, loss)


def some_weights(backend: str) -> None:
    rank = dist.get_rank()
    model, plain = make(), make()
    x = torch.randn(6, 19, generator=torch.Generator().manual_seed(0))
    with engine_for(model, backend) as engine:
        names = ["0.weight", "2.bias"]
        params, expected = dict(model.named_parameters()), dict(plain.named_parameters())
        for _ in range(2):
            with engine.train_step():
                loss = model(x).square().mean()
            loss.backward(inputs=[params[name] for name in names])
        for _ in range(2):
            plain(x).square().mean().backward(inputs=[expected[name] for name in names])
        for name, param in params.items():
            if name not in names:
                assert param.grad is None, name
                continue
            record = engine.sharder.find(param)
            assert record is not None
            assert param.grad is not None
            assert expected[name].grad is not None
            begin, end = record.layout.shard_range(rank)
            whole = expected[name].grad.reshape(-1)[begin:end]
            with no_shard_dispatch():
                own = param.grad.reshape(-1)[: end - begin]
            assert_close_relative(own, whole, 1e-5, what=name)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_for_some_weights_gives_gradients_to_them_only(ranks: Ranks, world_size: int, backend: str) -> None:
    ranks.run(world_size, some_weights, backend)


def of_weights(backend: str) -> None:
    model = make()
    x = torch.randn(6, 19, generator=torch.Generator().manual_seed(0))
    with engine_for(model, backend) as engine:
        for _ in range(2):
            with engine.train_step():
                loss = model(x).square().mean()
            with pytest.raises(
                RuntimeError, match=r"autograd\.grad\(\) cannot return the gradient of .*Call loss\.backward"
            ):
                torch.autograd.grad(loss, list(model.parameters()))
            assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_asking_for_gradients_of_sharded_weights_is_an_error(ranks: Ranks, backend: str) -> None:
    ranks.run(2, of_weights, backend)
