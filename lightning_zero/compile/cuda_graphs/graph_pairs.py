"""Capture a compiled forward and backward as two CUDA graphs.

:class:`EmulatedGraphPair` has the same interface and bookkeeping on any device, for tests and debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_zero.compat import cuda
from lightning_zero.native import Executor
from lightning_zero.native.capture import capture_graph
from lightning_zero.offload.activations import ReservedBlocks


class GradientBuffers:
    """Memory for gradients of outputs, shared by backwards that never run at the same time."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []  # bytes; one for each differentiable output

    def like(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return a tensor for the gradient of each output; None for outputs without one."""
        wanted = [output.requires_grad for output in outputs]
        numbers = [sum(wanted[:n]) for n in range(len(outputs))]
        return [self._one(n, output) if yes else None for n, yes, output in zip(numbers, wanted, outputs, strict=True)]

    def _one(self, number: int, output: Tensor) -> Tensor:
        nbytes = output.numel() * output.element_size()
        if number == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8, device=output.device))
        if self._memory[number].numel() < nbytes:  # earlier captures go on using the former memory
            self._memory[number] = torch.zeros(nbytes, dtype=torch.uint8, device=output.device)
        strides = torch.empty_like(output, device="meta").stride()
        return self._memory[number][:nbytes].view(output.dtype).as_strided(output.shape, strides)


class BackwardMemory:
    """Memory of backwards that are replayed one after another.

    Activations stay in the pool of their own graph. A backward's temporary tensors are gone when its replay has
    ended, and its results are copied before the next replay. So all backwards of a step can allocate from one pool.
    Blocks belong to one stream, so all captures use the same.

    Args:
        shared: False leaves each capture its own memory.

    Attributes:
        buffers: memory for the gradients of outputs, which are copied there before each replay.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.buffers = GradientBuffers()
        self._stream: torch.cuda.Stream | None = None
        self._replayed_on: torch.cuda.Stream | None = None
        self._pool: Any = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream

    def begin_replay(self, device: torch.device) -> None:
        """Let the current stream wait for the last replay, which the user may have run on another stream."""
        current = torch.cuda.current_stream(device)
        if self.shared and self._replayed_on not in (None, current):
            current.wait_stream(self._replayed_on)
        self._replayed_on = current

    def gradients_like(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return a tensor for the gradient of each output; None for outputs without one."""
        if self.shared:
            return self.buffers.like(outputs)
        return [torch.zeros_like(output) if output.requires_grad else None for output in outputs]

    def reusable(self, tensor: Tensor) -> Tensor:
        """Return a tensor of memory that later allocations of its pool may use."""
        return cuda.without_owner(tensor) if self.shared and tensor.is_cuda else tensor

    @property
    def pool(self) -> Any:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool


CHANGED_INPUT = "an input is changed in place"


@dataclass(frozen=True)
class OutputView:
    """An output that is a view of another one, whose elements are dense.

    Attributes:
        of: number of the other output.
        offset: of the first element among those of the other one.
        differentiable: gradients reach the other output through the view.
    """

    of: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    differentiable: bool

    def make(self, other: Tensor) -> Tensor:
        """Return the view of ``other``, which has the memory layout of that time."""
        base = other if self.differentiable else other.detach()
        return base.as_strided(self.size, self.stride, other.storage_offset() + self.offset)


@dataclass(frozen=True)
class KnownOutputs:
    """Outputs that are not copied from a replay, by their numbers among all outputs.

    Attributes:
        inputs: number of an output -> number of the input that it is.
        views: number of an output -> the view that it is of another output.
    """

    inputs: Mapping[int, int] = field(default_factory=dict)
    views: Mapping[int, OutputView] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptureSpec:
    """Code to capture, with its inputs and conditions.

    Args:
        inputs: aliases of parameters and buffers, memory for other tensors, and sizes.
        copied: the inputs that are copies of the caller's tensors.
        accumulates: True if gradients are usually added to existing ones.
        shared: another pair that never runs at the same time, whose memory is shared.
        segment: the executor's number of the gradients that this backward produces; -1 if unknown.
        memory: of all backwards of the step.
        several: a step has several graphs, so that backwards share a pool. A backward that is alone can reuse the
            memory of activations instead.
    """

    compiled: Callable[..., Any]
    inputs: Sequence[Any]
    copied: Sequence[Tensor]
    executor: Executor
    accumulates: bool
    shared: GraphPair | None
    segment: int = -1
    memory: BackwardMemory = field(default_factory=partial(BackwardMemory, False))
    several: bool = False

    def reserve_blocks(self) -> ReservedBlocks:
        """Return host memory for offloaded activations, shared with the pair that never runs at the same time."""
        shared = self.shared
        return shared.blocks if isinstance(shared, CUDAGraphPair | EmulatedGraphPair) else ReservedBlocks()

    def use_blocks(self, blocks: ReservedBlocks) -> AbstractContextManager[None]:
        """Return a context in which a forward uses this host memory."""
        return nullcontext() if self.executor.activations is None else self.executor.activations.reserving(blocks)

    def record_offloads(self, sent: list[int]) -> AbstractContextManager[None]:
        """Return a context that records offloads while a forward is captured; see ``offload/activations.py``."""
        activations = self.executor.activations
        return nullcontext() if activations is None else activations.uncounted(sent)

    def wait_for_copies(self) -> None:
        """Wait for offloads and reloads in flight after a forward or backward raised."""
        if self.executor.activations is not None:
            self.executor.activations.wait_all()

    def run(self) -> tuple[list[Tensor], KnownOutputs]:
        """Run the compiled code and return the outputs to copy, and what the others are.

        Raises:
            NotImplementedError: a replay would behave differently; the message gives the reason.
        """
        before = [tensor._version for tensor in self.copied]
        try:
            outputs = list(self.compiled(*self.inputs))
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise NotImplementedError(CHANGED_INPUT) from error
        if [tensor._version for tensor in self.copied] != before:
            raise NotImplementedError(CHANGED_INPUT)
        if not all(isinstance(output, Tensor) for output in outputs):
            raise NotImplementedError("an output is not a tensor")
        inputs = [(n, value) for n, value in enumerate(self.inputs) if isinstance(value, Tensor)]
        known = {id(value): n for n, value in inputs if not value.requires_grad}
        returned = {n: known[id(output)] for n, output in enumerate(outputs) if id(output) in known}
        computed = {n: output for n, output in enumerate(outputs) if n not in returned}
        owned = {value.untyped_storage().data_ptr() for _, value in inputs}
        if any(output.untyped_storage().data_ptr() in owned for output in computed.values()):
            raise NotImplementedError("an output is a view of an input, or an input that requires grad")
        views = _views(computed)
        return [output for n, output in computed.items() if n not in views], KnownOutputs(returned, views)

    @contextmanager
    def restoring_on_error(self) -> Iterator[None]:
        """Restore buffers and the state of random numbers if the run in this context cannot be captured."""
        copied = {id(tensor) for tensor in self.copied}
        fixed = [v for v in self.inputs if isinstance(v, Tensor) and id(v) not in copied and not v.requires_grad]
        before = [tensor.clone() for tensor in fixed]
        random: Any = torch.cuda if self.executor.device.type == "cuda" else torch
        state = random.get_rng_state()
        try:
            yield
        except NotImplementedError:
            random.set_rng_state(state)
            with torch.no_grad():
                for tensor, value in zip(fixed, before, strict=True):
                    tensor.copy_(value)
            raise

    def run_backward(self, outputs: Sequence[Tensor] | Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        """Leave the gradients of ``copied`` in ``.grad``; the executor takes those of parameters."""
        torch.autograd.backward(outputs, grads)
        copied = {id(tensor) for tensor in self.copied}
        assert all(
            value.grad is None for value in self.inputs if isinstance(value, Tensor) and id(value) not in copied
        ), "a gradient went past the executor"


def _views(outputs: Mapping[int, Tensor]) -> dict[int, OutputView]:
    """Return which outputs are views of others, as of ``h, h.t()`` and ``h, h.detach()``.

    Raises:
        NotImplementedError: outputs share memory in another way. A change of one would not change the other's copy.
    """
    found: dict[int, OutputView] = {}
    # Those with a gradient and the largest are first: the others are found to be views of them.
    order = sorted(outputs, key=lambda n: (not outputs[n].requires_grad, -outputs[n].numel()))
    for place, n in enumerate(order):
        for other in order[:place]:
            if other in found or not _overlap(outputs[n], outputs[other]):
                continue
            if not _contains(outputs[other], outputs[n]):
                raise NotImplementedError("two outputs share memory, as `h[1:]` and `h[:-1]` do")
            view, base = outputs[n], outputs[other]
            offset = int(view.storage_offset() - base.storage_offset())
            found[n] = OutputView(other, view.size(), view.stride(), offset, view.requires_grad)
            break
    return found


def _contains(base: Tensor, view: Tensor) -> bool:
    """Return True if ``base`` is dense, and all elements of ``view`` are elements of it, in its dtype."""
    if base.dtype != view.dtype or not torch.ops.aten.is_non_overlapping_and_dense(base):
        return False
    begin = view.storage_offset() - base.storage_offset()
    last = begin + sum((size - 1) * stride for size, stride in zip(view.size(), view.stride(), strict=True))
    return begin >= 0 and last < base.numel()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def _overlap(one: Tensor, other: Tensor) -> bool:
    storage = one.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr() or not one.numel() or not other.numel():
        return False
    if one.dtype != other.dtype or _place(one) == _place(other):
        return True
    # On the host, since a capture would record it.
    marks = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool, device="cpu")
    marks.as_strided(one.size(), one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.size(), other.stride(), other.storage_offset()).any())


class GraphPair(Protocol):
    """Forward and backward of one compiled graph on fixed inputs.

    The constructor takes a :class:`CaptureSpec` and raises ``NotImplementedError`` if it cannot be captured. There is
    no backward if no output requires grad.

    Attributes:
        nbytes: size of the memory that it allocated, without memory of ``shared``.
    """

    nbytes: int

    differentiable: Sequence[bool]  # one per output; known after a forward
    known: KnownOutputs  # those that forward() leaves out; known after a forward

    def fits(self) -> bool:
        """Return True if a replay gives the same results as a run."""

    def forward(self) -> Sequence[Tensor]:
        """Return the outputs, in memory that the next forward overwrites."""

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Take gradients of the outputs (None means zero) and return those of the copied inputs.

        The next backward overwrites the memory of the results.
        """

    def close(self) -> None:
        """Free the memory and end replays. Idempotent."""


ACTIVATIONS_GONE = (
    "lightning_zero: the activations of a forward that was replayed as a CUDA graph are gone, because "
    "lightning_zero.unshard() was called, or the strategy was closed, before its backward pass. Run the backward pass "
    "first."
)


def _started(executor: Executor, number: int) -> None:
    """Record the effects of a replay that was launched and may still be running."""
    executor.graphs.after_replay(number)


class _Graph:
    """One CUDA graph and its recording in the executor.

    ``run`` enqueues the captured work. ``prepare`` runs before, after the recording has begun.
    """

    def __init__(
        self,
        spec: CaptureSpec,
        pool: Any,
        run: Callable[[], None],
        backward: bool,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = spec.executor
        self._graph = torch.cuda.CUDAGraph()
        spec.executor.graphs.begin(backward, backward and spec.accumulates, spec.segment if backward else -1)
        try:
            prepare()
            with capture_graph(self._graph, pool):
                try:
                    run()
                    self.number = spec.executor.graphs.end()
                except BaseException:
                    with suppress(RuntimeError):
                        spec.wait_for_copies()
                    spec.executor.graphs.abort()  # also joins the executor's streams; otherwise the capture cannot end
                    raise
        except BaseException:
            with suppress(RuntimeError):
                # the traceback keeps this object alive, and process groups wait for its collectives
                self._graph.reset()
            raise

    def replay(self) -> None:
        self._executor.graphs.before_replay(self.number)
        self._graph.replay()
        _started(self._executor, self.number)

    def close(self) -> None:
        self._graph.reset()
        self._executor.graphs.drop(self.number)


class CUDAGraphPair:
    """A :class:`GraphPair` of CUDA graphs."""

    _pool: Any
    _stream: torch.cuda.Stream
    known: KnownOutputs

    def __init__(self, spec: CaptureSpec) -> None:
        executor, device = spec.executor, spec.executor.device
        shared = spec.shared if isinstance(spec.shared, CUDAGraphPair) else None
        own = spec.memory.stream(device) if spec.memory.shared else torch.cuda.Stream(device)
        stream = shared._stream if shared is not None else own
        self._stream, current = stream, torch.cuda.current_stream(device)
        # otherwise the graph would contain a wait for one particular step
        executor.weights.sync_compute_shards(ahead=True)
        reserved = 0
        self._sent: list[int] = []  # bytes of each offload in a forward
        stream.wait_stream(current)
        self._executor, self._memory = executor, spec.memory
        self.blocks = spec.reserve_blocks()
        self._pool = shared._pool if shared is not None else torch.cuda.graph_pool_handle()
        with (
            _join_streams(current, stream),
            torch.cuda.stream(stream),
            _separate_cublas_workspaces(),
            spec.use_blocks(self.blocks),
        ):
            outputs: list[Tensor] = []

            def run() -> None:
                computed, self.known = spec.run()
                outputs.extend(computed)

            def prepare() -> None:
                nonlocal reserved
                # Captures cannot use memory cached outside of them, such as the buckets that the recording just
                # released.
                torch.cuda.empty_cache()
                reserved = torch.cuda.memory_reserved(device)

            with spec.record_offloads(self._sent):
                self._forward = _Graph(spec, self._pool, run, False, prepare)
            self.differentiable: Sequence[bool] = [output.requires_grad for output in outputs]
            wanted = [get_gradient_edge(output) for output in outputs if output.requires_grad]
            self._grads = spec.memory.gradients_like(outputs)
            # A replay's outputs are copied before anything else uses the pool.
            self._outputs = [spec.memory.reusable(output.detach()) for output in outputs]
            outputs.clear()
            given = [grad for grad in self._grads if grad is not None]
            try:
                self._backward: _Graph | None = None
                if wanted:
                    pool = spec.memory.pool if spec.several and spec.memory.shared else self._pool
                    self._backward = _Graph(spec, pool, lambda: spec.run_backward(wanted, given), backward=True)
                    executor.graphs.mark_not_run(self._backward.number)
            except BaseException:
                executor.graphs.mark_not_run(self._forward.number)
                self._forward.close()
                raise
            # The backward was recorded as if the forward had run, which no later code may assume.
            executor.graphs.mark_not_run(self._forward.number)
            self._input_grads = [
                None if tensor.grad is None else spec.memory.reusable(tensor.grad) for tensor in spec.copied
            ]
            for tensor in spec.copied:
                tensor.grad = None
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
        self._memory.begin_replay(self._executor.device)
        for mine, given in zip(self._grads, grads, strict=True):
            if mine is not None:
                mine.zero_() if given is None else mine.copy_(given)
        assert self._backward is not None, "a backward of outputs that need none"
        self._backward.replay()
        return self._input_grads

    def close(self) -> None:
        # Free these now: a loss that the user keeps references this object.
        self._outputs, self._grads, self._input_grads, self.blocks = [], [], [], ReservedBlocks()
        for graph in (self._forward, self._backward):
            if graph is not None:
                graph.close()


class EmulatedGraphPair:
    """A :class:`GraphPair` that runs the code each time with the same bookkeeping, for tests."""

    nbytes = 0

    def __init__(self, spec: CaptureSpec) -> None:
        self._spec, self._executor = spec, spec.executor
        self.blocks = spec.reserve_blocks()
        self._numbers: dict[bool, int] = {}
        self._adding: bool | None = None  # True if the first backward found gradients
        self._outputs: list[Tensor] = []
        self.differentiable: Sequence[bool] = ()
        self.known = KnownOutputs()

    @contextmanager
    def _recorded(self, backward: bool, accumulates: bool) -> Iterator[None]:
        known = self._numbers.get(backward)
        if known is None:
            if not (backward and self._executor.weights.sync_compute_shards(ahead=True)):
                self._executor.weights.sync_compute_shards()
        else:
            self._executor.graphs.before_replay(known)
        self._executor.graphs.begin(backward, accumulates, self._spec.segment if backward else -1)
        try:
            yield
            number = self._executor.graphs.end()
        except BaseException:
            self._executor.graphs.abort()
            raise
        if known is None and backward:
            # The number exists only after the first run. State that precedes a replay was already correct then.
            self._executor.graphs.before_replay(number)
        _started(self._executor, self._numbers.setdefault(backward, number))
        if known is not None:
            self._executor.graphs.drop(number)

    def fits(self) -> bool:
        numbers = list(self._numbers.values())
        return not numbers or self._executor.graphs.fits(numbers[0], numbers[-1])

    def forward(self) -> Sequence[Tensor]:
        holding = self._spec.use_blocks(self.blocks)
        restoring = nullcontext() if self._numbers else self._spec.restoring_on_error()
        with torch.enable_grad(), holding, self._recorded(backward=False, accumulates=False), restoring:
            self._outputs, self.known = self._spec.run()
        self.differentiable = [output.requires_grad for output in self._outputs]
        return self._outputs

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if not self._outputs:
            raise RuntimeError(ACTIVATIONS_GONE)
        for tensor in self._spec.copied:
            tensor.grad = None
        outputs, given = [], []
        for output, grad in zip(self._outputs, grads, strict=True):
            if output.requires_grad:
                outputs.append(output)
                given.append(torch.zeros_like(output) if grad is None else grad)
        if self._adding is None:
            self._adding = self._executor.gradients.has_gradients()
        with torch.enable_grad(), self._recorded(True, self._adding):
            self._spec.run_backward(outputs, given)
        return [tensor.grad for tensor in self._spec.copied]

    def close(self) -> None:
        self._outputs, self.blocks = [], ReservedBlocks()
        for number in self._numbers.values():
            self._executor.graphs.drop(number)


@contextmanager
def _join_streams(current: torch.cuda.Stream, stream: torch.cuda.Stream) -> Iterator[None]:
    """Make ``current`` wait for ``stream``, also after a failed capture.

    ``stream`` has waited for copies that use memory of ``current``, which ``current`` may reuse.
    """
    try:
        yield
    finally:
        current.wait_stream(stream)


@contextmanager
def _separate_cublas_workspaces() -> Iterator[None]:
    """Release cuBLAS workspaces before and after a capture.

    torch keeps one workspace per stream forever. Workspaces made during a capture would keep the graphs' memory alive.
    """
    cuda.clear_cublas_workspaces()
    try:
        yield
    finally:
        cuda.clear_cublas_workspaces()
