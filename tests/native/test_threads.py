"""Autograd's, users' and the main thread may use an executor concurrently.

ThreadSanitizer detects unlocked accesses: ``bash tests/native/sanitize.sh thread tests/native/test_threads.py``.
"""

import threading
import time
from collections.abc import Callable

import torch

from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from tests.helpers.options import config
from tests.native.sequences import deliver, new_twin, ops
from tests.ranks.pool import Ranks

SECONDS, LEAST = 1.0, 11  # at least so long, and so many times


def from_two_threads() -> int:
    """Return the number of gradients that arrived."""
    executor = Executor(Mesh.from_world(torch.device("cpu")), config(reduce_bucket_mb=1e-6))
    twins = [new_twin(executor, f"p{number}", torch.zeros(7)) for number in range(3)]
    spare = new_twin(executor, "spare", torch.zeros(7), trainable=False)
    parameters, weights, gradients = executor.parameters, executor.weights, executor.gradients
    asked: list[Callable[[], object]] = [
        executor.reset_counters,
        executor.counters,
        weights.shard_version,
        weights.user_write_count,
        gradients.completed_backwards,
        gradients.last_attached,
        gradients.defers,
        gradients.take_consensus_flag,
        lambda: gradients.set_consensus_flag(True),
        lambda: parameters.set_grad(spare.index, torch.zeros(spare.layout.shard_numel)),
        lambda: parameters.set_unsharded_cache(spare.index, None),
        lambda: parameters.set_deferred_gradient(spare.index, None, False),
        lambda: parameters.set_compute_shard(spare.index, torch.zeros(spare.layout.shard_numel, dtype=torch.bfloat16)),
    ]
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            for call in asked:
                call()

    other = threading.Thread(target=ask)
    other.start()
    end, count = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or count < LEAST:
        deliver([(torch.ones(7), twin.param) for twin in twins])
        ops.gather(twins[0].param, [7], torch.float32)
        count += 1
    over.set()
    other.join()
    for twin in twins:
        assert twin.param.grad is not None
        assert twin.param.grad[0].item() == count
    executor.close()
    return count


def test_two_threads_may_use_an_executor_at_once(ranks: Ranks) -> None:
    [count] = ranks.run(1, from_two_threads)
    assert count >= LEAST
