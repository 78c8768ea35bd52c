"""The faults that are tried. ``CASES`` need no GPU; ``GPU_CASES`` need two, some four."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from tests.faults.points import POINTS
from tests.faults.spec import Fault, Training
from tests.faults.verdict import LIMIT_S, Case

__all__ = ["CASES", "GPU_CASES"]

_OF_FAULT = {field.name for field in fields(Fault)}
_OF_CASE = {field.name for field in fields(Case)}


def case(action: str, point: str, **choices: Any) -> Case:
    """``choices``: fields of ``Fault``, ``Case`` and ``Training``; the point's own needs are met."""
    needed = dict(POINTS[point].training)
    fault = {key: choices.pop(key) for key in list(choices) if key in _OF_FAULT}
    case = {key: choices.pop(key) for key in list(choices) if key in _OF_CASE}
    if POINTS[point].ranks is not None:
        fault.setdefault("ranks", POINTS[point].ranks)
    return Case(Fault(action, point, **fault), Training(**needed | choices), **case)


NAMED_S = 30.0 + 5.0  # who waits says after 30 s for whom
WAITS_S = 40.0  # a hanging rank is only ended by the timeout; that of these jobs
AFTER_TIMEOUT: dict[str, Any] = {"timeout_s": WAITS_S, "limit_s": WAITS_S + LIMIT_S, "named_within_s": NAMED_S}
OTHER_COLLECTIVES: dict[str, Any] = {"limit_s": 30.0 + LIMIT_S}
GOES_ON: dict[str, Any] = {"ends": "finishes", "limit_s": 60.0 + 30.0, "named_within_s": NAMED_S}
CATCHING: dict[str, Any] = {"ranks": (0, 1), "catches": True, "ends": "finishes", "named": False, "limit_s": 60.0}


def _raises() -> Iterator[Case]:
    """An exception, everywhere; a rank that is just killed, everywhere."""
    quick_raise = {"first_forward", "backward", "in_step", "validation_step", "checkpoint_gather"}
    slow_raise = {"shard", "join"}
    quick_kill = {"forward", "compiled_backward", "data_loader", "checkpoint_write", "build", "on_fit_end"}
    slow_kill = {"setup", "on_validation_end", "on_save_checkpoint", "teardown_hook", "on_test_end", "on_predict_end"}
    for name in POINTS:
        if name not in ("data_worker",):
            # other ways to map memory, or to move weights, are tried before anything fails
            falls_back: dict[str, Any] = (
                {"ends": "finishes", "named": False, "limit_s": 60.0} if name == "peer_memory_mapped" else {}
            )
            yield case("raise", name, quick=name in quick_raise, slow=name in slow_raise, **falls_back)
            yield case("sigkill", name, quick=name in quick_kill, slow=name in slow_kill)


def _at_the_end() -> Iterator[Case]:
    """Cases in which no collective of the stage follows."""
    for point in ("on_fit_end", "teardown_hook"):
        for action in ("raise", "sigkill"):
            yield case(action, point, ranks=(0,))
            yield case(action, point, ranks=(2,), world=3)
            yield case(action, point, how="lightning", slow=(action, point) == ("sigkill", "on_fit_end"))
            yield case(action, point, ranks=(0,), how="lightning")
            yield case(action, point, ranks=(3,), world=4, options={"ranks_per_host": 2})
        yield case("raise", point, ranks=(0, 1, 2), world=3)
        yield case("exit", point)
        yield case("exit_at_once", point)
        yield case("sleep", point, **GOES_ON)
    yield case("sigkill", "on_fit_end", strategy="aot_eager", ranks=(0,), how="rank0")


