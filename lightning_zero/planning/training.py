"""Runs one training step on paper: forward and backward on tensors without memory, as the strategy would run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.compat.tensors import FakeTensorMode
from lightning_zero.compile.context import PassContext
from lightning_zero.planning.as_on_gpu import as_on_gpu
from lightning_zero.planning.compiled import GraphTotals, FakeCompiler
from lightning_zero.planning.faked import faked, faked_batch
from lightning_zero.planning.ledger import MemoryCounter
from lightning_zero.planning.regions import marked_regions
from lightning_zero.profiling.cost import DeviceSpeed, op_flops

__all__ = ["Precision", "StepEstimate", "TraceConfig", "run_step"]

LossFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Precision:
    """What a Trainer's ``precision`` comes to.

    Attributes:
        name: the Trainer's string.
        own: dtype of all floating point parameters; None for their own.
        autocast: dtype that autocast computes in; None without it.
    """

    name: str
    own: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, name: str) -> Precision:
        """Raises ``ValueError`` for one that the strategy does not have."""
        true = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
        mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        if name not in {*true, *mixed, "32-true"}:
            raise ValueError(f"precision={name!r} is none of {', '.join((*mixed, *true, '32-true'))}.")
        return cls(name, true.get(name), mixed.get(name))


@dataclass(frozen=True)
class TraceConfig:
    """How a step is traced.

    Attributes:
        context: of the graphs.
        precision: of the training.
        speed: of the device.
        gpu: ops behave as on a GPU.
        loss: gives the loss of a module and a batch.
    """

    context: PassContext
    precision: Precision
    speed: DeviceSpeed
    gpu: bool
    loss: LossFunction


@dataclass
class StepEstimate:
    """What one pass forward and backward takes on one GPU, besides what stays from step to step.

    Attributes:
        saved: bytes alive between forward and backward.
        peak: the most bytes at once.
        outside: bytes that it takes in addition once compiled code is replayed.
        forward_s: seconds that forward computes; likewise for backward.
        flops: of both.
        reduced: bytes of gradients as they are computed.
    """

    saved: int = 0
    peak: int = 0
    outside: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: int = 0
    reduced: int = 0
    graphs: GraphTotals = field(default_factory=GraphTotals)


def run_step(module: nn.Module, batch: Any, trace: TraceConfig, compiles: bool, away: bool = False) -> StepEstimate:
    """One pass, compiled or eagerly. The module is as before afterwards.

    Args:
        away: all that eager code saves for backward is on the host until then.

    Raises:
        Exception: whatever code raises that cannot run without values.
    """
    mode, precision = FakeTensorMode(allow_non_fake_inputs=True), trace.precision
    found = StepEstimate()
    with ExitStack() as stack:
        stack.enter_context(faked(module, mode, precision.own))
        stack.enter_context(as_on_gpu() if trace.gpu else nullcontext())
        stack.enter_context(_default_dtype(precision.own))
        inputs = faked_batch(batch, mode, precision.own)
        ledger = MemoryCounter([*module.parameters(), *module.buffers()], op_flops)
        compiler = FakeCompiler(mode, ledger, trace.context, trace.speed, marked_regions)
        stack.enter_context(_dropping_gradients(module))
        stack.enter_context(_calls_compiled(module, compiler) if compiles else nullcontext())
        stack.enter_context(mode)
        stack.enter_context(ledger)
        autocast = torch.autocast("cpu", precision.autocast, precision.autocast is not None, cache_enabled=False)
        compiler.outside.begin()
        with autocast, _saved_elsewhere(ledger) if away else nullcontext():
            loss = trace.loss(module, inputs)
        graphs = found.graphs = compiler.found
        before = ledger.flops, ledger.moved
        found.saved = ledger.alive
        if loss.requires_grad:
            loss.backward()
        else:
            raise ValueError("The loss does not depend on any parameter that is trained.")
        del loss
        found.outside = compiler.outside.end() if compiles else 0
    after = ledger.flops - before[0], ledger.moved - before[1]
    dtype = precision.autocast or precision.own or torch.float32
    found.forward_s = graphs.forward_s + trace.speed.seconds(*before, dtype, launches=0)
    found.backward_s = graphs.backward_s + trace.speed.seconds(*after, dtype, launches=0)
    found.flops = graphs.flops + ledger.flops
    found.peak, found.reduced = ledger.peak, graphs.reduced
    return found


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _saved_elsewhere(ledger: MemoryCounter) -> AbstractContextManager[Any]:
    """Inside, what autograd saves takes no memory until backward asks for it, weights aside."""

    def pack(tensor: Tensor) -> Any:
        return tensor if ledger.is_weight(tensor) else (tensor.size(), tensor.stride(), tensor.dtype)

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else torch.empty_strided(saved[0], saved[1], dtype=saved[2])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@contextmanager
def _dropping_gradients(module: nn.Module) -> Iterator[None]:
    """Gradients leave as soon as they are there: they have memory of their own."""

    def drop(param: Tensor) -> None:
        param.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _calls_compiled(root: nn.Module, compiler: FakeCompiler) -> Iterator[None]:
    """Inside, the outermost modules with parameters that a step calls are compiled on paper."""
    inside = 0
    wrapped: list[nn.Module] = []

    def wrap(module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            inside += 1
            try:
                return compiler.call(module, args, kwargs)
            finally:
                inside -= 1

        return forward

    for module in root.modules():
        if next(module.parameters(), None) is not None and "forward" not in vars(module):
            module.forward = wrap(module, module.forward)  # type: ignore[method-assign]
            wrapped.append(module)
    try:
        yield
    finally:
        for module in wrapped:
            del module.forward
