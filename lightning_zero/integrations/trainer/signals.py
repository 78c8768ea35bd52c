"""Stop and end all ranks together: at a SIGTERM, at SLURM's requeue signal, and at the end of a stage.

Lightning's handlers broadcast or save from wherever the process is, which hangs if one rank alone gets the signal. Here
handlers only record it, and ranks agree before the next batch. They do so over CPUs, because Lightning's broadcast on
the device makes the host wait, so that it is never ahead of the device. Lightning's loops also look at each rank's own
record after each batch, and a rank that left early would be missing in the save that follows. So the record is hidden
from them until all ranks know of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zero.engine import Engine
from lightning_zero.native.watchdog import SequenceId

Start = Callable[[bool], dist.Work | None]

POLL_S = 0.02
# Private members of Lightning; without one of them, that part of Lightning stays as it is.
_METHOD = "_broadcast_sigterm_tensor"
_HANDLER = "_sigterm_notifier_fn"
_REQUEUE = "_slurm_sigusr_handler_fn"
# Our attributes of Lightning's signal connector: the deferred requeue signal, and True for a deferred SIGTERM.
_DEFERRED_REQUEUE = "_zero_requeue"
_DEFERRED_TERM = "_zero_sigterm"


def _run_now(start: Start) -> None:
    start(False)


def check_stop_on_cpu(
    trainer: pl.Trainer, group: dist.ProcessGroup, collective: Callable[[Start], None] = _run_now
) -> Callable[[], None]:
    """Let the training loop check over ``group`` before each batch if it stops; return an undo function.

    The loop raises ``SIGTERMException`` on all ranks before the next batch after any rank got a SIGTERM. Lightning's
    own check knows rank 0's signal only.

    Args:
        collective: Starts a collective, asynchronously or not, and waits for it.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if not callable(getattr(type(loop), _METHOD, None)):
        return lambda: None

    def check() -> None:
        term = trainer.received_sigterm or getattr(connector, _DEFERRED_TERM, False)
        received = torch.tensor([int(term), int(getattr(connector, _DEFERRED_REQUEUE, 0))])
        collective(lambda later: dist.all_reduce(received, dist.ReduceOp.MAX, group=group, async_op=later))
        stop, requeue = received.tolist()
        if requeue:
            setattr(connector, _DEFERRED_REQUEUE, 0)
            getattr(type(connector), _REQUEUE)(connector, requeue, None)
        if stop:
            setattr(connector, _DEFERRED_TERM, False)
            connector.received_sigterm = True
            with suppress(Exception):
                dist.barrier(group=group)  # all ranks know of it before the first one ends
            raise SIGTERMException

    setattr(loop, _METHOD, check)

    def undo() -> None:
        loop.__dict__.pop(_METHOD, None)

    return undo


def check_stop_now(trainer: pl.Trainer) -> None:
    """Check at the end of training, after the last batch."""
    check = vars(trainer.fit_loop.epoch_loop).get(_METHOD)
    if check is not None:
        check()


def defer_sigterm(trainer: pl.Trainer) -> None:
    """Only record a SIGTERM and pass it on to the processes that the Trainer started.

    With several ranks the same holds for the signal by which SLURM requeues a job: each rank gets it at another place,
    and the handler's save needs all of them. Call this before the Trainer registers its handlers.
    """
    connector = trainer._signal_connector
    setattr(connector, _DEFERRED_TERM, False)
    if callable(getattr(type(connector), _HANDLER, None)):
        setattr(connector, _HANDLER, partial(_defer, connector))
    if trainer.world_size > 1 and all(
        callable(getattr(kind, name, None))
        for kind, name in ((type(connector), _REQUEUE), (type(trainer.fit_loop.epoch_loop), _METHOD))
    ):
        setattr(connector, _REQUEUE, partial(_defer_requeue, connector))  # not a closure: Trainers are pickled


def _defer_requeue(connector: Any, signum: Any, _: Any) -> None:
    setattr(connector, _DEFERRED_REQUEUE, int(signum))


def _defer(connector: Any, signum: Any, _: Any) -> None:
    trainer = connector.trainer
    launcher = trainer.strategy.launcher
    if not connector.received_sigterm and not getattr(connector, _DEFERRED_TERM) and launcher is not None:
        launcher.kill(signum)
    deferred = trainer.world_size > 1 and _METHOD in vars(trainer.fit_loop.epoch_loop)
    setattr(connector, _DEFERRED_TERM if deferred else "received_sigterm", True)


def wait_for_stage_end(engine: Engine, stage: int, stall_report_s: float) -> None:
    """Wait until all ranks end the stage, to notice a rank that fails in its last hooks. Collective.

    No collective of the stage follows ``on_fit_end`` and ``teardown``, so without this the other ranks would end with
    status 0. No timeout applies, since rank 0 may upload for hours in a last hook.

    Args:
        stage: A number that no earlier stage has, the same on all ranks.
        stall_report_s: Seconds of waiting after which a rank names the missing ones.

    Raises:
        RankFailedError: A rank failed, or its process is gone.
    """
    if engine.world_size == 1:
        return
    watchdog, mesh = engine.watchdog, engine.mesh
    store = mesh.store(f"stage end/{stage}")
    store.set(f"{mesh.rank}", "")
    begin = time.monotonic()
    # A busy rank is exempt from the timeout, and still ends when another rank fails.
    busy = watchdog.busy("waits until all ranks have ended the stage")
    with busy, watchdog.waiting("the end of the stage", SequenceId.UNCOUNTED):
        barrier = mesh.barrier()
        while not barrier.is_completed():
            watchdog.check()
            if (waited := time.monotonic() - begin) > stall_report_s:
                stall_report_s *= 10
                missing = [f"rank {rank}" for rank in range(mesh.world_size) if not store.check([f"{rank}"])]
                watchdog.print_line(
                    f"No progress. This rank has ended its stage, and has waited for {waited:.0f} s for others to run "
                    f"their last hooks, such as on_fit_end() and teardown(): {', '.join(missing) or 'none is missing'}."
                )
            time.sleep(POLL_S)
        try:
            barrier.wait()
        except RuntimeError:  # a connection broke; the watchdog finds the rank that broke it
            if watchdog.wait_for_verdict():
                watchdog.check()
            raise
