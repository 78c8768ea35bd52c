"""Random sequences of calls of the C++ executor, compared with plain tensors.

All ranks draw the same random numbers, so each rank knows the state of its peers, and the expected full parameters
and averaged gradients.
"""

import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.config import EngineConfig
from lightning_zero.mesh import Mesh
from lightning_zero.native import Executor
from lightning_zero.sharding.flat_memory import FlatBuffer
from lightning_zero.sharding.layout import ShardLayout
from lightning_zero.sharding.symm_mem import SymmetricMemory
from tests.helpers.options import config

ops = torch.ops.lightning_zero
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
SHAPES = [
    (),
    (0,),
    (0, 3),
    (1,),
    (2,),
    (3, 1),
    (5,),
    (31,),
    (32,),
    (3, 11),
    (64, 1),
    (4, 25),
    (2, 2, 25),
    (127,),
    (193,),
]
SHAPES += [(16, 16), (257,), (3, 7, 13), (1000,)]
BUCKETS = {"one each": 1e-6, "some": 0.002, "all": 64.0}
# Whole numbers below 2**8 are exact in every dtype. Their multiples of 6 stay so when they are divided by 1, 2 or 3.
STEP = 6
PEER_WAIT_S = 2.0  # kPeerWait of csrc/gradients/bucket.cpp, after which the host allocates another bucket


class Interruption(Exception):
    pass


class Deliver(torch.autograd.Function):
    """Pass gradients to the executor inside a backward pass, as a compiled graph does."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, arrivals: list[tuple[Tensor, Tensor]], interrupted: bool) -> Tensor:
        ctx.arrivals, ctx.interrupted = arrivals, interrupted
        return root.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        borrowed: list[tuple[Tensor, Tensor]] = []
        for number, (value, param) in enumerate(ctx.arrivals):
            if number % 3 == 0:
                ops.reduce_add(value, param)
                continue
            borrowed.append((value.clone(), param))
            ops.reduce_zero_copy([borrowed[-1][0]], [param], [1], [])
            if number % 3 == 2:
                give_back(*borrowed.pop(0))
        for value, param in borrowed:
            give_back(value, param)
        if ctx.interrupted:
            raise Interruption
        return grad, None, None


def give_back(value: Tensor, param: Tensor) -> None:
    """Reuse the gradient's memory."""
    ops.reduce_release([value], [param])
    value.fill_(math.nan if value.is_floating_point() else 77)


def deliver(*steps: list[tuple[Tensor, Tensor]], interrupted: bool = False) -> None:
    """Run one backward pass with one node per step."""
    root = torch.zeros((), requires_grad=True)
    for number, arrivals in enumerate(reversed(steps)):  # backward visits the last node first
        root = Deliver.apply(root, arrivals, interrupted and number == 0)
    root.backward()


@dataclass
class Twin:
    """A parameter of the executor, with its expected values."""

    index: int
    param: nn.Parameter
    layout: ShardLayout
    shard: Tensor
    full: Tensor
    grad: Tensor | None = None  # the full one, in float64
    slack: float = 0.0  # tolerance of the gradient's norm
    compute_shard: torch.dtype | None = None
    held: list[Tensor] = field(default_factory=list)

    def part(self, full: Tensor, rank: int) -> Tensor:
        part = torch.zeros(self.layout.shard_numel, dtype=full.dtype)
        self.layout.write(part, full, rank)
        return part.view(self.layout.visible_shape)


def new_twin(executor: Executor, name: str, full: Tensor, trainable: bool = True) -> Twin:
    layout = ShardLayout.from_shape(full.shape, full.dtype, executor.world_size)
    shard = torch.empty(layout.shard_numel, dtype=full.dtype)
    layout.write(shard, full, executor.rank)
    param = nn.Parameter(full.clone(), requires_grad=trainable)
    index = executor.parameters.add(name, param, shard, layout.shape)
    param.data = shard.view(layout.visible_shape)
    return Twin(index, param, layout, shard, full.clone())


