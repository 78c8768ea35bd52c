"""Two GPUs as two hosts: weights come, and gradients go, across them by NCCL, inside CUDA graphs too, and what is
trained is what one host of two trains."""

from typing import Any

import pytest
import torch

from tests.helpers.oracle import assert_close_relative
from tests.helpers.replays import BY_COLLECTIVE, WAYS, train
from tests.ranks.pool import Ranks

pytestmark = pytest.mark.gpu(2)

HOSTS: dict[str, dict[str, Any]] = {
    "a copy per host": {},
    "no copy per host": {"shard_compute_copy": "all"},
    "reduced once per step": {"reduce_across": "step"},
}


def on_one_host_and_on_two(way: str, options: dict[str, Any]) -> list[Any]:
    device = f"cuda:{torch.cuda.current_device()}"
    collectives = BY_COLLECTIVE["weights and gradients"]
    return [
        train(way, "aot_eager", device, cuda_graph_model=False, **collectives),
        *(
            train(way, "aot_eager", device, cuda_graph_model=capture, **collectives | options | {"ranks_per_host": 1})
            for capture in (False, True)
        ),
    ]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("way", ["clipped", "accumulated, kept until the step", "accumulated, stage 1"])
def test_two_hosts_train_as_one_host_does(ranks: Ranks, way: str, hosts: str) -> None:
    found = ranks.run(2, on_one_host_and_on_two, way, HOSTS[hosts], backend="nccl", deadline=150)
    for (one_host, _), *two_hosts in found:
        for out, _ in two_hosts:
            assert_close_relative(out.losses, one_host.losses, 1e-3, what="losses")
            assert_close_relative(out.params, one_host.params, 1e-2, what="weights")  # gradients are bfloat16
        (_, run), (_, replayed) = two_hosts
        assert "replayed_graphs" not in run
        assert replayed["replayed_graphs"] >= WAYS[way].replays
        for counters in (run, replayed):
            assert counters["gather_bytes_across"] > 0
            assert counters["reduce_bytes_across"] > 0
