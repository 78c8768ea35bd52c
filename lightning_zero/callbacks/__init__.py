"""Lightning callbacks: what the strategy does, told to the user."""

from lightning_zero.callbacks.report import PlanReport

__all__ = ["PlanReport"]
