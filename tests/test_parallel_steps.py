"""Training steps as people write them: losses, metrics, arguments, results; all agree."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from two_layers import (
    BATCHES,
    PARTS,
    PIPELINE,
    QUICK,
    SIZE,
    descend,
    errors_of,
    make_params,
    mean_loss,
    predict,
)

import alpa_meta as alpa


def _step_of(loss):
    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return descend(params, gradients), {"loss": value}

    return step


def _sum_loss(params, batch):
    return errors_of(params, batch).sum() / 50


def _mean_and_decay(params, batch):
    return mean_loss(params, batch) + 1e-2 * sum(jnp.sum(p**2) for p in params.values())


@pytest.mark.sample("loss", "options")
@pytest.mark.parametrize("loss", [mean_loss, _sum_loss, _mean_and_decay])
@pytest.mark.parametrize("options", [PARTS, PIPELINE], ids=["one mesh", "two stages"])
def test_means_sums_and_decay_terms_are_scaled_right_under_microbatches(agrees, loss, options):
    agrees(_step_of(loss), make_params(), BATCHES, **options)


@pytest.mark.sample(options=1)
@pytest.mark.parametrize("options", [PIPELINE, PARTS, QUICK], ids=["two stages", "parts", "whole"])
def test_complex_parameters_of_a_linear_recurrence(agrees, options):
    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    def loss(params, batch):
        inputs = batch["x"][:, None] * jnp.linspace(0.5, 1.0, 6)[:, None] @ params["in"]
        decays = jnp.broadcast_to(jnp.exp(-jnp.exp(params["decay"])), inputs.shape)
        _, states = jax.lax.associative_scan(combine, (decays, inputs), axis=1)
        return jnp.mean(((states @ params["out"]).real.mean(1) - batch["y"]) ** 2)

    def step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return descend(params, jax.tree.map(jnp.conj, gradients)), {"loss": value}

    turns = jnp.exp(1j * jnp.arange(SIZE * 8.0))
    params = {
        "in": 0.3 * turns.reshape(SIZE, 8),
        "decay": jnp.linspace(-1.0, 0.5, 8) + 1j * jnp.linspace(0.1, 2.0, 8),
        "out": 0.3 * jnp.conj(turns).reshape(8, SIZE),
    }
    agrees(step, params, BATCHES, **options)


@pytest.mark.sample(options=2)
@pytest.mark.parametrize("options", [{}, PIPELINE, PARTS, {**PARTS, "num_microbatches": 8}])
def test_labels_looked_up_row_by_row(agrees, options):
    def loss(params, batch):
        logp = jax.nn.log_softmax(predict(params, batch["x"]))
        return -logp[jnp.arange(len(logp)), jnp.argmax(batch["y"], axis=1)].mean()

    options = {**QUICK, **options}
    agrees(_step_of(loss), make_params(), BATCHES, **options)
    if options["num_stages"] == 1:
        step = agrees(_step_of(loss), make_params(), BATCHES, **options, preset="dp")
        planned = step.executable.planned_collectives().values()
        gathered = [one for task in planned for one in task if one.kind != "all-reduce"]
        assert not any("test_parallel_steps" in one.source for one in gathered)


def test_a_sum_and_a_decay_term(close):
    def loss(params, batch):
        return _sum_loss(params, batch) + 1e-2 * jnp.sum(params["up"] ** 2)

    _run_both(_step_of(loss), (make_params(), BATCHES[0]), close, **PARTS)


def _with_metrics(params, batch):
    def loss(params):
        errors = errors_of(params, batch)
        predicted = predict(params, batch["x"])
        return errors.mean(), {
            "errors": errors,
            "predicted": predicted,
            "total": errors.sum(),
            "worst": errors.max(),
            "least": errors.min(),
            "large": jnp.sum(errors > 2.0),
            "count": errors.shape[0],
            "share": jnp.mean(errors > 2.0),
        }

    (value, auxiliary), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    predicted = auxiliary.pop("predicted")
    chosen, right = jnp.argmax(predicted, -1), jnp.argmax(batch["y"], -1)
    hits = chosen == right
    metrics = {
        **auxiliary,
        "confusion": jnp.zeros((SIZE, SIZE), int).at[right, chosen].add(1),
        "clean": errors_of(params, {**batch, "x": jnp.sign(batch["x"])}).mean(),
        "loss": value,
        "accuracy": hits.mean(),
        "hits": hits.sum(),
        "norm": optax.global_norm(gradients),
    }
    return descend(params, gradients), metrics


@pytest.mark.sample(options=2)
@pytest.mark.parametrize("options", [PIPELINE, QUICK, PARTS], ids=["two stages", "whole", "parts"])
def test_metrics_of_every_kind_are_those_of_the_whole_batch(agrees, options):
    agrees(_with_metrics, make_params(), BATCHES, **options)


def _run_both(step, args, close, static_argnums=(), **options):
    """Require that one call of the parallel step returns what the plain one does."""
    expected = jax.jit(step, static_argnums=static_argnums)(*args)
    parallel = alpa.parallelize(step, static_argnums=static_argnums, **options)
    got = parallel(*(jax.tree.map(_fresh, arg) for arg in args))
    close(got, expected)
    return parallel


def _fresh(leaf):
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def test_several_state_arguments_and_a_loss(close):
    optimizer = optax.adam(1e-2, eps=1e-4)

    def step(params, opt_state, batch):
        value, gradients = jax.value_and_grad(mean_loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    args = (make_params(), optimizer.init(make_params()), BATCHES[0])
    for options in (PARTS, PIPELINE):
        _run_both(step, args, close, **options)


def test_a_batch_of_several_arguments(close):
    def step(params, x, y):
        value, gradients = jax.value_and_grad(mean_loss)(params, {"x": x, "y": y})
        return descend(params, gradients), value

    _run_both(step, (make_params(), BATCHES[0]["x"], BATCHES[0]["y"]), close, **PARTS)


def test_a_batch_that_is_a_tuple(close):
    def step(params, batch):
        x, y = batch
        value, gradients = jax.value_and_grad(mean_loss)(params, {"x": x, "y": y})
        return descend(params, gradients), value

    _run_both(step, (make_params(), (BATCHES[0]["x"], BATCHES[0]["y"])), close, **PARTS)


@pytest.mark.sample(make_key=1)
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_random_numbers_from_a_key_argument(close, make_key):
    def step(params, batch, key):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["up"])
            kept = jax.random.bernoulli(key, 0.8, hidden.shape)
            return jnp.mean((jnp.where(kept, hidden, 0) @ params["down"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return descend(params, gradients), value

    args = (make_params(), BATCHES[0], make_key(3))
    _run_both(step, args, close, **QUICK)
    _run_both(step, args, close, **PARTS)


def test_python_numbers_are_arguments(close):
    def step(params, batch, rate, clip):
        value, gradients = jax.value_and_grad(mean_loss)(params, batch)
        gradients = jax.tree.map(lambda g: jnp.clip(g, -clip, clip), gradients)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value

    _run_both(step, (make_params(), BATCHES[0], 0.1, 2), close, **PARTS)


def test_static_arguments_choose_the_program(close):
    def step(params, batch, kind):
        loss = {"mean": mean_loss, "sum": _sum_loss}[kind]
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return descend(params, gradients), value

    for kind in ("mean", "sum"):
        _run_both(step, (make_params(), BATCHES[0], kind), close, static_argnums=(2,), **PARTS)


def test_statistics_of_a_mapped_model_over_its_batch(agrees):
    def loss(params, batch):
        def one(x):  # as equinox' BatchNorm
            hidden = x @ params["up"]
            mean = jax.lax.pmean(hidden, "batch")
            variance = jax.lax.pmean((hidden - mean) ** 2, "batch")
            return jnp.tanh((hidden - mean) * jax.lax.rsqrt(variance + 1e-3)) @ params["down"]

        return jnp.mean((jax.vmap(one, axis_name="batch")(batch["x"]) - batch["y"]) ** 2)

    step = agrees(_step_of(loss), make_params(), BATCHES, **QUICK, preset="dp")
    assert not any(stage.replicated_ops for stage in step.plan.shardings)


def test_batch_statistics_need_whole_batches(agrees):
    def step(state, batch):
        def loss(params):
            hidden = batch["x"] @ params["up"]
            mean, variance = hidden.mean(0), hidden.var(0)
            normal = (hidden - mean) * jax.lax.rsqrt(variance + 1e-3)
            out = jnp.tanh(normal) @ params["down"]
            return jnp.mean((out - batch["y"]) ** 2), (mean, variance)

        (value, (mean, variance)), gradients = jax.value_and_grad(loss, has_aux=True)(
            state["params"]
        )
        averages = {
            "mean": 0.9 * state["averages"]["mean"] + 0.1 * mean,
            "variance": 0.9 * state["averages"]["variance"] + 0.1 * variance,
        }
        params = descend(state["params"], gradients)
        return {"params": params, "averages": averages}, {"loss": value}

    averages = {"mean": jnp.zeros(2 * SIZE), "variance": jnp.ones(2 * SIZE)}
    state = {"params": make_params(), "averages": averages}
    agrees(step, state, BATCHES, **QUICK)
    with pytest.raises(alpa.PlanError, match="mixes examples of the batch"):
        alpa.parallelize(step, **PARTS).plan_for(state, BATCHES[0])


@pytest.mark.parametrize("options", [QUICK, PARTS], ids=["whole", "parts"])
def test_a_fixed_point_with_its_own_gradient(agrees, options):
    def trips(body, start):
        return jax.lax.fori_loop(0, 12, lambda _, value: body(value), start)

    @jax.custom_vjp
    def fixed_point(weight, x):
        return trips(lambda value: jnp.tanh(value @ weight + x), jnp.zeros_like(x))

    def forward(weight, x):
        value = fixed_point(weight, x)
        return value, (weight, x, value)

    def backward(kept, cotangent):
        weight, x, value = kept
        _, of_value = jax.vjp(lambda value: jnp.tanh(value @ weight + x), value)
        total = trips(lambda total: cotangent + of_value(total)[0], cotangent)
        _, of_inputs = jax.vjp(lambda weight, x: jnp.tanh(value @ weight + x), weight, x)
        return of_inputs(total)

    fixed_point.defvjp(forward, backward)

    def loss(params, batch):
        out = fixed_point(0.1 * params["up"] @ params["down"], batch["x"])
        return jnp.mean((out - batch["y"]) ** 2)

    agrees(_step_of(loss), make_params(), BATCHES, **options)


def test_gradients_accumulated_by_the_users_own_scan(agrees):
    # all computing is in the loop: no forward pass is left that stages could cut
    def step(params, batch):
        def body(total, part):
            loss, gradients = jax.value_and_grad(mean_loss)(params, part)
            return jax.tree.map(jnp.add, total, gradients), loss

        parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
        return descend(params, jax.tree.map(lambda g: g / 4, total)), {"losses": losses}

    agrees(step, make_params(), BATCHES, cluster="host:8")


@pytest.mark.sample(options=1)
@pytest.mark.parametrize("options", [PIPELINE, PARTS], ids=["two stages", "one mesh"])
def test_an_update_that_transposes_gradients(agrees, options):
    def root(matrix):
        values, vectors = jnp.linalg.eigh(matrix + 1e-2 * jnp.eye(len(matrix)))
        return (vectors * values**-0.25) @ vectors.T

    def step(state, batch):  # Shampoo
        value, gradients = jax.value_and_grad(mean_loss)(state["params"], batch)
        sums = {
            name: (state["sums"][name][0] + g @ g.T, state["sums"][name][1] + g.T @ g)
            for name, g in gradients.items()
            if g.ndim == 2
        }
        moves = {
            name: root(left) @ gradients[name] @ root(right) for name, (left, right) in sums.items()
        }
        return {"params": descend(state["params"], gradients | moves), "sums": sums}, {
            "loss": value
        }

    params = make_params()
    sums = {k: (jnp.eye(p.shape[0]), jnp.eye(p.shape[1])) for k, p in params.items() if p.ndim == 2}
    agrees(step, {"params": params, "sums": sums}, BATCHES, **options)


def test_a_step_that_returns_only_its_state(close):
    def step(params, batch):
        return descend(params, jax.grad(mean_loss)(params, batch))

    _run_both(step, (make_params(), BATCHES[0]), close, **PARTS)
    _run_both(step, (make_params(), BATCHES[0]), close, **PIPELINE)


def test_a_model_of_one_operation(close):
    def step(weight, x):
        gradient = jax.grad(lambda weight: jnp.mean(x @ weight))(weight)
        return weight - gradient

    _run_both(step, (make_params()["up"], BATCHES[0]["x"]), close, **PARTS)


def test_nested_jit_remat_and_scan(agrees):
    @jax.jit
    def block(x, weights):
        up, down = weights
        return x + jax.jit(jnp.tanh)(x @ up) @ down, None

    def loss(params, batch):
        x, _ = jax.lax.scan(jax.checkpoint(block), batch["x"], (params["ups"], params["downs"]))
        return jnp.mean((x - batch["y"]) ** 2)

    params = {
        "ups": jnp.stack([make_params(k)["up"] for k in range(4)]),
        "downs": jnp.stack([make_params(k)["down"] for k in range(4)]),
    }
    agrees(jax.jit(_step_of(loss)), params, BATCHES, **PARTS)


@pytest.mark.parametrize("options", [PARTS, PIPELINE], ids=["one mesh", "two stages"])
def test_gradients_marked_explicitly(agrees, options):
    def step(params, batch):
        value, gradients = alpa.value_and_grad(mean_loss)(params, batch)
        return descend(params, gradients), {"loss": value}

    parallel = agrees(step, make_params(), BATCHES, **options)
    assert parallel.plan.program.phases_from == "marker"


def test_second_order_gradients_with_a_marker(agrees):
    def penalised(params, batch):
        slope = jax.grad(lambda x: errors_of(params, {**batch, "x": x}).sum())(batch["x"])
        return mean_loss(params, batch) + 1e-3 * jnp.mean(slope**2)

    def step(params, batch):
        value, gradients = alpa.value_and_grad(penalised)(params, batch)
        return descend(params, gradients), {"loss": value}

    agrees(step, make_params(), BATCHES, **PARTS)


def test_half_precision_with_gradients_summed_in_float32(agrees):
    def loss(params, batch):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch))
        return mean_loss(*low).astype(jnp.float32)

    # bfloat16 has 8 bits: sums in another order differ by some 2^-8
    agrees(_step_of(loss), make_params(), BATCHES[:2], tolerance=0.02, **PARTS)


def test_the_decorator_takes_options():
    @alpa.parallelize(**QUICK)
    def step(params, batch):
        """Descend once."""
        return descend(params, jax.grad(mean_loss)(params, batch))

    assert isinstance(step, alpa.ParallelStep)
    assert step.__name__ == "step"
    assert step.__doc__ == "Descend once."
    assert functools.reduce(np.maximum, step.plan_for(make_params(), BATCHES[0]).layer_cuts, 0) == 0


def _step_with_later_loss(params, batch):
    updated, metrics = _step_of(mean_loss)(params, batch)
    return updated, {**metrics, "later": mean_loss(updated, batch)}


@pytest.mark.sample(options=2)
@pytest.mark.parametrize("options", [PARTS, PIPELINE, QUICK, {**PIPELINE, "num_microbatches": 1}])
def test_work_on_examples_after_the_update_is_given_the_whole_batch(agrees, options):
    agrees(_step_with_later_loss, make_params(), BATCHES, **options)


def test_epochs_of_parts_of_a_permuted_batch_inside_the_step(agrees):
    def step(state, batch):
        key, now = jax.random.split(state["key"])

        def descend_on(params, part):
            value, gradients = jax.value_and_grad(mean_loss)(params, part)
            return descend(params, gradients), value

        def epoch(params, key):
            order = jax.random.permutation(key, len(batch["x"]))
            parts = jax.tree.map(lambda a: a[order].reshape(2, -1, SIZE), batch)
            return jax.lax.scan(descend_on, params, parts)

        params, losses = jax.lax.scan(epoch, state["params"], jax.random.split(now, 3))
        return {"params": params, "key": key}, losses

    state = {"params": make_params(), "key": jax.random.key(0)}
    agrees(step, state, BATCHES, **QUICK)
    with pytest.raises(alpa.PlanError, match="2 microbatches would change the result"):
        alpa.parallelize(step, **PARTS).plan_for(state, BATCHES[0])


def test_a_counter_of_examples_counts_the_whole_batch(agrees):
    def step(state, batch):
        params, metrics = _step_of(mean_loss)(state["params"], batch)
        seen = state["seen"] + batch["x"].shape[0]
        per_example = optax.tree.norm(params) / batch["x"].shape[0]
        return {"params": params, "seen": seen}, {**metrics, "per_example": per_example}

    state = {"params": make_params(), "seen": jnp.zeros((), jnp.int32)}
    for count in (2, 8):
        agrees(step, state, BATCHES, **{**PARTS, "num_microbatches": count})
