"""Run hooks on gradients as under DDP.

Those of ``register_hook`` see and change this rank's full gradient before it is reduced. Those of
``register_post_accumulate_grad_hook`` see this rank's shard of the reduced gradient once per backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.engine import engine_of
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from tests.helpers.options import arguments
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    OUTPUTS,
    RTOL,
    WIDTH,
    Regression,
    check_captured,
    close,
    global_losses,
    make_loader,
    make_trainer,
    seeded,
    whole_state,
)
from tests.ranks.pool import Ranks
from tests.ranks.report import RankFailure

Seen = tuple[str, tuple[int, ...], torch.dtype, bool, Tensor]  # whose, its shape, dtype, whether it is plain, a copy


class Hooked(Regression):
    """Weights that are used once, tied, and checkpointed, each with hooks that are not linear."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.first, self.second, self.third = (nn.Linear(OUTPUTS, OUTPUTS) for _ in range(3))
            self.conv = nn.Conv2d(1, OUTPUTS, (1, OUTPUTS)).to(memory_format=torch.channels_last)
        self.second.weight = self.first.weight
        self.seen: list[Seen] = []
        self.handles: dict[str, Any] = {}
        self.noise = torch.Generator()
        mask = torch.rand(self.net[2].weight.shape, generator=torch.Generator().manual_seed(7)) > 0.5
        self.hook("clamped", self.net[0].weight, lambda grad: grad.clamp(-0.01, 0.01))
        self.hook("looked at", self.net[0].bias, lambda grad: None)
        self.hook("masked", self.net[2].weight, lambda grad: grad * mask)
        self.hook("masked, rows zeroed", self.net[2].weight, lambda g: torch.cat([torch.zeros_like(g[:2]), g[2:]]))
        self.hook("noisy", self.net[2].bias, lambda g: g + 0.1 * torch.randn(g.shape, generator=self.noise))
        self.hook("tied", self.first.weight, lambda grad: grad / (grad.norm() + 0.1))
        self.hook("in place", self.third.weight, lambda grad: (grad[:3].zero_(), None)[1])
        self.hook("expanded", self.third.bias, lambda grad: grad.mean().expand_as(grad))
        self.hook("a convolution's", self.conv.weight, lambda grad: grad.sign() * 0.01)

    def hook(self, name: str, weight: Tensor, change: Callable[[Tensor], Tensor | None]) -> None:
        def see(grad: Tensor) -> Tensor | None:
            self.seen.append((name, tuple(grad.shape), grad.dtype, type(grad) is Tensor, grad.clone()))
            return change(grad)

        self.handles[name] = weight.register_hook(see)

    def on_train_start(self) -> None:
        self.noise.manual_seed(self.global_rank)
        self.hook("late", self.net[4].weight, lambda grad: grad.clamp(min=-0.005))
        self.hook("late, of parameters()", dict(self.named_parameters())["net.4.bias"], lambda grad: grad.abs())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            for name in ("clamped", "masked", "late"):
                self.handles[name].remove()

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        y = self.second(torch.tanh(checkpoint(self.first, y, use_reentrant=False)))
        y = y + checkpoint(self.third, y, use_reentrant=False)
        return y + self.conv(y.unflatten(0, (-1, 1)).unsqueeze(2)).flatten(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if "in a step" not in self.handles:
            self.hook("in a step", self.second.bias, lambda grad: grad.clamp(-0.01, 0.01))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Emulated(ZeroStrategy):
    def __init__(self) -> None:
        super().__init__(**arguments(compile_backend="aot_eager", emulate_cuda_graph_model=True))


KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "eager": {"kind": "eager"},
    "compiled": {"kind": "compiled"},
    "stage 1": {"kind": "compiled", "stage": 1},
    "stage 2": {"kind": "compiled", "stage": 2},
    "captured": {"kind": "captured"},
}


@contextmanager
def fitted(make: Callable[[], Any], how: str, steps: int = 6, **options: Any) -> Iterator[tuple[Any, pl.Trainer]]:
    chosen = dict(KINDS.get(how, {"kind": "compiled"}))
    if how == "emulated":
        chosen["strategy"] = Emulated()
    elif how == "inductor":
        chosen["strategy"] = ZeroStrategy()
    module, trainer = make(), make_trainer(**chosen, **options)
    try:
        trainer.fit(module, make_loader(chosen["kind"], steps))
        check_captured(trainer)
        yield module, trainer
    finally:
        close(module)


def _hooked(how: str, options: dict[str, Any]) -> dict[str, Any]:
    with fitted(Hooked, how, **options) as (module, trainer):
        return {"values": (module.losses, whole_state(module)), "seen": module.seen}


