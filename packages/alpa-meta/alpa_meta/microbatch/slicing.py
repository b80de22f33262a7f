"""The equations of one microbatch: every operator's local form on the microbatch's parts.

Equations whose operands are whole stay as they are. Where an operator's local form is the operator
itself, its equation is kept with smaller shapes; other local forms are traced once for all
equations of one signature. The number of the microbatch is an operand: where a part of a whole
value is taken (by `dynamic_slice`), where a whole value becomes a sum (the first microbatch has it,
the others zeros), and where a local form asks for its place (iota, random bits).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import jax
import jax.numpy as jnp
from attrs import evolve
from jax import Array, lax
from jax.extend.core import jaxpr_as_fun

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec, Strategy
from alpa_meta.compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    abstract_of,
    array_type,
    consts,
    is_drop,
    open_jaxpr,
    scan_counts,
    shape_of,
)
from alpa_meta.errors import PlanError
from alpa_meta.identity import Identity
from alpa_meta.microbatch.demand import with_parts_made
from alpa_meta.microbatch.flow import Atom, Flow, Run, literal_placement, runs_over_examples
from alpa_meta.microbatch.gathering import gathered
from alpa_meta.microbatch.placement import REPLICATED, Placement, Reading
from alpa_meta.operators import LocalCall, operator_of, operator_signature, sharding_rule
from alpa_meta.operators.cutting import params_of_parts
from alpa_meta.operators.operator import run_unchanged
from alpa_meta.operators.regions import fold, scan_of, with_bodies
from alpa_meta.operators.rewrites.replacement import instantiated
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.step.trace import inline
from alpa_meta.types import Function

if TYPE_CHECKING:
    from alpa_meta.spmd.collectives import Collectives

AXIS = "microbatch"


class InTime:
    """The microbatches as the devices of a mesh axis: the place is an operand, nothing is sent."""

    def __init__(self, number: Array, count: int) -> None:
        self._number, self._count = number, count

    def index(self, axes: tuple[str, ...]) -> Array:
        """Return the number of the microbatch."""
        return self._number if axes else jnp.int32(0)

    def part(self, value: Array, axes: tuple[str, ...], dim: int) -> Array:
        """Return the microbatch's part of `value` along `dim`."""
        size = value.shape[dim] // self._count
        return lax.dynamic_slice_in_dim(value, self.index(axes) * size, size, dim)

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(f"an operator that needs {name!r} does not run in microbatches")


