"""A compiled graph's forward and backward as two CUDA graphs, or, for debugging, as something that behaves like them on
any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zero.compat import cuda
from lightning_zero.native import Executor
from lightning_zero.native.capture import capture_graph, reserve_pool_block
from lightning_zero.offload.activations import ReservedBlocks

__all__ = ["CUDAGraphPair", "EmulatedGraphPair", "CaptureSpec", "GraphPair"]


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture.

    Args:
        compiled: called with ``inputs``.
        inputs: aliases of parameters and buffers, memory for other tensors, and sizes.
        copied: those of them that whoever calls knows nothing of.
        executor: keeps the books.
        adding: whether gradients will usually be added to those that are there.
        beside: another pair that never runs at the same time.
        segment: the gradients that its backward brings, as the executor numbers them; -1 where nobody knows.
        takes: bytes that a run had in tensors at most; 0 where nobody has looked.
    """

    compiled: Callable[..., Any]
    inputs: Sequence[Any]
    copied: Sequence[Tensor]
    executor: Executor
    accumulates: bool
    shared: GraphPair | None
    segment: int = -1
    peak_bytes: int = 0

    def held(self) -> ReservedBlocks:
        """Memory of the host for what is captured: another pair's, that never runs at the same time."""
        shared = self.shared
        return shared.held if isinstance(shared, CUDAGraphPair | EmulatedGraphPair) else ReservedBlocks()

    def holding(self, held: ReservedBlocks) -> AbstractContextManager[None]:
        """Surrounds each forward that is to use it."""
        return nullcontext() if self.executor.activations is None else self.executor.activations.reserving(held)

    def recording(self, sent: list[int]) -> AbstractContextManager[None]:
        """Surrounds the capture of a forward: see ``offload/activations.py``."""
        activations = self.executor.activations
        return nullcontext() if activations is None else activations.uncounted(sent)

    def settle(self) -> None:
        """What is on its way to the host or back is waited for, where a forward or backward has ended by an
        exception."""
        if self.executor.activations is not None:
            self.executor.activations.wait_all()

    def run(self) -> list[Tensor]:
        """The outputs.

        Raises:
            NotImplementedError: a replay would not do the same; the message says why.
        """
        before = [tensor._version for tensor in self.copied]
        outputs = list(self.compiled(*self.inputs))
        if [tensor._version for tensor in self.copied] != before:
            raise NotImplementedError("an input is changed in place")
        if not all(isinstance(output, Tensor) for output in outputs):
            raise NotImplementedError("an output is no tensor")
        owned = {value.untyped_storage().data_ptr() for value in self.inputs if isinstance(value, Tensor)}
        if any(output.untyped_storage().data_ptr() in owned for output in outputs):
            raise NotImplementedError("an output is an input, or a view of one")
        return outputs

    def run_backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Leaves the gradients of ``copied`` in their ``grad``; the executor gets those of parameters."""
        torch.autograd.backward(outputs, grads)
        copied = {id(tensor) for tensor in self.copied}
        assert all(
            value.grad is None for value in self.inputs if isinstance(value, Tensor) and id(value) not in copied
        ), "a gradient went past the executor"


class GraphPair(Protocol):
    """Forward and backward of one compiled graph on fixed inputs; made of a :class:`CaptureSpec`, which may be refused with
    ``NotImplementedError``. There is no backward where no output needs one.

    Attributes:
        nbytes: of memory that it holds, and did not find with ``shared``.
    """

    nbytes: int

    differentiable: Sequence[bool]  # by output; known after a forward

    def fits(self) -> bool:
        """Whether a replay does what a run would do."""

    def forward(self) -> Sequence[Tensor]:
        """The outputs, in memory that the next forward overwrites."""

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Takes the gradients of the outputs, of which None means zero; returns those of the copied inputs, in memory
        that the next backward overwrites."""

    def close(self) -> None:
        """Gives the memory back. Nothing is replayed any more. Harmless when repeated."""


