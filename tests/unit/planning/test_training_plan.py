"""Text of a training plan."""

from lightning_zero.config import EngineConfig
from lightning_zero.planning.persistent_memory import persistent_bytes
from lightning_zero.planning.step_seconds import StepSeconds
from lightning_zero.planning.training_plan import MEANINGS, PassEstimates, TrainingPlan
from lightning_zero.profiling.devices import find_device

GIB = 2**30


def test_a_plan_prints_as_tables() -> None:
    roles = {"master_shard": GIB, "gradient": GIB // 2, "unsharded_cache": 0}
    passes = PassEstimates(None, None, "ValueError: no", 0)
    plan = TrainingPlan(find_device("H100"), 2, 1234567, roles, passes, 0, graphs=False)
    shown = str(plan)
    assert shown.splitlines()[0] == "Estimate for 1,234,567 parameters on each of 2 H100"
    sizes = {row[0]: row[1] for row in plan.memory_rows()}
    assert sizes == {
        "master shard": "1.00 GiB",
        "gradient": "512.0 MiB",
        "activations": "unknown",
        "peak": "1.50 GiB",
        "peak of first step": "unknown",
        "needed": "3.50 GiB",
        "available": "79.20 GiB",
    }
    assert all(name in shown and size in shown and meaning in shown for name, size, meaning in plan.memory_rows())
    assert all(meaning for _, _, meaning in plan.memory_rows()), "each row is explained"
    assert "The training fits: 75.70 GiB of each GPU stay free." in shown
    assert "ValueError: no" in shown
    assert plan.time_rows() == []
    timed = TrainingPlan(
        plan.device, 2, 1, roles, PassEstimates(None, None, "", 0), 0, False, StepSeconds(0.1, 0.02, 0.003)
    )
    assert [(name, time) for name, time, _ in timed.time_rows()] == [
        ("compute", "100.0 ms"),
        ("communication", "20.0 ms"),
        ("optimizer", "3.0 ms"),
        ("step", "123.0 ms"),
    ]


def test_every_role_has_a_meaning() -> None:
    config = EngineConfig()
    others = {"optimizer_state", "offload_buffers", "matrix_updates", "reduce_buckets", "buffers"}
    roles = {*persistent_bytes([], config), *others}
    assert roles == set(MEANINGS)


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    plan = TrainingPlan(
        find_device("L4"), 1, 1, {"master_shard": 30 * GIB}, PassEstimates(None, None, "", 0), 0, graphs=False
    )
    assert "does not fit: each GPU lacks 10.00 GiB" in plan.verdict()
