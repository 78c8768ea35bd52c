"""What ``compat/tensors.py`` takes from torch still means the same."""

import torch
import torch.distributed._functional_collectives  # registers them
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from lightning_zero.compat import tensors as ops


def test_ops_are_overloads_of_packets() -> None:
    add = torch.ops.aten.add
    assert isinstance(add, ops.OpOverloadPacket)
    assert isinstance(add.Tensor, ops.OpOverload)
    assert not isinstance(add, ops.OpOverload)
    assert add.Tensor.overloadpacket is add
    assert add.Tensor.overloadpacket.__name__ == "add"


def test_graphs_cast_and_reshape_with_them() -> None:
    graph = make_fx(lambda x, w: x.to(torch.float64) @ w)(torch.ones(2, 3, 4), torch.ones(4, 5).double()).graph
    called = {node.target for node in graph.nodes}
    assert {ops.to_copy, ops.unsafe_view} <= called


def test_a_wait_takes_one_tensor() -> None:
    assert isinstance(ops.wait_tensor, ops.OpOverload)
    assert len(ops.wait_tensor._schema.arguments) == 1
    assert ops.wait_tensor.namespace == "_c10d_functional"


def test_only_attention_on_the_cpu_lacks_a_formula_before_torch_2_15() -> None:
    """Once no supported torch lacks it, it need not be listed."""
    assert ops.flash_attention in flop_registry
    assert ops.flash_attention_backward in flop_registry
    older = torch.torch_version.TorchVersion(torch.__version__) < "2.15"
    assert (ops.flash_attention_on_cpu not in flop_registry) is older
    assert (ops.flash_attention_on_cpu_backward not in flop_registry) is older


def test_both_take_the_same_arguments_first() -> None:
    def first(packet: ops.OpOverloadPacket, count: int) -> list[str]:
        return [argument.name for argument in packet.default._schema.arguments][:count]

    assert first(ops.flash_attention_on_cpu, 3) == first(ops.flash_attention, 3)
    assert first(ops.flash_attention_on_cpu_backward, 4) == first(ops.flash_attention_backward, 4)


def test_schemas_tell_writes_from_views() -> None:
    written = torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info
    viewed = torch.ops.aten.view.default._schema.arguments[0].alias_info
    assert written is not None
    assert written.is_write
    assert viewed is not None
    assert not viewed.is_write
    assert torch.ops.aten.add.Tensor._schema.arguments[0].alias_info is None
