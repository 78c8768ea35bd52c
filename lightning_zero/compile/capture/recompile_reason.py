"""Translate Dynamo's reasons for a recompilation into words for users.

Dynamo names a failed guard by its own source: ``tensor 'args[0]' size mismatch at index 0. expected 8, actual 3``. The
frame that it compiles is ``call(*args, **kwargs)`` of ``discovery.py``, whose variable ``module`` is the user's module.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_zero.compat.compiler import guard_failures, metrics_context
from lightning_zero.compat.lookup import Absent

FRAME = "call of "  # begins the name of the frames of ``discovery.py``
LONGEST_VALUE = 60  # characters of a value in a reason
UNKNOWN = "a value that the code depends on has changed"
ARGUMENTS_CHANGED = "the call has other arguments"


@dataclass(frozen=True)
class RecompileReason:
    """Why Dynamo compiles code again.

    Attributes:
        text: the reason in words; it can follow "because".
        guard: the failed guard in Dynamo's words.
        expected: the user need not know it: an evaluation runs without gradients.
    """

    text: str
    guard: str
    expected: bool = False


def argument_names(module: nn.Module) -> Sequence[str]:
    """Return the names of the positional arguments of a module's forward."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def find_recompile_reason(arguments: Sequence[str] = ()) -> RecompileReason | None:
    """Return the reason of the current recompilation.

    None for a first compilation, and for other passes or options.
    """
    metrics = metrics_context()._metrics
    reason = metrics.get("recompile_reason")
    if not reason or "BACKEND_MATCH" in reason:
        return None
    if not str(metrics.get("co_name", FRAME)).startswith(FRAME):
        arguments = ()  # code after a graph break, or inside the module, has other arguments
    return explain_recompilation(reason, arguments)


def explain_recompilation(first: str, arguments: Sequence[str] = ()) -> RecompileReason:
    """Translate Dynamo's reason, which is that against the code that ran last.

    After a switch between training and evaluation, that code is the other mode's. Code of this mode has another reason.
    """
    found = [explain_guard(reason, arguments) for reason in _all_reasons(first) if "BACKEND_MATCH" not in reason]
    return next((reason for reason in found if not reason.expected), explain_guard(first, arguments))


def _all_reasons(first: str) -> list[str]:
    """Return the reasons against all code that is cached for a function, from one of them."""
    for noted in () if isinstance(guard_failures, Absent) else guard_failures.values():
        latest: dict[str, str] = {}  # by the number of the code
        for reason in reversed(noted):
            number = reason.partition(":")[0]
            if number in latest:
                break
            latest[number] = reason
        if first in latest.values():
            return [*reversed(latest.values())]
    return [first]


def explain_guard(reason: str, arguments: Sequence[str] = ()) -> RecompileReason:
    """Translate Dynamo's reason."""
    lines = re.sub(r"^\d+/\d+(_\d+)?: ?", "", reason).splitlines()
    guard = lines[0].strip() if lines else ""
    condition, _, comment = (part.strip() for part in guard.partition("  # "))
    condition = re.sub(r"\bL\['(\w+)'\]", r"\1", condition)
    if condition.startswith("GLOBAL_STATE changed:"):
        return _global_state(condition.partition(":")[2].split(), guard)
    text = _tensor_reason(condition, arguments) or _value_reason(condition, arguments)
    if text is None:
        text = UNKNOWN + _location(comment)
    elif text != ARGUMENTS_CHANGED and "mismatch" not in condition:
        text += _location(comment)
    return RecompileReason(text, guard)


def _global_state(changed: Sequence[str], guard: str) -> RecompileReason:
    if changed == ["grad_mode"]:
        return RecompileReason("gradients were switched on or off", guard, expected=True)
    others = [name for name in changed if name != "grad_mode"]
    if others and all("autocast" in name for name in others):
        return RecompileReason("autocast was switched on or off", guard)
    return RecompileReason(f"a global setting of torch has changed ({', '.join(others) or 'unknown'})", guard)


