"""Alternating batch shapes: one state, one search, and the results of a single device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import alpa_meta as alpa
from alpa_meta import api
from alpa_meta.planning.planner import make_plan

OPTIMIZER = optax.adamw(1e-2, eps=1e-4)
VOCAB, HIDDEN = 16, 8


def _params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "embed": jax.random.normal(keys[0], (VOCAB, HIDDEN)),
        "layers": [jax.random.normal(key, (HIDDEN, HIDDEN)) / 3 for key in keys[1:]],
    }


def _loss(params, batch):
    x = params["embed"][batch["tokens"]]
    for weight in params["layers"]:
        scores = jax.nn.softmax(x @ x.swapaxes(1, 2) / 4)
        x = x + scores @ jnp.tanh(x @ weight)
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def _step(state, batch):
    params, moments = state
    value, gradients = jax.value_and_grad(_loss)(params, batch)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": value}


def _batch(seed, examples, length):
    tokens = jax.random.randint(jax.random.key(seed), (examples, length + 1), 0, VOCAB)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


BATCHES = [_batch(k, n, t) for k, (n, t) in enumerate([(4, 8), (8, 4), (4, 8), (8, 12), (8, 4)])]


PIPELINE = {"cluster": "host:4", "num_stages": 2, "num_microbatches": 2, "max_mesh_axes": 1}


def test_alternating_buckets_train_one_state_that_never_moves(agrees, monkeypatch):
    searched = []

    def counted(*given):
        searched.append(given)
        return make_plan(*given)

    monkeypatch.setattr(api, "make_plan", counted)
    params = _params()
    parallel = agrees(
        _step, (params, OPTIMIZER.init(params)), BATCHES, dynamic_dims={0, 1}, **PIPELINE
    )
    assert len(searched) == 1
    assert [bucket.taken_over for bucket in parallel.buckets] == [False, True, True]
    state = (params, OPTIMIZER.init(params))
    places = []
    for batch in BATCHES[:4]:
        executable = parallel.lower(state, batch).compile()
        paths = [leaf.path for leaf in executable.planned.program.inputs if leaf.role == "state"]
        places.append({path: executable.input_sharding(path) for path in paths})
    assert places[0] == places[1] == places[3]


def test_state_born_for_one_bucket_serves_the_next():
    parallel = alpa.parallelize(_step, cluster="host:2", num_stages=1, dynamic_dims={0, 1})

    def make(key):
        params = _params()
        return params, OPTIMIZER.init(params)

    state = parallel.init(make, jax.random.key(0), batch=BATCHES[0])
    before = state[0]["embed"].sharding
    state, _ = parallel(state, BATCHES[1])
    assert state[0]["embed"].sharding == before
