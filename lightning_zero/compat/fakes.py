"""Fake tensors that AOTAutograd makes of a graph's inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch._subclasses import meta_utils


@contextmanager
def without_gradients() -> Iterator[None]:
    """Inside, fakes have no gradients. In a forward parameters still have those of the step before; Dynamo gives those
    that code reads to a graph as inputs of their own, so for AOTAutograd each would be made in vain."""
    # A tensor's gradient, of which a fake is made with that of the tensor. (torch 2.11+)
    with patch.object(meta_utils, "safe_grad", lambda tensor: None):
        yield