def _tensor_reason(condition: str, arguments: Sequence[str]) -> str | None:
    found = re.match(r"tensor '(.+)' (.+?) mismatch", condition)
    if found is None:
        return None
    name, what = _name(found[1], arguments), found[2]
    values = re.search(r"expected (?:requires_grad=)?(.+?)(?:, actual (.+?))?\.?(?: Guard failed on .*)?$", condition)
    index = re.search(r"at index (\d+)", condition)
    before, now = (values[1], values[2]) if values else (None, None)
    if what == "requires_grad":
        return f"{name} {'needs a gradient now' if before == '0' else 'needs no gradient any more'}"
    if what == "size" and index and now:
        return f"{name} changed in dimension {index[1]} from {before} to {now}"
    if what == "stride" and index and now:
        return f"{name} changed its stride in dimension {index[1]} from {before} to {now}"
    if what == "rank" and now:
        return f"{name} changed from {before} to {now} dimensions"
    if what == "dtype" and now:
        return f"{name} changed its dtype from {before.lower() if before else '?'} to {now.lower()}"
    return f"{name} is another kind of tensor (device, layout or subclass)"


def _value_reason(condition: str, arguments: Sequence[str]) -> str | None:
    if re.match(
        r"(not )?(kwargs|args)$|len\((kw)?args\) == |.*\bdict\.keys\(kwargs\)|'\w+' (not )?in kwargs", condition
    ):
        return ARGUMENTS_CHANGED
    if found := re.match(r"(.+)\.training == (True|False)$", condition):
        owner = _name(found[1], arguments)
        return f"{owner} switched to {'evaluation' if found[2] == 'True' else 'training'}"
    if found := re.match(r"(\d+) <= (.+)\.size\(\)\[(\d+)\]$", condition):
        return f"{_name(found[2], arguments)} is smaller than {found[1]} in dimension {found[3]}"
    if found := re.match(r"(.+)\.size\(\)\[(\d+)\] == (\d+)$", condition):
        return f"{_name(found[1], arguments)} is no longer {found[3]} long in dimension {found[2]}"
    if found := re.match(r"___check_(?:type|obj)_id\((.+?), ", condition):
        return f"{_name(found[1], arguments)} is another object"
    found = re.match(r"([\w.\[\]']+) (?:==|is) (.+)$", condition)
    if found is None:
        return None
    name, value = _name(found[1], arguments), found[2]
    if re.match(r"(args|kwargs|module)\b", value):
        return f"{name} and {_name(value, arguments)} are no longer the same"
    return f"{name} is no longer {value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + ' ...'}"


def _name(source: str, arguments: Sequence[str]) -> str:
    """Translate Dynamo's name of a value, such as ``args[0]`` or ``module._modules['norm'].eps``."""
    if found := re.match(r"args\[(\d+)\](.*)$", source):
        number = int(found[1])
        called = repr(arguments[number]) if number < len(arguments) else str(number + 1)
        return f"argument {called}{_within(found[2])}"
    if found := re.match(r"kwargs\['(\w+)'\](.*)$", source):
        return f"argument {found[1]!r}{_within(found[2])}"
    found = re.match(r"module\b(.*)$", source)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", found[1] if found else f".{source}")
    return repr(path.removeprefix(".")) if path else "the module"


def _within(rest: str) -> str:
    return f" at {rest}" if rest else ""


def _location(comment: str) -> str:
    """Return the user's line that reads a value; empty if it is torch's."""
    found = re.search(r"(\S+\.py):(\d+) in (\w+)", comment)
    if found is None or re.match(r"(torch|nn|_dynamo|lightning_zero)/|.*/lightning_zero/compile/", found[1]):
        return ""
    return f" ({found[3]} in {found[1].rpartition('/')[2]}, line {found[2]})"
