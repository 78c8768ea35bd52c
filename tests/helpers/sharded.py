"""Trains a model that an engine has sharded, and keeps the same record as the oracle.

Runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import DisableTorchFunctionSubclass, Tensor, nn

from lightning_zero.compile.events import GraphObserver
from lightning_zero.engine import Engine
from lightning_zero.profiling.cost_model import NOMINAL_COSTS, CostModel
from lightning_zero.sharding.shard_tensor import without_shard_dispatch
from tests.helpers.models import Case, build, make_batches
from tests.helpers.options import config
from tests.helpers.oracle import Batch, Reference, shard_batch
from tests.helpers.spread import check_spread

EAGER = "eager"
MIN_OFFLOAD_BYTES = 64  # that leave; the real limit is above all that our models have
BACKENDS = ("aot_eager", EAGER)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Context = Callable[[], AbstractContextManager[Any]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The usual eps of 1e-8 makes a full step out of a gradient that is rounding noise; no oracle could be followed.
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@contextmanager
def engine_for(
    model: nn.Module | None = None,
    backend: str = "aot_eager",
    observe: GraphObserver | None = None,
    small_bytes: int = 256,
    device: str = "cpu",
    costs: CostModel = NOMINAL_COSTS,
    **options: Any,
) -> Iterator[Engine]:
    """An engine that is closed at the end, with buckets so small that there are several.

    backend: EAGER, or one of the compiler's
    small_bytes: up to this size weights are gathered all together; the real limit is above all that our models have
    costs: as if they had been measured
    options: see ``tests.helpers.options.config``
    """
    compiled = {"compile": backend != EAGER, "compile_backend": "aot_eager" if backend == EAGER else backend}
    chosen = config(**{"reduce_bucket_mb": 0.01} | compiled | options)
    with patch("lightning_zero.compile.session.measure_costs", lambda *args: costs):
        engine = Engine(torch.device(device), chosen, observe=observe)
    try:
        limits = {"SMALL_BYTES": small_bytes, "MIN_OFFLOAD_BYTES": MIN_OFFLOAD_BYTES}
        with patch.multiple("lightning_zero.compile.context", **limits):
            if model is not None:
                engine.shard(model)
            yield engine
    finally:
        engine.close()


@without_shard_dispatch
def whole_all(
    engine: Engine, shards: Mapping[str, tuple[Tensor, Tensor | None]], any_padding: bool = False
) -> dict[str, Tensor | None]:
    """The whole values of things cut like parameters: name -> (parameter, shard). Collective.

    Fails unless all padding, of every rank, is exactly zero, or may be anything.
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    layouts = {}
    for name, (param, shard) in shards.items():
        record = engine.sharder.find(param)
        assert record is not None, f"{name}: the parameter is not sharded"
        layouts[name] = record.layout
        if shard is not None:
            assert shard.shape == record.layout.visible_shape, f"{name}: shape {tuple(shard.shape)} is no shard's"
            by_dtype.setdefault(shard.dtype, []).append(name)
    out: dict[str, Tensor | None] = dict.fromkeys(shards)
    for _, names in sorted(by_dtype.items(), key=str):  # alike on every rank, as an optimizer's state need not be
        names.sort()
        own = torch.cat([shards[name][1].detach().reshape(-1) for name in names])
        ranks = engine.mesh.all_gather_shard(own).chunk(engine.mesh.shard_group.size)
        begin = 0
        for name in names:
            layout = layouts[name]
            flat = torch.cat([rank[begin : begin + layout.shard_numel] for rank in ranks])
            begin += layout.shard_numel
            padding = flat[layout.numel :]
            assert any_padding or not padding.any(), f"{name}: padding holds {padding[padding != 0][:4].tolist()}"
            out[name] = layout.full_view(flat)
    return out


def whole_params(engine: Engine, model: nn.Module) -> dict[str, Tensor]:
    return whole_all(engine, {name: (param, param) for name, param in model.named_parameters()})


def whole_grads(engine: Engine, model: nn.Module) -> dict[str, Tensor | None]:
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return whole_all(engine, {name: (param, param.grad) for name, param in trained.items()})


