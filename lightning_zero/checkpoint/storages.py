"""Compare the storages of loaded tensors with the parts of the archive that hold them.

torch takes the size of a storage from the pickle and not from the archive. A size that is too large shows bytes of
something else: of the next part in a mapped file, of foreign memory otherwise.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_zero.errors import CheckpointError
from lightning_zero.sharding.layout import is_strided

__all__ = ["verify_storages", "tensors_in"]


def verify_storages(value: Any, file: Any, name: str) -> None:
    """Raise if a tensor in ``value`` has a storage of another size than the parts of the archive.

    Args:
        value: as ``torch.load`` returned it.
        file: the archive, open for reading, or its path; files of torch's older format have nothing to compare with.
        name: of the file, for errors.

    Raises:
        CheckpointError: the file contradicts itself.
    """
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        held = Counter(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    used: dict[int, int] = {}
    for tensor in tensors_in(value):
        if (
            tensor.device.type == "cpu"
            and is_strided(tensor)
            and type(tensor).untyped_storage is Tensor.untyped_storage
        ):
            storage = tensor.untyped_storage()
            used[storage.data_ptr()] = storage.nbytes()
    for count, number in Counter(size for size in used.values() if size).items():
        if held[count] < number:
            raise CheckpointError(
                f"{name} is damaged: {number} of its tensors lie in {count:,} bytes each, and {held[count]} of its "
                "parts are so long. Use another checkpoint."
            )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, and in attributes of objects that stand for others. Containers may hold
    themselves, and be nested to any depth."""
    left, seen = [value], set()
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            yield one
        elif id(one) not in seen and isinstance(one, Mapping | list | tuple | set | frozenset):
            seen.add(id(one))
            left.extend(one.values() if isinstance(one, Mapping) else one)
        elif id(one) not in seen and type(one).__module__.startswith("lightning_zero."):
            seen.add(id(one))
            left.extend(getattr(one, "__dict__", {}).values())
