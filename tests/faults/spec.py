"""The training of a job, and its fault, as JSON in an environment variable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

VARIABLE = "LIGHTNING_ZERO_TESTS_JOB"  # read by tests.faults.script only


@dataclass(frozen=True)
class Fault:
    """
    Args:
        action: kind of the fault; a name of ``actions.ACTIONS``.
        point: where; a name of ``points.POINTS``.
        ranks: affected ranks.
        step: not before this many batches (minus one) have begun: 0 is the first batch, -1 everything before it.
            ``None``: as the point says. In a loader's worker: batches that this worker has loaded.
        seconds: how long ``sleep`` sleeps.
    """

    action: str
    point: str
    ranks: tuple[int, ...] = (1,)
    step: int | None = None
    seconds: float = 60.0


@dataclass(frozen=True)
class Training:
    """
    Args:
        strategy: ``"zero3"``; ``"aot_eager"``, compiled without code being generated; ``"zero3_compile"``.
        options: further arguments of the strategy.
        device: ``"cpu"`` or ``"cuda"``.
        steps: batches of the one epoch; a validation of two batches and a checkpoint follow.
        late: the model is built in ``configure_model``.
        workers: processes that load data.
        resume: from a checkpoint of an earlier run.
        emulate: behave as if compiled code were replayed, on any device.
        cold: nothing is in the cache of the C++ executor.
        catches: a batch for which there is no memory is tried again, half of it.
        timeout_s: of the strategy; ``None``: the default, 30 minutes.
        pause_s: how long each batch takes to load, on every rank.
        then: ``"validate"``, ``"test"`` or ``"predict"``: this stage follows ``fit``.
    """

    strategy: str = "zero3"
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    precision: str = "32-true"
    steps: int = 4
    accumulate: int = 1
    clip: float | None = 1.0
    validate: bool = True
    save: bool = True
    late: bool = False
    workers: int = 0
    resume: bool = False
    emulate: bool = False
    cold: bool = False
    catches: bool = False
    timeout_s: float | None = None
    pause_s: float = 0.0
    then: str = ""


@dataclass(frozen=True)
class Orders:
    """The settings of a rank.

    Args:
        home: where it writes.
        fault: the injected fault.
        meanwhile: the work of other ranks at that time, for which the fault waits.
        checkpoint: path from which ``resume`` resumes.
    """

    home: str
    training: Training
    fault: Fault | None = None
    meanwhile: Fault | None = None
    world: int = 2
    checkpoint: str = ""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Orders:
        read = json.loads(text)
        for name in ("fault", "meanwhile"):
            fault = read[name]
            read[name] = None if fault is None else Fault(**fault | {"ranks": tuple(fault["ranks"])})
        return cls(**read | {"training": Training(**read["training"])})
