"""Random training steps of odd structure: networks, gradients, updates, states and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

EXAMPLES, WIDTH, MEMBERS = 8, 8, 4
Net = Callable[..., Any]

# ------------------------------------------------------------ networks: (params, x, state) -> out


def _plain(p: Any, x: Any, s: Any) -> Any:
    for w in p["w"]:
        x = x + jnp.tanh(x @ w)
    return x


def _recycled(p: Any, x: Any, s: Any) -> Any:
    for _ in range(3):
        x = jnp.tanh(x @ p["w"][0] + p["b"])
    return x @ p["w"][1]


def _scanned_same(p: Any, x: Any, s: Any) -> Any:
    def body(x: Any, _: Any) -> Any:
        return jnp.tanh(x @ p["w"][0] + p["b"]), x.mean(-1)

    x, means = jax.lax.scan(body, x, None, 3)
    return x @ p["w"][1] + means.mean(0)[:, None]


def _skips(p: Any, x: Any, s: Any) -> Any:
    kept = []
    for w in p["w"]:
        kept.append(x)
        x = jnp.tanh(x @ w)
    for w, before in zip(p["w"], reversed(kept)):
        x = jnp.tanh((x + before) @ w.T)
    return x


def _dense_net(p: Any, x: Any, s: Any) -> Any:
    kept = [x]
    for w in p["w"]:
        kept.append(jnp.tanh(sum(kept) @ w))
    return jnp.concatenate(kept, -1) @ jnp.concatenate([p["w"][0]] * len(kept))


def _stacked(p: Any, x: Any, s: Any) -> Any:
    out, _ = jax.lax.scan(lambda x, w: (x + jnp.sin(x @ w), None), x, jnp.stack(p["w"]))
    return out


def _scanned(p: Any, x: Any, s: Any) -> Any:
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["members"])[0]


def _scanned_again(p: Any, x: Any, s: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jnp.sin(x @ w) @ w.T), jnp.square(x).mean(-1)

    x, sizes = jax.lax.scan(jax.checkpoint(body), x @ p["w"][0], p["members"])
    return x @ p["w"][1] + 0.1 * sizes.sum(0)[:, None]


def _one_by_one(p: Any, x: Any, s: Any) -> Any:
    return jax.lax.map(lambda one: jnp.tanh(one @ p["w"][0]) @ p["w"][1] + p["b"], x)


def _ensemble(p: Any, x: Any, s: Any) -> Any:
    members = jax.vmap(lambda m: jnp.tanh(x @ m) @ p["w"][0])(p["members"])
    return members.mean(0) + 0.1 * members.std(0)


def _hyper(p: Any, x: Any, s: Any) -> Any:
    made = (p["b"] @ p["members"].reshape(MEMBERS, WIDTH, WIDTH)).sum(0)
    return jnp.tanh(x * made) @ p["w"][0] @ p["w"][1]


def _pruned(p: Any, x: Any, s: Any) -> Any:
    return jnp.tanh(x @ (p["w"][0] * s["mask"])) @ p["w"][1]


def _low_rank(p: Any, x: Any, s: Any) -> Any:
    frozen = jax.lax.stop_gradient(p["w"][0])
    return jnp.tanh(x @ frozen + x @ p["members"][0][:, :2] @ p["members"][1][:2]) @ p["w"][1]


def _complex(p: Any, x: Any, s: Any) -> Any:
    turn = p["w"][0] + 1j * p["w"][1]
    return jnp.abs(x @ turn) * jnp.exp(1j * p["b"]).real


def _two_inputs(p: Any, x: Any, s: Any) -> Any:
    one, other = _plain(p, x, s), _plain(p, jnp.flip(x, -1), s)
    return one * other / (1 + jnp.linalg.norm(one - other, axis=-1, keepdims=True))


def _closed_over(p: Any, x: Any, s: Any) -> Any:
    table = jnp.asarray(np.sin(np.arange(WIDTH * WIDTH)).reshape(WIDTH, WIDTH))
    return jnp.tanh(x @ table) @ p["w"][0] @ p["w"][1]


def _equilibrium(p: Any, x: Any, s: Any) -> Any:
    def goes_on(carry: Any) -> Any:
        return carry[0] < 4

    def body(carry: Any) -> Any:
        return carry[0] + 1, jnp.tanh(carry[1] @ (0.2 * p["w"][0]) + x)

    fixed = jax.lax.stop_gradient(jax.lax.while_loop(goes_on, body, (0, x))[1])
    return jnp.tanh(fixed @ p["w"][0] + x) @ p["w"][1]


def _remembered(p: Any, x: Any, s: Any) -> Any:
    scores = jax.nn.softmax(x @ s["memory"].T)
    return _plain(p, scores @ s["memory"] + x, s)


NETS: dict[str, Net] = {
    one.__name__.strip("_"): one
    for one in (
        _plain, _recycled, _scanned_same, _skips, _dense_net, _stacked, _ensemble, _hyper, _pruned,
        _low_rank, _complex, _two_inputs, _scanned, _scanned_again, _one_by_one,
        _closed_over, _equilibrium, _remembered,
    )
}  # fmt: skip

# ------------------------------------------------------------ gradients: (each, params) -> (value,
# gradient, results), where each(params) is the loss of every example


def _of_mean(each: Any, p: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda p: each(p).mean())(p)
    return value, gradient, {}


def _of_two_losses(each: Any, p: Any) -> Any:
    one, first = jax.value_and_grad(lambda p: each(p).mean())(p)
    other, second = jax.value_and_grad(lambda p: jnp.log(1 + each(p)).mean())(p)
    return one + other, jax.tree.map(lambda a, b: a + 0.5 * b, first, second), {"other": other}


def _without_conflict(each: Any, p: Any) -> Any:
    one, first = jax.value_and_grad(lambda p: each(p).mean())(p)
    other, second = jax.value_and_grad(lambda p: jnp.sqrt(1 + each(p)).mean())(p)
    along = optax.tree.vdot(first, second)
    share = jnp.minimum(along, 0) / (optax.tree.vdot(second, second) + 1e-3)
    return one, jax.tree.map(lambda a, b: a - share * b, first, second), {"along": along}


def _of_each_clipped(each: Any, p: Any) -> Any:
    values = each(p)
    jacobian = jax.jacrev(each)(p)
    norms = jnp.sqrt(
        sum(jnp.square(g).reshape(EXAMPLES, -1).sum(-1) for g in jax.tree.leaves(jacobian)) + 1e-6
    )
    factors = jnp.minimum(1, 1 / norms)
    clipped = jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / EXAMPLES, jacobian)
    return values.mean(), clipped, {"norms": norms}


def _with_fisher(each: Any, p: Any) -> Any:
    value, gradient, _ = _of_mean(each, p)
    pushed = jax.jvp(each, (p,), (jax.tree.map(jnp.ones_like, p),))[1]
    return value, gradient, {"pushed": pushed, "curvature": jnp.square(pushed).mean()}


def _forward(each: Any, p: Any) -> Any:
    value, gradient, _ = _of_mean(each, p)
    along = jax.jvp(lambda p: each(p).mean(), (p,), (p,))[1]
    return value, gradient, {"along": along}


def _of_sum_and_count(each: Any, p: Any) -> Any:
    value, gradient = jax.value_and_grad(lambda p: each(p).sum())(p)
    return value / EXAMPLES, jax.tree.map(lambda g: g / EXAMPLES, gradient), {}


def _of_some(each: Any, p: Any) -> Any:
    fixed = {name: leaf for name, leaf in p.items() if name != "w"}
    value, gradient = jax.value_and_grad(lambda w: each({**fixed, "w": w}).mean())(p["w"])
    return value, {**jax.tree.map(jnp.zeros_like, fixed), "w": gradient}, {}


def _of_both(each: Any, p: Any) -> Any:
    def loss(weights: Any, others: Any) -> Any:
        return each({**others, "w": weights}).mean()

    others = {name: leaf for name, leaf in p.items() if name != "w"}
    value, (of_weights, of_others) = jax.value_and_grad(loss, argnums=(0, 1))(p["w"], others)
    return value, {**of_others, "w": of_weights}, {}


def _uncertain(each: Any, p: Any) -> Any:
    def loss(p: Any) -> Any:
        values = each(p)
        return (jnp.exp(-p["b"][0]) * values).mean() + p["b"][0], values

    (value, values), gradient = jax.value_and_grad(loss, has_aux=True)(p)
    return value, gradient, {"values": values}


GRADIENTS: dict[str, Callable[..., Any]] = {
    one.__name__.strip("_"): one
    for one in (
        _of_mean, _of_two_losses, _without_conflict, _of_each_clipped, _with_fisher, _forward,
        _of_sum_and_count, _of_some, _of_both, _uncertain,
    )
}  # fmt: skip

# ------------------------------------------------------------ updates: (params, gradient, state,
# value) -> (params, entries of the state)


def _descent(p: Any, g: Any, s: Any, v: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.05 * g, p, g), {}


def _flat(p: Any, g: Any, s: Any, v: Any) -> Any:
    flat, back = ravel_pytree(p)
    slopes = ravel_pytree(g)[0]
    moved = flat - 0.05 * slopes / (1 + jnp.abs(slopes).max())
    return back(moved), {"size": jnp.linalg.norm(moved)}


def _orthogonalised(p: Any, g: Any, s: Any, v: Any) -> Any:
    def one(p: Any, g: Any) -> Any:
        if p.ndim != 2:
            return p - 0.05 * g
        g = g / (jnp.linalg.norm(g) + 1e-3)
        for _ in range(3):
            g = 1.5 * g - 0.5 * g @ g.T @ g
        return p - 0.02 * g

    return jax.tree.map(one, p, g), {}


def _preconditioned(p: Any, g: Any, s: Any, v: Any) -> Any:
    def one(p: Any, g: Any) -> Any:
        if p.ndim != 2:
            return p - 0.05 * g
        lower = jnp.linalg.cholesky(g @ g.T + 0.1 * jnp.eye(len(g)))
        return p - 0.02 * jax.scipy.linalg.cho_solve((lower, True), g)

    return jax.tree.map(one, p, g), {}


def _sparse(p: Any, g: Any, s: Any, v: Any) -> Any:
    def one(p: Any, g: Any) -> Any:
        least = jax.lax.top_k(jnp.abs(g).ravel(), 4)[0][-1]
        return p - 0.05 * jnp.where(jnp.abs(g) >= least, g, 0)

    return jax.tree.map(one, p, g), {}


def _noised(p: Any, g: Any, s: Any, v: Any) -> Any:
    leaves, tree = jax.tree.flatten(g)
    keys = jax.random.split(s["key"], len(leaves))
    noise = [0.01 * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves)]
    return jax.tree.map(lambda p, g, n: p - 0.05 * g + n, p, g, jax.tree.unflatten(tree, noise)), {}


def _kept_if_worse(p: Any, g: Any, s: Any, v: Any) -> Any:
    better = v < s["best"]
    moved = jax.tree.map(lambda p, g: jnp.where(better, p - 0.05 * g, p + 0.01 * g), p, g)
    return moved, {"best": jnp.minimum(v, s["best"])}


def _every_second(p: Any, g: Any, s: Any, v: Any) -> Any:
    total = jax.tree.map(jnp.add, s["total"], g)

    def apply() -> Any:
        return jax.tree.map(lambda p, t: p - 0.05 * t, p, total), jax.tree.map(
            jnp.zeros_like, total
        )

    p, total = jax.lax.cond(s["count"] % 2 == 1, apply, lambda: (p, total))
    return p, {"total": total}


def _pruning(p: Any, g: Any, s: Any, v: Any) -> Any:
    p = jax.tree.map(lambda p, g: p - 0.05 * g, p, g)
    sizes = jnp.abs(p["w"][0])
    return p, {"mask": sizes > jnp.quantile(sizes, 0.3)}


def _normalised(p: Any, g: Any, s: Any, v: Any) -> Any:
    p = jax.tree.map(lambda p, g: p - 0.05 * g / (jnp.linalg.norm(g) + 0.1), p, g)
    w = [one / jnp.linalg.norm(one, axis=0) for one in p["w"]]
    return {**p, "w": w}, {}


def _searched(p: Any, g: Any, s: Any, v: Any) -> Any:
    length = optax.tree.vdot(g, g)
    rate = jax.lax.while_loop(lambda r: r * length > 0.01, lambda r: r / 2, jnp.asarray(1.0))
    return jax.tree.map(lambda p, g: p - rate * g, p, g), {"rate": rate}


def _median_clipped(p: Any, g: Any, s: Any, v: Any) -> Any:
    most = 3 * jnp.median(jnp.abs(ravel_pytree(g)[0])) + 1e-3
    return jax.tree.map(lambda p, g: p - 0.05 * jnp.clip(g, -most, most), p, g), {}


def _averaged(p: Any, g: Any, s: Any, v: Any) -> Any:
    p = jax.tree.map(lambda p, g: p - 0.05 * g, p, g)
    mean = jax.tree.map(lambda m, p: m + (p - m) / (s["count"] + 2), s["mean"], p)
    return p, {"mean": mean}


UPDATES: dict[str, Callable[..., Any]] = {
    one.__name__.strip("_"): one
    for one in (
        _descent, _flat, _orthogonalised, _preconditioned, _sparse, _noised, _kept_if_worse,
        _every_second, _pruning, _normalised, _searched, _median_clipped, _averaged,
    )
}  # fmt: skip

# ------------------------------------------------------------ what else there is

OTHERS = (
    "raw_key", "returns_gradient", "returns_before", "returns_batch", "returns_constant",
    "returns_twice", "returns_none", "unused_state", "aliased_state", "saliency", "memory_written",
    "statistics_of_batch", "normalised_data", "weighted_examples", "weight_decay", "dropout",
    "loss_of_average", "tuple_result", "number_in_batch", "argsorted_examples",
)  # fmt: skip

PARTS = (
    *(f"net:{name}" for name in NETS),
    *(f"gradient:{name}" for name in GRADIENTS),
    *(f"update:{name}" for name in UPDATES),
    *(f"other:{name}" for name in OTHERS),
)


def choose(seed: int) -> tuple[str, ...]:
    """Return the parts of a random step: a network, a gradient, an update, and more."""
    rng = np.random.default_rng(seed)
    others = rng.choice(OTHERS, int(rng.integers(0, 5)), replace=False)
    return (
        f"net:{rng.choice(list(NETS))}",
        f"gradient:{rng.choice(list(GRADIENTS))}",
        f"update:{rng.choice(list(UPDATES))}",
        *(f"other:{name}" for name in others),
    )


def num_examples(seed: int) -> int:
    return EXAMPLES


def training(seed: int, parts: tuple[str, ...]) -> tuple[Any, Any, list[Any]]:
    """Return (step, state, batches) made of the parts; a part left out is the plainest."""

    def of(kind: str, table: Any) -> Any:
        found = [part.partition(":")[2] for part in parts if part.startswith(f"{kind}:")]
        return table[found[0]] if found else next(iter(table.values()))

    net, gradient_of, update = of("net", NETS), of("gradient", GRADIENTS), of("update", UPDATES)
    has = {part.partition(":")[2] for part in parts if part.startswith("other:")}.__contains__

    def step(state: Any, batch: Any) -> Any:
        key = state["key"]
        if has("raw_key"):
            key = jax.random.wrap_key_data(key)
        key, now = jax.random.split(key)
        x, y = batch["x"], batch["y"]
        if has("normalised_data"):
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-2)
        if has("dropout"):
            x = jnp.where(jax.random.bernoulli(now, 0.8, x.shape), x, 0)

        def each(p: Any) -> Any:
            values = jnp.square(net(p, x, state) - y).mean(-1)
            if has("weighted_examples"):
                values = values * batch["weight"] / batch["weight"].mean()
            if has("number_in_batch"):
                values = values * batch["rate"]
            if has("weight_decay"):
                values = values + 1e-2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
            return values

        value, gradient, results = gradient_of(each, state["params"])
        params, new = update(state["params"], gradient, {**state, "key": now}, value)
        results = {**results, "loss": value}
        if has("returns_gradient"):
            results["gradient"] = gradient
        if has("returns_before"):
            results["before"] = state["params"]["w"]
        if has("returns_batch"):
            results["batch"] = batch["y"]
        if has("returns_constant"):
            results["constant"] = (jnp.arange(3), jnp.asarray(2.5))
        if has("returns_twice"):
            results["again"] = (value, value, params["b"], params["b"])
        if has("returns_none"):
            results["none"] = None
        if has("saliency"):
            out = jax.grad(lambda x: jnp.square(net(state["params"], x, state)).sum())(x)
            results["saliency"] = jnp.abs(out).max(-1)
        if has("memory_written"):
            new = {**new, "memory": state["memory"].at[batch["place"]].set(0.5 * x)}
        if has("statistics_of_batch"):
            results["statistics"] = (x.mean(), jnp.median(y), (y > 0).sum(0), jnp.cov(y.T)[0])
        if has("loss_of_average"):
            results["average"] = jnp.square(net(state["mean"], x, state) - y).mean()
        if has("argsorted_examples"):
            results["order"] = jnp.argsort(jnp.square(x - y).sum(-1))
        if has("raw_key"):
            key = jax.random.key_data(key)
        state = {**state, **new, "params": params, "key": key, "count": state["count"] + 1}
        return (state, tuple(results.values())) if has("tuple_result") else (state, results)

    rng = np.random.default_rng(seed + 1)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape) * 0.6 / shape[-2 if len(shape) > 1 else 0] ** 0.5)

    params = {
        "w": [normal(WIDTH, WIDTH) for _ in range(int(rng.integers(2, 5)))],
        "b": normal(WIDTH),
        "members": normal(MEMBERS, WIDTH, WIDTH),
    }
    if net is _hyper:
        params["b"] = normal(WIDTH)
    key = jax.random.PRNGKey(seed) if has("raw_key") else jax.random.key(seed)
    state: dict[str, Any] = {
        "params": params,
        "mean": jax.tree.map(lambda p: 0.9 * p, params),
        "total": jax.tree.map(jnp.zeros_like, params),
        "key": key,
        "count": jnp.asarray(0),
        "best": jnp.asarray(10.0),
        "size": jnp.asarray(0.0),
        "rate": jnp.asarray(1.0),
        "mask": jnp.ones((WIDTH, WIDTH), bool),
        "memory": normal(2 * EXAMPLES, WIDTH),
    }
    if has("unused_state"):
        state["unused"] = {"a": jnp.arange(4), "none": None, "empty": jnp.zeros((0, 3)), "d": {}}
    if has("aliased_state"):
        state["alias"] = params["w"][0]
    batches = [
        {
            "x": normal(EXAMPLES, WIDTH) * 3,
            "y": normal(EXAMPLES, WIDTH) * 3,
            "weight": jnp.asarray(rng.random(EXAMPLES)),
            "place": jnp.asarray(rng.permutation(2 * EXAMPLES)[:EXAMPLES]),
            "rate": jnp.asarray(1.5),
        }
        for _ in range(2)
    ]
    return step, state, batches