def whole_state(engine: Engine, optimizer: torch.optim.Optimizer, any_padding: bool = False) -> dict[str, Tensor]:
    """The sharded entries of an optimizer's state."""
    shards = {}
    for param, entries in optimizer.state.items():
        record = engine.sharder.find(param)
        for key, value in entries.items():
            if isinstance(value, Tensor):
                with DisableTorchFunctionSubclass():  # the shard as it is in memory
                    value = value.as_subclass(Tensor)
            if isinstance(value, Tensor) and value.shape == record.layout.visible_shape:
                shards[f"{record.name}.{key}"] = (param, value)
    return whole_all(engine, shards, any_padding)


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def case_loss(model: Any, batch: Batch) -> Tensor:
    return model.loss(batch)


def _listed(losses: Any) -> list[Tensor]:
    return list(losses) if isinstance(losses, (list, tuple)) else [losses]


def train_step(engine: Engine, optimizer: torch.optim.Optimizer, forward: Callable[[], Tensor]) -> None:
    """Train for one step on the loss that ``forward`` returns."""
    with engine.train_step():
        loss = forward()
    loss.backward()
    with engine.optimizers.stepping(optimizer):
        optimizer.step()
    optimizer.zero_grad()


def train_sharded(
    engine: Engine,
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Batch], Any] = case_loss,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    set_to_none: bool = True,
    retain_graph: bool = False,
    context: Context = nullcontext,
    before_batch: Callable[[nn.Module, int], None] | None = None,
    announce: bool = False,
) -> Reference:
    """Train on this rank's share of global batches, with the steps of the Trainer's path.

    It also steps after a last partial window.

    loss_fn: may return several losses, each of which gets a backward pass of its own
    announce: announce micro-batches that others follow, as a Trainer does
    """
    check_spread(engine, model)
    out = Reference()
    for index, batch in enumerate(batches):
        if before_batch is not None:
            before_batch(model, index)
        more = (index + 1) % accumulate and index + 1 < len(batches)
        with engine.cycle.accumulating() if more and announce else nullcontext():
            with engine.train_step(), context():
                losses = _listed(loss_fn(model, shard_batch(batch, engine.rank, engine.world_size)))
            for number, loss in enumerate(losses, 1):
                (loss / accumulate).backward(retain_graph=retain_graph and number < len(losses))
        out.losses.append(mean_over_ranks(torch.stack([loss.detach() for loss in losses]).sum()))
        if more:
            continue
        out.grads.append(whole_grads(engine, model))
        with engine.optimizers.stepping(optimizer, clip=clip_norm) as norm:
            optimizer.step()
        out.grad_norms.append(_norm_of(out.grads[-1]) if norm is None else norm.item())
        optimizer.zero_grad(set_to_none=set_to_none)
        out.params.append(whole_params(engine, model))
    return out


def _norm_of(grads: Mapping[str, Tensor | None]) -> float:
    present = [grad.double() for grad in grads.values() if grad is not None]
    return nn.utils.get_total_norm(present).item()


def train_plain(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[Any, Batch], Any] = case_loss,
    *,
    world: int = 1,
    accumulate: int = 1,
    clip_norm: float | None = None,
    set_to_none: bool = True,
    before_batch: Callable[[nn.Module, int], None] | None = None,
) -> Reference:
    """The oracle for cases that ``train_reference`` does not have; several losses are added."""
    out = Reference()
    for index, batch in enumerate(batches):
        if before_batch is not None:
            before_batch(model, index)
        total = 0.0
        for rank in range(world):
            loss = sum(_listed(loss_fn(model, shard_batch(batch, rank, world))))
            (loss / (world * accumulate)).backward()
            total += loss.item()
        out.losses.append(total / world)
        if (index + 1) % accumulate and index + 1 < len(batches):
            continue
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        out.grads.append({n: None if g is None else g.clone() for n, g in grads.items()})
        out.grad_norms.append(_norm_of(grads))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        out.params.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return out


def train_case(
    case: str | type[Case],
    backend: str,
    steps: int = 6,
    samples: int = 12,
    make_optimizer: MakeOptimizer = adamw,
    engine_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Reference, dict[str, int]]:
    """Return the record of a case's training on shards, and the executor's counters at its end."""
    model = build(case)
    with engine_for(model, backend, **(engine_options or {})) as engine:
        optimizer = make_optimizer(model)
        out = train_sharded(engine, model, make_batches(case, steps, samples), optimizer, **options)
        whole_state(engine, optimizer)
        return out, engine.executor.counters()


@contextmanager
def single_thread() -> Iterator[None]:
    """Ranks have one thread, and sums split over threads round differently.

    Bitwise comparison needs the same.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