def _more() -> Iterator[Case]:
    # the process that serves the store ends it, and Lightning's own observer ends the processes of its launcher
    for how in ("rank0", "lightning"):
        for rank in (0, 1):
            yield case("raise", "forward", ranks=(rank,), how=how, slow=(how, rank) == ("lightning", 1))
            yield case("sigkill", "backward", ranks=(rank,), how=how, quick=(how, rank) == ("rank0", 0))
    yield case("sigkill", "compiled_forward", ranks=(0,), how="lightning")
    yield case("raise", "backward", ranks=(1,), world=3)
    yield case("sigkill", "forward", ranks=(2,), world=3)
    yield case("raise", "forward", ranks=(0, 1, 2), world=3, quick=True)
    yield case("raise", "on_before_optimizer_step", ranks=(0, 1), strategy="aot_eager")
    yield case("raise", "forward", ranks=(0, 1), how="lightning")
    yield case("raise", "forward", strategy="zero3", accumulate=2, workers=1)
    for action in ("raise", "sigkill"):
        yield case(action, "compile", strategy="zero3_compile")
        yield case(action, "end_backward", strategy="zero3_compile")

    # other ways to raise and to go
    yield case("cuda_error", "forward")
    yield case("cuda_error", "backward")
    for point in ("forward", "backward", "in_step", "capture"):
        yield case("out_of_memory", point)
    yield case("out_of_memory", "forward", ranks=(0, 1))
    for action in ("exit", "exit_at_once"):
        for point in ("forward", "batch_end", "validation_step"):
            yield case(action, point)
    # a SIGTERM lets all ranks stop after the batch; Ctrl-C is an exception like others
    for action, choices in (("sigterm", {"ends": "stops", "named": False}), ("sigint", {})):
        for point in ("forward", "batch_end", "backward"):
            yield case(action, point, **choices)
        yield case(action, "batch_end", ranks=(0,), **choices)
        yield case(action, "batch_end", ranks=(0, 1), **choices)
        # Lightning's launcher passes it on to those that it has started
        yield case(action, "batch_end", ranks=(0,), how="lightning", **choices | {"named": False})
        yield case(action, "forward", ranks=(0, 1), how="lightning", **choices)

    # a loader's process
    yield case("raise", "data_worker")
    yield case("sigkill", "data_worker")
    yield case("exit_at_once", "data_worker")
    yield case("hang", "data_worker", **AFTER_TIMEOUT)

    # who waits for ever is named, and ended by the timeout
    for action in ("hang", "hang_busily", "hang_in_c", "hang_holding_the_gil"):
        yield case(action, "forward", **AFTER_TIMEOUT)
    for point in (
        "data_loader",
        "compile",
        "validation_step",
        "checkpoint_write",
        "compiled_backward",
        "in_step",
        "clip",
        "log",
    ):
        yield case("hang", point, **AFTER_TIMEOUT)
    # the others fail while one cannot run Python, or not for long
    yield case("sleep", "forward", **GOES_ON)
    yield case("sleep", "data_loader", **GOES_ON)
    yield case("sleep", "compile", **GOES_ON)
    yield case("sleep", "checkpoint_write", **GOES_ON)

    # ranks that no longer do the same
    yield case("skip", "clip", **OTHER_COLLECTIVES)
    yield case("skip", "log", **OTHER_COLLECTIVES | {"named": False})  # gloo aborts where sizes differ
    for point in ("validation_step", "checkpoint_gather"):  # weights are read out of memory, without the others
        yield case("skip", point, **GOES_ON | {"named": False, "named_within_s": None})
        yield case("skip", point, options={"gather_transport": "collective"}, **OTHER_COLLECTIVES)

    yield case("full_shared_memory", "peer_memory")

    # users who catch exceptions that all ranks raise
    yield case("out_of_memory", "forward", **CATCHING)
    yield case("out_of_memory", "compiled_forward", **CATCHING)

    # independent of the others' work
    for point, busy in _BUSY:
        for action in ("raise", "sigkill"):
            slow = action == "raise" and (busy.action == "hang_holding_the_gil" or busy.point == "checkpoint_write")
            yield case(action, point, meanwhile=busy, slow=slow, **_needs(busy.point))


