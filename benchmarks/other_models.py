"""Plans large models of kinds that the corpus lacks: diffusion, recommendation, recurrence, graphs.

    .venv/bin/python benchmarks/other_models.py
    .venv/bin/python benchmarks/other_models.py --model dit --model mixer --cluster p3.16xlarge:2x8

Each is a training step in flax, traced on shapes, with the optimiser that is usual for it; nothing
is run. Seconds are CPU seconds from the step to the plan, tracing included. A model that takes more
than `--limit` CPU seconds, each in a process of its own, is reported and the next one planned. Exit
status 0 if all have a plan.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import typer
from jax import ShapeDtypeStruct as Shape

import alpa_meta

HALF, SINGLE, WHOLE = jnp.bfloat16, jnp.float32, jnp.int32
Array = jax.Array


def dense(width: int, x: Array) -> Array:
    found: Array = nn.Dense(width, dtype=HALF)(x)
    return found


def norm(x: Array) -> Array:
    found: Array = nn.LayerNorm(dtype=HALF)(x)
    return found


def attend(heads: int, *inputs: Array, mask: Array | None = None) -> Array:
    found: Array = nn.MultiHeadDotProductAttention(heads, dtype=HALF)(*inputs, mask=mask)
    return found


def feed_forward(x: Array) -> Array:
    width = x.shape[-1]
    return dense(width, nn.gelu(dense(4 * width, norm(x))))


def waves(times: Array, count: int) -> Array:
    """Return sines and cosines of times at `count` frequencies."""
    phases = times[:, None] * jnp.exp(-jnp.arange(count) / count * math.log(10_000))
    return jnp.concatenate([jnp.cos(phases), jnp.sin(phases)], axis=-1)


class DiT(nn.Module):
    """DiT-XL/2 (Peebles and Xie 2023)."""

    @nn.compact
    def __call__(self, images: Array, times: Array, labels: Array) -> Array:
        batch, height, width, channels = images.shape
        x = nn.Conv(1152, (2, 2), (2, 2), dtype=HALF)(images).reshape(batch, -1, 1152)
        x = x + self.param("places", nn.initializers.normal(), (1, x.shape[1], 1152))
        told = dense(1152, waves(times, 128)) + nn.Embed(1001, 1152, dtype=HALF)(labels)
        for _ in range(28):
            shift = jnp.split(dense(6 * 1152, nn.silu(told))[:, None], 6, axis=-1)
            y = norm(x) * (1 + shift[0]) + shift[1]
            x = x + shift[2] * attend(16, y)
            y = norm(x) * (1 + shift[3]) + shift[4]
            x = x + shift[5] * dense(1152, nn.gelu(dense(4 * 1152, y)))
        x = dense(4 * channels, norm(x)).reshape(batch, height // 2, width // 2, 2, 2, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape)


class UNet(nn.Module):
    """The U-Net of Stable Diffusion 1 (Rombach et al. 2022)."""

    @nn.compact
    def __call__(self, images: Array, times: Array, text: Array) -> Array:
        told = dense(1280, nn.silu(dense(1280, waves(times, 160))))
        x = nn.Conv(320, (3, 3), dtype=HALF)(images)
        kept, widths = [x], (320, 640, 1280, 1280)
        for level, width in enumerate(widths):
            for _ in range(2):
                x = self.block(x, told, text, width, attends=level < 3)
                kept.append(x)
            if level < 3:
                x = nn.Conv(width, (3, 3), (2, 2), dtype=HALF)(x)
                kept.append(x)
        x = self.block(self.block(x, told, text, 1280, True), told, text, 1280, False)
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(3):
                x = jnp.concatenate([x, kept.pop()], axis=-1)
                x = self.block(x, told, text, width, attends=level < 3)
            if level:
                larger = (len(x), 2 * x.shape[1], 2 * x.shape[2], width)
                x = nn.Conv(width, (3, 3), dtype=HALF)(jax.image.resize(x, larger, "nearest"))
        return nn.Conv(4, (3, 3), dtype=HALF)(nn.silu(nn.GroupNorm(32, dtype=HALF)(x)))

    def block(self, x: Array, told: Array, text: Array, width: int, attends: bool) -> Array:
        y = nn.Conv(width, (3, 3), dtype=HALF)(nn.silu(nn.GroupNorm(32, dtype=HALF)(x)))
        y = y + dense(width, nn.silu(told))[:, None, None]
        y = nn.Conv(width, (3, 3), dtype=HALF)(nn.silu(nn.GroupNorm(32, dtype=HALF)(y)))
        x = y + (x if x.shape[-1] == width else nn.Conv(width, (1, 1), dtype=HALF)(x))
        if not attends:
            return x
        y = nn.GroupNorm(32, dtype=HALF)(x).reshape(len(x), -1, width)
        y = y + attend(8, norm(y))
        y = y + attend(8, norm(y), text)
        value, gate = jnp.split(dense(8 * width, norm(y)), 2, axis=-1)
        found: Array = x + (y + dense(width, value * nn.gelu(gate))).reshape(x.shape)
        return found


class DLRM(nn.Module):
    """A recommendation model (Naumov et al. 2019) with 26 tables of 4 million rows."""

    @nn.compact
    def __call__(self, numbers: Array, categories: Array) -> Array:
        x = numbers
        for width in (512, 256, 128):
            x = nn.relu(nn.Dense(width)(x))
        tables = [nn.Embed(4_000_000, 128)(categories[:, k]) for k in range(26)]
        features = jnp.stack([x, *tables], axis=1)
        products = jnp.einsum("bid,bjd->bij", features, features)
        rows, columns = jnp.triu_indices(27, 1)
        x = jnp.concatenate([x, products[:, rows, columns]], axis=-1)
        for width in (1024, 1024, 512, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


class Mixer(nn.Module):
    """MLP-Mixer-H/14 (Tolstikhin et al. 2021)."""

    @nn.compact
    def __call__(self, images: Array) -> Array:
        x = nn.Conv(1280, (14, 14), (14, 14), dtype=HALF)(images)
        x = x.reshape(len(x), -1, 1280)
        for _ in range(32):
            tokens = jnp.swapaxes(norm(x), 1, 2)
            tokens = dense(tokens.shape[2], nn.gelu(dense(640, tokens)))
            x = x + jnp.swapaxes(tokens, 1, 2)
            x = x + feed_forward(x)
        return nn.Dense(1000)(x.mean(axis=1))


class ConvNeXt(nn.Module):
    """ConvNeXt-XL (Liu et al. 2022)."""

    @nn.compact
    def __call__(self, images: Array) -> Array:
        x = norm(nn.Conv(256, (4, 4), (4, 4), dtype=HALF)(images))
        for level, (width, depth) in enumerate(zip((256, 512, 1024, 2048), (3, 3, 27, 3))):
            if level:
                x = nn.Conv(width, (2, 2), (2, 2), dtype=HALF)(norm(x))
            for place in range(depth):
                y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=HALF)(x)
                small = nn.initializers.constant(1e-6)
                x = x + self.param(f"scale_{level}_{place}", small, (width,)) * feed_forward(y)
        return nn.Dense(1000)(norm(x.mean(axis=(1, 2))))


class LSTM(nn.Module):
    """Eight LSTMs of width 2048 over 512 tokens."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(50_000, 2048, dtype=HALF)(tokens)
        for _ in range(8):
            outputs: Any = nn.RNN(nn.OptimizedLSTMCell(2048, dtype=HALF))(norm(x))
            x = x + outputs
        return dense(50_000, x)


