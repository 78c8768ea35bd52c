"""Where the entries of a sharded checkpoint stand in nested dicts and lists.

Files name a path for each entry. :func:`nested` trusts none of them: it refuses paths that do not fit together, and
makes no list longer than the number of entries in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

__all__ = ["MOST_LEVELS", "Keys", "is_path", "nested"]

Keys = tuple[str | int, ...]  # the keys of nested dicts and lists on the way to a value

MOST_LEVELS = 200  # of nested containers: functions that walk them recurse, and Python stops at 1,000 calls


class _Branch(dict[Any, Any]):
    """Entries of a dict, or of a list by their numbers."""

    def __init__(self, is_list: bool) -> None:
        super().__init__()
        self.is_list = is_list


def is_path(value: Any) -> bool:
    """Return True if ``value`` is a tuple of keys that :func:`nested` can follow."""
    return (
        isinstance(value, tuple)
        and 0 < len(value) <= MOST_LEVELS
        and all(type(key) in (str, int) for key in value)
        and isinstance(value[0], str)
    )


def nested(entries: Mapping[Keys, Any]) -> dict[str, Any]:
    """Return the nested state of which each entry stands at its path: the inverse of ``flattened``.

    Raises:
        ValueError: paths do not fit together.
    """
    root = _Branch(is_list=False)
    for path, value in entries.items():
        branch = root
        for key, following in zip(path, path[1:], strict=False):
            branch = _step(branch, key, isinstance(following, int), path)
        _refuse_other_kind(branch, path[-1], path)
        if path[-1] in branch:
            raise ValueError(f"two entries stand at {short(path)}")
        branch[path[-1]] = value
    return {key: _joined(value, (key,)) for key, value in root.items()}


def _step(branch: _Branch, key: str | int, to_list: bool, path: Keys) -> _Branch:
    _refuse_other_kind(branch, key, path)
    below = branch.setdefault(key, _Branch(to_list))
    if not isinstance(below, _Branch):
        raise ValueError(f"{short(path)} stands below another entry")
    return below


def _refuse_other_kind(branch: _Branch, key: str | int, path: Keys) -> None:
    if branch.is_list != isinstance(key, int):
        raise ValueError(f"{short(path)} stands in a {'list' if branch.is_list else 'dict'} with the key {short(key)}")


def _joined(value: Any, path: Keys) -> Any:
    if not isinstance(value, _Branch):
        return value
    found = {key: _joined(inner, (*path, key)) for key, inner in value.items()}
    if not value.is_list:
        return found
    missing = next((number for number in range(len(found)) if number not in found), None)
    if missing is not None:
        others = next(key for key in found if not 0 <= key < len(found))
        raise ValueError(f"the list at {short(path)} has an entry {others}, and none {missing}")
    return [found[number] for number in range(len(found))]
