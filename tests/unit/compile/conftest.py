from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nothing_compiled_before() -> Iterator[None]:
    """Reset compiled code before and after each test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
