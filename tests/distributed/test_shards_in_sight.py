"""Functions of torch on shards as users hold them.

The result of a plain tensor, or an error with the line to write.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from lightning_zero import UnsupportedError
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import EAGER, engine_for
from tests.ranks.pool import Ranks

# of two tensors of one parameter, the shard's or the whole ones
RIGHT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "norm": lambda p, g: p.norm(),
    "norm of type 1": lambda p, g: torch.norm(g, 1),
    "norm of type inf": lambda p, g: g.norm(p=math.inf),
    "norm of type -inf": lambda p, g: torch.linalg.vector_norm(g, -math.inf),
    "norm of type 0": lambda p, g: torch.linalg.vector_norm(p.relu(), 0),
    "norm of type 3.5": lambda p, g: torch.linalg.vector_norm(p, ord=3.5),
    "torch.linalg.norm": lambda p, g: torch.linalg.norm(g),
    "norm of a step": lambda p, g: (g + 0.1 * p).norm() / (p.norm() + 1e-6),
    "norm of the data": lambda p, g: p.data.norm(),
    "norm of a detached, flat one": lambda p, g: torch.norm(p.detach().view(-1)),
    "sum": lambda p, g: p.sum(),
    "sum of squares": lambda p, g: g.pow(2).sum().sqrt(),
    "torch.sum": lambda p, g: torch.sum(p * g),
    "sum over all dimensions": lambda p, g: p.sum(tuple(range(p.dim()))),
    "mean": lambda p, g: p.mean(),
    "root of the mean square": lambda p, g: torch.sqrt(torch.mean(g**2)),
    "mean by counts": lambda p, g: g.sum() / g.numel(),
    "max": lambda p, g: p.max(),
    "min": lambda p, g: torch.min(p),
    "amax": lambda p, g: p.abs().amax(),
    "amin": lambda p, g: p.amin(),
    "aminmax": lambda p, g: list(torch.aminmax(p)),
    "max of absolutes": lambda p, g: g.abs().max(),
    "isfinite().all()": lambda p, g: g.isfinite().all(),
    "isnan().any()": lambda p, g: torch.isnan(g).any(),
    "any": lambda p, g: (p > 100).any(),
    "count_nonzero": lambda p, g: (p > 0).count_nonzero(),
    "sum of a mask": lambda p, g: (p > 0).sum(),
    "var": lambda p, g: p.var(),
    "std": lambda p, g: torch.std(p, unbiased=False),
    "var by correction": lambda p, g: p.var(correction=2),
    "view of gradients": lambda p, g: float(
        g._is_view()
    ),  # Dynamo makes fake tensors of the bases of views, in seconds
    "equal": lambda p, g: [float(torch.equal(p, g)), float(torch.equal(p, p.clone()))],
    "_foreach_norm": lambda p, g: list(torch._foreach_norm([p.detach(), g, torch.ones(3)], 2)),
    "get_total_norm": lambda p, g: nn.utils.get_total_norm([p.detach(), g]),
    "item": lambda p, g: p.norm().item(),
    "bfloat16": lambda p, g: p.bfloat16().float().norm(),
    "where": lambda p, g: torch.where(g > 0, p, -p).sum(),
    "maximum": lambda p, g: torch.max(p, g).sum(),
    "clamp in place": lambda p, g: p.detach().clone().clamp_(-0.1, 0.1).sum(),
    "masked": lambda p, g: p.detach().clone().masked_fill_(p > 0, 2.0).sum(),
    "ones": lambda p, g: torch.ones_like(p).sum(),
    "a copy": lambda p, g: copy.deepcopy(g).norm() + copy.deepcopy(p).norm(),
    "noise": lambda p, g: [(torch.randn_like(g) * p).sum(), torch.empty_like(p).uniform_().mul_(p).sum()],
    "lists": lambda p, g: torch._foreach_mul([p.detach(), g], 2.0)[1].norm(),
    "shape": lambda p, g: [*p.shape, *p.size(), *g.shape, *p.data.size(), p.size(0), p.size(dim=-1), len(p)],
    "dimensions": lambda p, g: [p.dim(), p.ndim, g.ndimension(), len(p.shape)],
    "sizes": lambda p, g: [p.numel(), g.nelement(), p.nbytes, p.data.nbytes, *p.stride(), g.stride(0)],
    "contiguous": lambda p, g: [float(p.is_contiguous()), float(g.is_contiguous())],
    "initialised by shape": lambda p, g: p.detach().clone().fill_(1 / math.sqrt(p.shape[-1])).sum(),
    "reshaped to its own shape": lambda p, g: p.reshape(p.shape).view(p.size()).view_as(g).norm(),
    "flattened": lambda p, g: (p.reshape(-1) * g.flatten() + p.view(p.numel())).sum(),
    "a full mask": lambda p, g: (g * _full(p).gt(0.2)).sum(),
    "a full value added": lambda p, g: p.detach().clone().add_(_full(p), alpha=0.3).square().sum(),
    "a full value copied": lambda p, g: p.detach().clone().copy_(_full(p)).square().sum(),
    "a full value flattened": lambda p, g: (p.flatten() * _full(p).flatten()).sum(),
    "a row broadcast": lambda p, g: (p * _full(p)[..., :1, :]).sum() if p.dim() > 1 else (p * _full(p)).sum(),
    "a column broadcast": lambda p, g: (p / (1 + _full(p)[..., :1])).sum(),
    "a full value written by it": lambda p, g: _full(p).copy_(p).mul_(_full(p)).sum(),
    "a full average": lambda p, g: _full(p).lerp_(p.detach(), 0.1).square().sum(),
    "full averages in lists": lambda p, g: _averaged([_full(p)], [p.detach()])[0].square().sum(),
    "lists with full values": lambda p, g: torch._foreach_mul([g], [_full(p)])[0].sum(),
    "new of its size": lambda p, g: [p.new_ones(p.shape).sum(), p.new_zeros(32).sum(), *p.new_ones(3).shape],
    "where by a full mask": lambda p, g: torch.where(_full(p) > 0.5, p, -p).sum(),
    "equal to a full value": lambda p, g: [float(torch.equal(_full(p), p)), float(torch.equal(_full(p).copy_(p), p))],
    "assigned a full gradient": lambda p, g: _assigned(p),
    "torch.tensor": lambda p, g: (torch.tensor(p, dtype=torch.float64) * _full(p)).sum(),
    "a shallow copy": lambda p, g: copy.copy(p.detach()).sum() + copy.copy(p).norm(),
    "pickled": lambda p, g: [(_full(p) * value).sum() for value in _pickled([p, g, p.detach().cpu().clone()])],
    "ops of the dispatcher": lambda p, g: torch.ops.aten.sum(torch.ops.aten.mul.Tensor(p, g)),
    "found by equality": lambda p, g: float((p == g).sum()),
    "formatted": lambda p, g: float(f"{p.sum():.3f}"),
}


def _full(param: Tensor) -> Tensor:
    return torch.rand(param.shape, generator=torch.Generator().manual_seed(11))


def _averaged(averages: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    torch._foreach_lerp_(averages, values, 0.2)
    return averages


def _assigned(param: Any) -> Tensor:
    before, param.grad = param.grad, _full(param)
    found, param.grad = param.grad.square().sum(), before
    return found


def _pickled(values: Any) -> Any:
    file = io.BytesIO()
    torch.save({"of": values}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["of"]
    assert [type(value) for value in loaded] == [nn.Parameter, Tensor, Tensor]
    return pickle.loads(pickle.dumps(loaded))


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "prod": lambda p: p.prod(),
    "dot": lambda p: torch.dot(p.flatten(), p.flatten()),
    "sum over a dimension": lambda p: p.sum(-1),
    "norm over a dimension": lambda p: p.norm(dim=1, keepdim=True),
    "max over a dimension": lambda p: p.max(1),
    "argmax": lambda p: p.argmax(),
    "sort": lambda p: p.sort(),
    "topk": lambda p: p.flatten().topk(2),
    "quantile": lambda p: torch.quantile(p, 0.5),
    "median": lambda p: p.median(),
    "cumsum": lambda p: p.cumsum(0),
    "softmax": lambda p: p.softmax(-1),
    "matmul": lambda p: p @ p.detach().t(),
    "linear": lambda p: F.linear(torch.ones(2, 64), p),
    "svd": lambda p: torch.linalg.svdvals(p),
    "spectral norm": lambda p: torch.linalg.matrix_norm(p, 2),
    "nuclear norm": lambda p: p.norm("nuc"),
    "einsum": lambda p: torch.einsum("ij->j", p),
    "transposed": lambda p: p.T,
    "another shape": lambda p: p.view(2, -1),
    "of another parameter's shape": lambda p: p.detach() + torch.ones(64, 63),
    "memory": lambda p: p.untyped_storage(),
    "rows": lambda p: list(p),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p.detach()),
    "func.grad": lambda p: torch.func.grad(lambda value: value.square().sum())(p.detach()),
    "func.jacrev": lambda p: torch.func.jacrev(lambda value: value.square().sum())(p.detach()),
    "asarray": lambda p: torch.asarray(p.detach(), copy=True),
    "as_tensor": lambda p: torch.as_tensor(p.detach(), dtype=torch.float64),
    "broadcast": lambda p: torch.distributed.broadcast(p.data, 0),
    "all_reduce": lambda p: torch.distributed.all_reduce(p.data),
    "coalesced": lambda p: torch.distributed._broadcast_coalesced(torch.distributed.group.WORLD, [p.data], 1 << 20, 0),
    "functional all_reduce": lambda p: all_reduce(p.data, "sum", torch.distributed.group.WORLD),
    "an op of the dispatcher": lambda p: torch.ops.aten.sum.dim_IntList(p, [0]),
    "an op of another library": lambda p: torch.ops.prims.sum(p, [0]),
    "set_": lambda p: p.data.set_(torch.zeros(64, 64)),
    "storage": lambda p: p.storage(),
    "a row": lambda p: p[0],
    "a slice": lambda p: p.data[:, :3].zero_(),
    "cat": lambda p: torch.cat([p.view(-1), p.view(-1)]),
    "numpy": lambda p: p.detach().numpy(),
    "eye": lambda p: nn.init.eye_(p),
    "data of another shape": lambda p: setattr(p, "data", torch.zeros(64, 63)),
    "a gradient of another shape": lambda p: setattr(p, "grad", torch.zeros(64, 63)),
    "data of another dtype": lambda p: setattr(p, "data", p.data.half()),
}


def _models() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    # a matrix that all ranks share, one whose last part is padding, vectors, one that rank 0 holds alone
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model.scale = nn.Parameter(torch.tensor([[1.5, 0.5, 2.0]]))  # type: ignore[assignment]
    return model, copy.deepcopy(model)


def _table() -> dict[str, list[Any]]:
    model, plain = _models()
    with engine_for(model, EAGER) as engine:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        with engine.train_step():
            loss = (model(x) * model.scale).square().sum()
        loss.backward()
        (plain(x) * plain.scale).square().sum().backward()
        found: dict[str, Any] = {}
        for name, function in RIGHT.items():
            results = []
            for of in (model, plain):
                torch.manual_seed(3)
                results.append([function(p, p.grad) for p in of.parameters()])  # type: ignore[arg-type]
            found[name] = results
        refusals = []
        for name, refused in REFUSED.items():
            param: Any = model[0]._parameters["weight"]
            try:
                refused(param)
                refusals.append([name, "nothing was raised"])
            except UnsupportedError as error:
                refusals.append([name, str(error)])
        return {"right": list(found.items()), "refused": refusals}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.exhaustive_variants("1", "2")
def test_each_function_is_right_or_refused(ranks: Ranks, world_size: int) -> None:
    for result in ranks.run(world_size, _table):
        for name, (ours, expected) in result["right"]:
            assert_close_relative(_numbers(ours), _numbers(expected), 2e-6, 1e-6, what=name)
        for name, message in result["refused"]:
            assert "'0.weight'" in message, (name, message)
            assert "module.weight" in message, (name, message)


def _numbers(values: Any) -> Any:
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return values.detach().float() if isinstance(values, Tensor) else float(values)


def _edited() -> list[tuple[str, Tensor, Tensor]]:
    """Return the shards after writes in users' ways, and the values of a plain module; padding stays zero."""
    model, plain = _models()
    seen = []
    with engine_for(model, EAGER) as engine:

        def compare(what: str) -> None:
            for record in engine.sharder.live:
                begin, end = record.layout.shard_range(engine.rank)
                assert not record.shard[end - begin :].any(), what
            state = model.state_dict()
            seen.extend((f"{what}: {key}", state[key], value.clone()) for key, value in plain.state_dict().items())

        def both(what: str, function: Callable[[Tensor], Any]) -> None:
            for of in (model, plain):
                torch.manual_seed(5)
                for param in of.parameters():
                    function(param)
            compare(what)

        init = nn.init
        both("xavier_uniform_", lambda p: init.xavier_uniform_(p) if p.dim() > 1 else init.zeros_(p))
        both("xavier_normal_", lambda p: init.xavier_normal_(p) if p.dim() > 1 else init.ones_(p))
        both("kaiming_uniform_", lambda p: init.kaiming_uniform_(p, a=5**0.5) if p.dim() > 1 else init.normal_(p))
        both("kaiming_normal_", lambda p: init.kaiming_normal_(p, mode="fan_out") if p.dim() > 1 else init.uniform_(p))
        both("trunc_normal_", lambda p: init.trunc_normal_(p, std=0.02))
        both("orthogonal_", lambda p: nn.init.orthogonal_(p) if p.dim() > 1 else nn.init.ones_(p))
        both("constant_", lambda p: init.constant_(p, 2.5))
        both("data.normal_", lambda p: p.data.normal_(0, 0.3))
        both("data = ", lambda p: setattr(p, "data", p.data * 0.9 + 1))
        both("data[:] =", lambda p: p.data.__setitem__(slice(None), 0.25))
        both("data = full", lambda p: setattr(p, "data", _full(p) - 0.5))
        both("data[:] = full", lambda p: p.data.__setitem__(slice(None), _full(p)))
        both("vector_to_parameters", lambda p: nn.utils.vector_to_parameters(_full(p).flatten() * 2, [p]))
        with torch.no_grad():
            both("add_", lambda p: p.add_(torch.randn_like(p), alpha=0.1))
            both("norm_clamp", lambda p: p.mul_(0.1 / p.norm()))
            both("a mask", lambda p: p.__setitem__(p > 0, 0.0))
            both("a full mask", lambda p: p.__setitem__(_full(p) > 0.7, 0.5))
            both("a full value", lambda p: p.mul_(_full(p)).add_(torch.ones(p.shape[-1:])))
        for record in engine.sharder.live:
            begin, end = record.layout.shard_range(engine.rank)
            assert torch.equal(record.param.to_local(), record.shard[: end - begin])
            assert f"elements {begin} to {end} of {record.layout.numel}" in repr(record.param)
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_written_to_shards_is_what_a_plain_module_has(ranks: Ranks, world_size: int) -> None:
    for seen in ranks.run(world_size, _edited):
        for what, ours, expected in seen:
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7, msg=lambda m, w=what: f"{w}: {m}")


