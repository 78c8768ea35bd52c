"""Hooks on gradients fire once per backward, with this rank's part of the reduced gradient, and may change it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import engine_of
from lightning_zero.sharding.refusals import plainly
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    INPUTS,
    RTOL,
    Regression,
    check_captured,
    close,
    global_losses,
    make_loader,
    make_trainer,
    whole_state,
)
from tests.ranks.pool import Ranks


class Hooked(Regression):
    """Hooks on the first layer before setup, on the last after it; the one between is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fired: list[tuple[str, tuple[int, ...]]] = []
        self.handles: list[Any] = []
        self.register("early", self.net[0].weight, self.net[0].bias)

    def on_fit_start(self) -> None:
        self.register("late", *list(self.parameters())[-2:])

    def register(self, when: str, weight: nn.Parameter, bias: nn.Parameter) -> None:
        def scale(grad: Tensor) -> Tensor:
            self.fired.append((f"{when} scale", tuple(grad.shape)))
            return grad * 0.5 + 0.01

        def only_look(grad: Tensor) -> None:
            self.fired.append((f"{when} look", tuple(grad.shape)))

        def clamp(param: Tensor) -> None:
            assert param.grad is not None
            self.fired.append((f"{when} clamp", tuple(param.grad.shape)))
            param.grad.clamp_(-0.05, 0.05)

        self.handles += [weight.register_hook(scale), weight.register_hook(only_look)]
        self.handles.append(bias.register_post_accumulate_grad_hook(clamp))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        engine = engine_of(self)
        for record in engine.sharder.live if engine is not None else ():
            begin, end = record.layout.range_of(engine.rank)
            with plainly():
                assert not record.param.grad.view(-1)[end - begin :].any(), "padding must stay zero"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Removed(Hooked):
    """All are removed half way."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 2:
            for handle in self.handles:
                handle.remove()


def _hooked(kind: str, make: Any, accumulate: int) -> dict[str, Any]:
    module, trainer = make(), make_trainer(kind, accumulate_grad_batches=accumulate)
    trainer.fit(module, make_loader(kind))
    check_captured(trainer)
    engine = engine_of(module)
    shards = {} if engine is None else {r.name: tuple(r.param.shape) for r in engine.sharder.live}
    out = {
        "values": (global_losses(kind, module), whole_state(module)),
        "fired": [name for name, _ in module.fired],
        "shapes": dict(module.fired),
        "shards": shards,
    }
    close(module)
    return out


def _hooked_under(make: Any, accumulate: int, *kinds: str) -> dict[str, Any]:
    return {kind: _hooked(kind, make, accumulate) for kind in kinds}


@pytest.mark.parametrize("make", [Hooked, Removed], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("world_size", "kind"), [(1, "eager"), (2, "eager"), (2, "compiled"), (2, "captured"), (3, "eager")]
)
def test_hooks_fire_once_with_the_shard_and_change_it(ranks: Ranks, world_size: int, kind: str, make: Any) -> None:
    for result in ranks.run(world_size, _hooked_under, make, 1, "single", kind):
        ours, single = result[kind], result["single"]
        assert sorted(ours["fired"]) == sorted(single["fired"])
        assert len(single["fired"]) == (6 * 4 if make is Hooked else 6 * 2)
        for when, index in (("early", 0), ("late", 4)):
            weight, bias = ours["shards"][f"net.{index}.weight"], ours["shards"][f"net.{index}.bias"]
            assert ours["shapes"][f"{when} scale"] == ours["shapes"][f"{when} look"] == weight
            assert ours["shapes"][f"{when} clamp"] == bias
        assert_close_relative(ours["values"], single["values"], 2 * RTOL)


@pytest.mark.parametrize("kind", ["eager", "compiled", "captured"])
def test_hooks_see_each_batchs_gradient_by_itself_while_accumulating(ranks: Ranks, kind: str) -> None:
    for result in ranks.run(2, _hooked_under, Hooked, 2, "single", kind):
        ours, single = result[kind], result["single"]
        assert sorted(ours["fired"]) == sorted(single["fired"])
        assert_close_relative(ours["values"], single["values"], 2 * RTOL)


def _unsharded() -> tuple[list[str], list[str], list[Tensor]]:
    module = Hooked()
    make_trainer("eager").fit(module, make_loader("eager"))
    expected = sorted({name for name, _ in module.fired})
    lightning_zero.unshard(module)
    module.fired.clear()
    module.zero_grad()
    module(torch.ones(2, INPUTS)).sum().backward()
    fired = sorted(name for name, _ in module.fired)
    for handle in module.handles:
        handle.remove()
    module.fired.clear()
    module(torch.ones(2, INPUTS)).sum().backward()
    return expected, fired, module.fired


def test_hooks_of_an_unsharded_module_are_autograds_again(ranks: Ranks) -> None:
    for expected, fired, after_removal in ranks.run(2, _unsharded):
        assert fired == expected
        assert len(fired) == 6
        assert not after_removal
