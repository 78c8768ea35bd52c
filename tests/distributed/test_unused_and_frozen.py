"""Parameters that get no gradient: never, not now, not on this rank, not any more; and gradients of another kind than
usual.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import Batch, Case, LoRA, build, make_batches
from tests.helpers.oracle import Reference, assert_close_relative, train_reference
from tests.helpers.sharded import (
    EAGER,
    adamw,
    case_loss,
    engine_for,
    sgd,
    train_case,
    train_plain,
    train_sharded,
    whole_params,
)
from tests.ranks.pool import Ranks

STEPS, SAMPLES = 6, 12


def compare(out: Reference, expected: Reference) -> None:
    __tracebackhide__ = True
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    # None where the oracle has None: weight decay must not change unused weights.
    assert_close_relative(out.grads, expected.grads, 3e-6, what="grads")
    assert_close_relative(out.grad_norms, expected.grad_norms, 1e-6, what="norms")
    assert_close_relative(out.params, expected.params, 1e-6, atol=2e-8, what="params")


@pytest.mark.parametrize(
    ("case", "world_size", "backend"),
    [
        ("LoRA", 2, "aot_eager"),
        ("BranchByStep", 2, "aot_eager"),
        *((case, 3, EAGER) for case in ("LoRA", "BranchByStep")),
        *((case, *how) for case in ("NeverUsed", "ReturnsParameter") for how in ((2, EAGER), (3, "aot_eager"))),
    ],
)
def test_parameters_without_gradients_train_as_in_one_process(
    ranks: Ranks, world_size: int, case: str, backend: str
) -> None:
    out, _ = ranks.run(world_size, train_case, case, backend, STEPS, SAMPLES, clip_norm=0.2)[0]
    expected = train_reference(build(case), make_batches(case, STEPS, SAMPLES), adamw, world=world_size, clip_norm=0.2)
    compare(out, expected)
    if case == "NeverUsed":
        keep_no_gradient_and_are_not_decayed(out)
    if case == "BranchByStep":
        have_gradients_in_the_steps_that_take_the_branch(out)


def keep_no_gradient_and_are_not_decayed(out: Reference) -> None:
    start = dict(build("NeverUsed").named_parameters())
    for name in ("idle.weight", "idle.bias"):
        assert [grads[name] for grads in out.grads] == [None] * STEPS
        assert_close_relative([params[name] for params in out.params], [start[name]] * STEPS, 0.0, what=name)
    assert out.grads[0]["used.weight"] is not None


def have_gradients_in_the_steps_that_take_the_branch(out: Reference) -> None:
    assert [grads["a.weight"] is not None for grads in out.grads] == [step % 2 == 0 for step in range(STEPS)]
    assert [grads["b.0.weight"] is not None for grads in out.grads] == [step % 2 == 1 for step in range(STEPS)]


class UsedOnOneRank(Case):
    """The bias counts only where the share's first sample says so.

    (A weight could not: its gathers need every rank.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.bias = nn.Parameter(torch.randn(25))
        self.last = nn.Linear(25, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        # In the third step no rank uses it.
        flags = (torch.arange(n) >= n // 2) & (seed != 2)
        return torch.randn(n, 19, generator=rng), flags, torch.randn(n, 23, generator=rng)

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        bias = self.bias if flags[0] else self.bias.detach()
        return self.last(torch.tanh(self.first(x) + bias))


def test_a_parameter_used_on_one_rank_only_gets_its_share_of_the_mean(ranks: Ranks, world_size: int) -> None:
    # Not compiled: compiled, ranks would run different graphs.
    out, _ = ranks.run(world_size, train_case, UsedOnOneRank, "eager", STEPS, SAMPLES, clip_norm=0.2)[0]
    batches = make_batches(UsedOnOneRank, STEPS, SAMPLES)
    expected = train_reference(build(UsedOnOneRank), batches, adamw, world=world_size, clip_norm=0.2)
    compare(out, expected)
    used = [grads["bias"] is not None for grads in out.grads]
    assert used == [world_size > 1 and step != 2 for step in range(STEPS)]


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, feedback: Tensor, learns: str) -> Tensor:
        ctx.save_for_backward(x, feedback)
        ctx.learns = learns
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, feedback = ctx.saved_tensors
        own = grad.t() @ x
        return grad @ feedback, own, {"": None, "also": own * 0.5, "alone": feedback * 0.1}[ctx.learns], None


class FeedbackAlignment(Case):
    """The weights that carry the error back are no part of the forward pass."""

    learns = ""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.weight = nn.Parameter(torch.randn(23, 25) * 0.3)
        self.feedback = nn.Parameter(torch.randn(23, 25) * 0.3)
        self.last = nn.Linear(23, 19)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 19, generator=rng), torch.randn(n, 19, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(_Aligned.apply(hidden, self.weight, self.feedback, self.learns))


class LearnedFeedback(FeedbackAlignment):
    learns = "also"


class FeedbackOnItsOwn(FeedbackAlignment):
    """Its gradient does not depend on the loss, so a compiler may compute it in the forward pass."""

    learns = "alone"


class _ReadsModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.module.feedback[0].detach(), None


class ReadsModuleInBackward(FeedbackAlignment):
    """The weight is first asked for when the backward pass is under way."""

    @torch.compiler.disable
    def twice(self, x: Tensor) -> Tensor:
        return _ReadsModule.apply(x, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(self.twice(torch.tanh(self.first(x))), self.weight))


@pytest.mark.parametrize(
    ("world_size", "backend", "case"),
    [
        *((2, "aot_eager", case) for case in (FeedbackAlignment, LearnedFeedback, ReadsModuleInBackward)),
        *((3, EAGER, case) for case in (FeedbackAlignment, LearnedFeedback, ReadsModuleInBackward)),
        (1, EAGER, FeedbackOnItsOwn),  # the mean of values that do not depend on the loss is not the sum in one process
    ],
)
def test_parameters_used_only_in_backward_train_as_in_one_process(
    ranks: Ranks, world_size: int, case: type[Case], backend: str
) -> None:
    out, _ = ranks.run(world_size, train_case, case, backend, STEPS, SAMPLES, clip_norm=0.2)[0]
    expected = train_reference(build(case), make_batches(case, STEPS, SAMPLES), adamw, world=world_size, clip_norm=0.2)
    compare(out, expected)
    assert (out.grads[0]["feedback"] is not None) == bool(case.learns)


class DenseRows(Case):
    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(29, 19, sparse=self.sparse)
        self.last = nn.Linear(19, 13)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(29, (n, 3), generator=rng), torch.randn(n, 13, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rows(x).mean(1))


class SparseRows(DenseRows):
    """Return a sparse gradient."""

    sparse = True


@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
def test_sparse_gradients_are_reduced_as_dense_ones(ranks: Ranks, backend: str) -> None:
    out, _ = ranks.run(2, train_case, SparseRows, backend, STEPS, SAMPLES)[0]
    compare(out, train_reference(build(DenseRows), make_batches(DenseRows, STEPS, SAMPLES), adamw, world=2))


def thaw_the_second_base(model: LoRA, index: int) -> None:
    if index == 2:
        model.second.base.requires_grad_(True)


def freeze_and_thaw(model: LoRA, index: int) -> None:
    if index == 2:
        for name, param in model.named_parameters():
            param.requires_grad = name not in ("first.down", "second.up") and param.requires_grad
    if index == 4:
        model.first.requires_grad_(True)


@pytest.mark.parametrize(
    ("world_size", "backend", "change"),
    [
        *((world_size, EAGER, change) for world_size in (1, 3) for change in (thaw_the_second_base, freeze_and_thaw)),
        (2, "aot_eager", freeze_and_thaw),
    ],
)
def test_freezing_and_thawing_in_mid_training(
    ranks: Ranks, world_size: int, change: Callable[[Any, int], None], backend: str
) -> None:
    out, _ = ranks.run(world_size, train_case, LoRA, backend, STEPS, SAMPLES, sgd, before_batch=change)[0]
    model = build(LoRA)
    optimizer = sgd(model)
    batches = make_batches(LoRA, STEPS, SAMPLES)
    expected = train_plain(model, batches, optimizer, world=world_size, before_batch=change)
    compare(out, expected)
    assert {len(grads) for grads in expected.grads} != {4}


def number(model: Any, index: int) -> None:
    model.number = index


def loss_of_what_is_frozen_then(model: Any, batch: Batch) -> Tensor:
    """In every other step, as where a GAN's optimizer is toggled between a forward and its backward."""
    model.requires_grad_(True)
    loss = case_loss(model, batch)
    model.second.requires_grad_(model.number % 2 == 0)
    return loss


@pytest.mark.parametrize(("world_size", "backend"), [(1, EAGER), (2, EAGER), (2, "aot_eager")])
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(
    ranks: Ranks, world_size: int, backend: str
) -> None:
    options: Any = {"loss_fn": loss_of_what_is_frozen_then, "before_batch": number}
    out, _ = ranks.run(world_size, train_case, LoRA, backend, STEPS, SAMPLES, sgd, **options)[0]
    model = build(LoRA)
    expected = train_plain(model, make_batches(LoRA, STEPS, SAMPLES), sgd(model), world=world_size, **options)
    compare(out, expected)
    first = len(list(model.first.parameters()))
    assert [len(grads) for grads in expected.grads] == STEPS // 2 * [len(list(model.parameters())), first]


def frozen_costs() -> dict[str, Any]:
    model = build(LoRA)
    with engine_for(model, EAGER) as engine:
        before = whole_params(engine, model)
        train_sharded(engine, model, make_batches(LoRA, 2, SAMPLES), adamw(model))
        after = whole_params(engine, model)
        frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
        room = sum(r.layout.shard_numel for r in engine.sharder.live if r.param.requires_grad)
        return {
            "frozen": {name: (before[name], after[name]) for name in frozen},
            "gradients": (sum(flat.numel() for flat in engine.sharder.memory.gradients.flat.values()), room),
        }


def test_frozen_parameters_stay_and_have_no_gradient_memory(ranks: Ranks) -> None:
    out = ranks.run(2, frozen_costs)[0]
    assert sorted(out["frozen"]) == ["first.base.bias", "first.base.weight", "second.base.bias", "second.base.weight"]
    for name, (before, after) in out["frozen"].items():
        assert torch.equal(before, after), name
    assert out["gradients"][0] == out["gradients"][1]
