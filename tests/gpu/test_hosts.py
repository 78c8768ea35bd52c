"""Two GPUs as two hosts, and four as two.

NCCL transfers weights and gradients between them, also inside CUDA graphs. The results are those of one host. Parts of
the exchange arrive while the first layers run.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.oracle import assert_close_relative
from tests.helpers.recut import expected, train_captured_at_once
from tests.helpers.replays import BY_COLLECTIVE, WAYS, train
from tests.helpers.sharded import engine_for, sgd
from tests.ranks.pool import Ranks

HOSTS: dict[str, dict[str, Any]] = {
    "a copy per host": {},
    "no copy per host": {"compute_shard_group": "all"},
    "reduced once per step": {"cross_host_reduce": "step"},
    "a replica on each": {"replicate_over": "hosts"},
    # A read before the arrival has the old values, and waits are real ones, in graphs, too.
    "a slow network": {"emulate_cross_host_gb_per_s": 2e-3},
}


def on_one_host_and_on_two(
    way: str, options: dict[str, Any], ranks_per_host: int, transports: dict[str, Any]
) -> list[Any]:
    device = f"cuda:{torch.cuda.current_device()}"
    chosen = transports | options | {"ranks_per_host": ranks_per_host}
    return [
        train(way, "aot_eager", device, cuda_graph_model=False, **transports),
        *(train(way, "aot_eager", device, cuda_graph_model=capture, **chosen) for capture in (False, True)),
    ]


def check(found: list[Any], way: str, copies: bool, exchange: bool = True) -> None:
    for (one_host, _), *two_hosts in found:
        for out, _ in two_hosts:
            assert_close_relative(out.losses, one_host.losses, 1e-3, what="losses")
            assert_close_relative(out.params, one_host.params, 1e-2, what="weights")  # gradients are bfloat16
        (_, run), (_, replayed) = two_hosts
        assert "replayed_graphs" not in run
        assert replayed["replayed_graphs"] >= WAYS[way].replays
        for counters in (run, replayed):
            assert ("gather_bytes_across" in counters) == exchange
            assert counters["reduce_bytes_across"] > 0
            if copies and exchange:
                assert counters["exchanged_parts"] >= 3 * counters["host_shard_refreshes"]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("way", ["clipped", "accumulated, kept until the step", "accumulated, stage 1"])
def test_two_hosts_train_as_one_host_does(ranks: Ranks, way: str, hosts: str) -> None:
    if hosts == "a slow network" and way != "clipped":
        pytest.skip("one way shows it")
    collectives = BY_COLLECTIVE["weights and gradients"]
    found = ranks.run(2, on_one_host_and_on_two, way, HOSTS[hosts], 1, collectives, backend="nccl", deadline=150)
    check(found, way, hosts != "no copy per host", hosts != "a replica on each")


@pytest.mark.gpu(4, apart=True)
@pytest.mark.parametrize("hosts", ["a copy per host", "a replica on each", "a slow network"])
@pytest.mark.parametrize("transports", ["copies", "collectives"])
def test_two_hosts_of_two_train_as_one_host_does(ranks: Ranks, transports: str, hosts: str) -> None:
    chosen = BY_COLLECTIVE["weights and gradients"] if transports == "collectives" else {}
    found = ranks.run(4, on_one_host_and_on_two, "clipped", HOSTS[hosts], 2, chosen, backend="nccl", deadline=200)
    check(found, "clipped", copies=True, exchange=hosts != "a replica on each")


def recut(options: dict[str, Any]) -> Any:
    return train_captured_at_once(f"cuda:{torch.cuda.current_device()}", cuda_graph_model=True, **options)


@pytest.mark.gpu(2)
def test_graphs_wait_for_no_part_that_there_is_no_more(ranks: Ranks) -> None:
    options = BY_COLLECTIVE["weights and gradients"] | HOSTS["a slow network"]
    reference = expected(2)
    for out, parts, dropped, replayed in ranks.run(2, recut, options, backend="nccl", deadline=100):
        assert_close_relative(out.losses, reference.losses, 1e-4, what="losses")
        assert_close_relative(out.params, reference.params, 1e-4, what="weights")
        assert parts[1] == parts[-1] < parts[0]
        assert len(dropped) == 1, dropped
        assert replayed > 0


def seconds_between_layers(gbs: float) -> tuple[float, float]:
    """Return the device's seconds from the first layer's forward to the last one's, and the least of the exchange."""
    device = f"cuda:{torch.cuda.current_device()}"
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    options: dict[str, Any] = {"ranks_per_host": 1, "gather_group_mb": 1.0, "cuda_graph_model": False}
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    @torch.library.custom_op(f"lightning_zero_tests::mark_{torch.cuda.current_device()}", mutates_args=())
    def mark(x: Tensor, number: int) -> Tensor:
        marks[number].record()
        return x.clone()

    mark.register_fake(lambda x, number: torch.empty_like(x))
    mark.register_autograd(lambda context, grad: (grad, None))

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number in (0, len(self.layers) - 1):
                    x = mark(x, min(number, 1))
            return x

    module = Marked()
    with engine_for(module, "aot_eager", device=device, emulate_cross_host_gb_per_s=gbs, **options) as engine:
        optimizer = sgd(module)
        for _ in range(4):
            with engine.train_step():
                loss = module(torch.ones(4, 512, device=device)).square().mean()
            loss.backward()
            with engine.optimizers.stepping(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        nbytes = sum(r.shard.nbytes for r in engine.sharder.live)  # of the other host, which arrive
    return marks[0].elapsed_time(marks[1]) / 1e3, nbytes / (1e9 * gbs)


@pytest.mark.gpu(2)
def test_the_first_layer_runs_before_the_last_part_has_come(ranks: Ranks) -> None:
    for between, exchange in ranks.run(2, seconds_between_layers, 0.05, backend="nccl", deadline=100):
        assert between > 0.5 * exchange, f"{between} s from the first layer to the last, and {exchange} s of transfers"
