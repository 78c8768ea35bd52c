"""Plans of compiled graphs: what they gather and reduce, in which order, and when.

A plan is read from a graph after the passes. It prints as a table and saves as JSON. All ranks must agree on
:meth:`GraphPlan.collectives`, which do not depend on activation sizes, so that ranks may run batches of different
lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_zero.config.text import format_table

FORMAT = 1


@dataclass(frozen=True)
class Gather:
    """One launch of all-gathers.

    Attributes:
        weights: parameter names, in memory order.
        dtype: on the wire, e.g. ``"bfloat16"``.
        bytes: of the unsharded weights with padding.
        started: position of the launch among nodes other than inputs and output.
        before: name of the node before which it starts.
        waited: position of the node that waits for it.
        used: name of the first node that reads one of the weights.
        until: end of the weights' life: ``"last use"``, ``"backward"`` or ``"step"`` (until the optimizer steps).
        started_s, waited_s: estimated seconds of compute before these positions; see :attr:`GraphPlan.compute_s`.
        transfer_s: estimated seconds of the transfer.
    """

    weights: tuple[str, ...]
    dtype: str
    bytes: int
    started: int
    before: str
    waited: int
    used: str
    until: str = "last use"
    started_s: float = 0.0
    waited_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True)
class Reduce:
    """One or more gradients passed to the reduce buckets at once.

    Attributes:
        weights: parameter names.
        dtype: of the gradients.
        bytes: of the unsharded gradients.
        at: position of the node.
        at_s: estimated seconds of compute before it.
        transfer_s: estimated seconds of the transfer.
    """

    weights: tuple[str, ...]
    dtype: str
    bytes: int
    at: int
    at_s: float = 0.0
    transfer_s: float = 0.0


FP8 = "fp8"


@dataclass(frozen=True)
class Linear:
    """Dtypes of the products of one weight in a graph, with ``linear_dtype="fp8"``.

    Attributes:
        weight: parameter name.
        products: pairs of a product, such as ``"forward"`` or ``"weight_gradient"``, and ``"fp8"`` or the reason why it
            stays in 16 bits.
    """

    weight: str
    products: tuple[tuple[str, str], ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons of products that are not in fp8, each once."""
        return tuple(dict.fromkeys(reason for _, reason in self.products if reason != FP8))


@dataclass(frozen=True)
class GraphPlan:
    """The plan of one graph.

    Seconds are 0 without measurements (on CPUs, on one rank, without ``prefetch``). A graph from a cache has those of
    the run that compiled it.

    Attributes:
        kind: ``"forward"`` or ``"backward"``.
        nodes: number of nodes.
        gathers: launches of all-gathers, in order.
        reduces: gradients, in order.
        compute_s: estimated seconds of compute.
        linears: weights whose products may be in fp8.
    """

    kind: str
    nodes: int
    gathers: tuple[Gather, ...]
    reduces: tuple[Reduce, ...]
    compute_s: float = 0.0
    linears: tuple[Linear, ...] = ()

    def collectives(self) -> tuple[str, ...]:
        """Return a line per collective in order, equal on all ranks."""
        lines = [
            f"{self.kind}: gather {' + '.join(g.weights)} as {g.dtype}, {g.bytes} bytes"
            + (", kept for backward" if g.until == "backward" else "")
            for g in self.gathers
        ]
        # Gradients may arrive in another order on each rank; the executor sorts them.
        enqueued = sorted({weight for reduce in self.reduces for weight in reduce.weights})
        return (*lines, *(f"{self.kind}: reduce {weight}" for weight in enqueued))

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.collectives()).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GraphPlan:
        return cls._from(json.loads(text))

    @classmethod
    def _from(cls, data: dict[str, Any]) -> GraphPlan:
        def parse(kind: Any, entries: list[dict[str, Any]]) -> tuple[Any, ...]:
            return tuple(kind(**{**entry, "weights": tuple(entry["weights"])}) for entry in entries)

        gathers, reduces = parse(Gather, data["gathers"]), parse(Reduce, data["reduces"])
        linears = tuple(
            Linear(entry["weight"], tuple((kind, dtype) for kind, dtype in entry["products"]))
            for entry in data.get("linears", ())
        )
        return cls(data["kind"], data["nodes"], gathers, reduces, data.get("compute_s", 0.0), linears)

    def __str__(self) -> str:
        gathered, reduced = (sum(entry.bytes for entry in entries) for entries in (self.gathers, self.reduces))
        title = (
            f"{self.kind} graph of {self.nodes} nodes: {len(self.gathers)} gathers of {_mib(gathered)} MiB, "
            f"{sum(len(reduce.weights) for reduce in self.reduces)} gradients of {_mib(reduced)} MiB"
        )
        heads = "bucket", "weights", "dtype", "MiB", "started before", "waited for by", "kept until"
        rows = []
        for number, gather in enumerate(self.gathers):
            before = f"{gather.before} (node {gather.started})"
            used = f"{gather.used} (node {gather.waited})"
            rows.append(
                (str(number), _shorten(gather.weights), gather.dtype, _mib(gather.bytes), before, used, gather.until)
            )
        return "\n".join([title, *format_table(heads, rows, indent=""), *_linear_lines(self.linears)])