ACTIVATIONS_GONE = (
    "lightning_zero: what a forward pass left for its backward pass is gone, since it was replayed as a graph, and "
    "lightning_zero.unshard() was called, or the strategy was closed, before its backward pass. Run the backward pass "
    "first."
)


def _started(executor: Executor, number: int) -> None:
    """A replay has been started, and may still be running: enters into the books what it does."""
    executor.graphs.after_replay(number)


class _Graph:
    """One of the two CUDA graphs, and its entries in the executor's books. Captures what ``run`` queues; ``prepare``
    comes before, once the books have begun."""

    def __init__(
        self,
        job: CaptureSpec,
        pool: Any,
        run: Callable[[], None],
        backward: bool,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = job.executor
        self._graph = torch.cuda.CUDAGraph()
        job.executor.graphs.begin(backward, backward and job.accumulates, job.segment if backward else -1)
        try:
            prepare()
            with capture_graph(self._graph, pool):
                try:
                    run()
                    self.number = job.executor.graphs.end()
                except BaseException:
                    with suppress(RuntimeError):
                        job.settle()
                    job.executor.graphs.abort()  # both join streams, without which the capture could not be ended
                    raise
        except BaseException:
            with suppress(RuntimeError):
                self._graph.reset()  # whoever holds the error must not keep the collectives' process groups waiting
            raise

    def replay(self) -> None:
        self._executor.graphs.before_replay(self.number)
        self._graph.replay()
        _started(self._executor, self.number)

    def close(self) -> None:
        self._graph.reset()
        self._executor.graphs.drop(self.number)


class CUDAGraphPair:
    """See :class:`GraphPair`."""

    _pool: Any
    _stream: torch.cuda.Stream

    def __init__(self, job: CaptureSpec) -> None:
        executor, device = job.executor, job.executor.device
        shared = job.shared if isinstance(job.shared, CUDAGraphPair) else None
        stream = shared._stream if shared is not None else torch.cuda.Stream(device)
        self._stream, current = stream, torch.cuda.current_stream(device)
        executor.weights.sync_compute_shards(ahead=True)  # or the graph would hold a wait, of one step for all
        reserved = 0
        self._sent: list[int] = []  # bytes that leave for the host in a forward
        stream.wait_stream(current)
        self._executor = executor
        self.held = job.held()
        self._pool = shared._pool if shared is not None else torch.cuda.graph_pool_handle()
        with (
            _join_streams(current, stream),
            torch.cuda.stream(stream),
            _separate_cublas_workspaces(),
            job.holding(self.held),
            ExitStack() as stack,
        ):
            outputs: list[Tensor] = []

            def prepare() -> None:
                nonlocal reserved
                # Graphs cannot use what is cached for others, the buckets among it that the books have just let go of.
                torch.cuda.empty_cache()
                reserved = torch.cuda.memory_reserved(device)
                if shared is None:
                    stack.enter_context(reserve_pool_block(self._pool, device, job.peak_bytes))

            with job.recording(self._sent):
                self._forward = _Graph(job, self._pool, lambda: outputs.extend(job.run()), False, prepare)
            self._outputs = [output.detach() for output in outputs]
            self.differentiable: Sequence[bool] = [output.requires_grad for output in outputs]
            wanted = [output for output in outputs if output.requires_grad]
            self._grads = [torch.zeros_like(output) if output.requires_grad else None for output in outputs]
            given = [grad for grad in self._grads if grad is not None]
            try:
                self._backward: _Graph | None = None
                if wanted:
                    self._backward = _Graph(job, self._pool, lambda: job.run_backward(wanted, given), backward=True)
                    executor.graphs.mark_not_run(self._backward.number)
            except BaseException:
                executor.graphs.mark_not_run(self._forward.number)
                self._forward.close()
                raise
            # The backward was recorded as if the forward had run. From here on nobody may think so.
            executor.graphs.mark_not_run(self._forward.number)
            self._input_grads = [tensor.grad for tensor in job.copied]
        self.nbytes = max(0, torch.cuda.memory_reserved(device) - reserved)

    def fits(self) -> bool:
        last = self._forward if self._backward is None else self._backward
        return self._executor.graphs.fits(self._forward.number, last.number)

    def forward(self) -> Sequence[Tensor]:
        self._forward.replay()
        for nbytes in self._sent:
            self._executor.activations.quota.record(nbytes)
        return self._outputs

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if not self._outputs:
            raise RuntimeError(ACTIVATIONS_GONE)
        for mine, given in zip(self._grads, grads, strict=True):
            if mine is not None:
                mine.zero_() if given is None else mine.copy_(given)
        assert self._backward is not None, "a backward of outputs that need none"
        self._backward.replay()
        return self._input_grads

    def close(self) -> None:
        # Not left to whoever holds this last: a loss that the user keeps leads here.
        self._outputs, self._grads, self._input_grads, self.held = [], [], [], ReservedBlocks()
        for graph in (self._forward, self._backward):
            if graph is not None:
                graph.close()


class EmulatedGraphPair:
    """See :class:`GraphPair`. Runs what it was given each time, with the same books, so that these can be tested."""

    nbytes = 0

    def __init__(self, job: CaptureSpec) -> None:
        self._job, self._executor = job, job.executor
        self.held = job.held()
        self._numbers: dict[bool, int] = {}
        self._adding: bool | None = None  # as the first backward found it
        self._outputs: list[Tensor] = []
        self.differentiable: Sequence[bool] = ()

    @contextmanager
    def _recorded(self, backward: bool, accumulates: bool) -> Iterator[None]:
        known = self._numbers.get(backward)
        if known is None:
            if not (backward and self._executor.weights.sync_compute_shards(ahead=True)):
                self._executor.weights.sync_compute_shards()
        else:
            self._executor.graphs.before_replay(known)
        self._executor.graphs.begin(backward, accumulates, self._job.segment if backward else -1)
        try:
            yield
            number = self._executor.graphs.end()
        except BaseException:
            self._executor.graphs.abort()
            raise
        if known is None and backward:
            # Only a first run can tell its number. What comes before a replay, it has found as it should be.
            self._executor.graphs.before_replay(number)
        _started(self._executor, self._numbers.setdefault(backward, number))
        if known is not None:
            self._executor.graphs.drop(number)

    def fits(self) -> bool:
        numbers = list(self._numbers.values())
        return not numbers or self._executor.graphs.fits(numbers[0], numbers[-1])

    def forward(self) -> Sequence[Tensor]:
        holding = self._job.holding(self.held)
        with torch.enable_grad(), holding, self._recorded(backward=False, accumulates=False):
            self._outputs = self._job.run()
        self.differentiable = [output.requires_grad for output in self._outputs]
        return self._outputs

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if not self._outputs:
            raise RuntimeError(ACTIVATIONS_GONE)
        for tensor in self._job.copied:
            tensor.grad = None
        outputs, given = [], []
        for output, grad in zip(self._outputs, grads, strict=True):
            if output.requires_grad:
                outputs.append(output)
                given.append(torch.zeros_like(output) if grad is None else grad)
        if self._adding is None:
            self._adding = self._executor.gradients.has_gradients()
        with torch.enable_grad(), self._recorded(True, self._adding):
            self._job.run_backward(outputs, given)
        return [tensor.grad for tensor in self._job.copied]

    def close(self) -> None:
        self._outputs, self.held = [], ReservedBlocks()
        for number in self._numbers.values():
            self._executor.graphs.drop(number)


@contextmanager
def _join_streams(current: torch.cuda.Stream, stream: torch.cuda.Stream) -> Iterator[None]:
    """``current`` goes on after ``stream``, after a failed capture, too: what was on its way when the capture began (in
    memory of ``current``, which may give it to somebody else) was waited for on ``stream``."""
    try:
        yield
    finally:
        current.wait_stream(stream)


@contextmanager
def _separate_cublas_workspaces() -> Iterator[None]:
    """torch keeps cuBLAS's workspaces, one for each stream, and would keep those that are made inside for as long as it
    lives: memory that is the graphs', and that closing them would not give back."""
    cuda.clear_cublas_workspaces()
    try:
        yield
    finally:
        cuda.clear_cublas_workspaces()
