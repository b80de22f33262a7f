"""Loops over a batch in which every example stands still once it has ended.

`jax.vmap` of a while loop whose condition differs between examples gives one loop with a condition
per example, which goes on while any holds and keeps the carries of the others. Libraries write the
same out (equinox' loops among them):

    while reduce_or(test(carry)):  carry = select(test(carry), body(carry), carry)

An example's result does not depend on how long others take, so each microbatch may stop when its
own examples have ended. The form written out is recognised by its parts: every carry that differs
between examples is selected by the test that the condition takes the "or" of, or is that test and
never holds again once it failed. The test may read no carry that all examples share and that
changes, as a counter of trips: an example that has ended could go on with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from alpa_meta.compat import Jaxpr, JaxprEqn, Literal, Var, is_drop, open_jaxpr
from alpa_meta.operators import operator_of, operator_signature
from alpa_meta.operators.elementwise import is_conjunction, is_selection
from alpa_meta.operators.reduction import is_any
from alpa_meta.operators.regions import is_while

if TYPE_CHECKING:
    from alpa_meta.microbatch.flow import Atom, Flow, Run


def each_example_alone(eqn: JaxprEqn, body: Flow, test: Flow) -> bool:
    """Return whether every example's carry is kept once its own test fails."""
    (goes_on,) = test.outputs
    if goes_on.kind == "split":
        return goes_on.dim == 0 and all(one == goes_on for one in body.outputs)
    num_test, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    inner, outer = open_jaxpr(body.body), open_jaxpr(test.body)
    if goes_on.kind != "extreme" or any(one.kind == "sum" for one in body.outputs):
        return False
    tested = _tested(outer)
    if tested is None:
        return False
    same = dict(zip(outer.invars[num_test:], inner.invars[num_body:], strict=True))
    given = list(zip(eqn.invars[num_test : num_test + num_body], inner.invars, strict=False))
    for var, atom in zip(outer.invars[:num_test], eqn.invars[:num_test], strict=True):
        same.update((var, twin) for other, twin in given if other is atom)
    matched = _Matched(outer, inner, same)
    if any(same.get(var) in shared_counters(eqn, body) for var in _read_by(outer, tested)):
        return False
    carries = zip(inner.invars[num_body:], inner.outvars, body.outputs, strict=True)
    return all(
        placement.kind == "replicated" or after is before or matched.keeps(before, after, tested)
        for before, after, placement in carries
    )


def ends_alone(eqn: JaxprEqn, run: Run) -> bool:
    """Return whether an equation is a loop that ends in each microbatch by the examples of it."""
    return is_while(eqn) and bool(run.bodies) and run.bodies[0].outputs[0].kind != "replicated"


def steered(eqn: JaxprEqn, run: Run) -> bool:
    """Return whether a microbatch works on its examples as long as they need, others on theirs."""
    if operator_of(eqn).steers and any(one.kind == "split" for one in run.reading.operands):
        return True
    if ends_alone(eqn, run):
        return True
    inner = ((open_jaxpr(flow.body).eqns, flow.runs) for flow in run.bodies)
    return any(steered(*pair) for eqns, runs in inner for pair in zip(eqns, runs, strict=True))


def shared_counters(eqn: JaxprEqn, body: Flow) -> frozenset[Var]:
    """Return the carries, as the body reads them, that all examples share and that change."""
    inner = open_jaxpr(body.body)
    carries = zip(
        inner.invars[eqn.params["body_nconsts"] :], inner.outvars, body.outputs, strict=True
    )
    return frozenset(
        before
        for before, after, placement in carries
        if placement.kind == "replicated" and after is not before
    )


def _read_by(jaxpr: Jaxpr, var: Var) -> set[Var]:
    """Return what a value of a program is computed from, itself included."""
    needed = {var}
    for eqn in reversed(jaxpr.eqns):
        if any(made in needed for made in eqn.outvars):
            needed.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
    return needed


def _tested(jaxpr: Jaxpr) -> Var | None:
    """Return the test of each example, of which the condition takes the "or"."""
    makers = {var: one for one in jaxpr.eqns for var in one.outvars if not is_drop(var)}
    (atom,) = jaxpr.outvars
    maker = None if isinstance(atom, Literal) else makers.get(atom)
    if maker is None or not is_any(maker):
        return None
    found = maker.invars[0]
    return found if isinstance(found, Var) else None


class _Matched:
    """Which values of the body are values of the condition: the same operators on the same
    carries."""

    def __init__(self, test: Jaxpr, body: Jaxpr, same: Mapping[Var, Var]) -> None:
        self._tests = {v: one for one in test.eqns for v in one.outvars if not is_drop(v)}
        self._makers = {v: one for one in body.eqns for v in one.outvars if not is_drop(v)}
        self._same = same

    def keeps(self, before: Var, after: Atom, tested: Var) -> bool:
        """Return whether `after` is selected by the test: `before` where it fails."""
        maker = None if isinstance(after, Literal) else self._makers.get(after)
        if maker is None:
            return False
        if is_conjunction(maker):
            return self._same.get(tested) is before and any(one is before for one in maker.invars)
        if not is_selection(maker) or len(maker.invars) != 3:
            return False
        which, where_false, _ = maker.invars
        return where_false is before and self._equal(tested, self._source(which))

    def _source(self, atom: Atom) -> Atom:
        """Return what a predicate was broadcast from."""
        while not isinstance(atom, Literal):
            maker = self._makers.get(atom)
            if maker is None or not operator_of(maker).layout:
                return atom
            atom = maker.invars[0]
        return atom

    def _equal(self, one: Atom, other: Atom) -> bool:
        """Return whether a value of the condition and one of the body are computed alike."""
        if isinstance(one, Literal) or isinstance(other, Literal):
            if isinstance(one, Literal) and isinstance(other, Literal):
                return bool(one.val == other.val)
            return False
        if one in self._same:
            return self._same[one] is other
        maker, twin = self._tests.get(one), self._makers.get(other)
        if maker is None or twin is None or operator_signature(maker) != operator_signature(twin):
            return False
        return len(maker.invars) == len(twin.invars) and all(
            self._equal(a, b) for a, b in zip(maker.invars, twin.invars, strict=True)
        )
