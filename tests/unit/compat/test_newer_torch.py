"""With an untested newer torch training is right, or an error says so."""

import os
import subprocess
import sys

import pytest

from tests.helpers.command import python_path
from tests.ranks.pool import REPO


def table(*names: str, timeout: float) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "tests.helpers.newer_torch", *names]
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_a_missing_or_changed_name_costs_an_optimization_or_is_named() -> None:
    optional, compiler, eager, changed = (
        "torch._functorch.partitioners.fx_graph_cse",
        "torch._dynamo.backends.common.aot_autograd",
        "torch.distributed.distributed_c10d._get_default_store",
        "+torch._functorch.partitioners._must_be_in_backward",  # takes one argument more
    )
    done = table(optional, compiler, eager, changed, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[2:-1]] for row in done.stdout.splitlines()[2:]}
    assert rows[optional] == ["right", "right", "right", "the partitioner copies fewer joint graphs"]
    assert rows[compiler][:3] == ["right", "right", "clear error"]
    assert rows[eager][:3] == ["right", "clear error", "clear error"]
    assert rows[changed] == rows[optional]


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [(), ("--changed",)], ids=["missing", "changed"])
def test_each_name_may_be_missing_or_changed(names: tuple[str, ...]) -> None:
    done = table(*names, timeout=3600)
    assert done.returncode == 0, done.stdout
