"""Nodes in the place of others. For each change of what a node reads, torch writes down anew all that it reads; a
graph's output reads something for each weight, so it is changed once, for all of them."""

from __future__ import annotations

from torch.fx import Graph, Node, map_arg

from lightning_zero.compile.graph import output_node

__all__ = ["NodeReplacer"]


class NodeReplacer:
    """Of nodes of a graph.

    Protocol: :meth:`replace` and :meth:`erase`, as often as needed; then :meth:`done`.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._output = output_node(graph)
        self._returned: dict[Node, Node] = {}
        self._gone: list[Node] = []

    def replace(self, node: Node, successor: Node) -> None:
        """Whatever reads ``node`` reads ``successor``, but for the output, which does once all is done. The node is
        erased then."""
        if self._output in node.users:
            self._returned[node] = successor
        node.replace_all_uses_with(successor, delete_user_cb=lambda user: user is not self._output)
        self.erase(node)

    def erase(self, node: Node) -> None:
        """Erases a node that only such nodes read as are replaced or erased before it, once all is done."""
        self._gone.append(node)

    def done(self) -> None:
        """Changes the output, and erases nodes."""
        if self._returned:
            self._output.args = map_arg(self._output.args, lambda node: self._returned.get(node, node))
        for node in self._gone:
            self._graph.erase_node(node)
