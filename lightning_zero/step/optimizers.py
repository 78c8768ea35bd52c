"""All optimizers of an engine, and the protocol of their steps.

An optimizer steps shards in this order, whoever drives it:

    ``begin``                 gradients are final: edits reach the shards, readers are waited for, and the runner does
                              its part; a captured one has made the whole step when this returns
    ``optimizer.step``        the optimizer's own, on flat parameters in place of its own ones, or on none
    a post-hook of ours       before those of users: the optimizer has its own parameters and state again
    ``end``                   other ranks may read; copies that were made of shards are void

:meth:`OptimizerSteps.stepping` does all of it around a plain ``optimizer.step()``.

Lightning runs forward and backward inside ``optimizer.step(closure)``, after the user's pre-hooks, and an optimizer may
call its closure several times. :meth:`OptimizerSteps.with_closure` surrounds that:

    ``optimizer.step``        calls the closure
        ``end``               of what an earlier call has begun: the closure sees the optimizer's own parameters
        closure               forward and backward
        ``before_step``       what hooks write to shards from here on wins over weights that were read
        clipping, hooks       Lightning's, at the end of its closure
        ``begin``             its last act
    ...                       the optimizer steps
    ``end``                   whatever happened
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.bf16_state import (
    STATE_DTYPE,
    bf16_state_names,
    check_bf16_state,
    keeps_bf16_state,
    restore_state_dtype,
)
from lightning_zero.optim.chunks import StateOnHost
from lightning_zero.optim.move_to_host import move_state_to_host
from lightning_zero.optim.norms import parameter_norms
from lightning_zero.optim.rules import rule_for
from lightning_zero.optim.state_placement import MakePlacer, StatePlacer, place_loaded_state
from lightning_zero.optim.support import (
    check_capture,
    check_members,
    check_offload,
    check_optimizer,
    is_torch_optimizer,
    speed_up_zero_grad,
)
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.step.captured import reason_not_captured
from lightning_zero.step.cycle import StepCycle
from lightning_zero.step.stepper import OptimizerStepper

__all__ = ["OptimizerSteps"]

Closure = Callable[[], Any]


class OptimizerSteps:
    """Steps optimizers over one engine's shards.

    Args:
        sharder: knows the shards.
        cycle: hears of each step.
        config: options.

    Attributes:
        before_arranging: is told the optimizers before shards are laid out for them.
    """

    def __init__(self, sharder: Sharder, cycle: StepCycle, config: EngineConfig) -> None:
        self.config = config
        self._sharder = sharder
        self._cycle = cycle
        self.before_arranging: Callable[[Sequence[torch.optim.Optimizer]], None] = lambda optimizers: None
        self._on_host: StateOnHost | None = None  # once some state is
        cycle.on_forward_begin, cycle.on_backward_begin = self._before_forward, self._prefetch_state
        self._steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerStepper] = weakref.WeakKeyDictionary()

    def stepper(self, optimizer: torch.optim.Optimizer) -> OptimizerStepper:
        """What steps this optimizer over the arenas."""
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            if self.bf16_state:
                check_bf16_state(optimizer, optimizer.param_groups)
            if self.on_host:
                check_offload(optimizer)
                optimizer.register_state_dict_pre_hook(lambda _: self.settle())
            where = self._host(), self.bf16_state
            stepper = OptimizerStepper(optimizer, self._sharder, *_capture_options(self.config), *where)
            self._steppers[optimizer] = stepper
        return stepper

    def configure(self, config: EngineConfig) -> None:
        """Other options. Where they capture steps otherwise, or have state or gradients lie elsewhere, each optimizer's
        next step is laid out anew; other buffers are for state that stays where it is."""
        if (_capture_options(config), _memory_options(config)) != (
            _capture_options(self.config),
            _memory_options(self.config),
        ):
            self.settle()
            if self.bf16_state and config.tuning.state_dtype is None:
                for optimizer in self._steppers:
                    restore_state_dtype(optimizer, self._sharder.find)
            if "optimizer" in config.offload and not self.on_host:
                for optimizer in self._steppers:
                    move_state_to_host(optimizer, self._sharder.find)
            self._steppers.clear()
            self._on_host = None
        elif config.offload_buffer_bytes != self.config.offload_buffer_bytes:
            self._resize_buffers(config)
        self.config = config

    def _resize_buffers(self, config: EngineConfig) -> None:
        if self._on_host is not None:
            self.settle()  # a step that failed may have left copies that nobody waits for
            self._on_host.ring.resize(config.offload_buffer_bytes)
            for stepper in self._steppers.values():
                stepper.drop_captures()

    @property
    def _masters_on_host(self) -> bool:
        return "parameters" in self.config.offload

    @property
    def on_host(self) -> bool:
        """Whether optimizers' state lies on the host, where nobody else need put it."""
        return "optimizer" in self.config.offload

    @property
    def bf16_state(self) -> bool:
        """Whether state of parameters that are not small is kept in bfloat16."""
        return self.config.tuning.state_dtype is not None

    @property
    def make_placer(self) -> MakePlacer | None:
        """What puts an optimizer's state in its place when it is loaded, where torch would put it elsewhere, or make
        it wider, on the way."""
        return self._make_placer if self.on_host or self.bf16_state else None

    def _make_placer(self, optimizer: torch.optim.Optimizer) -> StatePlacer:
        names = bf16_state_names(optimizer, optimizer.param_groups, self._sharder.find) if self.bf16_state else {}

        def place(param: Tensor, key: str, value: Tensor) -> Tensor:
            record = self._sharder.find(param)
            kept = param.dtype if param.is_floating_point() else value.dtype  # as torch has it
            if record is not None and value.is_floating_point() and key in names.get(record.index, ()):
                kept = STATE_DTYPE
            return value.to(value.device if self.on_host else param.device, kept)

        return place

    def empty_state(self, numel: int, dtype: torch.dtype) -> Tensor:
        """New memory, 1-D, where state lies that has one element for each of a shard's.

        Raises:
            HostMemoryError: that is the host, which has not so much.
        """
        host = self._host()
        if host is None:
            return torch.empty(numel, dtype=dtype, device=self._sharder.executor.device)
        return host.memory.empty(numel, dtype)

    def settle(self) -> None:
        """The host may read state that lies there: what copies there are on their way have arrived."""
        if self._on_host is not None:
            self._on_host.memory.settle()

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Has the optimizer load a state dict of shards.

        Raises:
            ValueError: another optimizer's.
        """
        settings = [set(group) & set(optimizer.defaults) for group in optimizer.param_groups]
        with nullcontext() if self.make_placer is None else place_loaded_state(optimizer, self.make_placer):
            optimizer.load_state_dict(state)
        # Settings come with the state. What older versions did not know torch's own optimizers add by themselves.
        lacking = sorted(set().union(*settings) - set().union(*optimizer.param_groups)) if settings else []
        if lacking and is_torch_optimizer(optimizer):
            raise ValueError(
                f"The checkpoint's optimizer is no {type(optimizer).__name__}: its settings lack "
                f"{', '.join(map(repr, lacking))}. Configure the optimizer as it was when the checkpoint was saved, or "
                "load only the weights with load_from_checkpoint()."
            )

    def captures(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its steps are captured, as far as it tells before it has made one."""
        return reason_not_captured(optimizer, self._sharder.executor.device, *_capture_options(self.config)) is None

    def _before_forward(self) -> None:
        """Not behind the step before: between steps users may write to state in ways that no version shows, and until
        backward to master shards."""
        if not self._masters_on_host:
            self._prefetch_state()

    def _prefetch_state(self) -> None:
        if self._on_host is not None and len(self._steppers) == 1:  # of several nobody knows which one steps next
            for stepper in self._steppers.values():
                stepper.prefetch_from_host()

    def _host(self) -> StateOnHost | None:
        if self.on_host and self._on_host is None:
            device, told = self._sharder.executor.device, self._sharder.executor.weights.user_write_count
            stamp = told if self._masters_on_host else lambda: None  # of master shards alone
            ring = StagingRing(device, self.config.offload_buffer_bytes, stamp=stamp)
            self._on_host = StateOnHost(HostMemory(device), ring)
        return self._on_host

    def begin(self, optimizer: torch.optim.Optimizer, skip: Tensor | None = None, in_closure: bool = True) -> None:
        """Gradients are final, and the optimizer's own ``step`` is next; :meth:`end` must come after it. Inside its
        ``step(closure)``, the closure's last act.

        skip, inside: see :meth:`OptimizerStepper.begin`

        Raises:
            RuntimeError: another optimizer's step is not over.
            UnsupportedError: the optimizer holds what is no shard, or keeps state for more than single elements.
        """
        stepper = self.stepper(optimizer)
        self._cycle.begin_step(stepper)
        # Of a step that is under way the state is in the buffers that there are.
        if self._on_host is not None and self._on_host.ring.can_grow and not stepper.in_progress:
            self._resize_buffers(self.config)
        stepper.begin(skip, in_closure)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """After the optimizer's ``step``, whether it succeeded or not, and before a closure is run again."""
        stepper = self.stepper(optimizer)
        self._cycle.end_step(stepper, changed=stepper.end())

    @contextmanager
    def stepping(
        self, optimizer: torch.optim.Optimizer, clip: float | None = None, skip: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        """Surrounds ``optimizer.step()``, once gradients are final. Collective with ``clip``.

        Args:
            optimizer: of shards.
            clip: gradients are scaled to a global 2-norm of at most this; the norm before is given, 0-dim on the
                device.
            skip: see :meth:`OptimizerStepper.begin`.
        """
        norm = None
        if clip is not None:
            self._cycle.finalize_gradients()
            norm = self.stepper(optimizer).clip_norm(clip, later=True)
        try:
            self.begin(optimizer, skip, in_closure=False)
            yield norm
        finally:
            self.end(optimizer)

    @contextmanager
    def with_closure(self, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[Closure], Closure]]:
        """Surrounds ``optimizer.step(wrap(closure))``, where ``wrap`` is what this gives. After the closure gradients
        may still change; then comes :meth:`begin`."""

        def wrap(closure: Closure) -> Closure:
            def announced() -> Any:
                self.end(optimizer)
                result = closure()
                self._cycle.end_backward()
                self._cycle.before_step(stepping=True)
                return result

            return announced

        try:
            yield wrap
        finally:
            self.end(optimizer)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises :class:`UnsupportedError` when the optimizer needs whole parameters, or holds parameters that are no
        shards."""
        check_optimizer(optimizer)
        if self.bf16_state:
            check_bf16_state(optimizer, optimizer.param_groups)
        if self.on_host:
            check_offload(optimizer)
        if self.config.cuda_graph_step is True:
            check_capture(
                optimizer, self.stepper(optimizer).eager_reason, self.config.controlling_option("cuda_graph_step")
            )
        check_members(optimizer.param_groups, type(optimizer).__name__, self._sharder.find)
        speed_up_zero_grad(optimizer)

    def arrange(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Lays the shards out for these optimizers, so that each steps its groups as few tensors. Best called before
        training; without it everything works in smaller pieces. Collective."""
        self.before_arranging(optimizers)
        # What steps an optimizer holds it, and its state: one of an earlier training would be there for good.
        for earlier, stepper in [*self._steppers.items()]:
            if earlier not in optimizers and not stepper.in_progress:
                del self._steppers[earlier]
        groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        simple = all(rule_for(optimizer, group) is not None for optimizer, group in groups)

        def kind(record: ShardedParameter) -> tuple[int, bool]:
            bf16_state = self.bf16_state and keeps_bf16_state(record.layout.numel, record.param.dtype)
            return 0 if simple else record.param.dim(), bf16_state

        self._sharder.memory.group_shards([group["params"] for _, group in groups], kind)

    def grad_norms(self, norm_type: float) -> dict[int, Tensor]:
        """The p-norm of each parameter's gradient over all ranks' shards, by the parameter's index: scalars on the
        device, zero where there is no gradient. Collective."""
        self._cycle.finalize_gradients()
        live = self._sharder.live
        executor = self._sharder.executor
        with no_shard_dispatch():
            shards = [record.param.grad for record in live]
        with executor.waiting("norms of gradients", SequenceId.GATHER):
            dtypes = [torch.float32 if t is None else r.param.dtype for r, t in zip(live, shards, strict=True)]
            norms = parameter_norms(shards, norm_type, self._sharder.mesh, executor.device, dtypes)
        return dict(zip([record.index for record in live], norms, strict=True))


def _capture_options(config: EngineConfig) -> tuple[bool | str, bool]:
    return config.cuda_graph_step, config.tuning.emulate_cuda_graph_step


def _memory_options(config: EngineConfig) -> tuple[tuple[str, ...], str | None, bool]:
    return config.offload, config.tuning.state_dtype, bool(config.tuning.grad_aliasing)
