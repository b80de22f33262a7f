"""What crosses from one layer of a window to the next, and how it lies on a mesh there."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from alpa_meta.compat import Literal, Var, dtype_of, is_drop, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.inter_op.window import Window
from alpa_meta.intra_op.selection import Selection


@frozen(eq=False)
class Boundary:
    """The values that cross from one layer of a window to the next, forward and back."""

    values: tuple[Var, ...]
    kinds: tuple[tuple[bool, str, int], ...]  # forward?, dtype, rank

    @property
    def forward_bytes(self) -> float:
        """Bytes of one microbatch that the next layer is sent."""
        pairs = zip(self.values, self.kinds, strict=True)
        return sum(tensor_bytes(var) for var, (forward, _, _) in pairs if forward)

    def layout(self, selection: Selection, choice: Sequence[int]) -> tuple[str, ...]:
        return tuple(str(selection.spec(var, choice)) for var in self.values)


def boundaries(window: Window) -> dict[int, Boundary]:
    """Return, by layer of the window, what crosses from it and those before it to those behind."""
    staging = window.staging
    made: dict[Var, int] = {}
    backward: set[Var] = set()
    last: dict[Var, int] = {}
    for eqn, phase, layer in zip(staging.eqns, staging.phases, staging.layers, strict=True):
        if layer is None or phase == "update":
            continue
        for atom in eqn.invars:
            if isinstance(atom, Literal) or atom not in made:
                continue
            if (phase == "backward") == (atom in backward):
                end = min if phase == "backward" else max
                last[atom] = end(last.get(atom, layer), layer)
        for var in eqn.outvars:
            if not is_drop(var):
                made[var] = layer
                if phase == "backward":
                    backward.add(var)
    found = {}
    for layer in sorted({layer for layer in staging.layers if layer is not None}):
        crossing = [
            (var not in backward, str(dtype_of(var)), len(shape_of(var)), number, var)
            for number, (var, stop) in enumerate(last.items())
            if min(made[var], stop) <= layer < max(made[var], stop)
        ]
        crossing.sort(key=lambda one: one[:4])
        found[layer] = Boundary(
            tuple(one[4] for one in crossing), tuple(one[:3] for one in crossing)
        )
    return found
