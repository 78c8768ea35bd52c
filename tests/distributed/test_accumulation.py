"""Gradients of several micro-batches add up, also if settings change between them."""

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.models import Batch, BranchByStep, Case, NextToken, build
from tests.helpers.oracle import assert_close_relative
from tests.helpers.sharded import BACKENDS, EAGER, sgd, train_case, train_plain
from tests.ranks.pool import Ranks

SAMPLES = 12


class Lengths(NextToken):
    """Every second micro-batch is shorter and smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(29, 31)
        self.positions = nn.Parameter(torch.randn(8, 31))
        self.head = nn.Linear(31, 29)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        n, length = (n, 8) if seed % 2 == 0 else (n // 2, 5)
        drawn = torch.randint(29, (n, length + 1), generator=torch.Generator().manual_seed(seed))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(ids) + self.positions[: ids.size(1)]))


class Branches(BranchByStep):
    """Some parameters get no gradient in some micro-batches, and some get none in a whole window of two."""

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        x, _, y = BranchByStep.make_batch(seed, n)
        return x, (0, 1, 0, 0, 1, 1, 0, 1)[seed % 8], y


# Micro-batches, and how many make a step; the last window may be partial.
WINDOWS = {"twos": (8, 2), "fours": (8, 4), "twos and one": (7, 2), "fours and three": (7, 4)}
NONE, ZERO = True, False  # zero_grad(set_to_none=...)


@pytest.mark.parametrize(
    ("world_size", "backend", "case", "window", "set_to_none"),
    [
        (2, "aot_eager", Lengths, "fours", NONE),
        (2, "aot_eager", Branches, "fours and three", NONE),
        *((2, backend, Branches, "twos and one", ZERO) for backend in BACKENDS),
        *((2, EAGER, case, "twos", NONE) for case in (Lengths, Branches)),
        (1, EAGER, Branches, "twos and one", NONE),
        pytest.param(3, "aot_eager", Branches, "twos and one", NONE, marks=pytest.mark.slow),
        pytest.param(3, "aot_eager", Lengths, "fours and three", ZERO, marks=pytest.mark.slow),
    ],
)
@pytest.mark.exhaustive_variants(
    "3-aot_eager-Branches-twos and one-True",
    "3-aot_eager-Lengths-fours and three-False",
    "2-aot_eager-Branches-twos and one-False",
)
def test_micro_batches_add_up(
    ranks: Ranks, world_size: int, backend: str, case: type[Case], window: str, set_to_none: bool
) -> None:
    batches, accumulate = WINDOWS[window]
    options = {"accumulate": accumulate, "set_to_none": set_to_none, "clip_norm": 0.5}
    out, _ = ranks.run(world_size, train_case, case, backend, batches, SAMPLES, sgd, **options)[0]
    model = build(case)
    expected = train_plain(
        model, [case.make_batch(i, SAMPLES) for i in range(batches)], sgd(model), world=world_size, **options
    )
    assert len(expected.params) == -(-batches // accumulate)
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out.grads, expected.grads, 3e-6, what="grads")
    assert_close_relative(out.grad_norms, expected.grad_norms, 1e-6, what="norms")
    assert_close_relative(out.params, expected.params, 1e-6, what="params")