class Hyena(nn.Module):
    """Long convolutions by FFT in place of attention (Poli et al. 2023)."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x, length = nn.Embed(32_000, 1536, dtype=HALF)(tokens), tokens.shape[1]
        for _ in range(24):
            gate, other, value = jnp.split(dense(3 * 1536, norm(x)), 3, axis=-1)
            times = jnp.linspace(0, 1, length)[:, None]
            filters = jnp.sin(nn.Dense(64)(jnp.sin(nn.Dense(64)(times))))
            filters = nn.Dense(1536)(filters) * jnp.exp(-5 * times)
            spectrum = jnp.fft.rfft((other * value).astype(SINGLE), 2 * length, axis=1)
            spectrum = spectrum * jnp.fft.rfft(filters, 2 * length, axis=0)
            mixed = jnp.fft.irfft(spectrum, 2 * length, axis=1)[:, :length]
            x = x + dense(1536, gate * mixed.astype(HALF))
            x = x + feed_forward(x)
        return dense(32_000, x)


class MeshGraphNet(nn.Module):
    """Fifteen rounds of messages on meshes of 5,000 nodes (Pfaff et al. 2021)."""

    @nn.compact
    def __call__(self, nodes: Array, edges: Array, sources: Array, targets: Array) -> Array:
        h, e = nn.Dense(512)(nodes), nn.Dense(512)(edges)
        take = jax.vmap(lambda values, at: values[at])
        total = jax.vmap(lambda values, at: jax.ops.segment_sum(values, at, nodes.shape[1]))
        for _ in range(15):
            e = e + self.perceptron(jnp.concatenate([e, take(h, sources), take(h, targets)], -1))
            h = h + self.perceptron(jnp.concatenate([h, total(e, targets)], -1))
        return nn.Dense(3)(h)

    def perceptron(self, x: Array) -> Array:
        found: Array = nn.LayerNorm()(nn.Dense(512)(nn.relu(nn.Dense(512)(x))))
        return found


class Whisper(nn.Module):
    """Whisper-large (Radford et al. 2023): speech encoder and text decoder of 32 layers each."""

    @nn.compact
    def __call__(self, sound: Array, tokens: Array) -> Array:
        x = nn.gelu(nn.Conv(1280, (3,), dtype=HALF)(sound))
        x = nn.gelu(nn.Conv(1280, (3,), (2,), dtype=HALF)(x))
        x = x + self.param("times", nn.initializers.normal(), x.shape[1:]).astype(HALF)
        for _ in range(32):
            x = x + attend(20, norm(x))
            x = x + feed_forward(x)
        words = nn.Embed(51_866, 1280, dtype=HALF)
        y = words(tokens)
        y = y + self.param("places", nn.initializers.normal(), y.shape[1:]).astype(HALF)
        for _ in range(32):
            y = y + attend(20, norm(y), mask=nn.make_causal_mask(tokens))
            y = y + attend(20, norm(y), x)
            y = y + feed_forward(y)
        logits: Array = words.attend(norm(y))
        return logits


class EvoformerBlock(nn.Module):
    """A block of AlphaFold 2 (Jumper et al. 2021), whose attention of pairs is along both dims."""

    @nn.compact
    def __call__(self, msa: Array, pair: Array) -> tuple[Array, Array]:
        x = norm(msa)
        query, key, value, gate = (nn.DenseGeneral((8, 32), dtype=HALF)(x) for _ in range(4))
        bias = jnp.moveaxis(dense(8, norm(pair)), -1, 1)[:, None]
        scores = jnp.einsum("bsihd,bsjhd->bshij", query, key) / 6 + bias
        mixed = jnp.einsum("bshij,bsjhd->bsihd", nn.softmax(scores), value) * nn.sigmoid(gate)
        msa = msa + nn.DenseGeneral(256, axis=(-2, -1), dtype=HALF)(mixed)
        msa = msa + jnp.swapaxes(attend(8, jnp.swapaxes(norm(msa), 1, 2)), 1, 2)
        msa = msa + feed_forward(msa)
        x = norm(msa)
        outer = jnp.einsum("bsic,bsjd->bijcd", dense(32, x), dense(32, x)) / msa.shape[1]
        pair = pair + dense(128, outer.reshape(*outer.shape[:3], -1))
        for triangles in ("bikc,bjkc->bijc", "bkic,bkjc->bijc"):
            x = norm(pair)
            one, other = (nn.sigmoid(dense(128, x)) * dense(128, x) for _ in range(2))
            found = dense(128, norm(jnp.einsum(triangles, one, other)))
            pair = pair + nn.sigmoid(dense(128, x)) * found
        pair = pair + attend(4, norm(pair))
        pair = pair + jnp.swapaxes(attend(4, norm(jnp.swapaxes(pair, 1, 2))), 1, 2)
        return msa, pair + feed_forward(pair)


class Evoformer(nn.Module):
    """Sixteen blocks, each computed again in the backward pass, and distances of pairs."""

    @nn.compact
    def __call__(self, msa: Array, pair: Array) -> Array:
        msa, pair = dense(256, msa), dense(128, pair)
        for _ in range(16):
            msa, pair = nn.remat(EvoformerBlock)()(msa, pair)
        return dense(64, pair)


class Swin(nn.Module):
    """Swin-L (Liu et al. 2021): attention in windows of 7 x 7, every second one shifted."""

    @nn.compact
    def __call__(self, images: Array) -> Array:
        x = norm(nn.Conv(192, (4, 4), (4, 4), dtype=HALF)(images))
        for level, depth in enumerate((2, 2, 18, 2)):
            if level:
                batch, height, width, channels = x.shape
                x = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
                x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height // 2, width // 2, -1)
                x = dense(2 * channels, norm(x))
            for place in range(depth):
                x = x + self.windows(x, 6 * 2**level, 3 * (place % 2))
                x = x + feed_forward(x)
        return nn.Dense(1000)(norm(x).mean(axis=(1, 2)))

    def windows(self, x: Array, heads: int, shift: int) -> Array:
        batch, height, width, channels = x.shape
        y = jnp.roll(norm(x), (-shift, -shift), (1, 2))
        y = y.reshape(batch, height // 7, 7, width // 7, 7, channels).transpose(0, 1, 3, 2, 4, 5)
        y = attend(heads, y.reshape(-1, 49, channels))
        y = y.reshape(batch, height // 7, width // 7, 7, 7, channels).transpose(0, 1, 3, 2, 4, 5)
        return jnp.roll(y.reshape(x.shape), (shift, shift), (1, 2))


class Perceiver(nn.Module):
    """Perceiver (Jaegle et al. 2021): 512 latents read 50,176 pixels eight times, each time with
    the same weights, and six layers follow that share theirs too."""

    @nn.compact
    def __call__(self, images: Array) -> Array:
        pixels = norm(dense(256, images.reshape(len(images), -1, 3)))
        latents = self.param("latents", nn.initializers.normal(), (512, 1024)).astype(HALF)
        x = jnp.broadcast_to(latents, (len(images), 512, 1024))
        read = nn.MultiHeadDotProductAttention(1, qkv_features=256, out_features=1024, dtype=HALF)
        layers = [nn.MultiHeadDotProductAttention(8, dtype=HALF) for _ in range(6)]
        for _ in range(8):
            x = x + read(norm(x), pixels)
            for layer in layers:
                x = x + layer(norm(x))
                x = x + feed_forward(x)
        return nn.Dense(1000)(norm(x).mean(axis=1))


class Towers(nn.Module):
    """A recommender of four towers of other depths and widths, and experts per task (Ma et al.
    2018)."""

    @nn.compact
    def __call__(self, ids: Array, history: Array, text: Array, numbers: Array) -> Array:
        user = nn.Embed(2_000_000, 256)(ids).reshape(len(ids), -1)
        items = nn.Embed(1_000_000, 256, dtype=HALF)(history)
        for _ in range(4):
            items = items + attend(8, norm(items))
            items = items + feed_forward(items)
        words = nn.Embed(30_000, 512, dtype=HALF)(text)
        for _ in range(6):
            words = words + attend(8, norm(words))
            words = words + feed_forward(words)
        for width in (1024, 512, 256):
            user = nn.relu(nn.Dense(width)(user))
        for width in (256, 256):
            numbers = nn.relu(nn.Dense(width)(numbers))
        features = jnp.concatenate([user, items.mean(1), words.mean(1), numbers], axis=-1)
        experts = [nn.relu(nn.Dense(512)(nn.relu(nn.Dense(1024)(features)))) for _ in range(8)]
        found = []
        for _ in range(3):
            shares = nn.softmax(nn.Dense(8)(features))
            mixed = sum(shares[:, k : k + 1] * one for k, one in enumerate(experts))
            found.append(nn.Dense(1)(nn.relu(nn.Dense(256)(mixed))))
        return jnp.concatenate(found, axis=-1)


# Of each the inputs and what is wanted of it.
MODELS: dict[str, tuple[nn.Module, tuple[Shape, ...], Shape]] = {
    "dit": (
        DiT(),
        (Shape((256, 32, 32, 4), SINGLE), Shape((256,), SINGLE), Shape((256,), WHOLE)),
        Shape((256, 32, 32, 4), SINGLE),
    ),
    "unet": (
        UNet(),
        (Shape((256, 64, 64, 4), SINGLE), Shape((256,), SINGLE), Shape((256, 77, 768), HALF)),
        Shape((256, 64, 64, 4), SINGLE),
    ),
    "dlrm": (
        DLRM(),
        (Shape((65_536, 13), SINGLE), Shape((65_536, 26), WHOLE)),
        Shape((65_536,), SINGLE),
    ),
    "mixer": (Mixer(), (Shape((1024, 224, 224, 3), HALF),), Shape((1024,), WHOLE)),
    "convnext": (ConvNeXt(), (Shape((1024, 224, 224, 3), HALF),), Shape((1024,), WHOLE)),
    "lstm": (LSTM(), (Shape((256, 512), WHOLE),), Shape((256, 512), WHOLE)),
    "hyena": (Hyena(), (Shape((64, 4096), WHOLE),), Shape((64, 4096), WHOLE)),
    "graphs": (
        MeshGraphNet(),
        (
            Shape((32, 5_000, 16), SINGLE),
            Shape((32, 30_000, 8), SINGLE),
            Shape((32, 30_000), WHOLE),
            Shape((32, 30_000), WHOLE),
        ),
        Shape((32, 5_000, 3), SINGLE),
    ),
    "whisper": (
        Whisper(),
        (Shape((256, 3_000, 128), HALF), Shape((256, 448), WHOLE)),
        Shape((256, 448), WHOLE),
    ),
    "evoformer": (
        Evoformer(),
        (Shape((32, 128, 256, 49), HALF), Shape((32, 256, 256, 65), HALF)),
        Shape((32, 256, 256), WHOLE),
    ),
    "swin": (Swin(), (Shape((1024, 224, 224, 3), HALF),), Shape((1024,), WHOLE)),
    "perceiver": (Perceiver(), (Shape((256, 224, 224, 3), HALF),), Shape((256,), WHOLE)),
    "towers": (
        Towers(),
        (
            Shape((16_384, 8), WHOLE),
            Shape((16_384, 50), WHOLE),
            Shape((16_384, 32), WHOLE),
            Shape((16_384, 32), SINGLE),
        ),
        Shape((16_384, 3), SINGLE),
    ),
}


def training_step(name: str) -> tuple[Callable[..., Any], Any, Any]:
    """Return (step, state, batch) of a model, the last two as shapes."""
    model, inputs, wanted = MODELS[name]
    optimiser = optax.adagrad(1e-2) if name == "dlrm" else optax.adamw(1e-4)

    def init(inputs: tuple[Array, ...]) -> Any:
        params = model.init(jax.random.key(0), *inputs)["params"]
        return params, optimiser.init(params)

    def loss(params: Any, batch: Any) -> Array:
        inputs, wanted = batch
        found = jnp.asarray(model.apply({"params": params}, *inputs), SINGLE)
        if wanted.dtype == WHOLE:
            each = optax.softmax_cross_entropy_with_integer_labels(found, wanted)
        elif name == "dlrm":
            each = optax.sigmoid_binary_cross_entropy(found, wanted)
        else:
            each = (found - wanted) ** 2
        return jnp.mean(each)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimiser.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, jax.eval_shape(init, inputs), (inputs, wanted)


def plan_one(name: str, cluster: str) -> str:
    """Return a line on the plan of a model, made in this process."""
    step, state, batch = training_step(name)
    parameters = sum(one.size for one in jax.tree.leaves(state[0]))
    start = time.process_time()
    plan = alpa_meta.parallelize(step, cluster=cluster, cache=False).plan_for(state, batch)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"{parameters / 1e9:5.2f} B  {time.process_time() - start:6.1f} CPU s  "
        f"{resident / 1e9:4.1f} GB resident  {plan.step_seconds:7.4f} s a step  gap {plan.gap:5.1%}"
        f"  {plan.num_stages} stages, {plan.num_microbatches} microbatches"
    )


def main(
    model: Annotated[list[str] | None, typer.Option(help="One of them; default: all.")] = None,
    cluster: Annotated[str, typer.Option(help="Cluster to plan for.")] = "h100:2x8",
    limit: Annotated[float, typer.Option(help="CPU seconds of each.")] = 600.0,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Print what planning each model takes, and its plan."""
    if here:
        assert model is not None
        print(json.dumps(plan_one(model[0], cluster)))
        return
    failed = 0
    seconds = math.ceil(limit)
    for name in model or MODELS:
        command = [sys.executable, __file__, "--here", "--model", name, "--cluster", cluster]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1)),
        )
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            print(f"{name:9} {json.loads(lines[-1])}", flush=True)
            continue
        failed += 1
        why = done.stderr.strip().splitlines()[-1:] or [f"ended by signal {-done.returncode}"]
        print(f"{name:9} FAILED: {why[0]}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