def _on_hosts() -> Iterator[Case]:
    """On one host of two."""
    hosts: dict[str, Any] = {"world": 4, "ranks": (3,), "options": {"ranks_per_host": 2}}
    compiled = hosts | {"strategy": "aot_eager"}
    for action in ("raise", "sigkill"):
        yield case(action, "forward", **hosts)
        yield case(action, "backward", **hosts)
        for point in ("in_step", "checkpoint_gather", "validation_step", "compiled_forward"):
            yield case(action, point, **compiled, slow=(action, point) == ("sigkill", "compiled_forward"))
    yield case("raise", "forward", **hosts | {"ranks": (1, 3)})
    yield case("hang", "backward", **hosts, **AFTER_TIMEOUT)
    yield case("sleep", "forward", **hosts, **GOES_ON)
    yield case("skip", "clip", **compiled, **OTHER_COLLECTIVES)
    once = {"options": {"ranks_per_host": 2, "cross_host_reduce": "step"}, "accumulate": 2}
    yield case("raise", "backward", **hosts | once)
    replicas = {"options": {"ranks_per_host": 2, "replicate_over": "hosts"}}
    for action in ("raise", "sigkill"):
        yield case(action, "backward", **compiled | replicas, slow=action == "sigkill")
    yield case("hang", "forward", **hosts | replicas, **AFTER_TIMEOUT)
    for action in ("out_of_memory", "raise"):
        yield case(action, "batch_end", **compiled)
    yield case("raise", "gradient_hook", **hosts)
    yield case("exit", "batch_end", **hosts)
    yield case("exit_well", "batch_end", **compiled, ends="stops", slow=True)
    yield case("hang_busily", "forward", **hosts, **AFTER_TIMEOUT)
    # ranks that no longer do the same, and faults of the user's code
    yield case("skip", "log", **hosts, **OTHER_COLLECTIVES | {"named": False})
    yield case("skip", "validation_step", **compiled, **OTHER_COLLECTIVES)
    yield case("exhaust", "data_loader", **hosts, **OTHER_COLLECTIVES)
    yield case("exhaust", "data_loader", **compiled, **OTHER_COLLECTIVES)
    yield case("reorder", "batch_end", **hosts, **OTHER_COLLECTIVES)
    yield case("reorder", "batch_end", options={"gather_transport": "collective"}, **OTHER_COLLECTIVES)
    as_ever = GOES_ON | {"named": False, "named_within_s": None}
    yield case("reorder", "batch_end", **compiled, **as_ever)  # a host has all weights, and ranks read alone
    yield case("nan", "batch_end", **compiled, **as_ever)
    # hosts of one rank, whose processes no other rank sees
    ones: dict[str, Any] = {"options": {"ranks_per_host": 1}}
    yield case("sigkill", "forward", **ones, slow=True)
    yield case("sigkill", "compiled_forward", **ones)
    yield case("sigkill", "batch_end", **ones, strategy="aot_eager", ranks=(0,))
    yield case("exit_well", "batch_end", **ones, ends="stops")
    yield case("hang", "forward", **ones, **AFTER_TIMEOUT)
    # one that is stopped beats no more, and is given up; it ends once it may go on
    for options in (hosts, ones):
        yield case("stop", "forward", **options, seconds=40.0, limit_s=40.0 + LIMIT_S, named_within_s=NAMED_S)


# Who fails must be able to get there while the other is where it is, hence the pairs of points.
_BUSY = (
    ("data_loader", Fault("sleep", "data_loader", (0,))),
    ("batch_end", Fault("hang_in_c", "batch_end", (0,))),
    ("batch_end", Fault("hang_busily", "batch_end", (0,))),
    ("batch_end", Fault("hang_holding_the_gil", "batch_end", (0,))),
    ("validation_start", Fault("sleep", "validation_start", (0,))),
    ("agreement", Fault("sleep", "compile", (0,))),
    ("capture", Fault("sleep", "capture", (0,))),
    ("checkpoint_outcome", Fault("sleep", "checkpoint_write", (0,))),
)


def _needs(point: str) -> dict[str, Any]:
    return dict(POINTS[point].training)


