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


def block(layer, x):
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
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


def measured(run, steps=4):
    """Return the losses of some steps, and the seconds of the fastest."""
    state, losses, seconds = make_state(jax.random.key(0)), [], []
    for step in range(steps):
        tokens, start = batch_of(step), time.perf_counter()
        state, loss = jax.block_until_ready(run(state, tokens))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    return np.array(losses), min(seconds[1:])


if __name__ == "__main__":
    expected, alone = measured(jax.jit(train_step))
    print(f"one device: {alone:.2f} s a step, losses {expected.round(4).tolist()}")
    for num_stages in (2, 4):
        seconds = {}
        for slices in (None, (320, 256, 240, 208)):
            options = alpa.Options(num_stages=num_stages, num_microbatches=1, token_slices=slices)
            pipeline = alpa.parallelize(train_step, cluster=f"host:{num_stages}", options=options)
            losses, seconds[slices] = measured(pipeline)
            apart = np.abs(losses - expected).max()
            told = f"slices of {slices} tokens" if slices else "whole sequences"
            print(f"{num_stages} stages, {told}: {seconds[slices]:.2f} s a step, ", end="")
            print(f"losses differ by {apart:.1e}")
        whole, sliced = seconds.values()
        print(f"{num_stages} stages: {whole / sliced:.2f} times as fast in slices")
