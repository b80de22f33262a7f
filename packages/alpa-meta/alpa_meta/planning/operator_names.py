"""The names that a plan calls operators by: the same in every version, while the program is.

    <name stack>/<primitive>.<number>       jvp(layers_0)/dot_general.1
    <region>><body>><name inside>           jvp(layers)/scan.0>0>tanh.2

The number counts the operators of one name stack and primitive in program order, so that an
operator that a version adds or leaves out renames its equals only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from alpa_meta.compat import JaxprEqn, Var, is_drop, name_stack
from alpa_meta.inter_op.staging import Staging


def operator_names(eqns: Sequence[JaxprEqn], inside: str = "") -> list[str]:
    """Return the name of every equation; `inside` names the body of a region that they are in."""
    seen: Counter[str] = Counter()
    names = []
    for eqn in eqns:
        scope, primitive = name_stack(eqn), eqn.primitive.name
        kind = f"{scope}/{primitive}" if scope else primitive
        names.append(f"{inside}{kind}.{seen[kind]}")
        seen[kind] += 1
    return names


def names_in_body(region: str, number: int, eqns: Sequence[JaxprEqn]) -> list[str]:
    """Return the names of the equations of one body of the region called `region`."""
    return operator_names(eqns, f"{region}>{number}>")


class StageNames:
    """The names of the operators of every stage, of the values that cross between stages, and of
    the arrays that the step closes over."""

    def __init__(self, staging: Staging, constants: Sequence[Var]) -> None:
        self.of_constant = {var: f"constant.{number}" for number, var in enumerate(constants)}
        names = operator_names(staging.eqns)
        self._of_stage: list[list[str]] = [[] for _ in range(staging.num_stages)]
        self.of_value: dict[Var, str] = {}
        for eqn, name, stage in zip(staging.eqns, names, staging.stages, strict=True):
            self._of_stage[stage].append(name)
            for number, var in enumerate(eqn.outvars):
                if not is_drop(var):
                    self.of_value[var] = f"{name}:{number}"

    def of_stage(self, stage: int) -> list[str]:
        """Return the names of the operators of a stage, in program order."""
        return self._of_stage[stage]
