"""Numbers of two trainings, for the tests of the report."""

from __future__ import annotations

from dataclasses import replace

from lightning_zero.profiling.device_gauges import DeviceMemory
from lightning_zero.report.step_recorder import StepTimes
from lightning_zero.report.training_summary import ROLE_NAMES, TrainingNumbers

GIB = 2**30
TIMES = StepTimes(
    {"forward": 0.0612, "backward": 0.1284, "optimizer": 0.0091, "between": 0.0012}, 50, 0.19, 1234.5, batches=4
)
ON_GPU = TrainingNumbers(
    "VisionTransformerWithAVeryLongNameForAModule",
    12000,
    "NVIDIA H200",
    8,
    3,
    "bfloat16",
    TIMES,
    {role: (number + 1) * GIB for number, role in enumerate(ROLE_NAMES)},
    {"between": 15 * GIB, "forward": 31 * GIB, "backward": 18 * GIB, "optimizer": 15 * GIB},
    DeviceMemory(140 * GIB, 2 * GIB, 45 * GIB, 40 * GIB, 15 * GIB),
    exposed_estimated_s=0.0213,
    not_captured={"forward_backward": "", "optimizer_step": ""},
)
ON_CPU = TrainingNumbers(
    "Tiny<1>",
    4,
    "CPU",
    2,
    3,
    "float32",
    replace(TIMES, batches=1),
    {"master_shard": 3 * 2**20, "gradient": 2**20},
    {"between": 700 * 2**20, "forward": 701 * 2**20},
    exposed_unknown="links are not measured on 'cpu'",
)
