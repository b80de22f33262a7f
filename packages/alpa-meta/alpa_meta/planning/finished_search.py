"""The pipeline that a menu search chose, with its stages solved exactly.

Rows and solved stages hold and take a little else than one another, so the menu is searched again:

    with less memory    where a stage does not fit                           -> Finish.run()
    with more           one stage of all strategies may fit, of which the menu has few rows only
                                                                             -> Finish.with_room()
"""

from __future__ import annotations

import functools

from attrs import evolve, frozen

import stage_dp
from alpa_interchange import ShardingSolution, StageCandidate
from alpa_meta.errors import InfeasibleError
from alpa_meta.intra_op.memory_limit import solve_within
from alpa_meta.intra_op.selection import Selection
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned, finish
from alpa_meta.planning.menu_search import MenuSearch
from alpa_meta.planning.outlooks import outlook_in_pieces, outlook_of
from alpa_meta.planning.solved_stages import MENU_ERROR, Lacking
from alpa_meta.step.program import Step
from cost_model import CostModel

MEMORY_ROUNDS = 6  # of searching with less memory, where a chosen stage turns out not to fit
# The same with more memory than there is, where another plan is at hand.
ROOM_ROUNDS = 2


@frozen
class Finish:
    """What the stages of a step's pipelines are solved with; its layers are `num_layers`."""

    num_layers: int
    step: Step
    model: CostModel
    options: Options

    def run(self, search: MenuSearch) -> Planned:
        """Return the plan of a search with its stages solved, searched again where they turn out
        not to fit: with less memory, by as much as the rows say too little, so that the same stages
        do not fit by them either. InfeasibleError where none fits."""
        missing = 0.0
        for _ in range(MEMORY_ROUNDS):
            planned = self._solved(search)
            if isinstance(planned, Planned):
                return self.with_room(search, planned)
            missing = planned.bytes
            others = self._others(search, planned)
            if not others:
                break
            search = min(others, key=lambda one: one.plan.step_seconds)
        raise InfeasibleError("no pipeline fits the memory", missing, None)

    def _others(self, search: MenuSearch, lacking: Lacking) -> list[MenuSearch]:
        """Return searches of plans that may fit where that of `search` does not: with less memory,
        and of pipelines with one stage a mesh where it has several. The rows of these say too
        little most, and with so much less others were slower: GPT-1.3B of 6 layers on 16 H100 with
        779 MB took 0.145 s, not 0.081."""
        found = []
        for other in (
            functools.partial(search.within_less, lacking.unpredicted),
            search.not_interleaved,
        ):
            try:
                one = other()
            except stage_dp.InfeasibleError:
                continue
            if one is not None:
                found.append(one)
        return found

    def with_room(self, search: MenuSearch, planned: Planned) -> Planned:
        """Return the plan of a search, or a faster one like it that fits though its rows do not."""
        more = search.within_more()
        for _ in range(ROOM_ROUNDS):
            if more is None or more.plan.step_seconds > search.plan.step_seconds * (1 - MENU_ERROR):
                break
            found = self._solved(more)
            if isinstance(found, Planned):
                return min(planned, found, key=step_seconds_of)
            more = more.within_less(found.unpredicted)
        return planned

    def _solved(self, search: MenuSearch) -> Planned | Lacking:
        """Return the plan with its stages solved, or what does not fit. Where they take longer than
        rows say, they are solved for the step too."""
        options, plan = self.options, search.stage_plan()

        def choose(_: StageCandidate, selection: Selection, memory: float) -> ShardingSolution:
            return solve_within(selection, options, memory)

        chosen = options
        if options.recompute is None:
            chosen = evolve(options, recompute=search.recomputation())
        program = self.step.program(plan.num_microbatches)
        told = program, chosen, self.model.cluster, self.num_layers
        found = outlook_in_pieces(*told) or outlook_of(*told)
        # One stage is one program, quicker than the two that the menu's layers are of.
        bound = search.bound if len(plan.stages) > 1 else 0.0
        several = len(plan.stages) > 1 and plan.num_microbatches > 1
        return finish(plan, *found, bound, self.step, self.model, options, choose, weigh=several)


def step_seconds_of(planned: Planned) -> float:
    """Return the seconds of a step, by which plans are compared."""
    return planned.plan.step_seconds
