"""Why Dynamo compiles what it has compiled before: the guard that failed."""

from __future__ import annotations

import re

from lightning_zero.compat.compiler import metrics_context

__all__ = ["format_first_guard", "find_recompile_reason"]

LONGEST = 300  # characters: guards over symbols can go on for pages


def find_recompile_reason() -> str | None:
    """Inside a backend, in Dynamo's words; None where nothing was compiled before, or with other passes or options, of
    which others tell."""
    reason = metrics_context()._metrics.get("recompile_reason")
    if not reason or "BACKEND_MATCH" in reason:
        return None
    return format_first_guard(reason)


def format_first_guard(reason: str) -> str:
    """Return the first guard of what Dynamo says of a recompilation."""
    lines = re.sub(r"^\d+/\d+(_\d+)?: ?", "", reason).splitlines()
    guard = re.sub(r" {2,}", "  ", lines[0]) if lines else "Dynamo does not say which guard failed"
    return guard if len(guard) <= LONGEST else f"{guard[:LONGEST]} ..."
