"""The C++ executor: built at first use, loaded once, wrapped in a typed handle."""

from lightning_zero.native.executor import Executor
from lightning_zero.native.load import load

__all__ = ["Executor", "load"]
