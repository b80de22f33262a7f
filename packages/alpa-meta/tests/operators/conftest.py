"""The claim every sharding rule must meet: local work plus stated collectives is the operator."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_interchange import LogicalMesh, MeshAxis, Strategy
from alpa_meta import compat
from alpa_meta.compat import shape_of
from alpa_meta.operators import linear_operands, sharding_rule
from alpa_meta.spmd import JaxprPlan, planned_collectives, shard_map_program
from alpa_meta.step.trace import inline
from ilp_sharding.strategies import Conversions, StrategyOptions, enumerate_strategies


def logical_mesh(shape: Sequence[int]) -> LogicalMesh:
    """Return a mesh with axes x, y, z of these sizes."""
    return LogicalMesh(
        axes=tuple(MeshAxis(name=name, size=size) for name, size in zip("xyz", shape))
    )


def jax_mesh(mesh: LogicalMesh) -> Mesh:
    """Return the mesh's first devices of this machine."""
    devices = np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.shape)
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axes))


def seconds(kind: str, bytes: float, axes: tuple[str, ...]) -> float:
    return 1e-6 + bytes / 1e9


def single(eqn: Any) -> Any:
    """Return the jaxpr that consists of one equation, its variables as inputs."""
    invars = list(dict.fromkeys(a for a in eqn.invars if not isinstance(a, compat.Literal)))
    outvars = [compat.Var(v.aval) for v in eqn.outvars]
    function = jax.make_jaxpr(lambda: None)().jaxpr
    with warnings.catch_warnings():  # the jaxpr is only evaluated, so it needs no debug names
        warnings.simplefilter("ignore", DeprecationWarning)
        jaxpr = function.replace(
            constvars=[],
            invars=invars,
            eqns=[eqn.replace(outvars=outvars)],
            outvars=outvars,
            debug_info=None,
        )
    return compat.ClosedJaxpr(jaxpr, ())


def strategies_of(eqn: Any, mesh: LogicalMesh) -> tuple[Strategy, ...]:
    """Return every strategy of an equation, with sums left open and passed through."""
    rule = sharding_rule(eqn)
    assert rule is not None, f"{eqn.primitive.name} has no rule"
    options = StrategyOptions(
        partial_results=(True,) * len(eqn.outvars), pass_partial=linear_operands(eqn)
    )
    return enumerate_strategies(rule, mesh, options)


