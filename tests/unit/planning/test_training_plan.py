"""Text of a training plan."""

from lightning_zero.planning.step_seconds import StepSeconds
from lightning_zero.planning.training_plan import PassEstimates, TrainingPlan
from lightning_zero.profiling.devices import find_device

GIB = 2**30


def test_a_plan_prints_as_tables() -> None:
    roles = {"master_shard": GIB, "gradient": GIB // 2, "resident_weight": 0}
    passes = PassEstimates(None, None, "ValueError: no", 0)
    plan = TrainingPlan(find_device("H100"), 2, 1234567, roles, passes, 0, graphs=False)
    assert str(plan).splitlines() == [
        "Estimated, for each of 2 x H100:",
        "  parameters             1,234,567",
        "  master shard (GiB)     1.00",
        "  gradient (GiB)         0.50",
        "  transient (GiB)        not known",
        "  peak (GiB)             1.50",
        "  first step peak (GiB)  not known",
        "  on device (GiB)        3.50",
        "  device memory (GiB)    79.20",
        "  fits                   yes",
        "Not all could be traced: ValueError: no",
    ]
    timed = TrainingPlan(
        plan.device, 2, 1, roles, PassEstimates(None, None, "", 0), 0, False, StepSeconds(0.1, 0.02, 0.003)
    )
    assert str(timed).splitlines()[-5:] == [
        "ms of a step:",
        "  compute    100.0",
        "  exposed    20.0",
        "  optimizer  3.0",
        "  total      123.0",
    ]
