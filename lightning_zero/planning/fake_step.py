"""Run one training step on fake tensors, as the strategy would run it: see :func:`run_step`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from lightning_zero.compat.graphs import AC_GRAPH_ID, RECOMPUTE
from lightning_zero.compat.modules import CHECKPOINT_REGIONS
from lightning_zero.compat.patches import swap_attribute
from lightning_zero.compat.tensors import FakeTensorMode, tree_map, tree_map_only
from lightning_zero.compile.context import PassContext
from lightning_zero.planning.fake_compiler import FakeCompiler, GraphTotals
from lightning_zero.planning.memory_counter import MemoryCounter
from lightning_zero.profiling.node_costs import DeviceSpeed, op_flops

LossFunction = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Precision:
    """Dtypes of a Trainer's ``precision``.

    Attributes:
        name: the Trainer's string.
        own: dtype of all floating-point parameters; None for their own.
        autocast: dtype of autocast; None without it.
    """

    name: str
    own: torch.dtype | None = None
    autocast: torch.dtype | None = None

    @classmethod
    def of(cls, name: str) -> Precision:
        """Return the precision of a name. Raises ``ValueError`` for an unsupported one."""
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
        loss: returns the loss of a module and a batch.
    """

    context: PassContext
    precision: Precision
    speed: DeviceSpeed
    gpu: bool
    loss: LossFunction


@dataclass
class StepEstimate:
    """Estimate of one forward and backward on one GPU, without what persists between steps.

    Attributes:
        saved: bytes alive between forward and backward.
        peak: peak bytes.
        forward_s: compute seconds of forward.
        backward_s: compute seconds of backward.
        flops: operations of both.
        reduced: bytes of gradients as they are computed.
        graphs: totals of the compiled graphs.
    """

    saved: int = 0
    peak: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: int = 0
    reduced: int = 0
    graphs: GraphTotals = field(default_factory=GraphTotals)


def run_step(
    module: nn.Module, batch: Any, trace: TraceConfig, compiles: bool, saves_on_host: bool = False
) -> StepEstimate:
    """Run one pass, compiled or eagerly; the module is unchanged afterwards.

    Args:
        saves_on_host: tensors that eager code saves for backward are on the host until then.

    Raises:
        Exception: any error of code that cannot run without values.
    """
    mode, precision = FakeTensorMode(allow_non_fake_inputs=True), trace.precision
    found = StepEstimate()
    with ExitStack() as stack:
        stack.enter_context(fake_parameters(module, mode, precision.own))
        stack.enter_context(emulate_gpu_ops() if trace.gpu else nullcontext())
        stack.enter_context(_default_dtype(precision.own))
        inputs = fake_batch(batch, mode, precision.own)
        counter = MemoryCounter([*module.parameters(), *module.buffers()], op_flops)
        compiler = FakeCompiler(mode, counter, trace.context, trace.speed, marked_regions)
        stack.enter_context(_dropping_gradients(module))
        stack.enter_context(_compiling_calls(module, compiler) if compiles else nullcontext())
        stack.enter_context(mode)
        stack.enter_context(counter)
        autocast = torch.autocast("cpu", precision.autocast, precision.autocast is not None, cache_enabled=False)
        with autocast, _saving_on_host(counter) if saves_on_host else nullcontext():
            loss = trace.loss(module, inputs)
        graphs = found.graphs = compiler.found
        before = counter.flops, counter.moved
        found.saved = counter.alive
        if loss.requires_grad:
            loss.backward()
        else:
            raise ValueError("The loss does not depend on any parameter that is trained.")
        del loss
    after = counter.flops - before[0], counter.moved - before[1]
    dtype = precision.autocast or precision.own or torch.float32
    found.forward_s = graphs.forward_s + trace.speed.seconds(*before, dtype, launches=0)
    found.backward_s = graphs.backward_s + trace.speed.seconds(*after, dtype, launches=0)
    found.flops = graphs.flops + counter.flops
    found.peak, found.reduced = counter.peak, graphs.reduced
    return found