def _linear_lines(linears: Sequence[Linear]) -> list[str]:
    """Return a line with the number of fp8 products, and a line for each reason of the others."""
    if not linears:
        return []
    products = [dtype for linear in linears for _, dtype in linear.products]
    by_reason: dict[str, list[str]] = {}
    for linear in linears:
        for reason in linear.reasons:
            by_reason.setdefault(reason, []).append(linear.weight)
    reasons = [f"  in 16 bits, {reason}: {_shorten(tuple(names))}" for reason, names in by_reason.items()]
    return [f"fp8 products: {products.count(FP8)} of {len(products)}", *reasons]


@dataclass(frozen=True)
class Plan:
    """Plans of all graphs of a training, in the order in which they first ran; ``print()`` shows them.

    Attributes:
        graphs: Plan of each graph, with its all-gathers and gradients.

    Examples:
        >>> from lightning_zero import Plan
        >>> print(Plan())  # trainer.strategy.plan() returns the plan of a training
        (nothing compiled yet)
    """

    graphs: tuple[GraphPlan, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.graphs)) or "(nothing compiled yet)"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        text = json.dumps({"format": FORMAT, "graphs": [asdict(graph) for graph in self.graphs]}, indent=1)
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of :meth:`save`.

        Raises:
            ValueError: The file is not a plan, or has another format version.
        """
        try:
            data = json.loads(Path(path).read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, not {FORMAT}")
            return cls(tuple(GraphPlan._from(graph) for graph in data["graphs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a plan that this version of lightning_zero can read: {error}.") from error


def first_difference(mine: Iterable[str], theirs: Iterable[str]) -> tuple[int, str, str]:
    """Return position and texts of the first line that differs between two lists of collectives."""
    a, b = list(mine), list(theirs)
    for position in range(max(len(a), len(b))):
        left, right = (lines[position] if position < len(lines) else "(nothing)" for lines in (a, b))
        if left != right:
            return position, left, right
    return len(a), "(nothing)", "(nothing)"


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def _shorten(names: tuple[str, ...], most: int = 2) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


class PlanStore:
    """Plans of one engine, equal on all ranks. A plan is added when all ranks agree on it."""

    def __init__(self) -> None:
        self._all: list[GraphPlan] = []
        self._agreed: dict[Hashable, list[GraphPlan]] = {}
        self._key: Hashable = None

    @property
    def count(self) -> int:
        """Return the number of graphs that have run."""
        return len(self._all)

    @property
    def plan(self) -> Plan:
        """Return the plans of all graphs that have run."""
        return Plan(tuple(self._all))

    @property
    def agreed_plans(self) -> tuple[GraphPlan, ...]:
        """Return the plans with the current key since :meth:`forget`, which later graphs follow."""
        return tuple(self._agreed.get(self._key, ()))

    def forward_seconds(self) -> float:
        """Return the estimated compute seconds of the forward graphs with the current key; 0 if unknown."""
        return sum(plan.compute_s for plan in self.agreed_plans if plan.kind == "forward")

    def keeps_more(self, share: float, budget: float, small_bytes: int) -> bool:
        """Return True if a weight would be kept that is gathered again now.

        Plans know the bytes of groups; the smallest weight of a group is at most as large as their mean.

        Args:
            budget: bytes of weights that are kept until the optimizer steps.
            small_bytes: size up to which weights do not count in ``budget``.
        """
        for plan in self.agreed_plans:
            room = share * sum(gather.bytes for gather in plan.gathers) if plan.kind == "backward" else 0.0
            for gather in plan.gathers:
                mean = gather.bytes / len(gather.weights)
                if mean <= room or small_bytes < mean <= budget:
                    return True
        return False

    def select(self, key: Hashable) -> None:
        """Set the key of graphs from now on.

        Graphs follow only plans of the same key. Other passes or another share of saved weights give other groups.
        """
        self._key = key

    def add(self, plan: GraphPlan) -> None:
        """Add the plan of a graph that has run on all ranks."""
        self._all.append(plan)
        self._agreed.setdefault(self._key, []).append(plan)

    def forget(self) -> None:
        """Forget agreed plans after options changed."""
        self._agreed.clear()
