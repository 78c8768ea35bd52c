"""What a training did and what it cost, shown to the user: as estimated from its graphs, and as measured."""

from lightning_zero.report.comm_monitor import CommMonitor
from lightning_zero.report.plan_report import PlanReport

__all__ = ["CommMonitor", "PlanReport"]
