from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nothing_compiled_before() -> Iterator[None]:
    """Nor afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
