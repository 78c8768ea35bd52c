"""The pool itself: the environment of a rank, the text of a failure, and the end of all processes."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import nursery, processes
from tests.ranks.pool import REPO, RankDeadline, RankFailure, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    # its own, as it gets killed
    with RankPool(2, grace=2.0, settle_deadline=3.0) as pool:
        yield pool


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all(map(processes.ended, pids)):
            return True
        time.sleep(0.05)
    return False


def add_up(weights: torch.Tensor, *, scale: int = 1) -> dict[str, Any]:
    total = weights * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "pid": os.getpid(), "total": total}


def strided() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3).t()


def fail_on(rank: int, word: str) -> None:
    print(f"about to see about {word}", flush=True)
    if dist.get_rank() == rank:
        raise ValueError(f"planted {word}")
    dist.barrier()


def fail_everywhere() -> None:
    raise ValueError(f"planted on {dist.get_rank()}")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def leave_collective_on(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.all_reduce(torch.ones(3), async_op=True)


def hang_with_children(folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(folder, f"{dist.get_rank()}").write_text(str(child.pid))
    if dist.get_rank() == 0:
        dist.barrier()
    # as Lightning's signal connector does when fit ends
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    while True:
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL, as a deadlock in C++ may


def litter() -> str:
    os.environ["LITTER"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch._dynamo.config.recompile_limit = 77
    torch.rand(3), random.random()
    Path("left-behind").touch()
    dist.new_group([0, 1])
    return os.getcwd()


def state() -> dict[str, Any]:
    return {
        "environ": "LITTER" in os.environ,
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "limit": torch._dynamo.config.recompile_limit,
        "random": (torch.rand(1).item(), random.random()),
        "files": os.listdir(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": torch.get_num_threads(),
    }


def replace_group() -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    return os.getpid()


def lightning_sees() -> tuple[bool, int, int, int]:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment as Elastic

    seen = Elastic()
    return Elastic.detect(), seen.world_size(), seen.global_rank(), seen.local_rank()


def test_results_come_by_rank_and_ranks_are_kept(pool: RankPool) -> None:
    first = pool.run(add_up, torch.tensor([1.0, 2.0]), scale=2)
    second = pool.run(add_up, torch.tensor([1.0, 2.0]))
    assert [result["rank"] for result in first] == [0, 1]
    assert torch.equal(first[1]["total"], torch.tensor([6.0, 12.0]))
    assert torch.equal(second[0]["total"], torch.tensor([3.0, 6.0]))
    assert [result["pid"] for result in first] == pool.pids
    assert [result["pid"] for result in second] == pool.pids


def test_strides_survive_the_trip(pool: RankPool) -> None:
    assert [result.stride() for result in pool.run(strided)] == [strided().stride()] * 2


def test_only_importable_functions_are_taken(pool: RankPool) -> None:
    with pytest.raises(TypeError, match="importable by name"):
        pool.run(lambda: None)


def test_failure_beside_a_waiting_rank_is_quick_and_named(pool: RankPool) -> None:
    pool.run(os.getpid)
    before = pool.pids
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        pool.run(fail_on, 1, "mishap")
    assert time.monotonic() - began < 30, "long before the deadline"
    text = str(caught.value)
    assert "fail_on failed first on rank 1" in text
    assert "==== rank 1 raised" in text
    assert "ValueError: planted mishap" in text
    assert "==== rank 0 gave no answer" in text
    assert "-- rank 0 stacks" in text
    assert "in barrier" in text  # rank 0's stack says where it waits
    assert "about to see about mishap" in text  # and the ranks' output is shown
    assert wait_until_gone(before)
    assert pool.run(os.getpid) == pool.pids != before


def test_pool_is_kept_when_all_ranks_stay_in_step(pool: RankPool) -> None:
    pool.run(os.getpid)
    before = pool.pids
    with pytest.raises(RankFailure) as caught:
        pool.run(fail_everywhere)
    assert "planted on 0" in str(caught.value)
    assert "planted on 1" in str(caught.value)
    assert pool.run(os.getpid) == before


def test_state_is_cleaned_between_calls(pool: RankPool) -> None:
    before = pool.run(state)
    first, second = pool.run(litter)
    assert first == second != os.getcwd()
    assert pool.run(state) == before
    assert before[0]["files"] == []
    assert before[0]["groups"] == 1
    assert before[0]["threads"] == 1


def test_call_may_replace_the_process_group(pool: RankPool) -> None:
    assert pool.run(replace_group) == pool.run(replace_group) == pool.pids
    assert pool.run(add_up, torch.ones(1))[0]["total"].item() == 3


def test_leftover_collective_is_noticed(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="unmatched collectives"):
        pool.run(leave_collective_on, 1)
    assert pool.pids == []


@pytest.mark.exhaustive
def test_what_leaves_a_collective_behind_may_be_the_last_call(pool: RankPool) -> None:
    pool.run(leave_collective_on, 1, last=True)
    assert not pool.pids
    assert [result["rank"] for result in pool.run(add_up, torch.ones(2))] == [0, 1]


def test_deadline_shows_stacks_and_leaves_nothing_running(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(os.getpid)
    before = pool.pids

    def since_children_run() -> float:
        return time.monotonic() if all((tmp_path / name).exists() for name in "01") else begun

    begun = time.monotonic()
    monkeypatch.setattr("tests.ranks.pool.time", SimpleNamespace(monotonic=since_children_run))
    with pytest.raises(RankDeadline) as caught:
        pool.run(hang_with_children, str(tmp_path), deadline=2.0)
    text = str(caught.value)
    assert "hang_with_children took longer than 2 s" in text
    assert text.count("in hang_with_children") == 2, text
    children = [int((tmp_path / name).read_text()) for name in "01"]
    assert wait_until_gone(before + children)
    assert pool.run(os.getpid) == pool.pids != before


def test_dead_rank_is_reported_and_replaced(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGSEGV") as caught:
        pool.run(die_on, 1)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert pool.pids == []


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from tests.ranks.pool import RankPool\n"
        "pool = RankPool(1, preload=('torch',))\n"
        "pool.run(os.getpid)\n"
        "print(*pool.pids, flush=True)\n"
        "pool._ask(('call', ('time', 'sleep'), pool_args, '/'), 0.2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    ).replace("pool_args", "__import__('tests.ranks.wire').ranks.wire.dumps(((600,), {}))")
    env = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}  # no process is left to clean up
    done = subprocess.run([sys.executable, "-c", script], env=env, cwd="/", capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert wait_until_gone([int(pid) for pid in done.stdout.split()])


def hash_of(word: str) -> int:
    return hash(word)


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="all processes hash alike")
def test_sets_have_another_order_on_each_rank(pool: RankPool) -> None:
    first, second = pool.run(hash_of, "word")
    assert first != second


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not forked")
def test_ranks_end_with_the_process_that_forked_them(tmp_path: Path) -> None:
    def start() -> nursery.Nursery:
        return nursery.shared(7, environ, str(tmp_path), (), 60.0)

    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    first = start()
    assert start() is first
    link, theirs = Pipe()
    with link, theirs, open(tmp_path / "log", "wb") as log:
        arguments = [str(tmp_path / "stacks"), "gloo", "60"]
        rank = first.fork(arguments, environ, str(tmp_path), theirs.fileno(), log.fileno())
        assert rank.poll() is None
        first.process.kill()
        assert wait_until_gone([rank.pid])
    assert rank.wait() == -signal.SIGKILL
    second = start()
    assert second is not first
    second.close()


def test_lightning_finds_the_rank_in_its_environment(ranks) -> None:  # noqa: ANN001
    assert ranks.run(2, lightning_sees) == [(True, 2, 0, 0), (True, 2, 1, 1)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not forked")
def test_ranks_end_with_the_connection_over_which_they_were_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nursery.SERVED, "put back afterwards")
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    nursery.serve({6: environ}, str(tmp_path), (), 60.0)
    [path] = Path(os.environ[nursery.SERVED]).glob("*.socket")
    links = [nursery.Connected.to(path, 60.0) for _ in range(2)]
    ranks, pipes = [], [Pipe() for _ in links]
    for link, (_, theirs) in zip(links, pipes, strict=True):
        with theirs, open(tmp_path / "log", "ab") as log:
            arguments = [str(tmp_path / "stacks"), "gloo", "60"]
            ranks.append(link.fork(arguments, environ, str(tmp_path), theirs.fileno(), log.fileno()))
    links[0].close()
    assert not links[0].usable
    assert wait_until_gone([ranks[0].pid])
    assert ranks[1].poll() is None
    served = nursery.shared(6, environ, str(tmp_path), (), 60.0)
    assert served.usable
    served.close()
    assert wait_until_gone([ranks[1].pid])


@pytest.mark.exhaustive
def test_a_run_of_tests_that_is_told_to_end_says_what_has_failed_so_far(tmp_path: Path) -> None:
    tests = tmp_path / "test_long.py"
    tests.write_text(
        "import time\n"
        "def test_first():\n    assert 1 == 2\n"
        "def test_second():\n    open('begun', 'w').close()\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tests)]
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    environ.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert run.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        run.terminate()
        out, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    assert "assert 1 == 2" in out
    assert "1 failed" in out
