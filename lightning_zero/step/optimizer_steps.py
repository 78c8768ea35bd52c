"""All optimizers of an engine, and the order of calls around a step.

    ``begin``              gradients are final; user writes reach the shards; readers finish; the runner does its part
    ``optimizer.step``     the optimizer steps flat parameters; none if the captured step has already run
    our post-hook          runs before users' hooks and restores the optimizer's own parameters and state
    ``end``                other ranks may read; copies of shards are invalid

:meth:`OptimizerSteps.stepping` makes these calls around a plain ``optimizer.step()``. Lightning runs forward and
backward in ``optimizer.step(closure)``, and an optimizer may call the closure several times;
:meth:`OptimizerSteps.with_closure` calls ``end`` before each closure and ``before_step`` after it. Lightning then
clips, and calls ``begin`` last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_zero.config import EngineConfig
from lightning_zero.native.watchdog import SequenceId
from lightning_zero.offload.pinned_memory import HostMemory
from lightning_zero.offload.staging_ring import StagingRing
from lightning_zero.optim.bf16_state import ROUNDING_COUNT
from lightning_zero.optim.flat_runs import StateOnHost
from lightning_zero.optim.grad_norms import parameter_norms
from lightning_zero.optim.quantized_state import is_quantized, is_stored_key
from lightning_zero.optim.state_dtypes import (
    Rounding,
    StoredDtypes,
    check_rounding,
    restore_state_dtypes,
    stored_dtypes,
    stored_dtypes_by_index,
)
from lightning_zero.optim.state_placement import MakePlacer, StatePlacer, move_state_to_host, place_loaded_state
from lightning_zero.optim.support import (
    check_capture,
    check_matrices,
    check_members,
    check_offload,
    check_optimizer,
    is_torch_optimizer,
    speed_up_zero_grad,
)
from lightning_zero.optim.update_rules import rule_for
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.sharding.sharder import Sharder
from lightning_zero.step.cycle import StepCycle
from lightning_zero.step.runners import reason_not_captured
from lightning_zero.step.stepper import OptimizerStepper, StepGuard

Closure = Callable[[], Any]


class OptimizerSteps:
    """Steps optimizers over one engine's shards.

    Attributes:
        before_arranging: Called with the optimizers before their shards are arranged.
    """

    def __init__(self, sharder: Sharder, cycle: StepCycle, config: EngineConfig) -> None:
        self.config = config
        self._sharder = sharder
        self._cycle = cycle
        self.before_arranging: Callable[[Sequence[torch.optim.Optimizer]], None] = lambda optimizers: None
        self._on_host: StateOnHost | None = None  # set once some state is offloaded
        cycle.events.forward_begin.append(self._before_forward)
        cycle.events.backward_begin.append(self._prefetch_state)
        self._steppers: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerStepper] = weakref.WeakKeyDictionary()

    def stepper(self, optimizer: torch.optim.Optimizer) -> OptimizerStepper:
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            check_rounding(optimizer, optimizer.param_groups, self.rounding)
            if self.on_host:
                check_offload(optimizer)
                optimizer.register_state_dict_pre_hook(lambda _: self.settle())
            bucket = int(self.config.tuning.matrix_bucket_mb * 2**20)
            capture, emulate = _capture_options(self.config)
            stepper = OptimizerStepper(optimizer, self._sharder, capture, emulate, self._host(), self.rounding, bucket)
            self._steppers[optimizer] = stepper
        return stepper

    def configure(self, config: EngineConfig) -> None:
        """Apply other options.

        If they change capture or the memory of state or gradients, each optimizer's next step gets a new layout. If
        only the buffer size changes, captures are dropped and state stays.
        """
        if (_capture_options(config), _memory_options(config)) != (
            _capture_options(self.config),
            _memory_options(self.config),
        ):
            self.settle()
            if config.tuning.state_dtype != self.rounding.state_dtype:
                for optimizer in self._steppers:
                    restore_state_dtypes(optimizer, self._sharder.find, self.rounding.state_dtype)
            if "optimizer" in config.offload and not self.on_host:
                for optimizer in self._steppers:
                    move_state_to_host(optimizer, self._sharder.find)
            self.drop_layouts()
        elif config.offload_buffer_bytes != self.config.offload_buffer_bytes:
            self._resize_buffers(config)
        self.config = config

    def _resize_buffers(self, config: EngineConfig) -> None:
        if self._on_host is not None:
            self.settle()  # a failed step may have left copies in flight
            self._on_host.ring.resize(config.offload_buffer_bytes)
            self.drop_captures()

    def drop_layouts(self) -> None:
        """Give each optimizer's next step a new layout, because memory of state or gradients has moved."""
        self.settle()
        self._steppers.clear()
        self._on_host = None

    def drop_captures(self) -> None:
        """Free the captured steps and their device memory; a later step is captured again."""
        for stepper in self._steppers.values():
            stepper.drop_captures()

    @property
    def _masters_on_host(self) -> bool:
        return "parameters" in self.config.offload

    @property
    def on_host(self) -> bool:
        """True if optimizer state is offloaded to the host."""
        return "optimizer" in self.config.offload

    @property
    def rounding(self) -> Rounding:
        return Rounding.of(self.config.tuning)

    @property
    def make_placer(self) -> MakePlacer | None:
        """Return a factory of functions that place loaded state; None if torch places it right."""
        return self._make_placer if self.on_host or any(self.rounding) else None

    def _make_placer(self, optimizer: torch.optim.Optimizer) -> StatePlacer:
        dtypes = self.stored_dtypes_of(optimizer, optimizer.param_groups)

        def place_state(param: Tensor, key: str, value: Tensor) -> Tensor:
            record = self._sharder.find(param)
            dtype = param.dtype if param.is_floating_point() else value.dtype  # as torch does
            stored = None if record is None else dtypes.get(record.index, {}).get(key)
            unchanged = is_stored_key(key) or is_quantized(stored) or key == ROUNDING_COUNT
            if unchanged or (stored is None and self.rounding.rounds_weights(param.dtype)):
                dtype = value.dtype  # counts need float32; the next step quantizes what is not quantized
            elif stored is not None and value.is_floating_point():
                dtype = stored
            return value.to(value.device if self.on_host else param.device, dtype)

        return place_state

    def stored_dtypes_of(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
    ) -> dict[int, StoredDtypes]:
        """Return the dtypes of state that is stored in fewer bytes, for these groups, by parameter index."""
        return stored_dtypes_by_index(optimizer, groups, self._sharder.find, self.rounding)

    def empty_state(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return new 1-D memory for state with one element per element of a shard.

        Raises:
            HostMemoryError: The state is offloaded, and the host has too little memory.
        """
        host = self._host()
        if host is None:
            return torch.empty(numel, dtype=dtype, device=self._sharder.executor.device)
        return host.memory.empty(numel, dtype)

    def settle(self) -> None:
        """Wait for copies of state to the host, so that the host may read it."""
        if self._on_host is not None:
            self._on_host.memory.settle()

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        settings = [set(group) & set(optimizer.defaults) for group in optimizer.param_groups]
        with nullcontext() if self.make_placer is None else place_loaded_state(optimizer, self.make_placer):
            optimizer.load_state_dict(state)
        # Settings are loaded with the state. torch's optimizers add the ones that older versions did not have.
        lacking = sorted(set().union(*settings) - set().union(*optimizer.param_groups)) if settings else []
        if lacking and is_torch_optimizer(optimizer):
            raise ValueError(
                f"The checkpoint's optimizer is no {type(optimizer).__name__}: its settings lack "
                f"{', '.join(map(repr, lacking))}. Configure the optimizer as it was when the checkpoint was saved, or "
                "load only the weights with load_from_checkpoint()."
            )

    def captures(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer's steps are captured, as far as known before the first one."""
        return reason_not_captured(optimizer, self._sharder.executor.device, *_capture_options(self.config)) is None

    def _before_forward(self) -> None:
        """Prefetch at forward, not after the step.

        Users may write to state between steps without a version change.

        Master shards may be written until backward, so they are not prefetched here.
        """
        for stepper in self._steppers.values():
            stepper.forward_begins()
        if not self._masters_on_host:
            self._prefetch_state()

    def _prefetch_state(self) -> None:
        if self._on_host is not None and len(self._steppers) == 1:  # of several it is unknown which steps next
            for stepper in self._steppers.values():
                stepper.prefetch_from_host()

    def _host(self) -> StateOnHost | None:
        if self.on_host and self._on_host is None:
            executor = self._sharder.executor
            # The stamp concerns master shards only.
            stamp = executor.weights.user_write_count if self._masters_on_host else lambda: None
            ring = StagingRing(executor.device, self.config.offload_buffer_bytes, stamp=stamp)
            self._on_host = StateOnHost(HostMemory(executor.device), ring)
        return self._on_host

    def begin(
        self,
        optimizer: torch.optim.Optimizer,
        skip: Tensor | None = None,
        in_closure: bool = True,
        clip: float | None = None,
    ) -> Tensor | None:
        """Make gradients final: the optimizer's own ``step`` is next, and :meth:`end` must follow it.

        Args:
            optimizer: Optimizer of shards.
            skip, in_closure: See :meth:`OptimizerStepper.begin`.
            clip: Scale gradients to a global 2-norm of at most this, and return the norm before.

        Raises:
            UnsupportedError: The optimizer holds a parameter that is no shard, or state that is not elementwise.
        """
        stepper = self.stepper(optimizer)
        self._cycle.begin_step(stepper)
        # A step in progress has its state in the present buffers.
        if self._on_host is not None and self._on_host.ring.can_grow and not stepper.in_progress:
            self._resize_buffers(self.config)
        norm = None if clip is None else stepper.clip_norm(clip, later=True)
        stepper.begin(skip, in_closure)
        return norm

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish the optimizer's ``step``, successful or not. Call it also before a closure runs again."""
        stepper = self.stepper(optimizer)
        self._cycle.end_step(stepper, changed=stepper.end())

    @contextmanager
    def _explaining_errors(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            self.stepper(optimizer).explain_error(error)
            raise

    @contextmanager
    def stepping(
        self, optimizer: torch.optim.Optimizer, clip: float | None = None, skip: Tensor | None = None
    ) -> Iterator[Tensor | None]:
        """Surround ``optimizer.step()`` after gradients are final. Collective with ``clip``.

        Args:
            clip: Scale gradients to a global 2-norm of at most this. Yields the norm before, 0-dim on the device.
        """
        try:
            with self._explaining_errors(optimizer):
                yield self.begin(optimizer, skip, in_closure=False, clip=clip)
        finally:
            self.end(optimizer)

    @contextmanager
    def with_closure(self, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[Closure], Closure]]:
        """Surround ``optimizer.step(wrap(closure))``, where ``wrap`` is the yielded function.

        Gradients may still change after the closure; then call :meth:`begin`.
        """

        def wrap(closure: Closure) -> Closure:
            def announced() -> Any:
                self.end(optimizer)
                result = closure()
                self._cycle.end_backward()
                self._cycle.before_step(stepping=True)
                return result

            return announced

        def check_other_step() -> None:
            self.stepper(optimizer).check_own_step()
            self._cycle.before_step()

        guard = StepGuard(lambda: self.stepper(optimizer).in_progress, check_other_step)
        hook = optimizer.register_step_pre_hook(guard)
        try:
            with self._explaining_errors(optimizer):
                yield wrap
        finally:
            hook.remove()
            self.end(optimizer)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise :class:`UnsupportedError` if the optimizer cannot step this engine's shards."""
        check_optimizer(optimizer)
        check_rounding(optimizer, optimizer.param_groups, self.rounding)
        if self.on_host:
            check_offload(optimizer)
        if self.config.cuda_graph_step is True:
            check_capture(
                optimizer, self.stepper(optimizer).eager_reason, self.config.controlling_option("cuda_graph_step")
            )
        check_members(optimizer.param_groups, type(optimizer).__name__, self._sharder.find)
        check_matrices(optimizer, self._sharder.find, self._masters_on_host)
        speed_up_zero_grad(optimizer)

    def arrange(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Arrange the shards so that each optimizer steps its groups as few tensors.

        Call before training. Collective.

        Without it, steps use more and smaller tensors.
        """
        self.before_arranging(optimizers)
        # A stepper holds its optimizer and its state: drop those of earlier trainings.
        for previous, stepper in [*self._steppers.items()]:
            if previous not in optimizers and not stepper.in_progress:
                del self._steppers[previous]
        groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        by_group = [(rule_for(optimizer, group), group["params"]) for optimizer, group in groups]
        rules = {id(param): rule for rule, params in by_group for param in params}
        simple = all(rule is not None for rule, _ in by_group)

        def kind(record: ShardedParameter) -> tuple[int, str]:
            rule = rules.get(id(record.param))
            stored = stored_dtypes(rule, record.layout, record.param.dtype, self.rounding)
            return 0 if simple else record.param.dim(), repr(sorted(stored.items(), key=repr))

        self._sharder.memory.group_shards([group["params"] for _, group in groups], kind)

    def grad_norms(self, norm_type: float) -> dict[int, Tensor]:
        """Return the p-norm of each parameter's full gradient by parameter index. Collective.

        Norms are scalars on the device, and zero for parameters without a gradient.
        """
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


def _memory_options(config: EngineConfig) -> tuple[tuple[str, ...], Rounding, bool, float]:
    tuning = config.tuning
    return config.offload, Rounding.of(tuning), bool(tuning.grad_aliasing), tuning.matrix_bucket_mb