def _on_gpus() -> Iterator[Case]:
    cuda: dict[str, Any] = {"device": "cuda", "precision": "bf16-mixed", "steps": 16, "emulate": False}
    compiled = cuda | {"strategy": "aot_eager"}
    eager = cuda | {"strategy": "zero3"}
    yield case("device_assert", "forward", **eager)
    yield case("device_assert", "backward", **eager, quick=True)
    yield case("device_assert", "compiled_backward", **compiled)
    yield case("out_of_memory", "forward", **eager, quick=True)
    yield case("out_of_memory", "backward", **eager, quick=True)
    yield case("out_of_memory", "compiled_backward", **compiled)
    yield case("out_of_memory", "in_step", **eager, quick=True)
    yield case("out_of_memory", "forward", **eager, **CATCHING)
    yield case("out_of_memory", "compiled_forward", **compiled, **CATCHING)
    # a capture that fails is local to its rank, which runs on; the others replay
    yield case("out_of_memory", "capture", **compiled, ends="finishes", named=False, limit_s=60.0, quick=True)
    yield case("raise", "capture", **compiled)
    yield case("sigkill", "capture", **compiled)
    for action in ("raise", "sigkill"):
        for point in ("replay", "replay_backward", "replaying", "compiled_forward", "batch_end", "validation_step"):
            yield case(action, point, **compiled, quick=(action, point) == ("sigkill", "replaying"))
        yield case(action, "batch_end", step=10, **compiled, quick=action == "raise")  # while the others replay
        yield case(action, "in_step", step=10, **compiled)
    yield case("sigkill", "replay", ranks=(0,), how="rank0", **compiled)
    yield case("sigkill", "replay", ranks=(0,), how="lightning", **compiled)
    yield case("sigterm", "batch_end", step=10, ends="stops", named=False, **compiled)
    yield case("sigint", "replay", ends="stops", named=False, **compiled)
    yield case("hang", "batch_end", step=10, **compiled, **AFTER_TIMEOUT)
    yield case("hang_holding_the_gil", "batch_end", step=10, **compiled, **AFTER_TIMEOUT)
    yield case("sleep", "batch_end", step=10, **compiled, **GOES_ON, quick=True)
    yield case("sleep", "forward", **eager, **GOES_ON)
    yield case("skip", "validation_step", **compiled, **GOES_ON | {"named": False, "named_within_s": None})
    yield case("skip", "validation_step", **compiled, options={"gather_transport": "collective"}, **OTHER_COLLECTIVES)
    # devices wait in collectives of graphs, which no barrier lets pass
    by_collective: dict[str, Any] = compiled | {
        "options": {"gather_transport": "collective", "reduce_transport": "collective"}
    }
    yield case("out_of_memory", "capture", **by_collective, ends="finishes", named=False, limit_s=60.0, quick=True)
    for action in ("raise", "sigkill"):
        for point in ("capture", "replay", "replay_backward", "replaying", "in_step"):
            yield case(action, point, **by_collective, quick=(action, point) == ("raise", "replay_backward"))
        yield case(action, "batch_end", step=10, **by_collective, quick=action == "sigkill")
    # both have failed without a message from the other; the device of rank 0 still waits for rank 1's
    both_fail = Fault("raise", "replaying", (0,))
    yield case("raise", "replay", meanwhile=both_fail, **by_collective, named=False, limit_s=15.0 + LIMIT_S)
    yield case("sleep", "batch_end", step=10, **by_collective, **GOES_ON, quick=True)
    yield case("hang", "batch_end", step=10, **by_collective, **AFTER_TIMEOUT)
    # on one host of two, of two GPUs each
    hosts: dict[str, Any] = compiled | {"world": 4, "ranks": (3,), "options": {"ranks_per_host": 2}}
    for action in ("raise", "sigkill"):
        yield case(action, "replaying", **hosts)
    yield case("hang", "batch_end", step=10, **hosts, **AFTER_TIMEOUT)
    # hosts go on, and their devices do not
    not_at_once = AFTER_TIMEOUT | {"limit_s": 2 * WAITS_S + LIMIT_S, "named_within_s": None}
    yield case("skip", "replay", **by_collective, **not_at_once)


CASES: tuple[Case, ...] = (*_raises(), *_at_the_end(), *_more(), *_on_hosts())
GPU_CASES: tuple[Case, ...] = tuple(_on_gpus())
