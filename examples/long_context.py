"""Trains on one long sequence with a pipeline along its tokens, and compares it with whole ones.

A batch of one sequence leaves a pipeline nothing but its bubble: one stage works, the others wait.
Cut into slices of tokens, the next stage starts on the first while this one works on the second.

Run with: python examples/long_context.py
"""

import os
import time

# a device is to be one core, as it would be one accelerator: no operator takes the others' cores
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false " + os.environ.get("XLA_FLAGS", "")
os.environ["NPROC"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_meta as alpa

jax.config.update("jax_num_cpu_devices", 4)

TOKENS, WIDTH, HEADS, VOCABULARY, LAYERS = 1024, 256, 4, 512, 4
SLICES = (320, 256, 240, 208)  # the later ones, which look back on more, are shorter
adam = optax.adam(1e-3)


def make_state(key):
    keys = iter(jax.random.split(key, 4 * LAYERS + 2))

    def made(*shape):
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    layers = [
        {
            "qkv": made(WIDTH, 3 * WIDTH),
            "out": made(WIDTH, WIDTH),
            "up": made(WIDTH, 4 * WIDTH),
            "down": made(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    params = {
        "embed": made(VOCABULARY, WIDTH),
        "positions": 0.1 * made(TOKENS, WIDTH),
        "layers": layers,
    }
    return params, adam.init(params)


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(layer, x, num_heads=HEADS):
    heads = (*x.shape[:2], num_heads, x.shape[2] // num_heads)
    queries, keys, values = (
        part.reshape(heads) for part in jnp.split(normed(x) @ layer["qkv"], 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
    x = x + mixed.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]


def loss_of(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["positions"]
    for layer in params["layers"]:
        x = block(layer, x)
    logits = normed(x) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens):
    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    updates, moments = adam.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def batch_of(step):
    return jax.random.randint(jax.random.key(step), (1, TOKENS + 1), 0, VOCABULARY)


def losses_and_seconds(runs, steps=6):
    """Return for each of `runs` the losses of some steps and the seconds of the fastest; the runs
    take turns, so that what else the machine does slows all of them."""
    states = {name: make_state(jax.random.key(0)) for name in runs}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps):
        tokens = batch_of(step)
        for name, run in runs.items():
            start = time.perf_counter()
            states[name], loss = jax.block_until_ready(run(states[name], tokens))
            seconds[name].append(time.perf_counter() - start)
            losses[name].append(float(loss))
    return {name: (np.array(losses[name]), min(seconds[name][1:])) for name in runs}


def pipeline(num_stages, **slices):
    options = alpa.Options(num_stages=num_stages, num_microbatches=1, **slices)
    return alpa.parallelize(train_step, cluster=f"host:{num_stages}", options=options)


def main():
    for num_stages in (2, 4):
        found = losses_and_seconds(
            {
                "one device": jax.jit(train_step),
                "whole sequences": pipeline(num_stages, num_token_slices=1),
                "slices": pipeline(num_stages, token_slices=SLICES),
            }
        )
        expected, _ = found["one device"]
        for name, (losses, seconds) in found.items():
            apart = np.abs(losses - expected).max()
            print(f"{num_stages} stages, {name}: {seconds:.2f} s a step, losses {apart:.1e} apart")
        gain = found["whole sequences"][1] / found["slices"][1]
        print(f"{num_stages} stages: {gain:.2f} times as fast in slices of {SLICES} tokens")


if __name__ == "__main__":
    main()
