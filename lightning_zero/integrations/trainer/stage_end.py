"""End a stage on all ranks together, so that the others notice a rank that fails in its last hooks.

After ``on_fit_end`` and ``teardown`` no collective of the stage follows, so the other ranks would end with status 0.
"""

from __future__ import annotations

import time

from lightning_zero.engine import Engine
from lightning_zero.native.watchdog import SequenceId

__all__ = ["wait_for_stage_end"]

POLL_S = 0.02


def wait_for_stage_end(engine: Engine, stage: int, report_s: float) -> None:
    """Wait until all ranks have ended the stage. Collective.

    No timeout ends this, since rank 0 may upload for hours in a last hook; a rank that fails or is killed does.

    Args:
        stage: A number that no earlier stage had, the same on all ranks.
        report_s: Seconds after which a rank that waits names those that it waits for.

    Raises:
        RankFailedError: A rank has failed, or its process is gone.
    """
    if engine.world_size == 1:
        return
    watchdog, mesh = engine.watchdog, engine.mesh
    store = mesh.store(f"stage end/{stage}")
    store.set(f"{mesh.rank}", "")
    begun = time.monotonic()
    # Who says that it is busy is not ended by the timeout, and yet ends when another rank fails.
    busy = watchdog.busy("waits until all ranks have ended the stage")
    with busy, watchdog.waiting("the end of the stage", SequenceId.UNCOUNTED):
        barrier = mesh.barrier()
        while not barrier.is_completed():
            watchdog.check()
            if (waited := time.monotonic() - begun) > report_s:
                report_s *= 10
                missing = [f"rank {rank}" for rank in range(mesh.world_size) if not store.check([f"{rank}"])]
                watchdog.print_line(
                    f"No progress. This rank has ended its stage, and has waited for {waited:.0f} s for others to run "
                    f"their last hooks, such as on_fit_end() and teardown(): {', '.join(missing) or 'none is missing'}."
                )
            time.sleep(POLL_S)
        try:
            barrier.wait()
        except RuntimeError:  # a connection broke, and the watchdog finds out which rank broke it
            if watchdog.wait_for_verdict():
                watchdog.check()
            raise
