"""Autograd node of one captured forward and backward.

It copies inputs to the addresses that the graphs read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_zero.compile.cuda_graphs.graph_pairs import GraphPair
from lightning_zero.native.executor_stubs import Gradients


def unsupported_input(args: Sequence[Any], device: torch.device) -> str:
    """Return the reason why these inputs cannot be copied into a graph's memory; "" if they can."""
    for arg in args:
        if not isinstance(arg, Tensor):
            continue
        if arg.device.type != device.type:
            return "an input is on another device"
        if arg.layout != torch.strided or _may_overlap(arg):
            return "elements of an input share memory"
    return ""


def _may_overlap(tensor: Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


class PendingBackward:
    """Token that lives as long as a backward can still run."""


class CapturedCall:
    """A captured forward and backward, and the memory that they read and write.

    Args:
        args: of a call; later calls have the same shapes.
        capture: makes the pair from inputs with fixed addresses and the list of those that are copies.
    """

    def __init__(
        self,
        args: Sequence[Any],
        static_tensors: Iterable[Tensor],
        gradients: Gradients,
        capture: Callable[[Sequence[Any], Sequence[Tensor]], GraphPair],
    ) -> None:
        known = {id(tensor) for tensor in static_tensors}
        self._addresses = [(n, arg.data_ptr()) for n, arg in enumerate(args) if id(arg) in known]
        fixed = {n for n, _ in self._addresses}
        inputs = [
            (_alias(a) if n in fixed else _empty_copy(a)) if isinstance(a, Tensor) else a for n, a in enumerate(args)
        ]
        self._copied = [(n, t) for n, t in enumerate(inputs) if n not in fixed and isinstance(t, Tensor)]
        self._input_count = len(args)
        self._gradients = gradients
        self.pending_backward: weakref.ref[PendingBackward] | None = None
        self._closed = False
        self._copy_in(args)
        self.pair = capture(inputs, [tensor for _, tensor in self._copied])

    def fits(self, args: Sequence[Any]) -> bool:
        """Return True if a replay gives the same results as a run."""
        still = all(args[n].data_ptr() == address for n, address in self._addresses)
        return still and not self._has_pending_backward and self.pair.fits()

    @property
    def _has_pending_backward(self) -> bool:
        return self.pending_backward is not None and self.pending_backward() is not None

    def close(self) -> None:
        """Free the memory, or do so after a backward that is still pending."""
        self._closed = True
        if not self._has_pending_backward:
            self.pair.close()

    def forward(self, args: Sequence[Any]) -> tuple[list[Tensor], PendingBackward]:
        """Return copies of the computed outputs, and a token that must live until the backward."""
        self._copy_in(args)
        outputs = [output.detach().clone() for output in self.pair.forward()]
        token = PendingBackward()
        self.pending_backward = weakref.ref(token)
        return outputs, token

    def with_known_outputs(self, computed: Sequence[Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        """Return all outputs: those of :meth:`forward`, inputs returned as they are, and views of others.

        ``self.count += 1`` with a buffer makes compiled code return the buffer.
        """
        inputs, views, rest = self.pair.known.inputs, self.pair.known.views, iter(computed)
        if not inputs and not views:
            return tuple(computed)
        count = len(computed) + len(inputs) + len(views)
        outputs = {n: args[inputs[n]] if n in inputs else next(rest) for n in range(count) if n not in views}
        outputs |= {n: view.make(outputs[view.of]) for n, view in views.items()}
        return tuple(outputs[n] for n in range(count))

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of the inputs; None for parameters, whose gradients the executor has."""
        self._gradients.mark()
        found = self.pair.backward(grads)
        self._gradients.mark()
        self.pending_backward = None
        results: list[Tensor | None] = [None] * self._input_count
        for (n, _), grad in zip(self._copied, found, strict=True):
            results[n] = None if grad is None else grad.clone()
        if self._closed:
            self.pair.close()
        return results

    def _copy_in(self, args: Sequence[Any]) -> None:
        with torch.no_grad():
            for n, tensor in self._copied:
                tensor.copy_(args[n])


def _empty_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.requires_grad_(tensor.requires_grad)


def _alias(tensor: Tensor) -> Tensor:
    # Kept autograd graphs, such as that of the last loss, keep the parameters' own nodes. Those belong to another
    # stream, and the backward would wait for it, which a capture cannot.
    return tensor.detach().requires_grad_(tensor.requires_grad)


class GraphReplay(torch.autograd.Function):
    """Run a captured call: ``GraphReplay.apply(captured, *args)``."""

    @staticmethod
    def forward(ctx: Any, captured: CapturedCall, *args: Any) -> tuple[Tensor, ...]:
        outputs, token = captured.forward(args)
        differentiable = captured.pair.differentiable
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o, yes in zip(outputs, differentiable, strict=True) if not yes))
        ctx.captured, ctx.token = captured, token
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.token is None:
            raise RuntimeError(
                "lightning_zero: backward ran twice through one call of compiled code that is replayed as a CUDA "
                "graph, whose activations are gone after the first time. Call the module again for the second, or "
                "pass cuda_graphs=False to the strategy."
            )
        ctx.token = None
        return (None, *ctx.captured.backward(grads))
