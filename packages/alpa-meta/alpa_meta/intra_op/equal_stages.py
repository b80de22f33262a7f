"""The selection problem of a stage that is equal to one already built: its values have other
names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from attrs import evolve

from alpa_interchange import LogicalMesh
from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, is_drop
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import Selection, build
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.operators import operator_signature
from cost_model import CostModel

_SETS = (
    "state", "kept", "accumulated", "joined", "received", "returned", "sent", "delayed",
    "read_late", "read_once", "offloaded",
)  # fmt: skip


class Stages:
    """Builds the selection problems of stages, those of equal stages on equal meshes once."""

    def __init__(self) -> None:
        self._built: list[Selection] = []
        self._costs: dict[tuple[LogicalMesh, int], MeshCosts] = {}

    def costs(self, mesh: LogicalMesh, model: CostModel, host_group: int) -> MeshCosts:
        """Return the costs on a mesh, with what stages before remembered of them."""
        if (mesh, host_group) not in self._costs:
            self._costs[mesh, host_group] = MeshCosts(mesh, model, host_group)
        return self._costs[mesh, host_group]

    def build(self, stage: StageEqns, costs: MeshCosts, name: str) -> Selection:
        """Return the selection problem of a stage on a mesh."""
        for known in self._built:
            same_mesh = (known.costs.mesh, known.costs.host_group) == (costs.mesh, costs.host_group)
            names = _names(known.stage, stage) if same_mesh else None
            if names is not None:
                sources = {names.get(atom, atom): source for atom, source in known.sources.items()}
                memory = known.spans.profile(stage)
                problem = evolve(known.problem, name=name)
                return evolve(known, problem=problem, sources=sources, stage=stage, memory=memory)
        found = build(stage, costs, name)
        self._built.append(found)
        return found


def _names(here: StageEqns, there: StageEqns) -> dict[Atom, Atom] | None:
    """Return what the values of `here` are called in `there`; None where the stages differ in more
    than names and how many microbatches they hold."""
    if len(here.eqns) != len(there.eqns) or list(here.phases) != list(there.phases):
        return None
    if here.num_microbatches != there.num_microbatches or here.times or there.times:
        return None
    if list(here.tasks) != list(there.tasks):
        return None
    if _pattern(here.keys) != _pattern(there.keys):
        return None
    names: dict[Atom, Atom] = {}
    taken: set[Atom] = set()
    for one, other in zip(here.eqns, there.eqns, strict=True):
        if operator_signature(one) != operator_signature(other):
            return None
        for mine, its in zip(_atoms(one), _atoms(other), strict=True):
            if isinstance(mine, Literal) or isinstance(its, Literal):
                if type(mine) is not type(its):
                    return None
            elif is_drop(mine) or is_drop(its):
                if is_drop(mine) != is_drop(its):
                    return None
            elif mine not in names and its not in taken:
                names[mine] = its
                taken.add(its)
            elif names.get(mine) != its:
                return None
    if any(_renamed(getattr(here, of), names) != getattr(there, of) for of in _SETS):
        return None
    carried = [(names.get(new, new), names.get(old, old)) for new, old in here.carried]
    pins = {names.get(var, var): pin for var, pin in here.pins.items() if var in names}
    its_pins = {var: pin for var, pin in there.pins.items() if var in taken}
    return names if carried == list(there.carried) and pins == its_pins else None


def _atoms(eqn: JaxprEqn) -> list[Atom]:
    return [*eqn.invars, *eqn.outvars]


def _renamed(values: Iterable[Var], names: dict[Atom, Atom]) -> frozenset[Atom]:
    return frozenset([names.get(var, var) for var in values])


def _pattern(keys: Sequence[Hashable | None]) -> list[int]:
    """Return numbers that are equal where keys are, in the order that keys come first; -1: none."""
    numbers: dict[Hashable, int] = {}
    return [-1 if key is None else numbers.setdefault(key, len(numbers)) for key in keys]
