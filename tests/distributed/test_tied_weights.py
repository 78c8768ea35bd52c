"""One parameter read more than once, in one graph, in several, by several calls, by several backward passes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models import Batch, Case, TiedLayer, build, make_batches
from tests.helpers.oracle import assert_close_relative, train_reference
from tests.helpers.sharded import BACKENDS, EAGER, adamw, case_loss, sgd, train_case, train_plain
from tests.ranks.pool import Ranks

STEPS, SAMPLES = 6, 12


class EqualUses(Case):
    """Three reads of one weight whose gradients are equal, tensor by tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(19, 25)
        self.one, self.two = nn.Linear(25, 23), nn.Linear(25, 23, bias=False)
        self.two.weight = self.one.weight

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 19, generator=rng), torch.randn(n, 23, generator=rng)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.one(x) + self.two(x) + F.linear(x, self.one.weight)


@pytest.mark.parametrize(
    ("world_size", "case", "backend"),
    [
        (2, EqualUses, EAGER),
        (2, EqualUses, "aot_eager"),
        (1, TiedLayer, EAGER),
        (2, TiedLayer, "aot_eager"),
        (3, TiedLayer, EAGER),
        (1, "TiedAcrossBreak", EAGER),
        (2, "TiedAcrossBreak", EAGER),
        pytest.param(3, "TiedAcrossBreak", "aot_eager", marks=pytest.mark.slow),
        (1, "CalledTwice", EAGER),
        (2, "CalledTwice", "aot_eager"),
        (3, "CalledTwice", EAGER),
    ],
)
@pytest.mark.exhaustive_variants("3-TiedAcrossBreak-aot_eager", "3-CalledTwice-eager")
def test_tied_parameters_train_as_in_one_process(
    ranks: Ranks, world_size: int, case: str | type[Case], backend: str
) -> None:
    out, _ = ranks.run(world_size, train_case, case, backend, STEPS, SAMPLES, sgd, clip_norm=0.5)[0]
    expected = train_reference(build(case), make_batches(case, STEPS, SAMPLES), sgd, world=world_size, clip_norm=0.5)
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out.grads, expected.grads, 3e-6, what="grads")
    assert_close_relative(out.grad_norms, expected.grad_norms, 1e-6, what="norms")
    assert_close_relative(out.params, expected.params, 1e-6, what="params")


class TwoHeads(Case):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(19, 25), nn.Tanh())
        self.one = nn.Linear(25, 23)
        self.two = nn.Linear(25, 23)

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 19, generator=rng), torch.randn(n, 23, generator=rng)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.one(hidden), self.two(hidden)


def two_losses_of_one_forward(model: TwoHeads, batch: Batch) -> list[Tensor]:
    one, two = model(batch[0])
    return [F.mse_loss(one, batch[1]), F.l1_loss(two, batch[1])]


def two_losses_of_two_forwards(model: TwoHeads, batch: Batch) -> list[Tensor]:
    return [F.mse_loss(model(batch[0])[0], batch[1]), F.l1_loss(model(batch[0] + 1)[1], batch[1])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("losses", [two_losses_of_one_forward, two_losses_of_two_forwards])
@pytest.mark.parametrize("world_size", [1, 3], ids="W={}".format)
@pytest.mark.exhaustive_variants("W=3-two_losses_of_two_forwards-aot_eager")
def test_two_backward_passes_in_one_step_add_up(ranks: Ranks, world_size: int, losses: object, backend: str) -> None:
    retain = losses is two_losses_of_one_forward
    out, _ = ranks.run(
        world_size, train_case, TwoHeads, backend, STEPS, SAMPLES, sgd, loss_fn=losses, retain_graph=retain
    )[0]
    model = build(TwoHeads)
    expected = train_plain(model, make_batches(TwoHeads, STEPS, SAMPLES), sgd(model), losses, world=world_size)
    for what in ("losses", "grads", "grad_norms", "params"):
        assert_close_relative(getattr(out, what), getattr(expected, what), 1e-6, what=what)


class LateSurprise(Case):
    """From the third step on, a second graph reads a weight, and its backward runs after all other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(19, 19)
        self.others = nn.Sequential(nn.Linear(19, 19), nn.Tanh(), nn.Linear(19, 19))

    @staticmethod
    def make_batch(seed: int, n: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return torch.randn(n, 19, generator=rng), seed, torch.randn(n, 19, generator=rng)

    def forward(self, x: Tensor, step: int) -> Tensor:
        if step >= 2:
            x = torch.tanh(self.shared(x))
        torch._dynamo.graph_break()
        x = self.others(x)
        torch._dynamo.graph_break()
        return self.shared(x)


@pytest.mark.parametrize(("world_size", "backend"), [(1, EAGER), (2, "aot_eager"), (3, EAGER)])
@pytest.mark.parametrize("case", [LateSurprise])
@pytest.mark.exhaustive_variants("LateSurprise-1-eager")
def test_a_gradient_that_arrives_after_its_bucket_has_left_is_not_lost(
    ranks: Ranks, world_size: int, case: type[Case], backend: str
) -> None:
    options = {"reduce_bucket_mb": 0.0003}  # a bucket for each parameter
    out, counters = ranks.run(
        world_size, train_case, case, backend, STEPS, SAMPLES, engine_options=options, loss_fn=case_loss
    )[0]
    assert counters["late_flushes"] > 0
    expected = train_reference(build(case), make_batches(case, STEPS, SAMPLES), adamw, world=world_size)
    assert_close_relative(out.losses, expected.losses, 1e-6, what="losses")
    assert_close_relative(out.grads, expected.grads, 3e-6, what="grads")
    assert_close_relative(out.params, expected.params, 1e-6, atol=2e-8, what="params")
