"""Reports for the user: metrics, files about compiled graphs, and lines about a start."""

from lightning_zero.report.comm_monitor import CommMonitor
from lightning_zero.report.plan_report import PlanReport

__all__ = ["CommMonitor", "PlanReport"]
