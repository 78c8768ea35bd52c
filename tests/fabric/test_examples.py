"""Train the examples on two ranks, load their files into plain modules, and name a rank that fails."""

import contextlib
import io
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_zero
from lightning_zero.engine import engine_of
from tests.helpers.command import python_path
from tests.helpers.ports import free_port
from tests.helpers.readme import snippet
from tests.ranks import nursery
from tests.ranks.pool import PRELOAD, REPO, Ranks


def run_example(name: str, out: str) -> str:
    """Run a program as a user does, except for its imports, and return its output."""
    if name == "plain_loop":
        dist.destroy_process_group()  # it makes its own
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, "--compile-backend", "aot_eager", "--out", out])
        left: dict[str, Any] = runpy.run_path(str(REPO / "examples" / f"{name}.py"), run_name="__main__")
    engine = engine_of(left["model"].module) if name == "fabric_loop" else left["engine"]
    assert engine.session.progress.metrics["graphs"] > 0
    engine.close()
    return printed.getvalue()


@pytest.mark.parametrize("name", ["fabric_loop", "plain_loop"])
def test_examples_train_and_their_files_are_plain(ranks: Ranks, name: str, tmp_path: Path) -> None:
    printed, nothing = ranks.run(2, run_example, name, str(tmp_path / "file.pt"))
    assert "step" not in nothing
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines]
    assert len(losses) == 4, printed
    assert losses[-1] < losses[0] / 4, printed
    file, x = torch.load(tmp_path / "file.pt"), torch.randn(1000, 8)
    model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    model.load_state_dict(file["model"])
    assert nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True)) < losses[0] / 4
    torch.optim.AdamW(model.parameters()).load_state_dict(file["optimizer"])
    assert file["step"] == 99


def run_snippet(name: str) -> int:
    """Use a backend without code generation, and return a model, batches and a device."""
    model: Any = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    batches = [torch.randn(3, 40) for _ in range(6)]
    names: dict[str, Any] = {"torch": torch, "model": model, "batches": batches, "device": torch.device("cpu")}
    names["strategy"] = lightning_zero.FabricZeroStrategy(compile_backend="aot_eager")
    text = snippet(name).replace('strategy="zero3_compile"', "strategy=strategy")
    text = text.replace("EngineConfig(", 'EngineConfig(compile_backend="aot_eager", ')
    text = text.replace("torch.distributed.init_process_group()", "")
    assert "aot_eager" in text or "strategy=strategy" in text
    exec(compile(text, f"the snippet {name!r} of README.md", "exec"), names)
    engine = engine_of(model)
    assert engine is not None
    state = torch.load("model.pt")["model"] if name == "fabric" else names["state"]
    nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)).load_state_dict(state, strict=engine.rank == 0)
    graphs = int(engine.session.progress.metrics["graphs"])
    engine.close()
    return graphs


@pytest.mark.parametrize("name", ["fabric", "engine"])
def test_snippets_of_the_readme_train(ranks: Ranks, name: str) -> None:
    assert all(ranks.run(2, run_snippet, name))


def test_an_exception_in_a_users_loop_is_told_to_the_other_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Start ranks one by one, so that no launcher ends the other rank first."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": python_path(), "GLOO_SOCKET_IFNAME": "lo", "FAILS": "1"}
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    started = []
    try:
        for rank, output in enumerate(outputs):
            environ = os.environ | common | {"LOCAL_RANK": str(rank)}
            parent = nursery.shared(rank, dict(os.environ | common), str(REPO), PRELOAD, 180.0)
            with output.open("wb") as out:
                started.append(parent.run("tests.fabric.failing", environ, str(tmp_path), out.fileno(), out.fileno()))
        statuses = [process.wait(90) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    first, second = (output.read_text() for output in outputs)
    assert all(statuses), first + second
    assert "[lightning_zero, rank 1] Rank 1 failed:" in second, second
    assert second.count("Traceback (most recent call last)") == 1, second
    assert "RankFailedError: Rank 1 failed: ZeroDivisionError: this rank's own" in first, first
