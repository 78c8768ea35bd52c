"""`offload=("optimizer", "parameters")`: whatever happens to master weights, training is the same to the last bit."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.errors import UnsupportedError
from tests.helpers.masters import ANEW, AWAY, BF16, check, train_both_ways
from tests.helpers.sharded import engine_for
from tests.ranks.pool import Ranks

CAPTURED = {"emulate_cuda_graph_step": True}
REPLAYED = CAPTURED | {"emulate_cuda_graph_model": True, "resident_mb": 1.0}


@pytest.mark.parametrize(
    ("world_size", "name", "options"),
    [
        (1, "AdamW", CAPTURED),
        pytest.param(2, "AdamW", REPLAYED, marks=pytest.mark.slow),
        pytest.param(2, "SGD", CAPTURED | {"ranks_per_host": 1, "replicate_over": "hosts"}, marks=pytest.mark.slow),
        # Copies add gradients up in the ranks' order; in what order a collective of three does depends on where they lie.
        pytest.param(3, "SGD", {"reduce_transport": "copy"}, marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_to_the_last_bit(
    ranks: Ranks, world_size: int, name: str, options: dict[str, Any]
) -> None:
    for here, away in ranks.run(world_size, train_both_ways, name, deadline=300, **options):
        check(here, away)
        assert away["captured"] == here["captured"] == ("emulate_cuda_graph_step" in options)
        if name == "AdamW" and not options.get("resident_mb"):
            # Copies are written by steps alone, but where somebody else has changed masters.
            anew = {step: names for step, names in enumerate(away["stale"]) if names}
            assert list(anew) == ANEW
            assert anew[9] == anew[10] == ["frozen.weight"], "others were stepped, and written, after the edit"


def refuse() -> list[str]:
    found = []
    cases: list[dict[str, Any]] = [
        {"offload": ("parameters",), "compute_dtype": BF16},
        AWAY | {"compute_dtype": BF16, "compile": False},
        AWAY,
        AWAY | {"compute_dtype": BF16, "gather_transport": "copy"},
        AWAY | {"compute_dtype": BF16, "ranks_per_host": 1},
    ]
    for options in cases:
        with pytest.raises(UnsupportedError) as caught, engine_for(nn.Linear(8, 8), **options):
            pass
        found.append(str(caught.value))
    with engine_for(nn.Linear(8, 8), compute_dtype=BF16, **AWAY) as engine:
        before = engine.config
        for offload in (("optimizer",), ()):
            with pytest.raises(UnsupportedError) as caught:
                engine.configure(type(before)(offload=offload, compute_dtype=BF16, tuning=before.tuning))
            found.append(str(caught.value))
    return found


def test_where_masters_cannot_leave_it_is_refused_with_what_to_do(ranks: Ranks) -> None:
    for state, eager, dtype, copy, hosts, *later in ranks.run(2, refuse):
        assert "Pass offload=('optimizer', 'parameters')." in state
        assert "Leave compile at True, or 'parameters' out." in eager
        assert "Pass precision='bf16-mixed' or '16-mixed'" in dtype
        assert "gather_transport='copy' is impossible here: master weights lie on the host" in copy
        assert "over several hosts (2 here)" in hosts
        for message in later:
            assert "was settled then" in message
            assert "lightning_zero.unshard(model) first" in message


def make_plain() -> list[bool]:
    with engine_for(nn.Linear(8, 8), compute_dtype=BF16, **AWAY) as engine:
        assert engine.module is not None
        before = engine.module.weight.detach().clone()
        engine.unshard()
        model = engine.sharder.live
    return [torch.equal(before, record.param.detach()) for record in model if record.name == "weight"]


def test_a_model_that_is_made_plain_has_its_weights_back(ranks: Ranks) -> None:
    assert ranks.run(2, make_plain) == [[True], [True]]
