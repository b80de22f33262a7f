"""Random training steps of chained operators on odd sizes, with functions of functions of means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# ------------------------------------------------------------ of [examples, tokens, width] the same
# w is [width, width], b is [width], n is the example's number of tokens, key a random key


def _blocks(x: Any, w: Any, **_: Any) -> Any:
    return jnp.concatenate([jnp.tanh(x @ w)[..., 1:], x[..., :1]], -1)


def _transposed(x: Any, w: Any, **_: Any) -> Any:
    return (x.transpose(2, 0, 1).reshape(len(w), -1).T @ w).reshape(x.shape)


def _attended(x: Any, w: Any, **_: Any) -> Any:
    scores = jax.nn.softmax(jnp.einsum("btd,de,bse->bts", x, w, x))
    return x + scores @ x


def _pooled(x: Any, w: Any, **_: Any) -> Any:
    window = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME")
    return x + 0.3 * window @ w


def _averaged(x: Any, b: Any, **_: Any) -> Any:
    return x * b + jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3, 1), (1, 1, 1), "SAME") / 3


def _convolved(x: Any, w: Any, **_: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, w[None], (1,), "SAME", dimension_numbers=numbers)


def _padded(x: Any, w: Any, **_: Any) -> Any:
    return jnp.pad(x @ w, ((0, 0), (1, 0), (2, 0)))[:, :-1, 2:] + x


def _picked(x: Any, w: Any, n: Any, **_: Any) -> Any:
    return x + x[jnp.arange(len(x)), n][:, None] @ w


def _taken(x: Any, b: Any, n: Any, **_: Any) -> Any:
    return x + jnp.take_along_axis(x, n[:, None, None], 1) * b


def _put(x: Any, w: Any, n: Any, **_: Any) -> Any:
    return x.at[jnp.arange(len(x)), n].add(x.mean(1) @ w)


def _set_last(x: Any, w: Any, **_: Any) -> Any:
    return x.at[:, -1].set(jnp.sin(x[:, 0] @ w))


def _masked(x: Any, w: Any, n: Any, **_: Any) -> Any:
    kept = jnp.arange(x.shape[1]) <= n[:, None]
    return jnp.where(kept[..., None], x @ w, x)


def _sorted(x: Any, b: Any, **_: Any) -> Any:
    return jnp.sort(x, -1) * b + x


def _ranked(x: Any, w: Any, **_: Any) -> Any:
    order = jnp.argsort(x[..., 0], axis=1)
    return x @ w + jnp.take_along_axis(x, order[..., None], 1)


def _cumulative(x: Any, b: Any, **_: Any) -> Any:
    return x + 0.2 * b * jnp.cumsum(x, 1) + 0.1 * jax.lax.cummax(x, axis=1)


def _associative(x: Any, b: Any, **_: Any) -> Any:
    decay = jnp.broadcast_to(jax.nn.sigmoid(b), x.shape)

    def combine(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(combine, (decay, x), axis=1)[1]


def _recurrent(x: Any, w: Any, b: Any, **_: Any) -> Any:
    def body(h: Any, one: Any) -> Any:
        h = jnp.tanh(h @ w + one * b)
        return h, h

    return jax.lax.scan(body, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def _backwards(x: Any, w: Any, **_: Any) -> Any:
    def body(h: Any, one: Any) -> Any:
        return jnp.tanh(h + one @ w), h

    return jax.lax.scan(body, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1), reverse=True)[1].swapaxes(
        0, 1
    )


def _mapped(x: Any, w: Any, **_: Any) -> Any:
    return jax.lax.map(lambda one: jnp.tanh(one @ w), x)


def _looped(x: Any, w: Any, **_: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda i, x: x + 0.1 * jnp.sin(x @ w) * i, x)


def _each_example(x: Any, w: Any, b: Any, n: Any, **_: Any) -> Any:
    def one(x: Any, n: Any) -> Any:
        return jnp.where(n % 2 == 0, x @ w, x * b).at[n].multiply(0.5)

    return jax.vmap(one)(x, n)


def _solved(x: Any, w: Any, **_: Any) -> Any:
    matrix = w.T @ w + jnp.eye(len(w))
    return jnp.linalg.solve(matrix, x[..., None])[..., 0]


def _factored(x: Any, w: Any, **_: Any) -> Any:
    lower = jnp.linalg.cholesky(w @ w.T + jnp.eye(len(w)))
    return jax.scipy.linalg.solve_triangular(lower, x.reshape(-1, len(w)).T).T.reshape(x.shape)


def _turned(x: Any, b: Any, **_: Any) -> Any:
    return jnp.fft.irfft(jnp.fft.rfft(x * b, axis=1), n=x.shape[1], axis=1) + x


def _complex(x: Any, b: Any, **_: Any) -> Any:
    return ((x + 0.1j * b) * jnp.exp(1j * b)).real


def _dropped(x: Any, w: Any, key: Any, **_: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x @ w, 0)


def _noised(x: Any, b: Any, key: Any, **_: Any) -> Any:
    return x + 0.1 * b * jax.random.normal(key, x.shape[:2])[..., None]


def _drawn_words(x: Any, w: Any, key: Any, **_: Any) -> Any:
    words = jax.random.categorical(key, jax.lax.stop_gradient(x))
    return x + w[words % len(w)]


def _dropped_paths(x: Any, w: Any, key: Any, **_: Any) -> Any:
    return x + jax.random.bernoulli(key, 0.7, (len(x), 1, 1)) * jnp.tanh(x @ w)


def _selected(x: Any, w: Any, **_: Any) -> Any:
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ w), 2)
    return x + (gates[..., None] * w[chosen]).sum(2)


def _one_hot(x: Any, w: Any, **_: Any) -> Any:
    return x + jax.nn.one_hot(x.argmax(-1), x.shape[-1]) @ w


def _normalised(x: Any, b: Any, **_: Any) -> Any:
    centred = x - x.mean((1, 2), keepdims=True)
    return b * centred / jnp.sqrt(jnp.square(centred).mean((1, 2), keepdims=True) + 1e-2)


def _weights_normalised(x: Any, w: Any, **_: Any) -> Any:
    return x + x @ (w / jnp.linalg.norm(w, axis=0))


def _rotated(x: Any, w: Any, **_: Any) -> Any:
    angles = jnp.arange(x.shape[1])[:, None] * jnp.linspace(0.1, 1, x.shape[2])
    return x * jnp.cos(angles) + jnp.roll(x, 1, -1) @ w * jnp.sin(angles)


def _split_heads(x: Any, w: Any, **_: Any) -> Any:
    heads = x.reshape(*x.shape[:2], 2, -1)
    mixed = jnp.einsum("bthd,bshd->bhts", heads, heads)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(mixed), heads).reshape(x.shape) @ w


def _branched(x: Any, w: Any, count: Any, **_: Any) -> Any:
    return jax.lax.cond(count % 2 == 0, lambda x: jnp.tanh(x @ w), lambda x: x, x)


def _until(x: Any, w: Any, **_: Any) -> Any:
    size = jnp.square(w).sum()
    small = jax.lax.while_loop(lambda s: s > 1, lambda s: s / 2, jax.lax.stop_gradient(size))
    return x @ w * small


def _sliced(x: Any, w: Any, count: Any, **_: Any) -> Any:
    row = jax.lax.dynamic_slice(w, (count % len(w), 0), (1, len(w)))
    return x * row[0] + x


def _recomputed(x: Any, w: Any, **_: Any) -> Any:
    return x + jax.checkpoint(lambda x, w: jnp.tanh(x @ w) ** 2)(x, w)


def _jitted(x: Any, w: Any, **_: Any) -> Any:
    return jax.jit(lambda x: jax.nn.gelu(x @ w))(x)


def _straight_through(x: Any, w: Any, **_: Any) -> Any:
    return x + jax.lax.stop_gradient(jnp.round(x @ w) - x @ w) + x @ w


def _outer(x: Any, w: Any, **_: Any) -> Any:
    return jnp.einsum("bti,btj,ij->bti", x, x, w) / 4 + x


def _quantised(x: Any, b: Any, **_: Any) -> Any:
    edges = jnp.linspace(-1, 1, 5)
    return x + b * jnp.searchsorted(edges, jax.lax.stop_gradient(x))


OPERATORS: dict[str, Callable[..., Any]] = {
    one.__name__.strip("_"): one
    for one in (
        _blocks, _transposed, _attended, _pooled, _averaged, _convolved, _padded, _picked, _taken,
        _put, _set_last, _masked, _sorted, _ranked, _cumulative, _associative, _recurrent,
        _backwards, _mapped, _looped, _each_example, _solved, _factored, _turned, _complex,
        _dropped, _noised, _drawn_words, _dropped_paths, _selected, _one_hot, _normalised,
        _weights_normalised, _rotated, _split_heads, _branched, _until, _sliced, _recomputed,
        _jitted, _straight_through, _outer, _quantised,
    )
}  # fmt: skip

# ------------------------------------------------------------ scalars of x, and of scalars

MEANS: dict[str, Callable[..., Any]] = {
    "square": lambda x, y: jnp.square(x - y).mean(),
    "sum": lambda x, y: jnp.abs(x - y).sum() / 100,
    "huber": lambda x, y: optax.huber_loss(x, y).mean(1).sum(0).mean(),
    "likelihood": lambda x, y: -(jax.nn.log_softmax(x) * jax.nn.softmax(y)).sum(-1).mean(),
    "by_token": lambda x, y: jnp.sqrt(jnp.square(x - y).mean((0, 2)) + 0.1).sum(),
    "by_feature": lambda x, y: jnp.log(jnp.square(x).mean((0, 1)) + 0.1).mean(),
    "weighted": lambda x, y: (x * jax.nn.sigmoid(y)).sum() / jax.nn.sigmoid(y).sum(),
    "cosine": lambda x, y: (x * y).sum() / jnp.sqrt(1 + jnp.square(x).sum() * jnp.square(y).sum()),
    "cross": lambda x, y: jnp.square(jnp.einsum("btd,bte->de", x, y)).mean() / 100,
    "last": lambda x, y: jnp.square(x[:, -1]).mean(),
    "ratio": lambda x, y: jnp.where(y > 0, x, 0).sum() / (y > 0).sum(),
    "hinge": lambda x, y: jax.nn.relu(1 - x[..., 0] * jnp.sign(y[..., 0])).mean(),
}

SCALARS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "times": lambda a, b: a * jnp.tanh(b),
    "over": lambda a, b: a / (1 + b**2),
    "exponent": lambda a, b: jnp.exp(-jnp.abs(a)) + b,
    "root": lambda a, b: jnp.sqrt(a**2 + b**2 + 0.1),
    "detached": lambda a, b: a * jax.lax.stop_gradient(b) + b,
    "larger": lambda a, b: jnp.maximum(a, b),
    "chosen": lambda a, b: jnp.where(a > b, a, 2 * b),
}

REPORTS: dict[str, Callable[..., Any]] = {
    "out": lambda x, y: x,
    "each": lambda x, y: jnp.square(x - y).mean((1, 2)),
    "largest": lambda x, y: x.max(),
    "smallest": lambda x, y: x.min((0, 1)),
    "right": lambda x, y: (x.argmax(-1) == y.argmax(-1)).sum(),
    "any": lambda x, y: (x > 1).any(),
    "all": lambda x, y: jnp.isfinite(x).all(),
    "share": lambda x, y: (x > y).mean(),
    "counts": lambda x, y: jnp.zeros(x.shape[-1], int).at[x.argmax(-1)].add(1),
    "spread": lambda x, y: x.std(0),
    "median": lambda x, y: jnp.median(x),
    "place": lambda x, y: jnp.argmax(jnp.square(x - y).mean((1, 2))),
    "token_major": lambda x, y: x.swapaxes(0, 1)[..., 0],
    "histogram": lambda x, y: jnp.histogram(x, bins=4, range=(-2, 2))[0],
    "correlation": lambda x, y: jnp.corrcoef(x[:, 0, 0], y[:, 0, 0]),
    "first": lambda x, y: x[0],
    "norms": lambda x, y: jnp.linalg.norm(x.reshape(len(x), -1), axis=0),
}

PARTS = (
    *(f"operator:{name}" for name in OPERATORS),
    *(f"mean:{name}" for name in MEANS),
    *(f"scalar:{name}" for name in SCALARS),
    *(f"report:{name}" for name in REPORTS),
)


def choose(seed: int) -> tuple[str, ...]:
    """Return the parts of a random step: a chain of operators, means, scalars of them, reports."""
    rng = np.random.default_rng(seed)

    def some(kind: str, names: Any, least: int, most: int) -> list[str]:
        size = int(rng.integers(least, most + 1))
        return [f"{kind}:{name}" for name in rng.choice(list(names), size)]

    return (
        *some("operator", OPERATORS, 2, 6),
        *some("mean", MEANS, 1, 3),
        *some("scalar", SCALARS, 1, 3),
        *some("report", REPORTS, 0, 3),
    )


def num_examples(seed: int) -> int:
    return int(np.random.default_rng(seed + 2).choice([8, 8, 16, 12, 4]))


def training(seed: int, parts: tuple[str, ...]) -> tuple[Any, Any, list[Any]]:
    """Return (step, state, batches) made of the parts."""
    rng = np.random.default_rng(seed + 1)
    examples = num_examples(seed)
    tokens, width = int(rng.choice([3, 4, 6])), int(rng.choice([4, 6, 8, 10]))

    def of(kind: str) -> list[str]:
        return [part.partition(":")[2] for part in parts if part.startswith(f"{kind}:")]

    operators, means, scalars, reports = map(of, ("operator", "mean", "scalar", "report"))
    between = bool(rng.random() < 0.5)  # a mean of what the first half of the chain gives

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> tuple[Any, Any]:
            x, passed = batch["x"], [batch["x"]]
            for number, name in enumerate(operators):
                key = jax.random.fold_in(state["key"], number)
                more = {"n": batch["n"], "key": key, "count": state["count"]}
                x = 0.7 * OPERATORS[name](x, **params[number], **more) + 0.3 * x
                x = x / jnp.sqrt(1 + jnp.square(x).mean(-1, keepdims=True))
                passed.append(x)
            places = [passed[len(passed) // 2] if between and i % 2 else x for i in range(9)]
            values = [MEANS[name](p, batch["y"]) for name, p in zip(means, places)]
            value = values[0] if values else jnp.square(x).mean()
            for name, other in zip(scalars, [*values[1:], *values, *values]):
                value = SCALARS[name](value, other)
            return value, x

        (value, x), gradient = jax.value_and_grad(loss, has_aux=True)(state["params"])
        results = {name: REPORTS[name](x, batch["y"]) for name in reports}
        params = jax.tree.map(lambda p, g: p - 0.05 * g, state["params"], gradient)
        key, count = jax.random.split(state["key"])[0], state["count"] + 1
        new = {"params": params, "key": key, "count": count}
        return new, results | {"loss": value, "norm": optax.tree.norm(gradient)}

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape))

    params = [{"w": 0.6 * normal(width, width) / width**0.5, "b": 0.5 + 0.3 * normal(width)}
              for _ in operators]  # fmt: skip
    state = {"params": params, "key": jax.random.key(seed), "count": jnp.asarray(0)}
    batches = [
        {
            "x": normal(examples, tokens, width),
            "y": normal(examples, tokens, width),
            "n": jnp.asarray(rng.integers(0, tokens, examples)),
        }
        for _ in range(2)
    ]
    return step, state, batches
