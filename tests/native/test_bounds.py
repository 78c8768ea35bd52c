"""The executor checks memory and numbers from Python at once, since it reads them by address later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.native.watchdog import Watchdog
from tests.helpers.options import config
from tests.native.sequences import new_twin
from tests.ranks.pool import Ranks

CPU = torch.device("cpu")


def refused() -> dict[str, str]:
    """Return the errors of calls with too little memory, by name."""
    mesh = Mesh.from_world(CPU)
    executor = Executor(mesh, config())
    twin = new_twin(executor, "p0", torch.zeros(40))
    transport, size = executor.transport._native, executor.world_size
    numel, unit = twin.layout.shard_numel, executor.transport.staging_unit

    def of_each(numel: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(numel, dtype=dtype) for _ in range(size)]

    calls: dict[str, Callable[[], Any]] = {
        "copies": lambda: executor.parameters.set_peer_compute_shards(twin.index, of_each(numel - 1, torch.bfloat16)),
        "strided copies": lambda: executor.parameters.set_peer_compute_shards(
            twin.index, [copy[::2] for copy in of_each(2 * numel, torch.bfloat16)]
        ),
        "no turn": lambda: transport.set_epoch_lock(of_each(0, torch.int64)),
        "no staging": lambda: transport.set_staging(of_each(0, torch.uint8), mesh.gather_group.group_name, 1000),
        "another staging": lambda: transport.set_staging(
            [torch.zeros((rank + 1) * unit, dtype=torch.uint8) for rank in range(size)],
            mesh.gather_group.group_name,
            1000,
        ),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        found[name] = str(caught.value)
    executor.close()
    return found


def test_memory_that_is_too_small_is_refused(ranks: Ranks) -> None:
    for found in ranks.run(2, refused):
        assert all("INTERNAL ASSERT FAILED" in message for message in found.values()), found


def wrong_ranks() -> tuple[str, str]:
    mesh = Mesh.from_world(CPU)
    watchdog = Watchdog(mesh, 60.0)
    with pytest.raises(ValueError, match="no sequence 9") as sequence:
        watchdog.native.begin_wait(9, "nothing")
    with pytest.raises(ValueError, match="hosts") as hosts:
        torch.classes.lightning_zero.Watchdog(mesh.control_group.group_name, 60.0, 60.0, [0])
    watchdog.native.close()
    return str(sequence.value), str(hosts.value)


def test_a_watchdog_refuses_ranks_and_sequences_that_are_not_there(ranks: Ranks) -> None:
    for sequence, hosts in ranks.run(2, wrong_ranks):
        assert "there is no sequence 9 of collectives" in sequence
        assert "1 hosts were named for 2 ranks" in hosts
