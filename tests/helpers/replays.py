"""Trainings in which compiled code can be replayed, or must not be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_zero.engine import Engine, engine_of
from lightning_zero.native.watchdog import SequenceId
from tests.helpers.checkpointed import NonReentrant, Reentrant
from tests.helpers.in_parts import BrokenInTwo, FrozenEncoder, HoldsWeight, OtherHeads, Parts, TiedParts, WithTeacher
from tests.helpers.models import BatchNormNet, Case, OneBlock, TinyTransformer, build, made_one_mlp, make_batches
from tests.helpers.oracle import Reference
from tests.helpers.sharded import adamw, engine_for, train_sharded

BF16 = torch.bfloat16
STEPS, SAMPLES = 16, 12
COPY: dict[str, Any] = {
    "compute_dtype": BF16,
    "reduce_dtype": BF16,
    "gather_group_mb": 0.01,
    "gather_transport": "copy",
    "reduce_transport": "copy",
}
# Replaces the transports of COPY in a training of one rank, which has no other rank to copy from.
ALONE: dict[str, Any] = {"gather_transport": "auto", "reduce_transport": "auto"}
BY_COLLECTIVE: dict[str, dict[str, Any]] = {
    "weights and gradients": {"gather_transport": "collective", "reduce_transport": "collective"},
    "weights": {"gather_transport": "collective"},
    "gradients": {"reduce_transport": "collective"},
}
STAGE_1: dict[str, Any] = {"stage": 1}
TO_STEP: dict[str, Any] = {"unsharded_cache_mb": float("inf"), "unsharded_cache_until": "step"}


class Dropping(OneBlock):
    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout(super().forward(ids), 0.2, training=self.training)


class Counting(BatchNormNet):
    """Assigns a buffer to itself, so that its compiled code returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Spare(OneBlock):
    """Has a weight that nothing reads, frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 32, bias=False).requires_grad_(False)


class EditsItsInput(OneBlock):
    """In eager code the edit reaches the caller's tensor, so a copy of it will not do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x.mul_(0.5)
        return self.head(x)

    def loss(self, batch: Any, call: Any = None) -> Tensor:
        x = torch.ones(batch[0].shape[0], 8, 32, device=batch[0].device)
        loss = self.criterion((self if call is None else call)(x), batch[1])
        self.seen += x.sum().item() / x.numel()
        return loss


@torch.library.custom_op("lightning_zero_tests::read", mutates_args=())
def read(x: Tensor) -> Tensor:
    return x + (0 if x.sum().item() > float("-inf") else 1)  # waits for the device


@read.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lightning_zero_tests::through", mutates_args=())
def through(x: Tensor) -> Tensor:
    return x.clone()


through.register_fake(torch.empty_like)
through.register_autograd(lambda ctx, grad: read(grad))


class ReadsTheDevice(OneBlock):
    """In its backward, too late for a capture to be refused before it begins."""

    def forward(self, ids: Tensor) -> Tensor:
        return through(super().forward(ids))


def evaluate(model: nn.Module, index: int) -> None:
    if index == 10:
        engine = engine_of(model)
        assert engine is not None
        engine.eval_step()
        ids = torch.zeros(5, 8, dtype=torch.int64, device=engine.device)
        with torch.no_grad(), torch.autocast(engine.device.type, BF16, cache_enabled=False):
            model(ids)
        engine.cycle.after_eval()


def edit(model: nn.Module, index: int) -> None:
    if index == 10:
        with torch.no_grad():
            model.head.weight.mul_(0.9)


def train_spare(model: nn.Module, index: int) -> None:
    """The reads of compiled code stay the same, and buckets do not."""
    if index == 10:
        model.spare.requires_grad_(True)


class Forgetful(torch.optim.AdamW):
    """Zeroes gradients in one way at first, and in others later."""

    first = True  # set_to_none

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01, eps=1e-4)
        self.calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls < 9:
            super().zero_grad(self.first)
        elif self.calls % 3:
            super().zero_grad(not self.first)


class ForgetfulAtLast(Forgetful):
    first = False


def twice(model: Any, batch: Any) -> Tensor:
    return model.loss(batch) + 2 * model.loss(batch)


@dataclass(frozen=True)
class Way:
    case: str | type[Case] = OneBlock
    engine: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    samples: Callable[[int], int] = lambda index: SAMPLES
    replays: int = 12  # at least; each of a forward or a backward
    emulated: bool = True  # else only a capture shows that it cannot be replayed
    # aot_eager would keep the state of random numbers, which is on the host, for recomputed values
    generated: bool = False
    twice: bool = False  # a weight's gradients are sent twice, where they would be added up before in a run


