"""Which dims are one dim of a model, and which are cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.model_dims import model_dims
from alpa_meta.step.program import Step

SIZES = {"batch": 16, "in": 6, "wide": 64, "inner": 128}


def program(scanned=False):
    layers = {
        "up": jnp.zeros((2, SIZES["wide"], SIZES["inner"])),
        "down": jnp.zeros((2, SIZES["inner"], SIZES["wide"])),
    }
    weights = {"first": jnp.zeros((SIZES["in"], SIZES["wide"])), "layers": layers}

    def block(x, layer):
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None

    def loss(weights, x):
        y = x @ weights["first"]
        if scanned:
            y, _ = jax.lax.scan(block, y, weights["layers"])
        else:
            for k in range(2):
                y, _ = block(y, jax.tree.map(lambda w, k=k: w[k], weights["layers"]))
        return jnp.mean(y**2)

    def step(state, x):
        gradients = jax.grad(loss)(state["weights"], x)
        sums = jax.tree.map(lambda m, g: 0.9 * m + g, state["sums"], gradients)
        new = jax.tree.map(jnp.subtract, state["weights"], sums)
        return {"weights": new, "sums": sums}

    state = {"weights": weights, "sums": weights}
    return Step(step, (state, jnp.zeros((SIZES["batch"], SIZES["in"])))).program(1)


def paths(program, variables):
    names = dict(zip(program.jaxpr.invars, (leaf.path for leaf in program.inputs), strict=True))
    return {names[var] for var in variables}


@pytest.mark.parametrize("scanned", [False, True])
def test_what_only_the_update_reads_is_the_optimiser_s(scanned):
    one = program(scanned)
    found = model_dims(one)
    assert len(found.parameters) == len(found.optimiser) == 3
    assert all("sums" in path for path in paths(one, found.optimiser))


def test_the_inner_width_is_cut_in_layers_of_a_scan_and_what_mirrors_it_too():
    one = program(scanned=True)
    cut = model_dims(one).tensor_cut(4)
    names = dict(zip(one.jaxpr.invars, (leaf.path for leaf in one.inputs), strict=True))
    dims = {names[var]: dim for var, dim in cut.items()}
    assert dims == {
        f"state['{part}']['layers']['{name}']": dim
        for part in ("weights", "sums")
        for name, dim in (("up", 2), ("down", 1))
    }


def test_nothing_is_cut_over_more_devices_than_a_dim_has_elements():
    assert not model_dims(program(scanned=True)).tensor_cut(5)


def test_the_share_of_flops_is_that_of_products_with_a_cut_factor():
    one = program(scanned=True)
    found = model_dims(one)
    cut = [(var, dim) for var, dim in found.tensor_cut(4).items()]
    inner = 2 * 2 * SIZES["wide"] * SIZES["inner"]
    assert found.flops_share(cut) == pytest.approx(inner / (inner + SIZES["in"] * SIZES["wide"]))
    assert found.flops_share([]) == 0