def _hooked_under(hows: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    return {how: _hooked(how, options) for how in hows}


def _compare(results: list[dict[str, Any]], rtol: float = 2 * RTOL) -> None:
    for result in results:
        expected = result.pop("ddp")
        for how, ours in result.items():
            for name in {one[0] for one in expected["seen"]}:
                mine, ddp = ([one for one in run["seen"] if one[0] == name] for run in (ours, expected))
                assert [one[1:4] for one in mine] == [one[1:4] for one in ddp], f"{how}: {name}"
                assert_close_relative([one[4] for one in mine], [one[4] for one in ddp], rtol, what=f"{how}: {name}")
            assert len(ours["seen"]) == len(expected["seen"])
            assert_close_relative(ours["values"], expected["values"], rtol, what=how)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.exhaustive_variants("1")
def test_hooks_see_and_change_what_they_do_under_ddp(ranks: Ranks, accumulate: int) -> None:
    hows = ("ddp", "eager", "compiled", "stage 1", "stage 2") if accumulate == 2 else ("ddp", "eager", "compiled")
    _compare(ranks.run(2, _hooked_under, hows, {"accumulate_grad_batches": accumulate}, deadline=240))


def test_hooks_of_three_ranks_see_what_they_do_under_ddp(ranks: Ranks) -> None:
    _compare(ranks.run(3, _hooked_under, ("ddp", "eager"), {}))


def test_hooks_see_float32_gradients_of_bf16_mixed_training(ranks: Ranks) -> None:
    results = ranks.run(2, _hooked_under, ("ddp", "eager", "compiled"), {"precision": "bf16-mixed"}, deadline=120)
    assert all(one[2] == torch.float32 for result in results for run in result.values() for one in run["seen"])
    _compare(results, rtol=3e-2)


@pytest.mark.exhaustive  # the others here compile with aot_eager
def test_hooks_of_code_that_inductor_compiles_see_what_they_do_under_ddp(ranks: Ranks) -> None:
    _compare(ranks.run(2, _hooked_under, ("ddp", "inductor"), {}, deadline=300))


class HookedLater(Regression):
    """Replay steps until hooks are registered, and again after their removal."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.replayed: list[int] = []
        self.handle: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        def clamp(grad: Tensor) -> Tensor:
            self.seen.append(self.global_step)
            return grad.clamp(-0.01, 0.01)

        if batch_idx == 8:
            self.handle = self.net[2].weight.register_hook(clamp)
        elif batch_idx == 11:
            self.handle.remove()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        engine = engine_of(self)
        counters = engine.executor.counters() if engine is not None else {}
        self.replayed.append(counters.get("replayed_graphs", 0))


def _hooked_later(how: str) -> dict[str, Any]:
    with fitted(HookedLater, how, 20) as (module, trainer):
        return {"values": (module.losses, whole_state(module)), "seen": module.seen, "replayed": module.replayed}


def _hooked_later_under(*hows: str) -> dict[str, Any]:
    return {how: _hooked_later(how) for how in hows}


def test_a_replayed_graph_is_run_while_hooks_see_its_gradients(ranks: Ranks) -> None:
    for result in ranks.run(2, _hooked_later_under, "ddp", "emulated", deadline=120):
        ours, ddp = result["emulated"], result["ddp"]
        assert ours["seen"] == ddp["seen"] == [8, 9, 10]
        assert_close_relative(ours["values"], ddp["values"], 2 * RTOL)
        replayed = ours["replayed"]
        assert 0 < replayed[7] == replayed[10] < replayed[-1], replayed


class HookedAfterForward(HookedLater):
    """Register a hook after a forward that was replayed."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 7:
            self.net[0].weight.register_hook(lambda grad: grad * 2)
        return loss

    def on_train_batch_start(self, *args: Any) -> None:
        pass


def _hooked_after_forward() -> None:
    with fitted(HookedAfterForward, "emulated", 20):
        pass


def test_a_hook_that_comes_after_a_replayed_forward_is_refused_by_name(ranks: Ranks) -> None:
    with pytest.raises(
        RankFailure, match=r"(?s)register_hook\(\) was called on net\.0\.weight between a forward .*CUDA graph"
    ):
        ranks.run(2, _hooked_after_forward, deadline=120)


class Fails(Regression):
    def __init__(self, bad: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.handle = self.net[2].weight.register_hook(bad)


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("a hook's own")


def _failing(kind: str) -> list[str]:
    messages = []
    for bad in (_fail, lambda grad: grad[:1], lambda grad: grad.double(), lambda grad: 1):
        module, trainer = Fails(bad), make_trainer(kind)
        with pytest.raises((ArithmeticError, RuntimeError, TypeError)) as raised:
            trainer.fit(module, make_loader(kind))
        messages.append(f"{type(raised.value).__name__}: {raised.value}")
        module.handle.remove()
        make_trainer(kind).fit(module, make_loader(kind))
        close(module)
    return messages


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.exhaustive_variants("compiled")
def test_a_hook_that_fails_ends_the_backward_with_its_error(ranks: Ranks, kind: str) -> None:
    for own, size, dtype, number in ranks.run(2, _failing, kind, deadline=120):
        assert own == "ArithmeticError: a hook's own"
        assert "has changed the size" in size
        assert "has changed the type" in dtype
        assert "TypeError" in number


class OnMeta(Regression):
    """Whose weights have hooks before they have values, or as they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        del self.net
        with torch.device("meta"):
            self.net = nn.Linear(INPUTS, OUTPUTS)
        self.net.weight.register_hook(lambda grad: self.seen.append("meta"))

    def configure_model(self) -> None:
        if not hasattr(self, "built"):
            self.built = nn.Linear(OUTPUTS, OUTPUTS)
            self.built.weight.register_hook(lambda grad: self.seen.append("built"))

    def forward(self, x: Tensor) -> Tensor:
        return self.built(self.net(x))


def _on_meta() -> list[str]:
    with fitted(OnMeta, "eager", 2) as (module, _):
        return sorted(module.seen)


def test_hooks_of_weights_without_values_are_kept(ranks: Ranks) -> None:
    assert ranks.run(2, _on_meta) == [["built"] * 2 + ["meta"] * 2] * 2


class HookedAfterwards(Regression):
    """By hooks that see reduced gradients, on the first layer before setup, on the last after it."""

    def __init__(self) -> None:
        super().__init__()
        self.fired: list[tuple[str, tuple[int, ...]]] = []
        self.handles: list[Any] = []
        self.register("early", self.net[0].weight)

    def on_fit_start(self) -> None:
        self.register("late", list(self.parameters())[-2])

    def register(self, when: str, param: nn.Parameter) -> None:
        def clamp(param: Tensor) -> None:
            assert param.grad is not None
            with no_shard_dispatch():
                self.fired.append((when, tuple(param.grad.shape)))
            param.grad.clamp_(-0.05, 0.05)

        self.handles.append(param.register_post_accumulate_grad_hook(clamp))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        engine = engine_of(self)
        for record in engine.sharder.live if engine is not None else ():
            begin, end = record.layout.shard_range(engine.rank)
            with no_shard_dispatch():
                assert not record.param.grad.view(-1)[end - begin :].any(), "padding must stay zero"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Removed(HookedAfterwards):
    """All are removed half way."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 2:
            for handle in self.handles:
                handle.remove()


def _hooked_afterwards(kind: str, make: Any, accumulate: int) -> dict[str, Any]:
    module, trainer = make(), make_trainer(kind, accumulate_grad_batches=accumulate)
    trainer.fit(module, make_loader(kind))
    check_captured(trainer)
    engine = engine_of(module)
    shards = {} if engine is None else {r.name: r.layout.visible_shape for r in engine.sharder.live}
    out = {
        "values": (global_losses(kind, module), whole_state(module)),
        "fired": [name for name, _ in module.fired],
        "shapes": dict(module.fired),
        "shards": shards,
    }
    close(module)
    return out


def _hooked_afterwards_under(make: Any, accumulate: int, *kinds: str) -> dict[str, Any]:
    return {kind: _hooked_afterwards(kind, make, accumulate) for kind in kinds}


@pytest.mark.parametrize("make", [HookedAfterwards, Removed], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("world_size", "kind"), [(1, "eager"), (2, "eager"), (2, "compiled"), (2, "captured"), (3, "eager")]
)
def test_later_hooks_fire_once_with_the_shard_and_change_it(
    ranks: Ranks, world_size: int, kind: str, make: Any
) -> None:
    for result in ranks.run(world_size, _hooked_afterwards_under, make, 1, "single", kind):
        ours, single = result[kind], result["single"]
        assert sorted(ours["fired"]) == sorted(single["fired"])
        assert len(single["fired"]) == (2 * 4 if make is HookedAfterwards else 2 * 2)
        assert ours["shapes"] == {"early": ours["shards"]["net.0.weight"], "late": ours["shards"]["net.4.weight"]}
        assert_close_relative(ours["values"], single["values"], 2 * RTOL)


@pytest.mark.parametrize("kind", ["eager", "compiled", "captured"])
def test_later_hooks_see_what_is_accumulated_in_each_micro_batch(ranks: Ranks, kind: str) -> None:
    for result in ranks.run(2, _hooked_afterwards_under, HookedAfterwards, 2, "single", kind):
        ours, single = result[kind], result["single"]
        assert sorted(ours["fired"]) == sorted(single["fired"])
        assert_close_relative(ours["values"], single["values"], 2 * RTOL)


class HookedTwice(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.fired: list[str] = []
        weight = self.net[0].weight
        self.handles = [
            weight.register_hook(lambda grad: self.fired.append(f"a gradient {tuple(grad.shape)}")),
            weight.register_post_accumulate_grad_hook(lambda param: self.fired.append("a parameter")),
        ]


def _unsharded() -> tuple[list[str], list[str], list[str]]:
    module = HookedTwice()
    make_trainer("eager").fit(module, make_loader("eager", 1))
    expected = list(module.fired)
    lightning_zero.unshard(module)
    module.fired.clear()
    module.zero_grad()
    module(torch.ones(2, INPUTS)).sum().backward()
    fired = list(module.fired)
    for handle in module.handles:
        handle.remove()
    module.fired.clear()
    module(torch.ones(2, INPUTS)).sum().backward()
    return expected, fired, module.fired


def test_hooks_of_an_unsharded_module_are_autograds_again(ranks: Ranks) -> None:
    for expected, fired, after_removal in ranks.run(2, _unsharded):
        assert fired == expected == [f"a gradient {(WIDTH, INPUTS)}", "a parameter"]
        assert not after_removal
