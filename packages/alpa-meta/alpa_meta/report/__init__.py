"""What the user sees: tables on the terminal and pictures in files."""

from alpa_meta.report.cluster import cluster_table
from alpa_meta.report.loss_figure import draw_loss
from alpa_meta.report.plan_figure import draw_plan
from alpa_meta.report.plan_table import print_plan
from alpa_meta.report.timeline_figure import draw_timeline

__all__ = [
    "cluster_table",
    "draw_loss",
    "draw_plan",
    "draw_timeline",
    "print_plan",
]
