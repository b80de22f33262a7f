"""A step planned for arguments of given shapes, before it is compiled."""

from __future__ import annotations

import functools

from attrs import frozen

from alpa_interchange import KeptMenu, ParallelPlan
from alpa_interchange.plan_text import one_line
from alpa_meta.execution.evaluation import Evaluation
from alpa_meta.execution.executable import Executable
from alpa_meta.execution.ray_meshes import RayPool
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.program_caches import programs_forgotten


@frozen(eq=False, repr=False)
class Lowered:
    """A planned step; `compile` makes it runnable on this process's devices."""

    planned: Planned
    options: Options
    pool: RayPool | None = None  # None: it runs in this process

    def __repr__(self) -> str:
        return f"<Lowered: {one_line(self.plan)}>"

    def __str__(self) -> str:
        return str(self.plan)

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.planned.plan

    @functools.cached_property
    def menu(self) -> KeptMenu | None:
        """The menu that the plan was chosen from (`alpa_meta.explain`, `replan`), if one was."""
        return self.planned.kept_menu()

    @property
    def from_cache(self) -> bool:
        """Whether the plan was found by an earlier search (`Options.cache`)."""
        return self.planned.cached

    @functools.cached_property
    @programs_forgotten()
    def _executable(self) -> Executable:
        options = self.options
        return Executable(
            self.planned,
            trace=options.trace,
            donate=options.donate,
            pool=self.pool,
            guarded=options.on_nan is not None,
        )

    @functools.cached_property
    @programs_forgotten()
    def evaluation(self) -> Evaluation:
        """The plan without its backward, compiled."""
        return Evaluation(self.planned, self.options.trace, self.pool)

    def compile(self) -> Executable:
        """Return the plan compiled for this process's devices: the one that calls run, too."""
        return self._executable
