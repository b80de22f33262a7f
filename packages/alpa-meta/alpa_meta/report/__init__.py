"""What the user sees: tables on the terminal and pictures in files."""

from alpa_meta.report.loss_figure import draw_loss
from alpa_meta.report.timeline_figure import draw_timeline

__all__ = ["draw_loss", "draw_timeline"]
