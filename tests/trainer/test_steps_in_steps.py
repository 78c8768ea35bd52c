"""An optimizer step that a hook makes inside a step is that of plain torch, or is refused in words."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero import register_rule
from lightning_zero.optim.update_rules import rule_for
from tests.helpers.lightning_modules import Wide
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import RTOL, train
from tests.ranks.pool import Ranks

PLACES = ("register_step_pre_hook", "register_step_post_hook", "on_before_optimizer_step")


class StepsTwice(Wide):
    def __init__(self, place: str, manual: bool, subclass: bool = False) -> None:
        super().__init__()
        self.place, self.busy, self.subclass = place, False, subclass
        self.automatic_optimization = not manual

    def configure_optimizers(self) -> Any:
        optimizer: Any = (Subclass if self.subclass else torch.optim.AdamW)(self.parameters(), lr=1e-2, eps=1e-3)
        if self.place.startswith("register"):
            getattr(optimizer, self.place)(self.step_once_more)
        return optimizer

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.place.startswith("on"):
            self.step_once_more(optimizer)

    def step_once_more(self, optimizer: Any, *_: Any) -> None:
        if not self.busy:
            self.busy = True
            optimizer.step()
            self.busy = False

    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


class Subclass(torch.optim.AdamW):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


def outcomes(kinds: dict[str, tuple[str, dict[str, Any]]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, (kind, options) in kinds.items():
        for place in PLACES:
            for manual in (False, True):
                try:
                    found[name, place, manual] = train(kind, partial(StepsTwice, place, manual), **options)
                except Exception as error:
                    found[name, place, manual] = f"{type(error).__name__}: {error}"
    return found


def test_a_step_of_a_hook_is_a_second_step_of_plain_torch(ranks: Ranks) -> None:
    kinds: dict[str, Any] = {name: (name, {}) for name in ("single", "eager", "captured")}
    for found in ranks.run(2, outcomes, kinds, deadline=120):
        for place in PLACES:
            for manual in (False, True):
                for name in ("eager", "captured"):
                    expected = found["single", place, manual]
                    assert_close_relative(
                        found[name, place, manual], expected, 4 * RTOL, what=f"{name} {place} {manual}"
                    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_a_hook_that_shards_cannot_make_is_refused(ranks: Ranks, world_size: int) -> None:
    aliased = {"grad_aliasing": True, "precision": "bf16-mixed"}
    kinds: dict[str, Any] = {
        "aliased": ("compiled", aliased),
        "aliased, captured": ("compiled, captured", aliased),
        "offloaded": ("eager", {"offload": ("optimizer",)}),
        "rounded": ("eager", {"state_dtype": "8bit"}),
    }
    words = r"MisconfigurationException: AdamW\.step\(\) was called again inside a step, .*"
    for found in ranks.run(world_size, outcomes, kinds, deadline=120):
        for key, outcome in found.items():
            assert isinstance(outcome, str), f"{key}: nothing was raised"
            assert re.match(words + r"Set `self\.automatic_optimization = False`", outcome), f"{key}: {outcome}"


def calls_super() -> Any:
    plain = torch.optim.AdamW([torch.zeros(1)])  # torch calls hooks in the step of a class that has had an instance
    rule = rule_for(plain, plain.param_groups[0])
    with suppress(ValueError):  # the rank has it from an earlier call
        register_rule(Subclass, lambda group: rule)
    make = partial(StepsTwice, "", False, True)
    return [train(kind, make, **options) for kind, options in (("single", {}), ("eager", {"offload": ("optimizer",)}))]


def test_the_step_of_the_base_class_is_no_second_step(ranks: Ranks) -> None:
    for expected, found in ranks.run(2, calls_super):
        assert_close_relative(found, expected, 4 * RTOL)
