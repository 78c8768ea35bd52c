"""Compare manual optimization with a single device."""

from typing import Any

import pytest

from tests.helpers.lightning_modules import GAN, Accumulating
from tests.helpers.oracle import assert_close_relative
from tests.helpers.trainer import (
    RTOL,
    fitted,
    global_losses,
    is_ours,
    whole_state,
)
from tests.ranks.pool import Ranks


class Alternating(GAN):
    def __init__(self) -> None:
        super().__init__(alternate=True)


def _train(kind: str, make: Any) -> dict[str, Any]:
    with fitted(kind, make, steps=6) as (module, trainer):
        if is_ours(kind):
            optimizers = [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        else:
            optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        return {
            "losses": global_losses(kind, module),
            "state": whole_state(module),
            "optimizers": [o["state"] for o in optimizers if o],
            "steps": trainer.global_step,
            "toggled": getattr(module, "without_grad", None),
            "trainable": [param.requires_grad for param in module.parameters()],
        }


def _train_under(make: Any, *kinds: str) -> dict[str, dict[str, Any]]:
    return {kind: _train(kind, make) for kind in kinds}


@pytest.mark.parametrize(
    ("make", "world_size"),
    [(make, world_size) for make in (GAN, Alternating, Accumulating) for world_size in (2, 3)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.exhaustive_variants("Accumulating-2")
def test_manual_optimization_equals_a_single_device(ranks: Ranks, world_size: int, make: Any) -> None:
    kinds = ("eager",) if world_size == 3 else ("captured",) if make is Alternating else ("compiled", "captured")
    results = ranks.run(world_size, _train_under, make, "single", *kinds, deadline=90)
    for rank, result in enumerate(results):
        single = result["single"]
        for kind in kinds:
            ours = result[kind]
            for key in ("losses", "state"):
                assert_close_relative(ours[key], single[key], 2 * RTOL, what=f"{kind} {key} on rank {rank}")
            if rank == 0:
                assert_close_relative(ours["optimizers"], single["optimizers"], 1e-5, what=f"{kind} optimizer state")
            assert ours["steps"] == single["steps"]
            assert ours["toggled"] == single["toggled"]
            assert ours["trainable"] == single["trainable"] == [True] * len(ours["trainable"])
        assert single["toggled"] is None or not any(single["toggled"])
