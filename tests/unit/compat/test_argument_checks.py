"""Replaced functions of torch inside and around compiled code."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from lightning_zero.compat.argument_checks import check_tensor_arguments


def test_a_replaced_function_that_compiled_code_calls_outside_of_its_graph_is_not_compiled() -> None:
    """Dynamo makes tensors of arrays by torch.as_tensor."""
    check_tensor_arguments(lambda name, args: args)
    torch._dynamo.reset()
    counters.clear()

    def model(x: Tensor, array: np.ndarray) -> Tensor:
        return x + torch.from_numpy(array * 2)

    assert torch.compile(model, backend="eager")(torch.ones(2), np.ones(2, dtype=np.float32)).tolist() == [3.0, 3.0]
    assert counters["frames"]["total"] == 1
    assert not counters["graph_break"]


def test_graphs_call_torchs_own_functions_whenever_dynamo_looks_them_up() -> None:
    """Otherwise AOTAutograd would cache no such graph, and no layer with such a call would be deduplicated."""
    check_tensor_arguments(lambda name, args: args)
    replaced = (torch.tensor, torch.as_tensor, torch.asarray)
    targets: list[Any] = []

    def backend(graph: GraphModule, inputs: list[Tensor]) -> Any:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    def model(x: Tensor) -> Tensor:
        return x + torch.tensor(1.0) + torch.as_tensor([1.0, 2.0], device=x.device) + torch.asarray(x)

    torch._dynamo.trace_rules.clear_lru_cache()  # as torch.distributed.init_process_group does
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [4.0, 5.0]
    assert {function.__wrapped__ for function in replaced} <= set(targets)
    assert not set(replaced) & set(targets)
