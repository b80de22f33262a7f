"""The terms of random losses, by name; each is a scalar of what was `seen`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from random_steps.seen import EXAMPLES, WORDS, Seen, Term, layer, layers, output


def _bounded(x: Any) -> Any:
    return jnp.tanh(x)


# ------------------------------------------------------------ means, sums, and functions of them


def mean(s: Seen) -> Any:
    return s.each.mean()


def total(s: Seen) -> Any:
    return s.each.sum() / 50


def exponent_of_mean(s: Seen) -> Any:
    return jnp.exp(-s.each.mean())


def logarithm_of_mean(s: Seen) -> Any:
    return jnp.log(1 + s.out.mean() ** 2)


def root_of_mean(s: Seen) -> Any:
    return jnp.sqrt(s.each.mean())


def masked(s: Seen) -> Any:
    return (s.each * s.batch["mask"]).sum() / jnp.maximum(s.batch["mask"].sum(), 1)


def weighted(s: Seen) -> Any:
    weights = jax.nn.sigmoid(s.last[:, 0])
    return (weights * s.each).sum() / (weights.sum() + 1e-3)


def variance(s: Seen) -> Any:
    return jnp.mean(s.each**2) - s.each.mean() ** 2


def product_of_means(s: Seen) -> Any:
    return s.each.mean() * jnp.square(s.hidden[0]).mean()


def relative_to_mean(s: Seen) -> Any:
    return s.each.mean() / jax.lax.stop_gradient(s.each.mean() + 0.1)


def log_of_sum_of_exponents(s: Seen) -> Any:
    return jnp.log(jnp.exp(-s.each).sum())


def entropy_of_mean(s: Seen) -> Any:
    p = jax.nn.softmax(s.last).mean(0)
    return (p * jnp.log(p)).sum()


def covariance(s: Seen) -> Any:
    centre = s.last.mean(0)
    matrix = s.last.T @ s.last / EXAMPLES - jnp.outer(centre, centre)
    return jnp.sum(jnp.square(matrix) * (1 - jnp.eye(len(matrix))))


def branch_by_mean(s: Seen) -> Any:
    return jnp.where(s.each.mean() > 1, s.each.mean(), jnp.square(s.hidden[0]).mean())


def conditional_on_mean(s: Seen) -> Any:
    x = s.each.mean()
    return jax.lax.cond(x > 1, lambda x: 2 * x, lambda x: x**2, x)


# ------------------------------------------------------------ weights


def decay(s: Seen) -> Any:
    return 1e-2 * sum(jnp.sum(p**2) for p in jax.tree.leaves(s.params))


def decay_of_some(s: Seen) -> Any:
    return 1e-2 * jnp.abs(s.params["layers"][0]["up"]).sum() + s.params["scale"] ** 2


def norm(s: Seen) -> Any:
    return 0.1 * optax.tree.norm(s.params["layers"])


def orthogonal(s: Seen) -> Any:
    w = s.params["layers"][-1]["down"]
    return 1e-2 * jnp.sum(jnp.square(w.T @ w - jnp.eye(w.shape[1])))


def spectral(s: Seen) -> Any:
    w = s.params["layers"][0]["up"]
    left = w @ s.state["direction"]
    right = left @ w
    right = jax.lax.stop_gradient(right / jnp.linalg.norm(right))
    s.new["direction"] = right
    return jnp.linalg.norm(w @ right)


def tied(s: Seen) -> Any:
    decoded = s.hidden[-1] @ s.params["head"].T
    return jnp.square(decoded - s.batch["x"]).mean()


def tied_embedding(s: Seen) -> Any:
    found = output(s.params, s.params["embed"][s.batch["word"]])
    logits = found @ s.params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, s.batch["word"]).mean()


def temperature(s: Seen) -> Any:
    return jnp.exp(s.params["scale"]) * s.each.mean() + s.params["scale"] ** 2


def scaled_decay(s: Seen) -> Any:
    return 0.1 * s.each.mean() * jnp.sum(s.params["head"] ** 2)


def anchored(s: Seen) -> Any:
    pairs = zip(jax.tree.leaves(s.params), jax.tree.leaves(s.state["average"]))
    return 1e-2 * sum(jnp.sum((p - a) ** 2) for p, a in pairs)


# ------------------------------------------------------------ gradients inside


def slope_of_inputs(s: Seen) -> Any:
    slopes = jax.grad(lambda x: output(s.params, x).sum())(s.batch["x"])
    return jnp.square(jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-3) - 1).mean()


def slope_of_each(s: Seen) -> Any:
    def one(x: Any) -> Any:
        return output(s.params, x).sum()

    slopes = jax.vmap(jax.grad(one))(s.batch["x"])
    s.results["slopes"] = slopes.reshape(EXAMPLES, -1).sum(-1)
    return jnp.mean(slopes**2)


def slope_of_weights(s: Seen) -> Any:
    def inner(head: Any) -> Any:
        return jnp.square(s.hidden[-1] @ head - s.batch["y"]).mean()

    return jnp.sum(jnp.square(jax.grad(inner)(s.params["head"])))


def slope_of_all_weights(s: Seen) -> Any:
    def inner(params: Any) -> Any:
        return jnp.square(output(params, s.batch["x"]) - s.batch["y"]).mean()

    return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(inner)(s.params)))


def inner_step(s: Seen) -> Any:
    def inner(params: Any) -> Any:
        return jnp.square(output(params, s.batch["x"]) - s.batch["y"]).mean()

    moved = jax.tree.map(lambda p, g: p - 0.1 * g, s.params, jax.grad(inner)(s.params))
    return jnp.square(output(moved, s.batch["y"]) - s.batch["x"]).mean()


def directional(s: Seen) -> Any:
    _, moved = jax.jvp(lambda x: output(s.params, x), (s.batch["x"],), (s.batch["y"],))
    return jnp.mean(moved**2)


def attacked(s: Seen) -> Any:
    def inner(x: Any) -> Any:
        return jnp.square(output(s.params, x) - s.batch["y"]).mean()

    x = s.batch["x"] + 0.1 * jnp.tanh(jax.grad(inner)(s.batch["x"]) * 10)
    return inner(jax.lax.stop_gradient(x))


def curved(s: Seen) -> Any:
    def inner(x: Any) -> Any:
        return output(s.params, x).sum()

    pushed = jax.grad(lambda x: jnp.vdot(jax.grad(inner)(x), s.batch["y"]))(s.batch["x"])
    return 0.1 * jnp.mean(pushed**2)


# ------------------------------------------------------------ experts, noise, choices


def experts(s: Seen) -> Any:
    p = jax.nn.softmax(s.last @ s.params["router"])
    share = jax.nn.one_hot(p.argmax(-1), 4).mean(0)
    s.results["share"] = share
    return 4 * jnp.sum(share * p.mean(0))


def top_experts(s: Seen) -> Any:
    scores, chosen = jax.lax.top_k(s.last @ s.params["router"], 2)
    gates = jax.nn.softmax(scores)
    dispatch = (gates[..., None] * jax.nn.one_hot(chosen, 4)).sum(1)
    mixed = jnp.einsum("be,bd,ed->bd", dispatch, s.last, s.params["embed"][:4])
    return jnp.square(mixed).mean() + jnp.square(jax.nn.logsumexp(scores, -1)).mean()


def dropout(s: Seen) -> Any:
    kept = jax.random.bernoulli(s.key, 0.7, s.hidden[0].shape)
    hidden = jnp.where(kept, s.hidden[0] / 0.7, 0)
    return jnp.square(layer(s.params["layers"][-1], hidden)).mean()


def noise(s: Seen) -> Any:
    key = jax.random.fold_in(s.key, s.state["count"])
    x = s.batch["x"] + 0.1 * jax.random.normal(key, s.batch["x"].shape)
    return jnp.square(output(s.params, x) - s.batch["y"]).mean()


def key_of_each(s: Seen) -> Any:
    keys = jax.random.split(s.key, EXAMPLES)
    drawn = jax.vmap(lambda key: jax.random.uniform(key))(keys)
    return (drawn * s.each).mean()


def noised_weights(s: Seen) -> Any:
    head = s.params["head"] + 0.1 * jax.random.normal(s.key, s.params["head"].shape)
    return jnp.square(s.hidden[-1] @ head - s.batch["y"]).mean()


def diffusion(s: Seen) -> Any:
    time, spread = jax.random.split(s.key)
    t = jax.random.uniform(time, (EXAMPLES,) + (1,) * (s.batch["x"].ndim - 1))
    drawn = jax.random.normal(spread, s.batch["x"].shape)
    found = output(s.params, jnp.sqrt(1 - t**2) * s.batch["x"] + t * drawn)
    return jnp.mean((found - drawn) ** 2)


def best_features(s: Seen) -> Any:
    return jax.lax.top_k(s.hidden[-1], 3)[0].mean()


def sorted_features(s: Seen) -> Any:
    return (jnp.sort(s.last, -1) * jnp.linspace(0, 1, s.last.shape[-1])).mean()


def running_sums(s: Seen) -> Any:
    return (
        jnp.square(jnp.cumsum(s.hidden[-1], -1)).mean()
        + 0.1 * jnp.cumprod(_bounded(s.out), -1).mean()
    )


def rolled(s: Seen) -> Any:
    return (s.out * jnp.roll(s.out, 1, -1) * jnp.flip(s.batch["y"], -1)).mean()


def gathered_labels(s: Seen) -> Any:
    logits = jax.nn.log_softmax(s.last)
    labels = s.batch["word"] % logits.shape[-1]
    s.results["hits"] = (logits.argmax(-1) == labels).sum()
    s.results["guess"] = logits.argmax(-1)
    return -logits[jnp.arange(EXAMPLES), labels].mean()


def embedding(s: Seen) -> Any:
    return jnp.square(s.last - s.params["embed"][s.batch["word"]]).mean()


def words_counted(s: Seen) -> Any:
    counts = jnp.zeros(WORDS).at[s.batch["word"]].add(s.each)
    s.new["usage"] = jax.lax.stop_gradient(0.9 * s.state["usage"] + counts)
    return jnp.square(counts).sum() / 50


def segments(s: Seen) -> Any:
    sums = jax.ops.segment_sum(s.last, s.batch["word"] % 4, 4)
    sizes = jax.ops.segment_sum(jnp.ones(EXAMPLES), s.batch["word"] % 4, 4)
    return jnp.square(sums / (1 + sizes)[:, None]).mean()


def codebook(s: Seen) -> Any:
    far = jnp.square(s.last[:, None] - s.params["embed"]).sum(-1)
    near = s.params["embed"][far.argmin(-1)]
    passed = s.last + jax.lax.stop_gradient(near - s.last)
    s.results["code"] = far.argmin(-1)
    commit = jnp.square(s.last - jax.lax.stop_gradient(near)).mean()
    return jnp.square(passed @ s.params["head"]).mean() + 0.3 * commit


# ------------------------------------------------------------ state


def teacher(s: Seen) -> Any:
    target = output(s.state["average"], s.batch["x"])
    return jnp.mean((s.out - jax.lax.stop_gradient(target)) ** 2)


def centred_teacher(s: Seen) -> Any:
    target = layers(s.state["average"], s.batch["x"])[-1]
    target = target if target.ndim == 2 else target.mean(1)
    p = jax.nn.softmax(target - s.state["centre"])
    s.new["centre"] = 0.9 * s.state["centre"] + 0.1 * target.mean(0)
    return -(p * jax.nn.log_softmax(s.last)).sum(-1).mean()


def queue(s: Seen) -> Any:
    s.new["queue"] = jnp.concatenate([s.state["queue"][EXAMPLES:], jax.lax.stop_gradient(s.last)])
    return jax.nn.logsumexp(s.last @ s.state["queue"].T, -1).mean()


def replay(s: Seen) -> Any:
    weights = s.state["priorities"][s.batch["place"]]
    s.new["priorities"] = (
        s.state["priorities"].at[s.batch["place"]].set(jax.lax.stop_gradient(s.each))
    )
    return (weights * s.each).mean()


def warmed_up(s: Seen) -> Any:
    share = jnp.minimum(1.0, (s.state["count"] + 1) / 4)
    return share * jnp.square(s.hidden[0]).mean()


def switched_on(s: Seen) -> Any:
    def on(x: Any) -> Any:
        return jnp.square(layer(s.params["layers"][0], x)).mean()

    return jax.lax.cond(s.state["count"] > 0, on, lambda x: 0.0 * x.sum(), s.hidden[-1])


# ------------------------------------------------------------ functions with their own gradients


@jax.custom_vjp
def _reversed(x: Any) -> Any:
    return x


_reversed.defvjp(lambda x: (x, None), lambda _, g: (-0.5 * g,))


def reversed_gradient(s: Seen) -> Any:
    return jnp.square(_reversed(s.hidden[0]) @ s.params["head"]).mean()


@jax.custom_jvp
def _rounded(x: Any) -> Any:
    return jnp.round(4 * x) / 4


_rounded.defjvp(lambda primals, tangents: (_rounded(*primals), tangents[0]))


def rounded(s: Seen) -> Any:
    return jnp.square(_rounded(s.hidden[-1]) @ _rounded(s.params["head"])).mean()


def fixed_point(s: Seen) -> Any:
    w = 0.1 * s.params["head"]
    found = jax.lax.fori_loop(0, 5, lambda _, z: jnp.tanh(z @ w + s.last), jnp.zeros_like(s.last))
    return jnp.square(found).mean()


def recurrence(s: Seen) -> Any:
    def body(h: Any, x: Any) -> Any:
        h = jnp.tanh(0.5 * h + x[:, None] * s.params["scale"])
        return h, h.mean(-1)

    _, sums = jax.lax.scan(body, s.last, s.last.T)
    s.results["sums"] = sums.T
    return jnp.square(sums).mean()


def spectrum(s: Seen) -> Any:
    return jnp.square(jnp.abs(jnp.fft.rfft(s.last))).mean() / 8


def convolved(s: Seen) -> Any:
    kernel = s.params["layers"][0]["up"][:, :3].T[:, None, :]  # [3, 1, width]
    kernel = jnp.transpose(kernel[..., :1], (2, 1, 0))  # [1, 1, 3]
    found = jax.lax.conv_general_dilated(s.last[:, None], kernel, (1,), "SAME")
    return jnp.square(found).mean()


def recomputed(s: Seen) -> Any:
    again = jax.checkpoint(lambda p, x: output(p, x))(s.params, s.batch["y"])
    return jnp.square(again - s.batch["x"]).mean()


def of_each_example(s: Seen) -> Any:
    s.results["each"] = s.each
    s.results["out"] = s.out
    s.results["largest"] = s.each.max()
    return jnp.square(s.out).mean()


# ------------------------------------------------------------ what mixes examples


def median(s: Seen) -> Any:
    return (s.each / jax.lax.stop_gradient(jnp.median(s.each))).mean()


def hard_examples(s: Seen) -> Any:
    return jax.lax.top_k(s.each, 3)[0].mean()


def worst(s: Seen) -> Any:
    return s.each.max()


def log_sum_exp(s: Seen) -> Any:
    return jax.nn.logsumexp(s.each)


def contrastive(s: Seen) -> Any:
    features = s.last / jnp.linalg.norm(s.last, axis=-1, keepdims=True)
    other = s.batch["y"].reshape(EXAMPLES, -1)[:, : features.shape[-1]]
    return optax.softmax_cross_entropy_with_integer_labels(
        features @ other.T, jnp.arange(EXAMPLES)
    ).mean()


def batch_normalised(s: Seen) -> Any:
    normal = (s.last - s.last.mean(0)) * jax.lax.rsqrt(s.last.var(0) + 1e-3)
    s.new["centre"] = jax.lax.stop_gradient(0.9 * s.state["centre"] + 0.1 * s.last.mean(0))
    return jnp.square(normal @ s.params["head"] - s.last).mean()


def shuffled(s: Seen) -> Any:
    order = jax.random.permutation(s.key, EXAMPLES)
    return jnp.square(s.last - s.last[order]).mean()


def mixed_up(s: Seen) -> Any:
    x = 0.7 * s.batch["x"] + 0.3 * s.batch["x"][::-1]
    return jnp.square(output(s.params, x)).mean()


MIXING = {
    "median": median,
    "hard_examples": hard_examples,
    "worst": worst,
    "log_sum_exp": log_sum_exp,
    "contrastive": contrastive,
    "batch_normalised": batch_normalised,
    "shuffled": shuffled,
    "mixed_up": mixed_up,
}
"""Terms that need all examples at once: refused in several microbatches."""

TERMS: dict[str, Term] = {
    one.__name__: one
    for one in (
        mean, total, exponent_of_mean, logarithm_of_mean, root_of_mean, masked, weighted,
        variance, product_of_means, relative_to_mean, log_of_sum_of_exponents,
        entropy_of_mean, covariance, branch_by_mean, conditional_on_mean, decay, decay_of_some,
        norm, orthogonal, spectral, tied, tied_embedding, temperature, scaled_decay, anchored,
        slope_of_inputs, slope_of_each, slope_of_weights, slope_of_all_weights, inner_step,
        directional, attacked, curved, experts, top_experts, dropout, noise, key_of_each,
        noised_weights, diffusion, best_features, sorted_features, running_sums, rolled,
        gathered_labels, embedding, words_counted, segments, codebook, teacher, centred_teacher,
        queue, replay, warmed_up, switched_on, reversed_gradient, rounded, fixed_point,
        recurrence, spectrum, convolved, recomputed, of_each_example,
    )
}  # fmt: skip
