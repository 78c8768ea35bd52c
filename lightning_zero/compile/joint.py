"""When a joint graph gets its layers back: before Inductor's passes over joint graphs, or behind them.

These passes try hundreds of patterns on each node. For 48 layers that takes longer than differentiating them. Once they
have seen one layer of each kind (:mod:`~lightning_zero.compile.layer_dedup`), only the rest of the graph is left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.fx import Graph

from lightning_zero.compat.compiler import inductor_config, replace_random_passes, stable_topological_sort
from lightning_zero.compile.draws import draws
from lightning_zero.compile.layer_dedup import LayerDedup

__all__ = ["JointPasses"]


class JointPasses(ExitStack):
    """For one graph, which is handed on once; a context in which it is compiled.

    Args:
        layers: that were taken out of the graph.
        finish: puts them back and does what else is ours on a joint graph.
        first: before Inductor's passes in any case. What these make anew does not know of which layer it is, which a
            user's policy of what is computed again may ask.
    """

    def __init__(self, layers: LayerDedup | None, finish: Callable[[Graph], Graph], first: bool = False) -> None:
        super().__init__()
        self._layers = None if first else layers
        self._finish = finish
        self._finished = False

    def options(self, form: Callable[[Callable[[Graph], Any]], Any]) -> dict[str, Any]:
        """For Inductor, which takes passes in a form of its own."""
        options = {"joint_custom_pre_pass": form(self.before)}
        # What users pass there expects whole layers.
        if self._layers is not None and inductor_config.joint_custom_post_pass is None:
            options["joint_custom_post_pass"] = form(self.behind)
        else:
            self._layers = None
        return options

    def before(self, graph: Graph) -> None:
        """Before Inductor's passes."""
        if self._layers is None or not self._layers.passes_done(graph):
            self._finish(graph)
            self._finished = True
        else:
            self.enter_context(inductor_config.patch(fallback_random=True))

    def behind(self, graph: Graph) -> None:
        """Behind them."""
        if not self._finished:
            self.close()
            stable_topological_sort(graph)  # Inductor does so behind all passes; ours go by the order of nodes
            self._finish(graph)
            assert graph.owning_module is not None
            if any(map(draws, graph.nodes)):  # or each node would be tried in vain
                replace_random_passes(graph.owning_module)  # with the layers there: seeds of all are drawn at once
