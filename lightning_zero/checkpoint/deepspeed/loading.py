"""One file of DeepSpeed's: mapped, and unpickled without running anything that it names.

Beside tensors and plain containers there are objects of a few classes of DeepSpeed's in it, and which ones differs from
version to version. :class:`StandIn` takes the place of each: it keeps what the object was made of, and does nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from lightning_zero.checkpoint.storages import check_storages, tensors_in
from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.mapped import take_small

__all__ = ["StandIn", "load_mapped"]

OURS = "deepspeed."


class StandIn:
    """For an object of a class that is not imported.

    Attributes:
        made_of: what its class was called with.
    """

    made_of: tuple[Any, ...]

    def __new__(cls, *made_of: Any) -> StandIn:
        made = super().__new__(cls)
        made.made_of = made_of
        return made

    def __init__(self, *made_of: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __int__(self) -> int:
        """Of an enum's member."""
        if len(self.made_of) != 1 or type(self.made_of[0]) is not int:
            raise TypeError(f"{self.made_of!r:.80} is no number")
        return self.made_of[0]


def load_mapped(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """What is in a file; its tensors lie in the file until they are used.

    Args:
        path: of the file.
        weights_only: False: the user trusts it, and what cannot be read safely is unpickled all the same.

    Raises:
        CheckpointError: it is damaged, or holds what cannot be read safely.
    """
    others: list[str] = []
    try:
        named = get_unsafe_globals_in_checkpoint(str(path))
        others = [name for name in named if not name.startswith(OURS)]
        if others and weights_only is False:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        else:
            with safe_globals([(StandIn, name) for name in named if name.startswith(OURS)]):
                found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Use another checkpoint.") from error
    except Exception as error:  # damage may show as anything, and so may code that somebody wants to be run
        if others and weights_only is not False:
            raise CheckpointError(
                f"{path} holds objects of {', '.join(others)}, and to read these is to run code that the file names. "
                "If you trust it, pass weights_only=False."
            ) from error
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, and is not DeepSpeed's. Use another checkpoint.")
    check_storages(found, path, str(path))
    take_small(tensors_in(found))
    return found
