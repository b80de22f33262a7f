"""Nothing of the process keeps a program that was planned, lowered and run."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp

import alpa_meta as alpa
from alpa_meta.compat import JaxprEqn
from alpa_meta.intra_op.stage_problem import StageEqns
from alpa_meta.step.program import Program


def made():
    """Return a step that was run, with weak references to its programs."""

    def train_step(weights, batch):
        def loss(weights):
            hidden = batch
            for weight in weights:
                hidden = jnp.tanh(hidden @ weight)
            return (hidden**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    weights, batch = [jnp.ones((8, 8))] * 4, jnp.ones((8, 8))
    options = alpa.Options(num_stages=2, num_microbatches=2, cache=False)
    step = alpa.parallelize(train_step, cluster="host:2", options=options)
    step(weights, batch)
    planned = step.lower(weights, batch).planned
    return step, [weakref.ref(planned), weakref.ref(planned.program)]


def test_a_program_is_freed_with_its_step():
    step, programs = made()
    assert step.menu is not None  # made of the program when it is asked for
    assert all(program() is not None for program in programs)
    del step
    gc.collect()
    assert [program() for program in programs] == [None, None]


def test_no_other_cache_has_equations_or_programs_for_keys():
    made()
    kept = []
    for cached in gc.get_objects():
        if isinstance(cached, functools._lru_cache_wrapper):
            name = f"{cached.__module__}.{cached.__qualname__}"
            entries = [one for one in gc.get_referents(cached) if isinstance(one, dict)]
            keys = [key for one in entries for key in one if name.startswith("alpa_meta.")]
            told = [part for key in keys for part in (key if isinstance(key, tuple) else (key,))]
            if any(isinstance(part, JaxprEqn | Program | StageEqns) for part in told):
                kept.append(name)
    assert kept == []
