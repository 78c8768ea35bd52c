"""What Dynamo does with tensors and numbers that come into a graph from outside, and notes of them."""

import math
import re
from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_zero.compat.compiler import TensorVariable, dynamo_config
from lightning_zero.compat.dynamo import SubclassVariable
from lightning_zero.compat.graphs import EXAMPLE_VALUE, NN_MODULE_STACK, GRAPH_ARG, STACK_TRACE
from lightning_zero.compat.lookup import module

pgo = module("torch._dynamo.pgo")
utils = module("torch._dynamo.utils")
builder = module("torch._dynamo.variables.builder")

__all__ = ["has_changed_before", "input_like"]

# What Dynamo is told of a tensor is noted at it by names that begin so, and in MARK that it has to stay where it is;
# of parameters Dynamo notes that itself. (torch 2.11+)
MARKS, MARK = "_dynamo_", "_dynamo_static_input_type"

# What is noted at an input of a graph; where there is more, nobody knows of what. (torch 2.11+)
KEYS = {"creation_timestamp", "tensor_dict", EXAMPLE_VALUE, NN_MODULE_STACK, GRAPH_ARG, STACK_TRACE}


def has_changed_before(tx: Any, path: Any, number: float) -> bool:
    """Whether a number was another one when this code was compiled before: Dynamo makes it an input. Notes it."""
    # What is known of it from one compilation to the next, by the code that was called first, not by that which calls a
    # layer, and by its path. (torch 2.11+)
    make: Any = pgo.FrameStateSizeEntry.make_scalar
    entry = pgo.process_automatic_dynamic(tx.output.root_tx, path.name, make(number))
    if dynamo_config.specialize_float or not math.isfinite(number):
        return False  # it stays a number whatever it was
    return entry.scalar is pgo.auto_dynamic or not dynamo_config.assume_static_by_default


def input_like(tx: Any, path: Any, value: Tensor, like: Node) -> Node | None:
    """Makes a tensor an input of the graph, as one that is alike has become ``like``, but for guards, for the modules
    it was read in and the lines of code. Torch takes three times as long: it looks for these lines for each weight, and
    asks the same of each.

    Returns:
        None where something is not alike, or the tensor is known already: a VariableBuilder tells what it is then.
    """
    output, origin = tx.output, like.meta[GRAPH_ARG]
    twin = output.input_source_to_var.get(origin.source)
    if not _is_alike(output, path, value, like, twin):
        return None
    old = origin.example
    if MARK in vars(old):
        vars(value).setdefault(MARK, vars(old)[MARK])
    # With all that is noted of it: its sizes for guards, and its fake one. (torch 2.11+)
    fake = builder.wrap_to_fake_tensor_and_record(value, tx=output.root_tx, source=path, is_tensor=True)
    proxy = _placeholder(output.root_tracer, path, type(value), fake)
    proxy.node.meta[GRAPH_ARG] = type(origin)(path, value, False, fake)
    # What else is noted at a tensor for later stages. (torch 2.11+)
    proxy.node.meta["tensor_dict"] = utils._extract_tensor_dict(value)
    if _form(fake) == _form(like.meta[EXAMPLE_VALUE]):
        variable = twin.clone(proxy=proxy, source=path, mutation_type=None)
    else:  # sizes that have changed before are symbols
        kind = builder.infer_subclass_type(value)
        variable = builder.wrap_fx_proxy(tx, proxy, example_value=fake, subclass_type=kind, source=path)
    # From here on torch takes it for known, and makes no guard where it is read.
    output.side_effects.track_object_existing(value, variable)
    output.input_source_to_var[path] = output.variable_tracker_cache[path] = variable
    return proxy.node  # type: ignore[no-any-return]


def _is_alike(output: Any, path: Any, value: Tensor, like: Node, twin: Any) -> bool:
    """Whether torch would do with a tensor what it did with the one that became ``like``, and has not done it yet."""
    is_tensor = type(twin) in (TensorVariable, SubclassVariable) and twin.as_proxy().node is like
    if not is_tensor or set(like.meta) - KEYS:
        return False
    known = path in output.variable_tracker_cache or path in output.input_source_to_var
    if known or id(value) in output.side_effects.id_to_variable or getattr(dynamo_config, "_shapes_spec", None):
        return False
    old = like.meta[GRAPH_ARG].example
    if type(value) is not type(old) or not value.is_leaf or value._is_view() or old._is_view():
        return False
    if value.grad is not None and value.grad.dtype is not value.dtype:  # torch does not compile this
        return False
    marks, marked = _marks(value), _marks(old)
    if marks != marked and (marks or marked != {MARK: "unguarded"}):
        return False
    now = twin.dtype, twin.device, twin.layout, twin.requires_grad, twin._size, twin.stride
    form = value.dtype, value.device, value.layout, value.requires_grad, tuple(value.shape), value.stride()
    return bool(now == form)  # a trace may have changed the other one's


def _marks(value: Tensor) -> dict[str, Any]:
    return {name: mark for name, mark in vars(value).items() if name.startswith(MARKS)}


def _form(fake: Any) -> tuple[Any, ...]:
    return type(fake), fake.shape, fake.stride(), fake.dtype, fake.device, fake.requires_grad


def _placeholder(tracer: Any, path: Any, kind: type, fake: Any) -> Any:
    """Without what torch looks for along all frames: in which lines of code."""

    def create_proxy(kind: str, target: str, args: Any, kwargs: Any, type_expr: Any) -> Any:
        return tracer.proxy(tracer.create_node(kind, target, args, kwargs, None, type_expr))

    tracer.create_proxy = create_proxy
    try:
        # Finds a name and a place for it. (torch 2.11+)
        return tracer.create_graph_input(re.sub(r"[^a-zA-Z0-9]+", "_", path.name), kind, fake, source=path)
    finally:
        del tracer.create_proxy
