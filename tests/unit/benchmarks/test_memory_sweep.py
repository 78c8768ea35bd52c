"""A sweep of options in addition to ``memory=``: the tried ones, and the best."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GIB = 2**30


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "benchmarks" / "memory_sweep.py"
    spec = importlib.util.spec_from_file_location("memory_sweep", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(ms: float, gib: float, **more: Any) -> dict[str, Any]:
    return {
        "ms": ms,
        "reserved_steady": (gib - 2) * GIB,
        "others": 2 * GIB,
        "device": (gib + 1) * GIB,
        "first_steps": [],
    } | more


def test_every_budget_is_tried_with_every_way_to_offload(sweep: ModuleType) -> None:
    found = sweep.by_hand([0.5, 1.0], ["", "optimizer+activations"])
    assert [(one["activation_memory_budget"], one["offload"]) for one in found] == [
        (1.0, ()),
        (0.5, ()),
        (1.0, ("optimizer", "activations")),
        (0.5, ("optimizer", "activations")),
    ]
    assert '--option=offload=["optimizer", "activations"]' in sweep.command("t5_base", found[-1], None, 12)
    buffered = sweep.by_hand([0.5], ["", "optimizer"], [256, 8000])
    assert [one.get("tuning.offload_buffer_mb") for one in buffered] == [None, 8000, 256]
    assert sweep.command("t5_base", {}, 14.0, 12)[-1] == "--memory=14.0"


def test_the_best_is_the_fastest_that_held_the_limit(sweep: ModuleType) -> None:
    chosen = {"chosen": {"activation_memory_budget": 0.5}, "fits": True}
    rows = [sweep.row({"memory": 32}, measured(105, 31.9, chosen=chosen), 32)]
    rows += [sweep.row({"n": n}, measured(ms, gib), 32) for n, (ms, gib) in enumerate([(90, 33), (100, 32), (110, 30)])]
    rows.append(sweep.row({"n": 3}, None, 32))
    found = sweep.verdict(rows)
    assert found["best"]["options"] == {"n": 1}
    assert (found["ratio"], found["tried"], found["held"]) == (1.05, 4, 2)
    assert found["planned"]["fits"]
    assert sweep.verdict(rows[:2])["ratio"] is None, "nothing by hand held it"
    assert sweep.verdict([sweep.row({}, None, 32), *rows[1:]])["ratio"] is None


def test_a_training_that_is_cut_off_counts_with_what_it_said_last(sweep: ModuleType) -> None:
    says = """echo '{"ms": 1}'; echo '{"ms": 2}'; """
    assert sweep.trained(["sh", "-c", says + "sleep 600"], 3.0) == {"ms": 2}
    assert sweep.trained([sys.executable, "-c", "raise SystemExit(1)"], 30.0) is None
