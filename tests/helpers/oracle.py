"""The oracle of sharded runs: plain training in one process."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any


def _number(value: Tensor | float) -> Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float64)


def _difference(what: str, actual: Any, expected: Any, rtol: float, atol: float) -> str | None:
    """The complaint about one pair of tensors, if any."""
    if (actual is None) != (expected is None):
        return f"{what}: got {_kind(actual)}, expected {_kind(expected)}"
    if actual is None:
        return None
    a, b = _number(actual), _number(expected)
    if a.shape != b.shape:
        return f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    for name, value in (("result", a), ("expected value", b)):
        # inf - inf would be NaN too, and no correct run of ours has either
        if bad := int((~value.isfinite()).sum()):
            return f"{what}: {bad} of {value.numel()} elements of the {name} are NaN or infinite"
    error, size = (a - b).norm().item(), b.norm().item()
    if error <= rtol * size + atol:
        return None
    worst = int((a - b).abs().argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape))
    return (
        f"{what}: relative error {error / size if size else math.inf:.3e} > {rtol:.1e}"
        f" (||a-b|| = {error:.3e}, ||a|| = {a.norm().item():.3e}, ||b|| = {size:.3e};"
        f" worst at {at} of {tuple(a.shape)}: {a[at].item():.9g}, expected {b[at].item():.9g})"
    )


def _kind(value: Any) -> str:
    return "nothing" if value is None else "a value"


def _differences(what: str, actual: Any, expected: Any, rtol: float, atol: float) -> list[str]:
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        found = []
        if lost := [key for key in expected if key not in actual]:
            found.append(f"{what}: missing {lost}")
        if extra := [key for key in actual if key not in expected]:
            found.append(f"{what}: unexpected {extra}")
        pairs = [(f"{what}[{key!r}]", actual[key], expected[key]) for key in expected if key in actual]
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{what}: {len(actual)} entries, expected {len(expected)}"]
        found = []
        pairs = [(f"{what}[{i}]", a, b) for i, (a, b) in enumerate(zip(actual, expected, strict=True))]
    else:
        complaint = _difference(what, actual, expected, rtol, atol)
        return [complaint] if complaint else []
    for name, a, b in pairs:
        found += _differences(name, a, b, rtol, atol)
    return found


def assert_close_relative(actual: Any, expected: Any, rtol: float, atol: float = 0.0, what: str = "value") -> None:
    """||actual - expected|| <= rtol * ||expected|| + atol, for each tensor of a nested pair.

    Norms, not elements: another summing order moves an element near zero by any factor. NaN and
    infinities fail even where both sides have them. With the default atol an expected zero must
    be met exactly.
    """
    __tracebackhide__ = True
    found = _differences(what, actual, expected, rtol, atol)
    if found:
        shown = found[:20] + ([f"and {len(found) - 20} more"] if len(found) > 20 else [])
        raise AssertionError("\n".join(shown))


def shard_batch(batch: Batch, rank: int, world: int) -> Batch:
    """This rank's contiguous, equal share of each tensor's first dimension; the rest as it is."""
    if isinstance(batch, Tensor):
        if batch.dim() == 0:
            return batch
        share, left = divmod(batch.size(0), world)
        if left:
            # unequal shares would make the mean of the ranks' means differ from the global mean
            raise ValueError(f"batch of {batch.size(0)} does not divide by {world} ranks")
        return batch[rank * share : (rank + 1) * share]
    if isinstance(batch, Mapping):
        return {key: shard_batch(value, rank, world) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        shares = [shard_batch(value, rank, world) for value in batch]
        return type(batch)(*shares) if hasattr(batch, "_fields") else type(batch)(shares)
    return batch


def batches_for_rank(global_batches: Iterable[Batch], rank: int, world: int) -> list[Batch]:
    return [shard_batch(batch, rank, world) for batch in global_batches]


@dataclass
class Reference:
    """Per optimizer step, except `losses` and `buffers`: per batch."""

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # before clipping
    grad_norms: list[float] = field(default_factory=list)  # before clipping
    params: list[dict[str, Tensor]] = field(default_factory=list)  # after the step
    buffers: list[list[dict[str, Tensor]]] = field(default_factory=list)  # then by rank
    model: nn.Module | None = None  # as trained
    optimizer: torch.optim.Optimizer | None = None


def assert_same_bits(actual: Reference, expected: Reference) -> None:
    """Losses, gradients (there or not) and weights of two trainings are equal, to the bit."""
    assert actual.losses == expected.losses
    for what in ("grads", "params"):
        mine, theirs = getattr(actual, what), getattr(expected, what)
        assert len(mine) == len(theirs) > 0
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.keys() == b.keys()
            for name, value in b.items():
                got = a[name]
                assert (got is None) == (value is None), f"{what}[{step}][{name!r}]: {_kind(got)} and {_kind(value)}"
                assert value is None or torch.equal(got, value), f"{what}[{step}][{name!r}] differs"


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named}


def _case_loss(model: Any, batch: Batch) -> Tensor:
    return model.loss(batch)


def train_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss_fn: Callable[[Any, Batch], Tensor] = _case_loss,
    *,
    world: int = 1,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    unused_as_zero: bool = False,
) -> Reference:
    """Train a copy of `model` on global batches, in the dtypes it has.

    world: 1 takes the loss of the whole batch, which equals the mean of the ranks' losses when a
        sample's loss ignores the other samples; W splits each batch as the ranks do and averages,
        each share with buffers of its own, as BatchNorm needs
    unused_as_zero: an unused parameter gets a zero gradient (so weight decay and momentum move
        it) instead of none (so the optimizer skips it)
    """
    if len(batches) % accumulate:
        raise ValueError(f"{len(batches)} batches are no whole number of {accumulate}-batch steps")
    model = copy.deepcopy(model).train()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())
    rank_buffers = [_copies(buffers.items()) for _ in range(world)]
    out = Reference(model=model, optimizer=optimizer)

    for index, batch in enumerate(batches):
        loss_sum = 0.0
        for rank in range(world):
            for name, buffer in buffers.items():
                buffer.copy_(rank_buffers[rank][name])
            loss = loss_fn(model, shard_batch(batch, rank, world))
            (loss / (world * accumulate)).backward()
            loss_sum += loss.item()
            rank_buffers[rank] = _copies(buffers.items())
        out.losses.append(loss_sum / world)
        out.buffers.append(list(rank_buffers))
        if (index + 1) % accumulate:
            continue
        if unused_as_zero:
            for param in trained.values():
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
        grads = {n: p.grad for n, p in trained.items()}
        out.grads.append({n: None if g is None else g.clone() for n, g in grads.items()})
        present = [g.float() for g in grads.values() if g is not None]
        out.grad_norms.append(math.sqrt(sum(g.double().square().sum().item() for g in present)))
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(trained.values(), clip_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(trained.values(), clip_value)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        out.params.append(_copies(model.named_parameters()))
    return out