@contextmanager
def fake_parameters(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Replace parameters and buffers by fake CPU tensors within the context, with the same ties."""
    fakes: dict[int, Tensor] = {}
    replaced: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for owner in module.modules():
            params = owner.named_parameters(recurse=False, remove_duplicate=False)
            buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in [*params, *buffers]:
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = _fake(tensor, mode, dtype)
                replaced.append((owner, name, tensor))
                setattr(owner, name, fakes[id(tensor)])
        yield
    finally:
        for owner, name, tensor in replaced:
            setattr(owner, name, tensor)


def fake_batch(batch: Any, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Any:
    """Return the same containers with fake CPU tensors."""

    def fake(value: Any) -> Any:
        return _fake(value, mode, dtype) if isinstance(value, Tensor) else value

    return tree_map(fake, batch)


def _fake(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


@CHECKPOINT_REGIONS
@contextmanager
def marked_regions() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` run its function once and tag its nodes, as Dynamo does."""
    numbers = count(1)

    @contextmanager
    def region() -> Iterator[None]:
        meta = traceback.current_meta
        before = {key: meta[key] for key in (RECOMPUTE, AC_GRAPH_ID) if key in meta}
        meta.update({RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE, AC_GRAPH_ID: next(numbers)})
        try:
            yield
        finally:
            for key in (RECOMPUTE, AC_GRAPH_ID):
                meta.pop(key, None)
            meta.update(before)

    def run_without_reentrant(
        function: Any, preserve: bool = True, context: Callable[[], Any] | None = None, *_: Any, **__: Any
    ) -> Iterator[None]:
        forward, _recompute = context() if context is not None else (None, None)
        with region():
            if forward is None:
                yield
            else:
                with forward:  # the user's own choice of saved tensors
                    yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region():
                return function(*args)

    makers: dict[str, Callable[[Any], Any]] = {
        "checkpoint_without_reentrant_generator": lambda plain: run_without_reentrant,
        "CheckpointFunction": lambda plain: Reentrant,
    }
    with CHECKPOINT_REGIONS.replace(makers):
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _saving_on_host(counter: MemoryCounter) -> AbstractContextManager[Any]:
    def pack(tensor: Tensor) -> Any:
        return tensor if counter.is_weight(tensor) else (tensor.size(), tensor.stride(), tensor.dtype)

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else torch.empty_strided(saved[0], saved[1], dtype=saved[2])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@contextmanager
def _dropping_gradients(module: nn.Module) -> Iterator[None]:
    """Drop gradients as soon as they exist, because their memory counts as persistent."""

    def drop(param: Tensor) -> None:
        param.grad = None

    handles = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _compiling_calls(root: nn.Module, compiler: FakeCompiler) -> Iterator[None]:
    """Compile calls of the outermost modules with parameters within the context."""
    depth = 0
    wrapped: list[nn.Module] = []

    def wrap(module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            depth += 1
            try:
                return compiler.call(module, args, kwargs)
            finally:
                depth -= 1

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


# -- ops of a GPU
#
# Plans use fake CPU tensors, because fake CUDA tensors need a build of torch with CUDA. Two things differ: autocast
# computes other ops in float32 on CUDA, and attention with dropout keeps no score matrix there.

# Ops that autocast runs in float32 on CUDA but not on the CPU, from torch's ATen/autocast_mode.h.
_FLOAT32_OPS = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
    "huber_loss mse_loss margin_ranking_loss soft_margin_loss binary_cross_entropy_with_logits dist cdist renorm "
    "logsumexp"
)
# Ops that autocast asks for a float32 result on CUDA, unless the caller passes a dtype.
_FLOAT32_RESULTS = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
_KEY = "AutocastCPU"
DROPOUT = 4  # position of dropout_p among the arguments of attention
_LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextmanager
def emulate_gpu_ops() -> Iterator[None]:
    """Give this process's CPU autocast the rules of CUDA, and attention no dropout, within the context."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that kernels are overridden
            for names, kernel in ((_FLOAT32_OPS, _float32_kernel), (_FLOAT32_RESULTS, _float32_result_kernel)):
                for name in names.split():
                    if (op := _op(name)) is not None:
                        library.impl(name, kernel(op), _KEY, allow_override=True)
        attention = _without_dropout(F.scaled_dot_product_attention)
        with swap_attribute(F, "scaled_dot_product_attention", attention):
            yield
    finally:
        del library  # removes the kernels


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _float32_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            args, kwargs = tree_map_only(Tensor, _to_float32, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _LOW_PRECISION else tensor


def _float32_result_kernel(op: Any) -> Callable[..., Any]:
    def kernel(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if tensor.dtype in _LOW_PRECISION and kwargs.get("dtype") is None and len(args) < _dtype_position(op):
                kwargs["dtype"] = torch.float32
            return op(tensor, *args, **kwargs)

    return kernel


def _dtype_position(op: Any) -> int:
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    return names.index("dtype") if "dtype" in names else len(names)


def _without_dropout(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return attention without dropout, whose mask a GPU draws again instead of storing it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > DROPOUT:
            args = (*args[:DROPOUT], 0.0, *args[DROPOUT + 1 :])
        kwargs.pop("dropout_p", None)
        return attention(*args, **kwargs)

    return call