WAYS = {
    "clipped": Way(training={"clip_norm": 0.1}),
    "accumulated": Way(training={"accumulate": 3}),
    "accumulated, kept until the step": Way(engine=TO_STEP, training={"accumulate": 3, "announce": True}),
    "accumulated, stage 1": Way(engine=STAGE_1, training={"accumulate": 3, "announce": True}),
    "gradients over copies": Way(engine={"grad_aliasing": True}),
    "gradients zeroed, not dropped": Way(training={"set_to_none": False}),
    "frozen weights, gradients dropped first, then added to": Way("LoRA", optimizer=Forgetful),
    "gradients added to first, then dropped": Way(optimizer=ForgetfulAtLast),
    "dropout": Way(Dropping),
    "activations checkpointed": Way(NonReentrant, generated=True),
    # The first backward to end in the first step, which runs eagerly, is within another, and brings only some gradients.
    "activations checkpointed, by the reentrant way": Way(
        Reentrant, engine=BY_COLLECTIVE["weights and gradients"], generated=True
    ),
    "buffers": Way(Counting),
    "an evaluation between": Way(training={"before_batch": evaluate}),
    "a weight edited between": Way(training={"before_batch": edit}),
    "another weight trained from then on": Way(Spare, training={"before_batch": train_spare}),
    "a smaller batch between": Way(samples=lambda index: 6 if index == 9 else SAMPLES, replays=8),
    "a module used twice, kept until backward": Way("CalledTwice", engine={"unsharded_cache_mb": float("inf")}),
    "called twice before a backward": Way(training={"loss_fn": twice}, replays=40, twice=True),
    "modules one after another": Way(Parts, replays=60),
    "modules one after another, accumulated": Way(Parts, training={"accumulate": 2}, replays=40),
    "a weight in two modules": Way(TiedParts, replays=60, twice=True),
    "a weight in two modules, stage 1": Way(
        TiedParts, engine=STAGE_1, training={"accumulate": 3, "announce": True}, replays=30, twice=True
    ),
    "a frozen encoder": Way(FrozenEncoder, replays=36),
    "a teacher": Way(WithTeacher, replays=70),
    "heads in turn": Way(OtherHeads, replays=30),
    "a weight held by eager code": Way(HoldsWeight, engine=BY_COLLECTIVE["weights and gradients"], replays=60),
    "a graph that is broken in two": Way(BrokenInTwo, replays=30),
    "sizes in turn": Way(samples=lambda index: 6 * (1 + index % 3), replays=16),
    "the device is waited for": Way(ReadsTheDevice, replays=0, emulated=False),
    "an input edited": Way(EditsItsInput, replays=0, emulated=False),
}


def shorter_on_one(index: int) -> int:
    """Samples of all ranks, as rank 1 sees them: from the eighth batch on it has less than the others."""
    return SAMPLES - 4 if dist.get_rank() == 1 and index > 6 else SAMPLES


# Only where several ranks gather by collectives is there a question whether they still meet.
SHORTER_ON_ONE = Way(samples=shorter_on_one, engine=BY_COLLECTIVE["weights and gradients"], replays=10)


def meetings(engine: Engine) -> dict[str, int]:
    """Return the number of collectives of this rank, by which the watchdog finds late ranks."""
    lanes = (SequenceId.CONTROL, SequenceId.GATHER, SequenceId.REDUCE)
    return {f"met_{lane.name.lower()}": engine.watchdog.native.sequence_number(int(lane)) for lane in lanes}


def graphs_are_cut(way: str) -> bool:
    """Return True if buckets end where graphs do, and so are others, and more, with replays."""
    case = WAYS[way].case
    return WAYS[way].twice or (isinstance(case, type) and issubclass(case, Parts))


def train(way: str, backend: str, device: str = "cpu", **options: Any) -> tuple[Reference, dict[str, int]]:
    """Return the record of the training, the executor's counters at its end, and the :func:`meetings`."""
    chosen = SHORTER_ON_ONE if way == "shorter on one" else WAYS[way]
    kind = torch.device(device).type
    torch.manual_seed(17)
    model: Any = build(chosen.case)
    if kind == "cpu" and isinstance(model, TinyTransformer):
        # Nothing is captured here, and most of the time is compilation of recorded code.
        made_one_mlp(model)
    batches = [model.make_batch(step, chosen.samples(step)) for step in range(STEPS)]
    batches = tree_map_only(Tensor, lambda tensor: tensor.to(device), batches)
    with engine_for(model, backend, device=device, **(COPY | chosen.engine | options)) as engine:
        context = partial(torch.autocast, kind, BF16, cache_enabled=False)
        got = train_sharded(engine, model, batches, chosen.optimizer(model), context=context, **chosen.training)
        if isinstance(model, EditsItsInput):
            got.losses.append(model.seen)
        return got, engine.executor.counters() | meetings(engine)


def train_up_to_a_replayed_forward(engine: Engine, model: Any) -> tuple[Tensor, int]:
    """The loss of a forward that was replayed, whose backward has not run; how many graphs were replayed."""
    optimizer = adamw(model)
    for batch in make_batches("OneBlock", 10, SAMPLES):
        mine = [part.to(engine.device) for part in batch]
        with engine.train_step(), torch.autocast(engine.device.type, BF16, cache_enabled=False):
            loss: Tensor = model.loss(mine)
        replayed = engine.executor.counters().get("replayed_graphs", 0)
        if replayed > 4:
            return loss, replayed
        loss.backward()
        with engine.optimizers.stepping(optimizer):
            optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("nothing was replayed")
