"""What compiled code needs in each cycle of a training step: memory, replays, and a look at the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from lightning_zero.compile.context import small_weight_bytes
from lightning_zero.compile.cuda_graphs import CUDAGraphManager
from lightning_zero.compile.eager import regather_saved_weights
from lightning_zero.compile.session import CompileSession
from lightning_zero.config.text import format_gib
from lightning_zero.offload.saved_tensors import SavedTensorOffload
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.sharding.symm_mem import PeerTransports

__all__ = ["CompiledStepHooks"]


class CompiledStepHooks:
    """The :class:`~lightning_zero.step.cycle.CompiledPart` of one engine.

    Args:
        session: compiles.
        replays: of what it compiles, as CUDA graphs.
        sharder: has the weights.
        peers: have memory that others read and write, once it is allocated.

    Attributes:
        session, sharder, peers: these.
    """

    def __init__(
        self, session: CompileSession, replays: CUDAGraphManager, sharder: Sharder, transports: PeerTransports
    ) -> None:
        self.session = session
        self._cuda_graphs = replays
        self.sharder = sharder
        self.transports = transports
        self._eager_reads = -1  # in the last step; -1 where nobody knows
        self._reported_hooks = False
        self._reported_limit: float | None = None  # the quota of activations that more has left than

    def allocate(self) -> None:
        """Memory that peers read and write, once it is known what for. Collective, the first time."""
        self.sharder.memory.finalize_layout()
        if self.sharder.memory.allocate_transport_memory():
            self.remeasure_links()

    def remeasure_links(self) -> None:
        """Weights or gradients travel another way than was thought when the engine was made. Collective."""
        reason = self.transports.no_capture_reason(self.sharder.executor)
        self._cuda_graphs.configure(self.session.config, reason)
        self.session.remeasure_links()

    def on_gradients_moved(self) -> None:
        """They lie elsewhere than what was captured has them."""
        self._cuda_graphs.drop()

    def prepare(self) -> None:
        """Before each forward of a training step; collective."""
        config = self.session.config
        self.sharder.executor.activations.wait_all()
        self._check_offloaded(config.tuning.offload_activations_mb)
        if config.compiled.enabled:
            self.sharder.executor.weights.refresh_compute_shards()
        used = config.compute_dtype if config.compiled.enabled else None  # what is not compiled casts what it has read
        kept = self.session.next_pass()
        self.sharder.memory.cache_unsharded(used, small_weight_bytes(config.compiled), kept)
        if not self._first_pass:
            self.session.budget.cache.forward_begins(self.session.config.memory, self.session.compiled)

    @property
    def _first_pass(self) -> bool:
        """Whether it is under way, which looks after what is cached by itself."""
        return self.session.budget.first_step.saves is not None

    def _check_offloaded(self, megabytes: float | None) -> None:
        """Whether the last pass kept to the quota; see ``offload/activations.py`` for what nobody knows beforehand."""
        quota = self.sharder.executor.activations.quota
        sent, beyond = quota.sent / 2**20, quota.exceeded_by
        quota.begin_pass(float("inf") if megabytes is None else megabytes * 2**20)
        if megabytes is None or not beyond or megabytes == self._reported_limit:
            return
        self._reported_limit = megabytes
        self.session.progress.report(
            f"offload_activations_mb={megabytes:g} is not held: the last pass sent {sent:.3g} MiB, and went beyond it "
            f"in {beyond}, where a graph ran more than once in a call, or for modules that differ, or in a call that "
            "the first step did not have, or with a larger batch than it was compiled for. Name less where the host is "
            f"to hold less: {megabytes * megabytes / sent:.3g} would come to about that."
        )

    @contextmanager
    def surround(self) -> Iterator[None]:
        """Around each forward of a training step. The first one runs eagerly and shows what to compile."""
        first, (eager, gathers) = self.session.is_discovering, self._count_reads()
        saves = self._first_saves() if first else None
        with ExitStack() as stack:
            stack.enter_context(self.session.step())
            # These cost a call for each tensor that autograd saves, for nothing where compiled code reads all weights.
            if first or self._eager_reads != 0:
                stack.enter_context(regather_saved_weights(self.sharder, saves))
            stack.callback(setattr, self._cuda_graphs, "in_step", False)
            self._cuda_graphs.in_step = True
            stack.callback(self.sharder.executor.weights.serve_eager_from_resident, False)
            self.sharder.executor.weights.serve_eager_from_resident(True)
            yield
        if first:
            self.session.set_last_read(self.sharder.reader.last_read)
            self._report_offloaded(saves)
        eager_now, gathers_now = self._count_reads()
        if gathers_now != gathers:  # this rank may have left the forward out, and the next one is as those before
            self._eager_reads = eager_now - eager

    def _first_saves(self) -> SavedTensorOffload | None:
        """Packs what an eager forward saves that shows what to compile."""
        first = self.session.budget.first_step
        return first.saves if self._first_pass else first.unmeasured_saves(self.session.config.memory)

    def _report_offloaded(self, saves: SavedTensorOffload | None) -> None:
        """Of what an eager forward saved; but not of one that a budget looks at, which tells itself."""
        if saves is not None and saves.nbytes and not self._first_pass:
            self.session.progress.report(
                f"{format_gib(saves.nbytes)} GiB of what this step, which runs eagerly, saved in its forward went to the "
                "host until its backward, as the device had no room for them. Compiled steps save less."
            )

    def stepped(self) -> None:
        """An optimizer steps now. Harmless when repeated."""
        self.session.budget.optimizer_steps()
        if not self._first_pass:
            self.session.budget.cache.optimizer_steps(self.session.config.memory, self.session.compiled)

    def set_hooked_parameters(self, hooked: Collection[ShardedParameter], forward_ran: bool) -> None:
        """Run what computes these parameters' gradients instead of replaying it. Parameters that get their first hook
        after the forward of a step stay among them: the next such hook would come too late for a replayed forward."""
        self._cuda_graphs.set_hooked_parameters({id(record.param) for record in hooked}, forward_ran)
        if not hooked or self._reported_hooks:
            return
        self._reported_hooks = True
        names = [repr(record.name) for record in hooked]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        replayed = (
            "; compiled code that reads these is not replayed as a CUDA graph" if self._cuda_graphs.enabled else ""
        )
        self.session.progress.report(
            f"Gradient hooks (register_hook): whole gradients wait for them before they are reduced{replayed}. "
            f"(parameters={', '.join(names[:4])}{more})"
        )

    def backward_begins(self) -> None:
        """A forward is over, and its backward comes."""
        self.session.budget.backward_begins()
        if not self._first_pass:
            self.session.budget.cache.phase_begins(self.session.config.memory, self.session.compiled)

    def release_memory(self) -> None:
        """Something runs that is not a training step. Memory of CUDA graphs of forward and backward is given back where
        little is left."""
        self._cuda_graphs.release_memory()
        self.session.budget.cache.evaluates(self.session.config.memory, self.session.compiled)

    def reset(self) -> None:
        """Likewise, and what was half done is forgotten."""
        self._cuda_graphs.drop()
        self.sharder.executor.activations.reset()
        self._eager_reads = -1

    def _count_reads(self) -> tuple[int, int]:
        """Return how many weights eager code has read, and how many have been gathered for any code."""
        counters = self.sharder.executor.counters()
        return counters.get("eager_gathers", 0), counters.get("gathers", 0)
