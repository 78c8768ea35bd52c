"""Apply memory plans to one engine: move optimizer state and masters, and place gradients.

:class:`MemoryController` connects an engine's shards and optimizers to
:class:`~lightning_zero.memory_planner.planner.MemoryPlanner`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakMethod

import torch

from lightning_zero.compile.session import CompiledStepHooks
from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import OFFLOADABLE
from lightning_zero.config.text import format_bytes
from lightning_zero.memory_planner.inputs import MASTERS, EngineMemoryFacts, GradientBytes, MemoryConfig, memory_config
from lightning_zero.memory_planner.memory_plan import MemoryPlan
from lightning_zero.mesh import Mesh
from lightning_zero.offload.pinned_memory import free_bytes, host_master_policy
from lightning_zero.offload.staging_ring import measure_host_bandwidth
from lightning_zero.optim.matrix_exchange import update_memory
from lightning_zero.optim.quantized_state import is_stored_key
from lightning_zero.optim.reduction_rules import ReductionRule, of_parameter, shared_bytes
from lightning_zero.optim.state_dtypes import stored_bytes, stored_dtypes
from lightning_zero.optim.update_rules import MatrixRule, Rule, needs_ranks, rule_for
from lightning_zero.sharding.flat_memory import can_be_on_host, compute_dtype_of, free_gradients
from lightning_zero.sharding.param_record import Role, ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.step.optimizer_steps import OptimizerSteps

MIB = 2**20
MICRO_BATCHES = "several micro-batches share a step"  # why gradients cannot alias compute copies
WITH_MASTERS = ("optimizer", MASTERS)  # masters and optimizer state move together


class MemoryController:
    """Controls the memory of one engine.

    Args:
        compiled: the engine's compiled steps, with its shards and symmetric memory.
        optimizers: the engine's optimizer steps, whose state may move to the host.
        accumulates: returns True if micro-batches were announced whose gradients can wait.
    """

    def __init__(
        self, compiled: CompiledStepHooks, optimizers: OptimizerSteps, accumulates: Callable[[], bool]
    ) -> None:
        self._session = session = compiled.session
        self._planner = session.planner
        self._links_changed = compiled.remeasure_links
        self._optimizers = optimizers
        self._sharder = compiled.sharder
        self._transports = compiled.transports
        self._mesh: Mesh = self._sharder.mesh
        self._link: float | None = None
        self._has_moved = False  # master weights, to the host
        self.gradients = GradientPlacement(compiled, optimizers.drop_layouts)
        self._planner.connect(self._apply, accumulates)
        optimizers.before_arranging = self._before_training

    @property
    def plan(self) -> MemoryPlan | None:
        """Return the last plan; None without ``memory``, and before anything is known."""
        return self._planner.plan

    def with_moved_masters(self, config: EngineConfig) -> EngineConfig:
        """Return options for a later training: masters that a plan has moved to the host stay there."""
        if MASTERS in config.offload or not self._has_moved:
            return config
        return replace(config, offload=cast(Any, memory_config(config, WITH_MASTERS).offload))

    def explain(self, error: BaseException) -> None:
        """Add a hint to an out-of-memory error; not collective."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        memory = self._session.config.memory
        if memory is None:
            line = (
                "lightning_zero: pass ZeroStrategy(memory='auto'), which plans recomputation, offload and the "
                "unsharded cache for this device, or set activation_memory_budget=0.5 or offload=('optimizer',)."
            )
        else:
            plan = self._planner.plan
            advice = plan.advice() if plan else "Take fewer samples in a batch."
            line = f"lightning_zero: memory={memory!r} was planned for. {advice}"
        if line not in getattr(error, "__notes__", ()):
            error.add_note(line)

    def _apply(self, config: EngineConfig, chosen: MemoryConfig) -> None:
        if MASTERS in chosen.offload and self._sharder.memory.can_move_to_host:
            self._move_masters_to_host(config)
        if self._optimizers.on_host and "optimizer" not in config.offload:
            self._planner.first_step.expect_state_from_host()
        over = bool(config.tuning.grad_aliasing) or self.gradients.automatic
        moves = self._optimizers.config.offload != config.offload or over != self.gradients.aliased
        self._optimizers.configure(config)
        if over != self.gradients.aliased:
            self.gradients.set_aliasing(over)
        if moves:  # or the next pass would allocate in addition to the freed state's cached blocks
            self._planner.empty_cache()
        self._sharder.executor.reduces_once = config.stage == 1 or chosen.reduce_once

    def _move_masters_to_host(self, config: EngineConfig) -> None:
        """Move master weights before training begins. Collective.

        Only the transport of weights was chosen before, and depends on their place.
        """
        away = host_master_policy(config, self._mesh)
        assert away is not None
        copied = self._transports.weight_memory is not None
        self._sharder.memory.move_to_host(away)
        self._has_moved = True
        if copied:
            self._links_changed()
        known = self._planner.known
        self._planner.known = replace(
            known, fixed=self._fixed_bytes(config, self.gradients.aliased), gather_s=self._gather_s
        )

    def _before_training(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        config = self._session.config
        if not self.gradients.single_micro_batch:
            self.gradients.stop_aliasing(MICRO_BATCHES)  # an earlier training may have aliased them
        if self.gradients.choose(config, optimizers):
            self._planner.empty_cache()
        if config.memory is not None:  # so that the communicator's memory is measured
            self._transports.connect(self._sharder.executor)
        update = self._planner.plan_before_training(config, self._facts(config, optimizers))
        if update is not None:
            self._session.apply_update(update)

    def _facts(self, config: EngineConfig, optimizers: Sequence[torch.optim.Optimizer]) -> EngineMemoryFacts:
        rules = [rule_for(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        masters = [record for record in self._sharder.live if can_be_on_host(record, config.compute_dtype)]
        may_move = bool(masters) and all(rules) and config.compile and self._can_move_masters(config)
        may_move = may_move and not any(map(needs_ranks, rules))
        can_move_now = may_move and self._sharder.memory.can_move_to_host
        streams_state = all(rules) and not any(isinstance(rule, ReductionRule) for rule in rules)
        possible = {"optimizer": streams_state, MASTERS: can_move_now, "activations": config.compile}
        offloadable = tuple(name for name in OFFLOADABLE if possible[name])
        if config.memory is not None and offloadable and self._link is None:
            self._link = measure_host_bandwidth(self._mesh)
        free, full = free_bytes(), self._full_weight_bytes(config)
        with no_shard_dispatch():
            sizes = [size for optimizer in optimizers for size in self._state_sizes(optimizer)]
        return EngineMemoryFacts(
            fixed=self._fixed_bytes(config, bool(config.tuning.grad_aliasing)),
            states=sum(size for size, _ in sizes),
            unallocated_states=sum(size for size, allocated in sizes if not allocated),
            matrix_updates=self._update_bytes(config, optimizers),
            masters=sum(record.shard.nbytes for record in masters),
            gradients=self._gradient_bytes(config),
            full_weights=full if self._mesh.shard_group.size > 1 else 0,
            ring=config.offload_buffer_bytes,
            prefetches_state=len(optimizers) == 1 and self._optimizers.captures(optimizers[0]),
            host_free=None if free is None else free / self._mesh.intra_host.size,
            offloadable=offloadable,
            before_sharding=(MASTERS,) if may_move and not can_move_now else (),
            on_host=WITH_MASTERS if self._sharder.memory.on_host is not None else (),
            gather_s=self._gather_s,
            host_bytes_per_s=self._link,
        )

    def _update_bytes(self, config: EngineConfig, optimizers: Sequence[torch.optim.Optimizer]) -> int:
        """Return the bytes of full updates of matrices that exist between steps."""
        total = 0
        for optimizer in optimizers:
            rules = [rule_for(optimizer, group) for group in optimizer.param_groups]
            found = [[self._sharder.find(p) for p in group["params"]] for group in optimizer.param_groups]
            members = [
                (rule, [r.layout for r in records if r is not None and r.param.requires_grad])
                for rule, records in zip(rules, found, strict=True)
                if isinstance(rule, MatrixRule)
            ]
            used = update_memory(members, self._mesh.shard_group.size, int(config.tuning.matrix_bucket_mb * MIB))
            total += used.buffers + used.workspace * self._optimizers.captures(optimizer)
        return total

    @property
    def _gather_s(self) -> float:
        many = 1 << 27
        costs = self._session.costs_or_nominal
        return costs.gather_seconds(many) / many if self._mesh.shard_group.size > 1 else 0.0

    def _full_weight_bytes(self, config: EngineConfig) -> int:
        return self._sharder.memory.unsharded_bytes(config.compute_dtype if config.compile else None)

    def _fixed_bytes(self, config: EngineConfig, aliased: bool) -> int:
        live, used = self._sharder.live, config.compute_dtype if config.compile else None
        shards = sum(record.shard.nbytes for record in live if not record.is_on_host)
        full, buffers = self._full_weight_bytes(config), (config.tuning.gather_group_mb, config.tuning.reduce_bucket_mb)
        in_flight = sum(int(min(2 * size * MIB, full)) for size in buffers)
        taken = shards + self.gradients.bytes_taken(aliased, used) + self._compute_shard_bytes(live, used) + in_flight
        return max(taken - self._transports.nbytes, 0)  # symmetric memory is allocated already

    def _can_move_masters(self, config: EngineConfig) -> bool:
        tuning = config.tuning
        free = self._mesh.shard_host_count == 1 and tuning.gather_transport != "copy" and not tuning.grad_aliasing
        return free and self._sharder.memory.on_host is None

    def _gradient_bytes(self, config: EngineConfig) -> GradientBytes:
        aliasable = self.gradients.aliasable_bytes(config)
        if self._mesh.world_size == 1 or self._mesh.host_count > 1:  # they can wait on one host only
            return GradientBytes(aliasable=aliasable)
        trained = [record for record in self._sharder.live if record.param.requires_grad]
        full = [(r.layout.shard_numel * r.layout.world_size, r.param.dtype) for r in trained]
        wire = [(numel, config.wire_dtype if dtype.is_floating_point else None, dtype) for numel, dtype in full]
        return GradientBytes(
            full=sum(n * torch.promote_types(dtype, torch.float32).itemsize for n, dtype in full),
            reduced=sum(n * (sent or own).itemsize for n, sent, own in wire),
            aliasable=aliasable,
        )

    def _state_sizes(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, bool]]:
        """Yield for each parameter the bytes of its state, and True if they are allocated."""
        for group in optimizer.param_groups:
            rule = rule_for(optimizer, group)
            for param in group["params"]:
                record = self._sharder.find(param)
                if record is None or not param.requires_grad:
                    continue
                entries = optimizer.state.get(param, {}).items()
                allocated = sum(v.nbytes for k, v in entries if record.has_shard_shape(v) or is_stored_key(k))
                shaped = of_parameter(rule, record.layout.shape, param.dtype)
                names = shaped.state if shaped is not None else ()
                stored = stored_dtypes(shaped, record.layout, param.dtype, self._optimizers.rounding)
                expected = sum(stored_bytes(stored.get(name, param.dtype)) for name in names) * record.shard.numel()
                shared = shared_bytes(shaped, record.layout.shape, param.dtype)
                yield (allocated or int(expected)) + shared, allocated > 0

    def _compute_shard_bytes(self, live: Sequence[ShardedParameter], used: torch.dtype | None) -> int:
        if used is None:
            return 0
        numel = sum(record.shard.numel() for record in live if _has_copy(record, used))
        return numel * used.itemsize * self._mesh.shard_host_count


class GradientPlacement:
    """Places one engine's gradients in their own memory, or aliases the compute copies of the weights.

    A plan may alias them only if each step certainly has one micro-batch. If another one arrives, the planned aliasing
    is undone. Without a plan, :meth:`choose` aliases them on one rank if no user code can tell the difference.

    Args:
        compiled: the engine's compiled steps, whose captures hold addresses of gradients.
        drop_layouts: drops the layouts of optimizer steps, which hold gradients, too.

    Attributes:
        single_micro_batch: each step certainly has one micro-batch; set before training begins.
        unread: no user code reads gradients; set before training begins.
        automatic: :meth:`choose` has aliased them.
    """

    def __init__(self, compiled: CompiledStepHooks, drop_layouts: Callable[[], None]) -> None:
        self._compiled = compiled
        self._drop_layouts = drop_layouts
        self._session = compiled.session
        self._sharder = compiled.sharder
        self.single_micro_batch = self.unread = self.automatic = False

    def choose(self, config: EngineConfig, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Alias gradients without ``memory`` if that is certainly safe, and return True if they moved.

        On one rank with ``reduce_dtype="bf16"``, the rounding is the one that this option stands for. Rules are
        elementwise: others may need gradients in the parameters' dtype, or call backward several times.
        """
        rules = [rule_for(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        wanted = (
            self._sharder.mesh.world_size == 1
            and (self.single_micro_batch and self.unread)
            and (config.memory is None and config.tuning.grad_aliasing is None)
            and (config.may_alias_gradients and config.reduce_dtype == "bf16" and not config.tuning.fp8_shards)
            and all(isinstance(rule, Rule) for rule in rules)
            and not self._have_hooks()
        )
        moves = wanted != self.aliased and (wanted or self.automatic)
        self.automatic = wanted
        if moves:
            self.set_aliasing(wanted)
        else:
            self._watch_readers()
        return moves

    def _watch_readers(self) -> None:
        for record in self._sharder.records:
            # Executors hold parameters: a strong reference would be a cycle that is never collected.
            record.spec.on_missing_grad = partial(_call, WeakMethod(self._warn_of_readers)) if self.aliased else None

    def _warn_of_readers(self) -> None:
        """Warn once that code which reads gradients after the step finds none."""
        if not self._sharder.memory.tensors(Role.GRADIENT):
            return  # no backward has been yet
        for record in self._sharder.records:
            record.spec.on_missing_grad = None
        warnings.warn(
            "`param.grad` is None after the optimizer step, because gradients use the memory of the compute copies. "
            "Pass ZeroStrategy(tuning=Tuning(grad_aliasing=False)) to keep gradients until they are zeroed.",
            stacklevel=6,
        )

    def _have_hooks(self) -> bool:
        with no_shard_dispatch():
            return any(record.param._post_accumulate_grad_hooks for record in self._sharder.live)

    def aliasable_bytes(self, config: EngineConfig) -> int:
        """Return the bytes that aliasing would save; 0 if it is not certainly possible, or set by hand."""
        certain = self._sharder.mesh.host_count == 1 and self.single_micro_batch
        if not (certain and config.may_alias_gradients) or config.tuning.grad_aliasing is not None:
            return 0
        return sum(record.shard.nbytes for record in self._trained if _has_copy(record, config.compute_dtype))

    def bytes_taken(self, aliased: bool, used: torch.dtype | None) -> int:
        """Return the bytes of the gradients. ``used``: compute dtype; None for each weight's own."""
        return sum(record.shard.nbytes for record in self._trained if not (aliased and _has_copy(record, used)))

    @property
    def _trained(self) -> list[ShardedParameter]:
        with no_shard_dispatch():
            return [record for record in self._sharder.live if record.param.requires_grad]

    @property
    def aliased(self) -> bool:
        """Return True if gradients alias compute copies, by a plan or by hand."""
        return self._sharder.memory.alias_gradients

    def set_aliasing(self, aliased: bool) -> None:
        """Alias gradients, or not, after a step, when no optimizer reads them any more."""
        memory = self._sharder.memory
        allocated = bool(memory.tensors(Role.GRADIENT))
        memory.alias_gradients = aliased
        self._watch_readers()
        if allocated:
            self._compiled.on_gradients_moved()
            self._drop_layouts()
            memory.gradients = None
            free_gradients(self._sharder.executor, self._sharder.records)
            memory.allocate_gradients()

    def on_accumulation(self) -> None:
        """Undo planned aliasing, because a step has several micro-batches.

        Gradients that already alias weights cannot be kept: the accumulation itself raises for these.
        """
        if not self._hold_gradients():
            self.stop_aliasing(MICRO_BATCHES)

    def on_forward(self) -> None:
        """Undo planned aliasing on one rank, because code has read weights that had a gradient.

        Examples are a module that a step calls twice, and an evaluation before the step. Compiled code gathers such a
        weight from its master shard, and a replay would raise an error. Several ranks might disagree.
        """
        alone = self._sharder.mesh.world_size == 1
        read = alone and self.aliased and self._sharder.executor.weights.reads_of_gradients()
        if read and not self._hold_gradients():
            self.stop_aliasing("a step uses weights again after their gradient")

    def _hold_gradients(self) -> bool:
        """Return True if a parameter has a gradient that aliases its compute shard."""
        with no_shard_dispatch():
            return self.aliased and any(r.param.grad is not None for r in self._trained if r.grad_aliases_compute_shard)

    def stop_aliasing(self, why: str) -> None:
        """Undo planned aliasing after a step, and rule it out for later plans; ``why`` is for the message."""
        config = self._session.config
        if config.tuning.grad_aliasing or not (self.single_micro_batch or self.aliased):
            return
        self.single_micro_batch = False
        saved = self.bytes_taken(False, None) - self.bytes_taken(True, config.compute_dtype)
        if self.automatic:
            self.automatic = False
            self.set_aliasing(False)
            self._session.progress.report(
                f"{why[0].upper()}{why[1:]}, so gradients have memory of their own from now on, "
                f"{format_bytes(saved)}. Pass tuning=Tuning(grad_aliasing=False) to have it from the beginning."
            )
            return
        update = self._session.planner.stop_grad_aliasing()
        if update is None:
            return
        self._session.apply_update(update)
        self._session.progress.report(
            f"memory={config.memory!r}: {why}, so gradients have memory of their own "
            f"again, {format_bytes(saved)}. Pass tuning=Tuning(grad_aliasing=False), so that this is planned for "
            "from the beginning."
        )


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()


def _has_copy(record: ShardedParameter, used: torch.dtype | None) -> bool:
    return compute_dtype_of(record.shard.dtype, used) != record.shard.dtype
