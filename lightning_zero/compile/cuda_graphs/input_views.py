"""Outputs of compiled code that are inputs, or views of them.

A captured graph leaves them out, and each replay takes them from its own inputs. Eager code that edits one edits the
other, and autograd sends the gradient of the view to the input.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


@dataclass(frozen=True)
class InputView:
    """An output that is input number `index`, or a view of it.

    Attributes:
        offset: storage offset relative to the input's.
        whole: the output has the size and stride of the input.
        detached: the input requires grad, and the output does not.
    """

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool
    detached: bool

    def of(self, args: Sequence[Any]) -> Tensor:
        """Return the view of these inputs."""
        tensor: Tensor = args[self.index]
        if self.detached:
            tensor = tensor.detach()
        if self.whole:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class OutputPlan:
    """For each output, the view of an input; None for one that the compiled code computes."""

    views: Sequence[InputView | None] = ()

    def computed(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs that are no views of inputs."""
        return [output for output, view in zip(outputs, self.views, strict=True) if view is None]

    def restore(self, computed: Sequence[Tensor], args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return all outputs: the computed ones and views of `args`."""
        rest = iter(computed)
        return tuple(next(rest) if view is None else view.of(args) for view in self.views)


def find_input_views(outputs: Sequence[Tensor], inputs: Sequence[Any], refused: Collection[int] = ()) -> OutputPlan:
    """Return which outputs are inputs, or views of them.

    Args:
        refused: numbers of inputs, such as parameters, of which no output may be a view.

    Raises:
        NotImplementedError: an output shares memory with an input in another way.
    """
    owners: dict[int, int] = {}
    for number, value in enumerate(inputs):
        if isinstance(value, Tensor):
            owners.setdefault(value.untyped_storage().data_ptr(), number)
    owners.pop(0, None)  # tensors without elements share no memory
    return OutputPlan([_input_view(output, inputs, owners, refused) for output in outputs])


def _input_view(
    output: Tensor, inputs: Sequence[Any], owners: dict[int, int], refused: Collection[int]
) -> InputView | None:
    index = owners.get(output.untyped_storage().data_ptr())
    if index is None:
        return None
    owner: Tensor = inputs[index]
    same_kind = output.dtype == owner.dtype and not (output.is_neg() or output.is_conj())
    if index in refused or not same_kind or not _is_plain_view(output, owner):
        raise NotImplementedError("an output is an input, or a view of one")
    size, stride = tuple(output.size()), tuple(output.stride())
    return InputView(
        index,
        size,
        stride,
        int(output.storage_offset() - owner.storage_offset()),
        (size, stride, output.storage_offset()) == (tuple(owner.size()), owner.stride(), owner.storage_offset()),
        owner.requires_grad and not output.requires_grad,
    )


def _is_plain_view(output: Tensor, owner: Tensor) -> bool:
    """Return True if torch's own view operations lead from `owner` to `output`.

    The backward of an `autograd.Function` that returns a view is not that of a view.
    """
    if not output.requires_grad or output is owner:
        return True
    node = output.grad_fn
    while node is not None and not isinstance(node, BackwardCFunction) and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None) is owner