class Sequence:
    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.seed = seed
        self.draws = 0
        self.whole = self.rng.random() < 0.5  # integers: compared bitwise
        self.ragged = self.world > 1 and self.rng.random() < 0.3  # ranks have different gradients
        self.chosen = self._choose()
        self.executor = Executor(mesh, self.chosen, self._ended)
        self.one_sided = self.rng.random() < 0.3  # gradients are written to peers' memory
        if self.one_sided:
            size = self.rng.choice((1, 2, 64)) * self.executor.transport.staging_unit
            peers = SymmetricMemory(mesh)
            self.executor.transport.set_staging(peers.empty(size, torch.uint8)[1], mesh.gather_group)
        self.trace = [
            f"{'whole numbers' if self.whole else 'reals'}, {'ragged' if self.ragged else 'even'}, "
            f"{'one-sided' if self.one_sided else 'scattered'}, {self.chosen}"
        ]
        self.complaints: list[str] = []
        self.counts = {"gathers": 0, "gather_bytes": 0, "eager_gathers": 0, "reduces": 0, "agreements": 0}
        self.must_grow = False
        self.may_grow = False
        self.edited = False
        self.heard: list[list[int]] = []
        self.twins = [self._twin(number) for number in range(self.rng.randint(1, 6))]
        if not self.trainable:
            self.twins.append(self._twin(len(self.twins), torch.float32))
        if self.rng.random() < 0.7:
            self._lay_out()
        for twin in self.twins:
            if twin.full.dtype in (torch.float32, torch.float64) and self.rng.random() < 0.5:
                twin.compute_shard = self.rng.choice(FLOATS[1:3])
                self.executor.parameters.set_compute_shard(
                    twin.index, torch.full((twin.layout.shard_numel,), math.nan, dtype=twin.compute_shard)
                )

    # -- drawing

    def _choose(self) -> EngineConfig:
        rng = self.rng
        # If ranks differ, one may wait seconds for its peers before it allocates another buffer, too long for hundreds
        # of sequences.
        size = "all" if self.ragged else rng.choice(list(BUCKETS))
        return config(
            reduce_bucket_mb=BUCKETS[size],
            reduce_double_buffer=rng.random() < 0.6 or self.ragged,
            reduce_dtype=rng.choice((None, None, "bf16", "32")),
            free_reduce_buckets=rng.random() < 0.3,
            sync_collectives=rng.random() < 0.1,
        )

    def _values(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int = 0) -> Tensor:
        self.draws += 1
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.draws * 17 + rank)
        if self.whole or not dtype.is_floating_point:
            return STEP * torch.randint(-3 if dtype.is_signed else 0, 4, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def _twin(self, number: int, wanted: torch.dtype | None = None) -> Twin:
        rng = self.rng
        dtype = wanted or (rng.choice(INTEGERS) if rng.random() < 0.1 else rng.choice((torch.float32, *FLOATS)))
        full = self._values(rng.choice(SHAPES), dtype)
        trainable = dtype.is_floating_point and (wanted is not None or rng.random() < 0.8)
        return new_twin(self.executor, f"p{number}", full, trainable)

    def _lay_out(self) -> None:
        """Allocate contiguous memory, as the engine does, and fill gradient memory with NaN."""
        order = list(reversed(self.twins))
        pieces = [(twin.layout, twin.full.dtype) for twin in order]
        shards, grads = FlatBuffer(pieces, torch.device("cpu")), FlatBuffer(pieces, torch.device("cpu"))
        for twin, view, grad in zip(order, shards.views, grads.views, strict=True):
            view.copy_(twin.shard)
            twin.shard = view
            self.executor.parameters.move(twin.index, view)
            twin.param.data = view.view(twin.layout.visible_shape)
            if grad.is_floating_point():
                self.executor.parameters.set_grad(twin.index, grad.fill_(math.nan))

    @property
    def trainable(self) -> list[Twin]:
        return [twin for twin in self.twins if twin.param.requires_grad]

    # -- running and judging

    def run(self) -> None:
        steps = {
            self.gather: 3, self.gather_group: 2, self.backward: 9, self.gradients: 3, self.update: 3, self.edit: 2, self.toggle: 2, self.options: 1,
            self.rewrite: 1, self.release: 1, self.interrupted: 0 if self.ragged else 1,
        }  # fmt: skip
        for step in self.rng.choices(list(steps), list(steps.values()), k=self.rng.randint(3, 7)):
            self.trace.append(step.__name__)
            begun = time.monotonic()
            step()
            self.may_grow |= time.monotonic() - begun > PEER_WAIT_S  # a peer was late, on a busy machine
            self.check()
        self.executor.weights.sync_user_writes(forget=True)
        self.edited = False
        self.check()

    def expect(self, true: bool, words: str) -> None:
        # Never raise: other ranks would wait for this one.
        if not true:
            self.complaints.append(f"seed {self.seed}, rank {self.rank}: {words}\n  after {'; '.join(self.trace)}")

    def expect_equal(self, actual: Tensor, expected: Tensor, what: str) -> None:
        if actual.dtype == expected.dtype and torch.equal(actual, expected):
            return
        first = "its dtype or shape"
        if actual.shape == expected.shape:
            wrong = (actual != expected).reshape(-1).nonzero().reshape(-1)
            a, b = actual.reshape(-1)[wrong[:4]].tolist(), expected.reshape(-1)[wrong[:4]].tolist()
            first = f"{wrong.numel()} of {actual.numel()} elements, at {wrong[:4].tolist()}: {a}, expected {b}"
        self.expect(False, f"{what}: {first}")

    def check(self) -> None:
        for twin in self.twins:
            name = f"p{twin.index} {twin.full.dtype} {tuple(twin.full.shape)}"
            begin, end = twin.layout.shard_range(self.rank)
            if not self.edited:
                expected = twin.part(twin.full, self.rank)
                self.expect_equal(twin.param.detach(), expected, f"shard of {name}")
            self.expect(not twin.shard[end - begin :].any(), f"padding of {name} is not zero")
            self._check_grad(name, twin, end - begin)
        mine = self.executor.counters()
        for key, value in self.counts.items():
            self.expect(mine.get(key, 0) == value, f"counter {key} is {mine.get(key, 0)}, expected {value}")
        if self.must_grow:
            self.expect(mine["grown_buckets"] > 0, "a gradient larger than the bucket did not grow it")
        elif not self.may_grow:
            self.expect(mine["grown_buckets"] == 0, f"{mine['grown_buckets']} buckets grew, but everything fits")

    def _check_grad(self, name: str, twin: Twin, valid: int) -> None:
        grad = twin.param.grad
        if grad is None or twin.grad is None:
            kind = "nothing" if grad is None else "something"
            self.expect(grad is twin.grad, f"gradient of {name} is {kind}, expected the opposite")
            return
        self.expect(
            grad.shape == twin.param.shape and grad.dtype == twin.param.dtype, f"gradient of {name} has another form"
        )
        self.expect(not grad.reshape(-1)[valid:].any(), f"padding of the gradient of {name} is not zero")
        expected = twin.part(twin.grad, self.rank)
        error = (grad.double() - expected).norm().item()
        if not error <= twin.slack:
            self.expect_equal(grad.double(), expected, f"gradient of {name}, off by {error:.3g} > {twin.slack:.3g}")

    def _ended(self) -> None:
        self.heard.append(sorted(self.executor.gradients.last_attached()))

    def _count_gather(self, twin: Twin, dtype: torch.dtype, eager: bool = False) -> None:
        self.counts["gathers"] += 1
        self.counts["eager_gathers"] += eager
        self.counts["gather_bytes"] += self.world * twin.layout.shard_numel * dtype.itemsize

    # -- steps

    def gather(self) -> None:
        twin, other = self.rng.choice(self.twins), self.rng.choice(self.twins)
        dtype = twin.compute_shard or self.rng.choice(FLOATS) if self.rng.random() < 0.5 else twin.full.dtype
        shape = list(twin.full.shape)
        kind = self.rng.choice(("gather", "gather_eager", "gather_start"))
        self.trace[-1] += f" {kind} p{twin.index} {dtype}"
        with torch.set_grad_enabled(kind != "gather_start"):
            result = getattr(ops, kind)(twin.param, shape, dtype)
        self._count_gather(twin, dtype, kind == "gather_eager")
        if kind == "gather_start":
            # Two gathers in flight, waited for in reverse order.
            with torch.no_grad():
                second = ops.gather_start(other.param, list(other.full.shape), other.full.dtype)
            self._count_gather(other, other.full.dtype)
            second = torch.ops._c10d_functional.wait_tensor(second)
            self.expect_equal(second, other.full, f"gathered p{other.index}")
            result = torch.ops._c10d_functional.wait_tensor(result)
        self.edited = False
        expected = twin.full.to(dtype)
        self.expect_equal(result.detach(), expected, f"gathered p{twin.index}")
        if kind == "gather_eager":
            view = result.detach().reshape(-1)[1:]
            for tensor in (result, view) if view.numel() else ():
                self.expect(
                    self.executor.weights.find_gathered(tensor) == twin.index, "a gathered weight is not known as one"
                )
            self.expect(
                self.executor.weights.find_gathered(expected) == -1, "another tensor is taken for a gathered weight"
            )
            if self.rng.random() < 0.3:
                twin.held.append(result)

    @torch.no_grad()  # the op is used in compiled graphs only, below autograd
    def gather_group(self) -> None:
        group = self.rng.sample(self.twins, self.rng.randint(1, len(self.twins)))
        dtypes = [
            dtype
            for twin in group
            for dtype in (twin.compute_shard, twin.full.dtype)
            if dtype and dtype.is_floating_point
        ]
        dtype = self.rng.choice(dtypes or FLOATS)
        self.trace[-1] += f" {' '.join(f'p{twin.index}' for twin in group)} {dtype}"
        widths = [self.world * twin.layout.shard_numel for twin in group]
        flat = torch.ops._c10d_functional.wait_tensor(ops.gather_group([t.param for t in group], dtype, sum(widths)))
        self.edited = False
        for twin, whole in zip(group, flat.split(widths), strict=True):
            self._count_gather(twin, dtype)
            weight, padding = whole.split([twin.full.numel(), whole.numel() - twin.full.numel()])
            self.expect_equal(weight, twin.full.reshape(-1).to(dtype), f"p{twin.index} gathered in a group")
            self.expect(not padding.any(), f"padding of p{twin.index} gathered in a group is not zero")

    def edit(self) -> None:
        """Check that writes to gathered weights reach the shards, with any other copies alive."""
        twin = self.rng.choice([twin for twin in self.twins if twin.full.is_floating_point()])
        with torch.no_grad():
            weights = [
                ops.gather_eager(twin.param, list(twin.full.shape), twin.full.dtype)
                for _ in range(self.rng.randint(1, 2))
            ]
            for _ in weights:
                self._count_gather(twin, twin.full.dtype, eager=True)
            target = self.rng.choice(weights)
            target = target.data if self.rng.random() < 0.5 else target
            target.mul_(0.5)
            twin.full.mul_(0.5)
        self.edited = True
        if self.rng.random() < 0.5:
            twin.held += weights

    def _read_compute_copies(self) -> None:
        for twin in (twin for twin in self.twins if twin.compute_shard):
            with torch.no_grad():
                weight = ops.gather(twin.param, list(twin.full.shape), twin.compute_shard)
            self._count_gather(twin, twin.compute_shard)
            self.edited = False
            self.expect_equal(weight, twin.full.to(twin.compute_shard), f"compute shard of p{twin.index}")

    def rewrite(self) -> None:
        """Change weights without autograd's knowledge, as a swap of two sets of weights does."""
        self._read_compute_copies()
        self.executor.weights.sync_user_writes(forget=True)
        self.edited = False
        twin = self.rng.choice([twin for twin in self.twins if twin.full.is_floating_point()])
        twin.param.data.mul_(0.5)
        twin.full.mul_(0.5)
        self.executor.weights.expire_compute_shards()
        self._read_compute_copies()

    def update(self) -> None:
        """Change shards in place and elementwise, as an optimizer step does."""
        self._read_compute_copies()
        if self.edited or self.rng.random() < 0.5:
            self.executor.weights.sync_user_writes(forget=True)
            self.edited = False
        for twin in self.twins:
            if not twin.full.is_floating_point():
                continue
            with torch.no_grad():
                if twin.param.grad is not None and self.whole and twin.slack == 0.0:
                    assert twin.grad is not None
                    twin.param.sub_(twin.param.grad * 0.25)
                    twin.full.sub_((twin.grad * 0.25).to(twin.full.dtype))
                else:
                    twin.param.mul_(0.5)
                    twin.full.mul_(0.5)
        self._read_compute_copies()

    def gradients(self) -> None:
        """Change gradients between backward passes, as users and optimizers do."""
        for twin in self.trainable:
            kind = self.rng.choice(("keep", "drop", "zero", "replace"))
            self.trace[-1] += f" {kind}"
            if kind == "drop":
                twin.param.grad, twin.grad, twin.slack = None, None, 0.0
            elif kind == "zero" and twin.param.grad is not None:
                twin.param.grad.zero_()
                twin.grad, twin.slack = torch.zeros(twin.full.shape, dtype=torch.float64), 0.0
            elif kind == "replace":
                values = self._values(tuple(twin.full.shape), twin.full.dtype)
                twin.param.grad = twin.part(values, self.rank)
                twin.grad, twin.slack = values.double(), 0.0

    def toggle(self) -> None:
        twin = self.rng.choice([twin for twin in self.twins if twin.full.is_floating_point()])
        if len(self.trainable) > 1 or not twin.param.requires_grad:
            twin.param.requires_grad_(not twin.param.requires_grad)

    def options(self) -> None:
        self.chosen = self._choose()
        self.trace[-1] += f" {self.chosen}"
        self.executor.configure(self.chosen)

    def release(self) -> None:
        self.executor.gradients.release_buffers()
        self.expect(self.executor.counters()["bucket_bytes"] == 0, "bucket memory was not given back")

    def interrupted(self) -> None:
        """Interrupt a backward pass, then start over without gradients."""
        arrivals, _ = self._arrivals()
        self._note_sizes(arrivals)
        try:
            deliver(*self._chunks(arrivals[self.rank]), interrupted=True)
        except Interruption:
            pass
        else:
            self.expect(False, "the error was swallowed")
        self.expect(self.executor.counters()["aborted_backwards"] > 0, "an interrupted backward went unnoticed")
        for twin in self.twins:
            if twin.param.requires_grad:
                twin.param.grad, twin.grad, twin.slack = None, None, 0.0
        self.counts["reduces"] = self.executor.counters().get("reduces", 0)

    def backward(self) -> None:
        arrivals, even = self._arrivals()
        self.trace[-1] += " " + " | ".join(" ".join(f"p{twin.index}" for twin, _ in mine) for mine in arrivals)
        through_weights = [place for place in range(len(arrivals[0])) if even and self.rng.random() < 0.3]
        self._note_sizes(arrivals)
        before = self.executor.counters()
        loss = torch.zeros(())
        for place in through_weights:
            twin, grad = arrivals[self.rank][place]
            weight = ops.gather_eager(twin.param, list(twin.full.shape), grad.dtype)
            self._count_gather(twin, grad.dtype, eager=True)
            self.edited = False
            loss = loss + (weight * grad).sum().float()
        direct = [arrival for place, arrival in enumerate(arrivals[self.rank]) if place not in through_weights]
        root = torch.zeros((), requires_grad=True)
        for chunk in reversed(self._chunks(direct)):
            root = Deliver.apply(root, chunk, False)
        if self.rng.random() < 0.5:
            (loss + root).backward()
        else:
            (root + loss).backward()
        self._expect_gradients(arrivals, before)

    def _arrivals(self) -> tuple[list[list[tuple[Twin, Tensor]]], bool]:
        """Return the parameters and gradients of every rank, in order."""
        ragged = self.ragged and self.rng.random() < 0.7
        plans: list[list[tuple[Twin, torch.dtype, str]]] = []
        for _ in range(self.world):
            if plans and not ragged:
                plans.append(plans[0])
                continue
            chosen = [twin for twin in self.trainable if self.rng.random() < 0.75] or [self.rng.choice(self.trainable)]
            chosen += [twin for twin in chosen for _ in range(2) if self.rng.random() < 0.2]
            if self.rng.random() < 0.7:
                chosen.sort(key=lambda twin: -twin.index)
            else:
                self.rng.shuffle(chosen)
            plans.append([
                (twin, self.rng.choice(FLOATS) if self.rng.random() < 0.3 else twin.full.dtype,
                 self.rng.choice(("plain", "plain", "transposed", "strided", "expanded")))
                for twin in chosen
            ])  # fmt: skip
        result = []
        for rank, plan in enumerate(plans):
            result.append([(twin, self._gradient(twin, dtype, form, rank)) for twin, dtype, form in plan])
        return result, not ragged

    def _gradient(self, twin: Twin, dtype: torch.dtype, form: str, rank: int) -> Tensor:
        shape = tuple(twin.full.shape)
        if form == "transposed":
            return self._values(shape[::-1], dtype, rank).permute(tuple(reversed(range(len(shape)))))
        if form == "strided" and shape:
            return self._values((*shape, 2), dtype, rank)[..., 1]
        if form == "expanded":
            return self._values((), dtype, rank).expand(shape)
        return self._values(shape, dtype, rank)

    def _chunks(self, arrivals: list[tuple[Twin, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
        pairs = [(grad, twin.param) for twin, grad in arrivals]
        # Ranks may have different numbers of gradients, so this must not use the common random numbers.
        half = len(pairs) // 2
        return [pairs[:half], pairs[half:]]

    def _wire(self, twin: Twin) -> torch.dtype:
        return self.chosen.wire_dtype or twin.full.dtype

    def _note_sizes(self, arrivals: list[list[tuple[Twin, Tensor]]]) -> None:
        for twin, _ in (arrival for mine in arrivals for arrival in mine):
            row = int(self.chosen.tuning.reduce_bucket_mb * 2**20) // self._wire(twin).itemsize // self.world
            self.must_grow |= twin.layout.shard_numel > row
        # Small buckets may all be filling at once, and a rank may wait for its peers with all of its buffers.
        self.may_grow |= self.chosen.tuning.reduce_bucket_mb < 1 or self.ragged

    def _expect_gradients(self, arrivals: list[list[tuple[Twin, Tensor]]], before: dict[str, int]) -> None:
        sums: dict[int, Tensor] = {}
        rounding: dict[int, float] = {}
        for mine in arrivals:
            for twin, grad in mine:
                share = grad.double() / self.world
                sums[twin.index] = sums.get(twin.index, torch.zeros(twin.full.shape, dtype=torch.float64)) + share
                unit = max(torch.finfo(self._wire(twin)).eps, torch.finfo(twin.full.dtype).eps) / 2
                if grad.dtype.itemsize == self._wire(twin).itemsize:
                    unit = max(unit, torch.finfo(grad.dtype).eps / 2)  # bfloat16 into float16
                # Scaling, summing arrivals, summing ranks and accumulating round a sum of contributions once each.
                size = unit * share.norm().item() + 1e-7 * math.sqrt(share.numel())
                rounding[twin.index] = rounding.get(twin.index, 0.0) + size * (len(mine) + self.world + 3)
        wire_bytes = 0
        for index, value in sums.items():
            twin = self.twins[index]
            held = 0.0 if twin.grad is None else torch.finfo(twin.full.dtype).eps * twin.grad.norm().item()
            # 1/3 is exact in no dtype.
            exact = self.whole and self.world < 3
            twin.slack = twin.slack if exact else twin.slack + rounding[index] + held
            twin.grad = value if twin.grad is None else twin.grad + value
            wire_bytes += self.world * twin.layout.shard_numel * self._wire(twin).itemsize
        self.counts["reduces"] += len(arrivals[self.rank])
        self.counts["agreements"] += self.world > 1
        after = self.executor.counters()
        flushes, sent = (after.get(key, 0) - before.get(key, 0) for key in ("flushes", "reduce_bytes"))
        self.expect(flushes >= len({self._wire(self.twins[i]) for i in sums}), f"only {flushes} flushes")
        self.expect(sent >= wire_bytes, f"{sent} bytes reduced, at least {wire_bytes} expected")
        self.expect(
            (after["bucket_bytes"] == 0) == (self.chosen.tuning.free_reduce_buckets or self.one_sided),
            f"{after['bucket_bytes']} bytes of buckets kept",
        )
        self.expect(
            self.heard == [sorted(sums)], f"the end of backward was told as {self.heard}, expected {[sorted(sums)]}"
        )
        self.heard.clear()


def run_sequences(seeds: range) -> tuple[list[str], dict[str, int]]:
    """Return failures, and the counters summed over all sequences."""
    mesh = Mesh.from_world(torch.device("cpu"))
    complaints: list[str] = []
    totals: dict[str, int] = {}
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    for seed in seeds:
        sequence = Sequence(mesh, seed)
        try:
            sequence.run()
        finally:
            counters = sequence.executor.counters()
            sequence.executor.close()
        complaints += sequence.complaints[:2]
        for key, value in counters.items():
            totals[key] = totals.get(key, 0) + value
    return complaints, totals
