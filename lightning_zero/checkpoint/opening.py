"""Open a folder that several ranks have written as a checkpoint."""

from __future__ import annotations

from lightning_zero.checkpoint.sharded.folder import readable_location
from lightning_zero.checkpoint.sharded.metadata import METADATA
from lightning_zero.checkpoint.sharded.opened import CheckpointReader
from lightning_zero.errors import CheckpointError

__all__ = ["open_checkpoint"]


def open_checkpoint(path: str) -> CheckpointReader:
    """Return the sharded checkpoint at ``path``, which may be a URL.

    Raises:
        CheckpointError: it is no checkpoint, an incomplete one, or one of DeepSpeed.
    """
    if _is_deepspeed(path):
        new = f"{path.rstrip('/').removesuffix('.ckpt')}-full.ckpt"
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed. Convert it to a full one, once, with the script in this project's "
            f"repository, and load that: python examples/convert_deepspeed_checkpoint.py {path} {new}"
        )
    return CheckpointReader(path)


def _is_deepspeed(path: str) -> bool:
    """Return True if DeepSpeed seems to have written the folder at ``path``, or one in it."""
    fs, place = readable_location(path)
    if not fs.isdir(place) or fs.exists(f"{place}/{METADATA}"):
        return False
    homes = [home for home in (place, f"{place}/checkpoint") if fs.isdir(home)]
    names = [str(name) for home in homes for name in fs.ls(home, detail=False)]
    return fs.isfile(f"{place}/latest") or any(name.endswith("_model_states.pt") for name in names)
