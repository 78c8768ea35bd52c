"""``memory=`` for one engine: what its plans go by, and what they come to.

Decided is in ``compile/budget.py``. Here stands what is known of shards and optimizers, whose state is put where a plan
wants it, and what users are told after their device was full.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from lightning_zero.budget.facts import GradientBytes, MemoryConfig
from lightning_zero.budget.options import apply_memory_config, memory_config
from lightning_zero.budget.plan import MemoryPlan
from lightning_zero.compile.known import MASTERS, EngineMemoryFacts
from lightning_zero.compile.steps import CompiledStepHooks
from lightning_zero.config import EngineConfig
from lightning_zero.config.engine_config import OFFLOADABLE
from lightning_zero.config.text import format_gib
from lightning_zero.mesh import Mesh
from lightning_zero.offload.pinned_memory import free_bytes, host_master_policy
from lightning_zero.offload.staging_ring import measure_host_bandwidth
from lightning_zero.optim.bf16_state import STATE_DTYPE, keeps_bf16_state
from lightning_zero.optim.update_rules import rule_for
from lightning_zero.sharding.flat_memory import can_be_on_host
from lightning_zero.sharding.param_record import ShardedParameter
from lightning_zero.sharding.shard_tensor import no_shard_dispatch
from lightning_zero.step.gradients import GradientPlacement, has_copy
from lightning_zero.step.optimizer_steps import OptimizerSteps

__all__ = ["MemoryController"]

MIB, GIB = 2**20, 2**30
WITH_MASTERS = ("optimizer", MASTERS)  # which come and go together
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryController:
    """Of one engine.

    Args:
        compiled: has the budget, the shards, and the peers that have some of their memory.
        optimizers: whose state may go to the host.

    Attributes:
        gradients: where they lie.
    """

    def __init__(self, compiled: CompiledStepHooks, optimizers: OptimizerSteps) -> None:
        self._session = session = compiled.session
        self._links_changed = compiled.remeasure_links
        self._optimizers = optimizers
        self._sharder = compiled.sharder
        self._transports = compiled.transports
        self._mesh: Mesh = self._sharder.mesh
        self._link: float | None = None
        self._has_moved = False  # master weights to the host
        self.gradients = GradientPlacement(compiled)
        session.budget.apply = self._apply
        optimizers.before_arranging = self._before_training

    @property
    def plan(self) -> MemoryPlan | None:
        """The last one that was made; None without ``memory``, and before anything is known."""
        return self._session.budget.plan

    def _apply(self, config: EngineConfig, chosen: MemoryConfig) -> None:
        if MASTERS in chosen.offload and self._sharder.memory.can_move_to_host:
            self._masters_leave(config)
        if self._optimizers.on_host and "optimizer" not in config.offload:
            self._session.budget.first_step.expect_state_from_host()
        over = bool(config.tuning.grad_aliasing)
        moves = self._optimizers.config.offload != config.offload or over != self.gradients.aliased
        self._optimizers.configure(config)
        if over != self.gradients.aliased:
            self.gradients.lie(over)
        if moves:  # or the next pass takes its memory beside what state has left: 33.5 GiB were taken where 30 may be
            self._session.budget.give_back()
        self._sharder.executor.reduces_once = config.stage == 1 or chosen.reduce_once

    def _masters_leave(self, config: EngineConfig) -> None:
        """Before anything is trained, when nothing else is laid out like them: of what depends on where they lie, only
        how weights travel was settled when the engine was made. Collective."""
        away = host_master_policy(config, self._mesh)
        assert away is not None
        copied = self._transports.weight_memory is not None
        self._sharder.memory.move_to_host(away)
        self._has_moved = True
        if copied:
            self._links_changed()
        self._look_again(config)

    def settled(self, config: EngineConfig) -> EngineConfig:
        """Options of a later training: where a plan has put master weights on the host, they stay there, and the state
        that comes and goes with them."""
        if MASTERS in config.offload or not self._has_moved:
            return config
        return replace(config, offload=cast(Any, memory_config(config, WITH_MASTERS).offload))

    def _before_training(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        config = self._session.config
        if not self.gradients.single_micro_batch:
            self.gradients.stop_aliasing()  # as an earlier training did not
        if config.memory is not None:  # memory that a communicator takes is to be seen
            self._transports.connect(self._sharder.executor)
        decided = self._session.budget.before_training(config, self._known(config, optimizers))
        if decided is not None:
            self._session.apply_update(decided)

    def _known(self, config: EngineConfig, optimizers: Sequence[torch.optim.Optimizer]) -> EngineMemoryFacts:
        rules = [rule_for(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        masters = [record for record in self._sharder.live if can_be_on_host(record, config.compute_dtype)]
        masters_may = bool(masters) and all(rules) and config.compile and self._may_be_away(config)
        now = masters_may and self._sharder.memory.can_move_to_host
        needs = {"optimizer": all(rules), MASTERS: now, "activations": config.compile}
        may_leave = tuple(name for name in OFFLOADABLE if needs[name])
        if config.memory is not None and may_leave and self._link is None:
            self._link = measure_host_bandwidth(self._mesh)
        free, whole = free_bytes(), self._whole(config)
        with no_shard_dispatch():
            sizes = [size for optimizer in optimizers for size in self._states(optimizer)]
        return EngineMemoryFacts(
            fixed=self._fixed(config, bool(config.tuning.grad_aliasing)),
            states=sum(size for size, _ in sizes),
            to_come=sum(size for size, there in sizes if not there),
            masters=sum(record.shard.nbytes for record in masters),
            gradients=self._gradients(config),
            whole=whole if self._mesh.shard_group.size > 1 else 0,
            ring=config.offload_buffer_bytes,
            ahead=len(optimizers) == 1 and self._optimizers.captures(optimizers[0]),
            host=None if free is None else free / self._mesh.intra_host.size,
            may_leave=may_leave,
            before=(MASTERS,) if masters_may and not now else (),
            away=WITH_MASTERS if self._are_away else (),
            gather_s=self._gather_s,
            host_bytes_per_s=self._link,
        )

    def _look_again(self, config: EngineConfig) -> None:
        """Shards have moved, and weights may travel another way, since that was made."""
        budget = self._session.budget
        budget.known = replace(budget.known, fixed=self._fixed(config, self.gradients.aliased), gather_s=self._gather_s)

    @property
    def _gather_s(self) -> float:
        many = 1 << 27
        costs = self._session.costs_or_nominal
        return costs.gather_seconds(many) / many if self._mesh.shard_group.size > 1 else 0.0

    def _whole(self, config: EngineConfig) -> int:
        return self._sharder.memory.unsharded_bytes(config.compute_dtype if config.compile else None)

    def _fixed(self, config: EngineConfig, over: bool) -> int:
        """``over``: gradients lie over copies."""
        live, used = self._sharder.live, config.compute_dtype if config.compile else None
        here = sum(record.shard.nbytes for record in live if not record.is_on_host)
        whole, buffers = self._whole(config), (config.tuning.gather_group_mb, config.tuning.reduce_bucket_mb)
        passing = sum(int(min(2 * size * MIB, whole)) for size in buffers)
        taken = here + self.gradients.taken(over, used) + self._copies(live, used) + passing
        return max(taken - self._transports.nbytes, 0)  # which the device has given already

    @property
    def _are_away(self) -> bool:
        return self._sharder.memory.on_host is not None

    def _may_be_away(self, config: EngineConfig) -> bool:
        """Whether master weights could lie on the host, and do not: nobody has chosen what that would change."""
        tuning = config.tuning
        free = self._mesh.shard_host_count == 1 and tuning.gather_transport != "copy" and not tuning.grad_aliasing
        return free and not self._are_away

    def _gradients(self, config: EngineConfig) -> GradientBytes:
        """Whole ones, where they can wait on one host, and what of them travels in a pass."""
        over = self.gradients.aliasable_bytes(config)
        if self._mesh.world_size == 1 or self._mesh.host_count > 1:
            return GradientBytes(over=over)
        trained = [record for record in self._sharder.live if record.param.requires_grad]
        whole = [(r.layout.shard_numel * r.layout.world_size, r.param.dtype) for r in trained]
        wire = [(numel, config.wire_dtype if dtype.is_floating_point else None, dtype) for numel, dtype in whole]
        return GradientBytes(
            whole=sum(n * torch.promote_types(dtype, torch.float32).itemsize for n, dtype in whole),
            wire=sum(n * (sent or own).itemsize for n, sent, own in wire),
            over=over,
        )

    def _states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, bool]]:
        """Bytes that it keeps for each element of its shards, and whether they are there already."""
        for group in optimizer.param_groups:
            rule = rule_for(optimizer, group)
            for param in group["params"]:
                record = self._sharder.find(param)
                if record is None or not param.requires_grad:
                    continue
                held = [value for value in optimizer.state.get(param, {}).values() if record.has_shard_shape(value)]
                there = sum(value.nbytes for value in held)
                small = self._optimizers.bf16_state and keeps_bf16_state(record.layout.numel, param.dtype)
                itemsize = STATE_DTYPE.itemsize if small else param.dtype.itemsize
                expected = len(rule.state) * record.shard.numel() * itemsize if rule is not None else 0
                yield there or expected, there > 0

    def _copies(self, live: Sequence[ShardedParameter], used: torch.dtype | None) -> int:
        if used is None:
            return 0
        numel = sum(record.shard.numel() for record in live if has_copy(record, used))
        return numel * used.itemsize * self._mesh.shard_host_count

    def explain(self, error: BaseException) -> None:
        """Where the device was full, adds to the error what would fit. Not collective; an error of its own would hide
        that one, and is left out."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        try:
            line = self._advice(str(error))
        except Exception:
            return
        if line and line not in getattr(error, "__notes__", ()):
            error.add_note(line)

    def _advice(self, said: str) -> str:
        config = self._session.config
        self._look_again(config)
        plan = self._session.budget.next_plan(config, _requested(said))
        if plan is None:
            return ""
        options = plan.options()
        if "tuning" in options:  # what is set there besides stays
            options["tuning"] = apply_memory_config(config, plan.chosen).tuning
        if plan.chosen.weights < self._session.budget.now(config).weights:
            options["reshard_after_forward"] = True
        if not plan.fits or not options:
            return f"lightning_zero: nothing that may be chosen is estimated to fit. {plan.instead()}"
        if isinstance(config.memory, int | float) and plan.limit > config.memory * GIB:
            options = {"memory": _rounded_up(plan)} | options
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        # A plan from the beginning moves master weights before anything is known of activations, which are in the way.
        found = config.memory is None and (
            MASTERS in self._session.budget.known.away or MASTERS not in plan.chosen.offload
        )
        planned = " memory='auto' has this planned from the beginning." if found else ""
        return (
            f"lightning_zero: ZeroStrategy({arguments}) is estimated to fit, with {format_gib(plan.peak)} GiB of "
            f"{format_gib(plan.limit)} at the peak.{planned}"
        )


def _rounded_up(plan: MemoryPlan) -> float:
    """GiB that the plan fits in, to a tenth where that is within its limit."""
    return min(math.ceil(plan.peak / GIB * 10) / 10, plan.limit / GIB)


def _requested(said: str) -> int:
    """Bytes that could not be had, as torch words it."""
    found = re.search(r"Tried to allocate ([\d.]+) (B|KiB|MiB|GiB)", said)
    return int(float(found[1]) * UNITS[found[2]]) if found else 0