class Writer:
    """Writes the equations of a microbatch for one jaxpr; `number` is the microbatch's, a scalar.

    `eqns` are the equations written so far, `local` the variable in them for each of the whole
    program, `placements` how microbatches hold it.
    """

    def __init__(self, num_microbatches: int, number: Var) -> None:
        self.count, self.number = num_microbatches, number
        self.eqns: list[JaxprEqn] = []
        self.local: dict[Var, Atom] = {}
        self.placements: dict[Var, Placement] = {}
        self.uses_number = False
        self.phase = ""  # values are converted anew in each phase, which would hold them else
        self._converted: dict[Hashable, Var] = {}
        self._held: dict[Var, Placement] = {}  # of conversions
        self._templates: dict[Hashable, ClosedJaxpr] = {}

    def define(self, var: Var, placement: Placement) -> Var:
        """Return the variable for `var`, of the shape that a microbatch holds."""
        held = var
        if placement.kind == "split":
            held = Var(var.aval.update(shape=self.shape(shape_of(var), placement)))
        self.local[var], self.placements[var] = held, placement
        return held

    def held(self) -> dict[Var, Placement]:
        """Return the placements of what a microbatch holds, conversions included: of those that
        only the update reads, it adds up what each microbatch has."""
        own = {
            held: self.placements[var] for var, held in self.local.items() if isinstance(held, Var)
        }
        return own | self._held

    def shape(self, shape: Sequence[int], placement: Placement) -> tuple[int, ...]:
        """Return the shape of a microbatch's share of a value of this shape."""
        return tuple(
            size // self.count if placement.kind == "split" and d == placement.dim else size
            for d, size in enumerate(shape)
        )

    def read(self, atom: Atom, wanted: Placement | None) -> Atom:
        """Return the microbatch's operand for `atom`, as `wanted`; None: as it is held."""
        source = literal_placement(atom) if isinstance(atom, Literal) else self.placements[atom]
        held = atom if isinstance(atom, Literal) else self.local[atom]
        if wanted is None or source.kind != "replicated":
            return held
        same = ("replicated", "extreme", "own")
        if wanted.kind in same or source.zero and wanted.kind == "sum":
            return held
        key = (self.phase, Identity(held), evolve(wanted, zero=False))
        if key not in self._converted:
            self._converted[key] = self._convert(held, wanted)
        return self._converted[key]

    def _convert(self, held: Atom, wanted: Placement) -> Var:
        def part(number: Array, value: Array) -> Array:
            dim, outer, shape = wanted.dim, wanted.outer, value.shape
            blocks = lax.reshape(
                value, (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
            )
            taken = InTime(number, self.count).part(blocks, (AXIS,), dim + 1)
            return lax.reshape(taken, self.shape(shape, wanted))

        def first_only(number: Array, value: Array) -> Array:
            return jnp.where(number == 0, value, jnp.zeros_like(value))

        aval = array_type(held)
        result = Var(aval.update(shape=self.shape(aval.shape, wanted)))
        self._held[result] = wanted
        function = part if wanted.kind == "split" else first_only
        key = (wanted, aval.shape, aval.dtype)
        self._write(key, function, [self.number, held], [result], None)
        return result

    def gather(self, var: Var, whole: Var) -> None:
        """Write `whole`, of which each microbatch has its part of `var` among zeros."""
        source, aval, held = self.placements[var], array_type(var), gathered(var)
        assert held is not None
        dim, outer = source.dim, source.outer

        def blocks(shape: Sequence[int]) -> tuple[int, ...]:
            return (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])

        def among_zeros(number: Array, value: Array) -> Array:
            part = lax.reshape(value, blocks(value.shape))
            zeros = jnp.zeros(blocks(aval.shape), aval.dtype)
            start = number * part.shape[dim + 1]
            made = lax.dynamic_update_slice_in_dim(zeros, part, start, dim + 1)
            return lax.reshape(made, aval.shape)

        key = ("put together", source, aval.shape, aval.dtype)
        operands, results = [self.number, self.local[var]], [self.define(whole, held)]
        self._write(key, among_zeros, operands, results, None)

    def _write(
        self,
        key: Hashable,
        function: Function[object],
        operands: Sequence[Atom],
        results: Sequence[Var],
        source: JaxprEqn | None,
    ) -> None:
        """Write the equations of a jax function of `operands`, traced once for each `key`."""
        if key not in self._templates:
            avals = [abstract_of(atom) for atom in operands]
            self._templates[key] = inline(jax.make_jaxpr(function)(*avals))
        made = instantiated(open_jaxpr(self._templates[key]), operands, results, source)
        self.uses_number |= any(atom is self.number for eqn in made for atom in eqn.invars)
        self.eqns += made

    def write(self, eqn: JaxprEqn, run: Run) -> None:
        """Write what a microbatch runs for `eqn`."""
        reading = run.reading
        operands = [
            self.read(atom, wanted)
            for atom, wanted in zip(eqn.invars, reading.operands, strict=True)
        ]
        results = [
            var if is_drop(var) else self.define(var, placement)
            for var, placement in zip(eqn.outvars, reading.results, strict=True)
        ]
        if run.bodies:
            self._region(eqn, run, operands, results)
        elif reading.blocks_along is not None:
            params = params_of_parts(eqn, reading.blocks_along, self.count)
            self.eqns.append(eqn.replace(invars=operands, outvars=results, params=params))
        elif reading.factor is None or operator_of(eqn).local is run_unchanged:
            self.eqns.append(eqn.replace(invars=operands, outvars=results))
        else:
            self._local(eqn, reading, operands, results)

    def _local(
        self, eqn: JaxprEqn, reading: Reading, operands: Sequence[Atom], results: Sequence[Var]
    ) -> None:
        """Write the local form of an operator along the batch."""
        rule, factor = sharding_rule(eqn), reading.factor
        assert rule is not None and factor is not None
        strategy = Strategy(
            assignment=((factor, (AXIS,)),),
            operands=tuple(map(_spec, reading.operands, eqn.invars)),
            results=tuple(map(_spec, reading.results, eqn.outvars)),
        )
        mesh = LogicalMesh(axes=(MeshAxis(name=AXIS, size=self.count),))

        def run(number: Array, *values: Array) -> list[Array]:
            places = cast("Collectives", InTime(number, self.count))
            call = LocalCall(eqn, list(values), rule, strategy, mesh, places)
            try:
                return operator_of(eqn).local(call)
            except NameError as error:  # as jax says of axes that are not there
                raise PlanError(
                    f"the local form of {eqn.primitive.name!r} must not communicate over the axis "
                    f"that its parts lie along, which microbatches do not do ({error}); use "
                    "num_microbatches=1, or a local form that works on its part alone"
                ) from None

        key = (operator_signature(eqn), reading)
        self._write(key, run, [self.number, *operands], results, eqn)

    # ------------------------------------------------------------------ regions

    def _region(
        self, eqn: JaxprEqn, run: Run, operands: Sequence[Atom], results: Sequence[Var]
    ) -> None:
        if runs_over_examples(eqn, run):
            length = eqn.params["length"] // self.count
            eqn = eqn.replace(params={**eqn.params, "length": length})
        bodies = [self._body(flow) for flow in run.bodies]
        numbered = any(uses for _, uses in bodies)
        closed = [_numbered(body, numbered) for body, _ in bodies]
        self.uses_number |= numbered
        extra = [self.number] if numbered else []
        fold(
            eqn,
            scan=lambda: self._scan(eqn, closed[0], numbered, operands, results),
            loop=lambda: self._while(eqn, closed, numbered, operands, results),
            branches=lambda: self._replaced(
                eqn, closed, [operands[0], *extra, *operands[1:]], results
            ),
            remat=lambda: self._replaced(eqn, closed, [*extra, *operands], results),
        )

    def _body(self, flow: Flow) -> tuple[ClosedJaxpr, bool]:
        """Return a body for a microbatch, the number its first input, and whether it is read."""
        jaxpr = open_jaxpr(flow.body)
        inner = Writer(self.count, Var(self.number.aval))
        inner._templates = self._templates
        for var in jaxpr.constvars:
            inner.define(var, REPLICATED)
        invars = [
            inner.define(var, placement)
            for var, placement in zip(jaxpr.invars, flow.inputs, strict=True)
        ]
        outputs = list(zip(jaxpr.outvars, flow.outputs, strict=True))
        runs, _ = with_parts_made(jaxpr.eqns, flow.runs, outputs, self.count)
        for eqn, run in zip(jaxpr.eqns, runs, strict=True):
            assert run is not None
            inner.write(eqn, run)
        outvars = [inner.read(atom, placement) for atom, placement in outputs]
        made = jaxpr_of(jaxpr, list(jaxpr.constvars), [inner.number, *invars], outvars, inner.eqns)
        return ClosedJaxpr(made, consts(flow.body)), inner.uses_number

    def _replaced(
        self,
        eqn: JaxprEqn,
        made: Sequence[ClosedJaxpr],
        operands: Sequence[Atom],
        results: Sequence[Var],
    ) -> None:
        """Write a region with other bodies, operands and results."""
        left = iter(made)
        changed = with_bodies(eqn, lambda _: next(left))
        self.eqns.append(changed.replace(invars=list(operands), outvars=list(results)))

    def _scan(
        self,
        eqn: JaxprEqn,
        body: ClosedJaxpr,
        numbered: bool,
        operands: Sequence[Atom],
        results: Sequence[Var],
    ) -> None:
        """Write a scan; one whose body also reads the number of the microbatch is made anew."""
        if not numbered:
            self._replaced(eqn, [body], operands, results)
            return
        num_consts, num_carry, _ = scan_counts(eqn)
        run = scan_of(eqn, body, 1 + num_consts, num_carry)
        self._write(object(), run, [self.number, *operands], results, eqn)

    def _while(
        self,
        eqn: JaxprEqn,
        bodies: Sequence[ClosedJaxpr],
        numbered: bool,
        operands: Sequence[Atom],
        results: Sequence[Var],
    ) -> None:
        """Write a loop; one that also reads the number of the microbatch is made anew."""
        if not numbered:
            self._replaced(eqn, bodies, operands, results)
            return
        num_test = eqn.params["cond_nconsts"]
        first = num_test + eqn.params["body_nconsts"]
        test, body = (jaxpr_as_fun(one) for one in bodies)

        def run(number: Array, *values: Array) -> tuple[Array, ...]:
            return lax.while_loop(
                lambda carry: test(number, *values[:num_test], *carry)[0],
                lambda carry: tuple(body(number, *values[num_test:first], *carry)),
                tuple(values[first:]),
            )

        self._write(object(), run, [self.number, *operands], results, eqn)


def _spec(placement: Placement, atom: Atom) -> ShardingSpec:
    held = placement.dim if placement.kind == "split" else None
    dims = tuple((AXIS,) if d == held else () for d in range(len(shape_of(atom))))
    return ShardingSpec(dims, (AXIS,) if placement.kind == "sum" else ())


def _numbered(body: ClosedJaxpr, wanted: bool) -> ClosedJaxpr:
    """Return a body with the number of the microbatch as its first input, or without it."""
    if wanted:
        return body
    jaxpr = open_jaxpr(body)
    return ClosedJaxpr(
        jaxpr_of(jaxpr, list(jaxpr.constvars), jaxpr.invars[1:], jaxpr.outvars, jaxpr.eqns),
        consts(body),
    )
