"""What users compile by hand and the strategy cannot take apart: a function that is given a module, say.

In the first step Dynamo meets what watches modules there, which it cannot trace. Where it may break its graph, that
costs nothing but time; with ``fullgraph=True`` it ends in an error about code of ours.
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_zero.compat.compiler import Unsupported
from lightning_zero.errors import UnsupportedError

__all__ = ["explain_unsupported"]

_OURS = str(Path(__file__).parents[1])


def explain_unsupported(error: Exception) -> UnsupportedError | None:
    """What to do, in place of Dynamo's error, where it cannot trace our code. None of what it cannot trace in the
    user's own, as under any strategy."""
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)', str(error))
    if not isinstance(error, Unsupported) or not any(path.startswith(_OURS) for path, _, _ in frames):
        return None
    users = [frame for frame in frames if not frame[0].startswith(_OURS) and "torch" not in Path(frame[0]).parts]
    where = " ({2} in {0}, line {1})".format(*users[0]) if users else ""
    return UnsupportedError(
        f"A function that you compiled with torch.compile(fullgraph=True) calls sharded modules or reads their "
        f"weights{where}, which torch.compile cannot trace into one graph under this strategy. Leave torch.compile out "
        "there: the strategy compiles the modules that a training step calls. Or leave fullgraph=True out."
    )
