"""What autograd has saved must not be changed until backward reads it. Torch looks for that itself, unless there are
hooks that pack what is saved: gradients would be wrong, and nobody would be told."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["VersionedTensor"]


class VersionedTensor(NamedTuple):
    """A tensor as it is saved.

    Attributes:
        tensor: detached: the result of an operation would keep itself alive by its own history.
        version: that it had.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> VersionedTensor:
        return cls(tensor.detach(), tensor._version)

    @property
    def holds(self) -> bool:
        """Whether nobody has changed it since."""
        return self.tensor._version == self.version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed, as torch's own.
        """
        if self.holds:
            return self.tensor
        shape = "x".join(map(str, self.tensor.shape)) or "no dimensions"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of {shape} in {str(self.tensor.dtype).removeprefix('torch.')} was saved for backward at "
            f"version {self.version} and is at version {self.tensor._version} now. Write to a new tensor, or "
            "clone the tensor before it is changed."
        )
