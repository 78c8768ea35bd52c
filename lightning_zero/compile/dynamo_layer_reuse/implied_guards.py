"""Which of a module's guards say nothing that others of its do not say, for those that are stamped out of it.

Each guard is made, sorted and built into compiled code for each layer, by Python, and asked at each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any

from lightning_zero.compat.compiler import dynamo_config
from lightning_zero.compat.dynamo import ChainedSource, Guard, Source, TypeSource, guard_name
from lightning_zero.compile.dynamo_layer_reuse.sources import parts_of

__all__ = ["CONSTANTS", "not_implied"]

CONSTANTS = {"CONSTANT_MATCH", "EQUALS_MATCH"}  # they ask for a value's class, too
# Guards that ask whether a value is the one that it was.
OF_ONE_VALUE = {*CONSTANTS, "BOOL_MATCH", "NONE_MATCH", "ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "CLOSURE_MATCH"}


def not_implied(guards: Iterable[Guard]) -> Iterator[Guard]:
    """Those that have to be asked of a module and installed for it, if all of them are for the one that was traced.

    What is read of an object's class is not asked again: that it is the class of the traced one is asked, and of that
    class the rest. Dynamo makes 41 such guards for each layer of GPT-2.
    """
    guards = list(guards)
    classes = {guard.originating_source for guard in guards if guard_name(guard) == "TYPE_MATCH"}
    whole = {guard.originating_source for guard in guards if guard_name(guard) in CONSTANTS}
    tensors = {guard.originating_source for guard in guards if guard_name(guard) == "TENSOR_MATCH"}
    of_classes = _of_classes(guards, classes)
    seen: set[Hashable] = set()
    for guard in guards:
        name, path = guard_name(guard), guard.originating_source
        if name == "DUPLICATE_INPUT":  # which is of two paths
            yield guard
            continue
        if name == "EMPTY_NN_MODULE_HOOKS_DICT" and dynamo_config.skip_nnmodule_hook_guards:
            continue  # nothing is made of it
        if name in ("SEQUENCE_LENGTH", "TYPE_MATCH") and path in whole:
            continue
        if name == "TYPE_MATCH" and path in tensors:  # whose guard asks for the class, too
            continue
        key = name, path, _given(guard)
        if key not in seen and id(guard) not in of_classes:
            yield guard
        seen.add(key)


def _of_classes(guards: Sequence[Guard], classes: Set[Source]) -> set[int]:
    """The ids of those that go through the class of an object, but for one of each object.

    Compiled code of torch 2.11 takes a module for unchanged as long as dictionaries are, if its guards ask nothing that
    dictionaries do not tell, and does not see that it has got another class. So the one stays that is the least likely
    to be of that kind.
    """
    found: dict[Source, list[Guard]] = {}
    for guard in guards:
        owner = _owner(guard.originating_source, classes)
        if owner is not None and guard_name(guard) in OF_ONE_VALUE:
            found.setdefault(owner, []).append(guard)
    return {id(guard) for some in found.values() for guard in some if guard is not max(some, key=_depth)}


def _depth(guard: Guard) -> tuple[bool, int]:
    """The function behind a property before all others, and else what is the farthest from the object."""
    steps, path = [], guard.originating_source
    while isinstance(path, ChainedSource):
        steps.append(path)
        path = path.base
    names = [getattr(step, "member", "__") for step in steps[: _class_at(steps)]]
    plain = any(not name.startswith("__") and name != "cell_contents" for name in names)
    return plain, -len(steps) if plain else len(steps)


def _class_at(steps: Sequence[Source]) -> int:
    return max(at for at, step in enumerate(steps) if isinstance(step, TypeSource))


def _owner(path: Source, classes: Set[Source]) -> Source | None:
    """The path of the object, the outermost, through whose class it goes, if that class is guarded, and nothing else of
    the module has a part in it."""
    found = None
    while isinstance(path, ChainedSource):
        if any(isinstance(value, Source) for name, value in parts_of(path) if name != "base"):
            return None  # a table of the class, read by a key that is not its
        if isinstance(path, TypeSource) and path.base in classes:
            found = path.base
        path = path.base
    return found


def _given(guard: Guard) -> Hashable:
    """What a guard is asked with. Dynamo takes two for one only if they were made by the same line of code."""
    how: Any = guard.create_fn
    if not isinstance(how, partial):
        return None
    given = (how.args, *sorted(how.keywords.items()))
    try:
        hash(given)
    except TypeError:
        return id(guard)
    return given
