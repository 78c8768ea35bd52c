"""Test that each optimization of compilation is in use with this version of torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import python_path
from tests.ranks.pool import REPO

# Replaced functions that this training does not call, with the reason.
NOT_CALLED = {
    "torch._dynamo.variables.ListVariable.call_method": "no layer calls a list's method",
    "torch._dynamo.variables.TupleVariable.call_method": "no layer calls a tuple's method",
    "torch._dynamo.variables.TensorVariable.call_method": "no forward calls a tensor's method",
    "torch._dynamo.variables.functions.invoke_and_store_as_constant": "no function's result is a constant",
    "torch._dynamo.variables.nn_module.invoke_and_store_as_constant": "no function's result is a constant",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": "for plans, see tests/unit/planning",
    "torch.utils.checkpoint.CheckpointFunction": "for plans, see tests/unit/planning",
    "torch._inductor.runtime.triton_heuristics._persistent_reduction_configs": "only 8-bit state reduces rows",
    "torch.tensor": "for users' code, see tests/distributed/test_shards_in_sight.py",
    "torch.as_tensor": "for users' code",
    "torch.asarray": "for users' code",
    "torch.distributed._broadcast_coalesced": "for users' code",
    "torch._functorch.eager_transforms._wrap_tensor_for_grad": "for users' code",
}
OPTIMIZATION_COUNTS = {
    "layers traced": 1,
    "layers stamped": 5,
    "layers": 12,
    "layers differentiated": 2,
    "subgraphs": 81,
    "subgraphs compiled": 21,
}


@pytest.mark.slow
def test_every_optimization_is_in_use_as_with_every_supported_torch(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": python_path(), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.active_run"],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["active"] == OPTIMIZATION_COUNTS
    never = {name for name, count in found["calls"].items() if not count}
    # Collectives of torch before 2.13 are for users' code, too.
    expected = {name for name in found["calls"] if name in NOT_CALLED or name.startswith("torch.distributed.")}
    assert never == expected, "torch calls others now, or does not ask"
