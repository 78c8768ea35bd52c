"""Ranks agree whether to stop for a SIGTERM, and nobody waits for the device.

Lightning asks before each batch, by a broadcast on the device whose answer the host waits for. The host can then never
be ahead of the device, and what it does first in a step is time in which the device has nothing to do. Here the same
question goes over a process group of CPUs. The method that asks is Lightning's own affair, so a Lightning that asks in
another way is left alone.

Its handler of the signal broadcasts, too, from wherever the process happens to be: where one rank alone gets the signal
nobody takes part, and the job hangs. Here the handler only notes it. Lightning's loops look at each rank's own note,
too, after each batch: a rank that got the signal a moment earlier than the others, as from a parent that passes it on,
would leave, and what callbacks then save needs all ranks. So the note is kept from them until all know of it.

So it is with SLURM's signal to requeue a job: the
handler saves a checkpoint, for which all ranks are needed, and each gets the signal at another place. Here it is
noted, and before the next batch all save together, whoever got it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["check_stop_now", "check_stop_on_cpu", "has_deferred_sigterm", "defer_sigterm", "expose_sigterm"]

Start = Callable[[bool], dist.Work | None]

_METHOD = "_broadcast_sigterm_tensor"
_HANDLER = "_sigterm_notifier_fn"
_REQUEUE = "_slurm_sigusr_handler_fn"
_NOTED = "_zero_requeue"  # our attribute of Lightning's connector: the signal
_TERM = "_zero_sigterm"  # another: whether this rank has got one


def _run_now(start: Start) -> None:
    start(False)


def check_stop_on_cpu(
    trainer: pl.Trainer, group: dist.ProcessGroup, collective: Callable[[Start], None] = _run_now
) -> Callable[[], None]:
    """From now on the training loop asks over ``group``, of all ranks on CPUs. Returns what undoes this.

    collective: starts one, asynchronously or not, and waits for it.

    The loop raises ``SIGTERMException`` on all ranks before the next batch once one of them has got a SIGTERM (with
    Lightning's own question: once rank 0 has).
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    if not callable(getattr(type(loop), _METHOD, None)):
        return lambda: None

    def ask() -> None:
        term = trainer.received_sigterm or getattr(connector, _TERM, False)
        received = torch.tensor([int(term), int(getattr(connector, _NOTED, 0))])
        collective(lambda later: dist.all_reduce(received, dist.ReduceOp.MAX, group=group, async_op=later))
        stop, requeue = received.tolist()
        if requeue:
            setattr(connector, _NOTED, 0)
            getattr(type(connector), _REQUEUE)(connector, requeue, None)
        if stop:
            setattr(connector, _TERM, False)
            connector.received_sigterm = True
            with suppress(Exception):
                dist.barrier(group=group)  # all have heard before the first of them ends
            raise SIGTERMException

    setattr(loop, _METHOD, ask)

    def undo() -> None:
        loop.__dict__.pop(_METHOD, None)

    return undo


def check_stop_now(trainer: pl.Trainer) -> None:
    """At the end of training, after which nobody asks any more."""
    ask = vars(trainer.fit_loop.epoch_loop).get(_METHOD)
    if ask is not None:
        ask()


def has_deferred_sigterm(trainer: pl.Trainer) -> bool:
    """Whether this rank has got a SIGTERM of which Lightning's loops do not know."""
    return bool(getattr(trainer._signal_connector, _TERM, False))


def expose_sigterm(trainer: pl.Trainer, whether: bool) -> None:
    """What this rank has noted, if anything, to Lightning's loops, which then stop; or no more."""
    if has_deferred_sigterm(trainer):
        trainer._signal_connector.received_sigterm = whether


def defer_sigterm(trainer: pl.Trainer) -> None:
    """A SIGTERM is only noted from now on, and passed on to the processes that the Trainer has started; and so is, with
    several ranks, the signal by which SLURM says that a job will be requeued.

    Must come before the Trainer registers its handlers."""
    connector = trainer._signal_connector
    setattr(connector, _TERM, False)
    if callable(getattr(type(connector), _HANDLER, None)):
        setattr(connector, _HANDLER, partial(_defer, connector))
    if trainer.world_size > 1 and all(
        callable(getattr(kind, name, None))
        for kind, name in ((type(connector), _REQUEUE), (type(trainer.fit_loop.epoch_loop), _METHOD))
    ):
        setattr(connector, _REQUEUE, partial(_defer_requeue, connector))  # a Trainer may be pickled


def _defer_requeue(connector: Any, signum: Any, _: Any) -> None:
    setattr(connector, _NOTED, int(signum))


def _defer(connector: Any, signum: Any, _: Any) -> None:
    trainer = connector.trainer
    launcher = trainer.strategy.launcher
    if not connector.received_sigterm and not getattr(connector, _TERM) and launcher is not None:
        launcher.kill(signum)
    asked = trainer.world_size > 1 and _METHOD in vars(trainer.fit_loop.epoch_loop)
    setattr(connector, _TERM if asked else "received_sigterm", True)