def equal(actual: Any, expected: Any, tolerance: float) -> bool:
    """Return whether arrays agree: floats to rounding, everything else to the bit."""
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    one, other = np.asarray(actual), np.asarray(expected)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not jnp.issubdtype(other.dtype, jnp.inexact):
        return bool(np.array_equal(one, other))
    complex_or_float = np.complex128 if np.iscomplexobj(other) else np.float64
    one, other = one.astype(complex_or_float), other.astype(complex_or_float)
    finite = np.abs(other)[np.isfinite(other)]
    scale = max(float(np.max(finite, initial=0)), 1e-30)
    return bool(np.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


def check_equation(
    eqn: Any,
    values: Sequence[Any],
    mesh: LogicalMesh,
    *,
    count: int = 4,
    seed: int = 0,
    tolerance: float = 1e-5,
) -> int:
    """Check strategies of one equation against the whole operator; return how many were sharded."""
    draw = random.Random(seed)
    strategies = strategies_of(eqn, mesh)
    chosen = list(strategies[1:])
    if len(chosen) > count:
        chosen = draw.sample(chosen, count)
    if not chosen:
        return 0
    closed = single(eqn)
    invars = compat.open_jaxpr(closed).invars
    places = [next(k for k, atom in enumerate(eqn.invars) if atom is var) for var in invars]
    conversions = Conversions(mesh, seconds)
    plans = [JaxprPlan(tuple(s.operands[k] for k in places), (s,), s.results) for s in chosen]

    def everything(*args: Any) -> Any:
        outputs = []
        for plan in plans:
            program = shard_map_program(closed, plan, mesh, conversions)
            given = []
            for arg, spec in zip(args, plan.inputs, strict=True):
                if spec.partial:
                    parts = mesh.size(spec.partial)
                    noise = [(arg * (k + 1)).astype(arg.dtype) for k in range(parts - 1)]
                    arg = jnp.stack([*noise, arg - sum(noise)] if noise else [arg])
                given.append(arg)
            found = program(*given)
            outputs.append(
                [
                    value.sum(0, dtype=value.dtype) if spec.partial else value
                    for value, spec in zip(found, plan.outputs, strict=True)
                ]
            )
        return outputs

    whole = NamedSharding(jax_mesh(mesh), PartitionSpec())
    expected = jax.jit(lambda *args: compat.bind(eqn, _operands(eqn, invars, args)))(*values)
    quick = {"xla_backend_optimization_level": 0}
    actual = jax.jit(everything, in_shardings=whole, out_shardings=whole, compiler_options=quick)(
        *values
    )
    for strategy, outputs in zip(chosen, actual, strict=True):
        for number, (one, other) in enumerate(zip(outputs, expected, strict=True)):
            assert equal(one, other, tolerance), (
                f"result {number} of {eqn.primitive.name}, rule {sharding_rule(eqn)}, differs for "
                f"strategy {strategy}: {strategy.operands} -> {strategy.results}\n"
                f"{np.asarray(one)}\nis not\n{np.asarray(other)}\nparams {eqn.params}"
            )
    return len(chosen)


def _operands(eqn: Any, invars: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    known = dict(zip(invars, args, strict=True))
    return [
        np.asarray(atom.val, compat.dtype_of(atom))
        if isinstance(atom, compat.Literal)
        else known[atom]
        for atom in eqn.invars
    ]


def check_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh_shape: Sequence[int] = (2, 2),
    only: str | None = None,
    count: int = 4,
    seed: int = 0,
    tolerance: float = 1e-5,
) -> dict[str, int]:
    """Check every equation of a function on its actual values; return strategies per primitive."""
    mesh = logical_mesh(mesh_shape)
    closed = inline(jax.make_jaxpr(function)(*args))
    jaxpr = compat.open_jaxpr(closed)
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    values.update(zip(jaxpr.constvars, compat.consts(closed), strict=True))
    checked: dict[str, int] = {}
    seen = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands: list[Any] = [
            np.asarray(a.val, compat.dtype_of(a)) if isinstance(a, compat.Literal) else values[a]
            for a in eqn.invars
        ]
        results = compat.bind(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
        signature = (name, str(eqn.params), tuple(str(a.aval) for a in eqn.invars))
        new = signature not in seen
        seen.add(signature)
        if (
            new
            and (only is None or name == only)
            and any(shape_of(v) for v in eqn.outvars + eqn.invars)
        ):
            variables = list(
                dict.fromkeys(a for a in eqn.invars if not isinstance(a, compat.Literal))
            )
            checked[name] = checked.get(name, 0) + check_equation(
                eqn,
                [values[v] for v in variables],
                mesh,
                count=count,
                seed=seed,
                tolerance=tolerance,
            )
    return checked


@pytest.fixture(scope="session")
def check() -> Callable[..., dict[str, int]]:
    """Return `check_function`."""
    return check_function


@pytest.fixture(scope="session")
def planned() -> Callable[..., Any]:
    """Return a function from (function, args, mesh shape, choice) to planned collectives.

    The function's one equation runs by the first strategy that `choice` accepts.
    """

    def collectives(
        function: Callable[..., Any],
        args: Sequence[Any],
        mesh_shape: Sequence[int],
        choice: Callable[[Strategy], bool],
    ) -> Any:
        mesh = logical_mesh(mesh_shape)
        closed = inline(jax.make_jaxpr(function)(*args))
        (eqn,) = compat.open_jaxpr(closed).eqns
        strategy = next(s for s in strategies_of(eqn, mesh) if choice(s))
        places = [next(k for k, a in enumerate(eqn.invars) if a is v) for v in closed.jaxpr.invars]
        inputs = tuple(strategy.operands[k] for k in places)
        plan = JaxprPlan(inputs, (strategy,), strategy.results)
        return planned_collectives(closed, plan, mesh, Conversions(mesh, seconds))

    return collectives