def _written_late() -> list[str]:
    model, _ = _models()
    with engine_for(model, EAGER) as engine:
        state, optimizer = model.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1)
        state["0.bias"].add_(1)
        with engine.train_step():
            loss = (model(torch.ones(2, 64)) * model.scale).square().sum()
        loss.backward()
        with engine.optimizers.stepping(optimizer):
            optimizer.step()
        messages = []
        for write in (lambda v: v.zero_(), lambda v: v[0].mul_(2), lambda v: torch._foreach_mul_([v], 2.0)):
            with pytest.raises(UnsupportedError) as raised:
                write(state["0.bias"])
            messages.append(str(raised.value))
        state["0.bias"].clone().zero_()
        return messages


def test_a_write_to_an_outdated_state_dict_is_refused(ranks: Ranks) -> None:
    for messages in ranks.run(2, _written_late):
        assert all("'0.bias' in a state_dict()" in message and "clone()" in message for message in messages)


class _Pairs(nn.Module):
    """Parameters of one shape whose cuts differ: by memory order, and by dtype."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 5, 3)
        self.nhwc = copy.deepcopy(conv).to(memory_format=torch.channels_last)
        self.nchw = conv
        self.narrow = nn.Parameter(torch.randn(9, 7).bfloat16())
        self.wide = nn.Parameter(torch.randn(9, 7))


def _paired(of: _Pairs) -> list[Any]:
    last, first = of.nhwc._parameters["weight"], of.nchw._parameters["weight"]
    half, wide = of._parameters["narrow"], of._parameters["wide"]
    with torch.no_grad():
        first.data.lerp_(last.data * 1.5, 0.2)
        torch._foreach_lerp_([last.data, wide.data], [first.data, half.data.float()], 0.3)
        torch._foreach_add_([first.data], [_full(first).to(memory_format=torch.channels_last)])
        half.copy_(wide)
        wide.add_(half)
        first.mul_(_full(last))
        found = [(last - first).square().sum(), torch.maximum(first, last).sum(), (wide * half).sum()]
        found += [(first.reshape(-1) * last.reshape(-1)).sum(), (last.flatten() * _full(last).flatten()).sum()]
        found += [*last.stride(), float(last.is_contiguous(memory_format=torch.channels_last))]
        found += [float(torch.equal(last, first)), float(torch.equal(last, last * torch.ones_like(first)))]
        return found


def _between() -> list[tuple[str, Any, Any]]:
    torch.manual_seed(2)
    plain = _Pairs()
    model = copy.deepcopy(plain)
    with engine_for(model, EAGER):
        found = [("numbers", _numbers(_paired(model)), _numbers(_paired(plain)))]
        state, expected = model.state_dict(), plain.state_dict()
        return found + [(key, state[key], expected[key].clone()) for key in expected]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_of_one_shape_work_together_however_they_are_cut(ranks: Ranks, world_size: int) -> None:
    for found in ranks.run(world_size, _between):
        for what, ours, expected in found:
            assert_close_relative(ours, expected, 2e-6, 1e-6, what=what)
