"""On GPUs, loads have no more than a part of one weight on the host.

Optimizer state on the host is there once.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.large import WEIGHT, Few, fit
from tests.helpers.resident import MIB, Held, holding
from tests.helpers.trainer import close
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)

LAYERS = 12
WEIGHTS = LAYERS * WEIGHT
MARGIN = 32 * MIB  # with the driver's memory for copies from memory that is not pinned
RANKS = 2


class Large(Few):
    layers = LAYERS


def _fit(path: str | None, options: dict[str, Any]) -> tuple[Any, Any]:
    return fit(path, module=Large(), accelerator="gpu", **options)


def _all(home: str, options: dict[str, Any]) -> tuple[dict[str, Held], int]:
    found = {}
    for kind in ("full", "sharded"):
        chosen = options | {"state_dict_type": kind}
        module, trainer = _fit(None, chosen)
        with holding() as found[f"save {kind}"]:
            trainer.save_checkpoint(f"{home}/{kind}.ckpt")
        close(module)
        del module, trainer
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with holding() as found[f"load {kind}"]:
            module, trainer = _fit(f"{home}/{kind}.ckpt", chosen)
        taken = torch.cuda.max_memory_allocated() - before
        close(module)
    return found, taken


@pytest.mark.parametrize("offload", [(), ("optimizer",)], ids=["on devices", "on the host"])
def test_ranks_hold_what_is_promised(ranks: Ranks, tmp_path: Path, offload: tuple[str, ...]) -> None:
    options = {"offload": offload} if offload else {}
    state, beside = 2 * WEIGHTS // RANKS, WEIGHT + MARGIN
    results = ranks.run(RANKS, _all, str(tmp_path), options, backend="nccl", deadline=300)
    for rank, (found, taken) in enumerate(results):
        print(rank, found, taken // MIB)
        for kind in ("full", "sharded"):
            assert found[f"load {kind}"].own <= (state if offload else 0) + beside, found
        assert found["save full"].own <= (3 * WEIGHTS if rank == 0 else 0) + beside, found
        assert found["save sharded"].own <= beside, found
        assert taken <= WEIGHTS // RANKS + (0 if offload else state) + 2 * WEIGHT + MARGIN
