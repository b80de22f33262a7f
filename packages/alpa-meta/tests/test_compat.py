"""What differs between jax versions is answered alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from alpa_meta.compat import (
    bind,
    closed,
    consts,
    is_drop,
    open_jaxpr,
    scan_counts,
    source_line,
    subjaxprs,
)
from alpa_meta.operators.regions import is_remat


def eqn_of(function, *args, primitive):
    found = [
        eqn
        for eqn in jax.make_jaxpr(function)(*args).jaxpr.eqns
        if eqn.primitive.name.startswith(primitive)
    ]
    return found[0]


def test_a_scan_says_its_constants_carries_and_scanned_inputs():
    def loop(weight, start, xs):
        def body(carry, x):
            return (carry[0] @ weight + x, carry[1] + 1), x.sum()

        return jax.lax.scan(body, (start, 0), xs)

    eqn = eqn_of(loop, jnp.ones((3, 3)), jnp.ones(3), jnp.ones((5, 3)), primitive="scan")
    assert scan_counts(eqn) == (1, 2, 1)


def test_a_scan_without_inputs_has_none():
    eqn = eqn_of(lambda x: jax.lax.scan(lambda c, _: (2 * c, c), x, None, 4), 1.0, primitive="scan")
    assert scan_counts(eqn) == (0, 1, 0)


def test_recomputation_is_recognised_and_its_body_found():
    function = jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))))
    regions = [eqn for eqn in jax.make_jaxpr(function)(1.0).jaxpr.eqns if is_remat(eqn)]
    assert regions
    assert all(len(subjaxprs(eqn)) == 1 for eqn in regions)


def test_branches_are_found_in_order():
    eqn = eqn_of(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x), True, 1.0, primitive="cond")
    bodies = [[inner.primitive.name for inner in open_jaxpr(b).eqns] for _, b in subjaxprs(eqn)]
    assert bodies == [["cos"], ["sin"]]


def test_open_and_closed_are_inverse():
    jaxpr = jax.make_jaxpr(jnp.sin)(1.0)
    assert closed(jaxpr) is jaxpr
    assert open_jaxpr(open_jaxpr(jaxpr)) is open_jaxpr(jaxpr)
    assert consts(jaxpr) == []
    assert not is_drop(open_jaxpr(jaxpr).outvars[0])


def test_binding_an_equation_runs_it():
    for function, args in (
        (lambda x: jnp.sin(x), (1.0,)),
        (lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, 3), (1.0,)),
        (lambda x: jax.lax.top_k(x, 2), (jnp.arange(4.0),)),
        (lambda x: jax.lax.psum(x, ()), (jnp.arange(4.0),)),
    ):
        for eqn in jax.make_jaxpr(function)(*args).jaxpr.eqns:
            values = [jnp.ones(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
            results = bind(eqn, values)
            assert [np.shape(r) for r in results] == [var.aval.shape for var in eqn.outvars]


def test_the_place_of_an_operation_inside_an_installed_package_is_the_users_call():
    eqn = eqn_of(lambda x: optax.global_norm(x), jnp.ones(3), primitive="sqrt")
    assert "test_compat.py" in source_line(eqn)
