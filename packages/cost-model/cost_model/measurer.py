"""Timing programs through JAX: the only module that imports jax, and only when it is used."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol


class Measurer(Protocol):
    """What calibration needs timed; every method returns the seconds of one run."""

    def describe(self) -> tuple[str, str, str, float]:
        """Return (platform, device kind, versions, bytes of memory per device)."""

    def num_devices(self) -> int:
        """Return how many devices collectives run on."""

    def matmul(self, m: int, n: int, k: int, dtype: str, num_devices: int) -> float:
        """Time an (m, k) x (k, n) product on each of `num_devices` devices at once.

        float32 is computed at highest precision, tensorfloat32 is float32 at high precision.
        """

    def elementwise(self, size: int, dtype: str) -> float:
        """Time x * y + 1 over `size` elements on one device."""

    def collective(self, kind: str, bytes: int, num_devices: int) -> float:
        """Time a collective whose buffer has `bytes` (as in COLLECTIVE_BYTES)."""

    def to_device(self, bytes: int) -> float:
        """Time copying `bytes` from host memory to one device."""

    def layer(self, hidden: int, seq: int, batch: int, dtype: str) -> tuple[float, float]:
        """Time one transformer layer on one device: (forward, forward and backward)."""


class JaxMeasurer:
    """Times with whatever backend JAX finds.

    Each program runs twice to warm up, then at most `repeats` times within `seconds`; the fastest
    counts, since other work on the machine only ever adds time.
    """

    def __init__(self, repeats: int = 7, seconds: float = 0.25) -> None:
        try:
            self._jax: Any = importlib.import_module("jax")
        except ImportError:
            raise ImportError(
                "calibration needs jax: install cost-model[calibrate], or jax for your accelerator"
            ) from None
        self._numpy: Any = importlib.import_module("jax.numpy")
        self._repeats, self._seconds = repeats, seconds

    def describe(self) -> tuple[str, str, str, float]:
        device = self._jax.devices()[0]
        try:
            memory = float((device.memory_stats() or {}).get("bytes_limit", 0.0))
        except (AttributeError, RuntimeError, NotImplementedError):
            memory = 0.0
        client = getattr(device, "client", None)
        runtime = str(getattr(client, "platform_version", "")).split("\n")[0].strip()
        versions = f"jax {self._jax.__version__}" + (f", {runtime}" if runtime else "")
        return str(device.platform), str(device.device_kind), versions, memory

    def num_devices(self) -> int:
        return len(self._jax.local_devices())

    def matmul(self, m: int, n: int, k: int, dtype: str, num_devices: int) -> float:
        jnp = self._numpy
        mesh, spec = self._mesh(num_devices)
        sharding = self._jax.sharding.NamedSharding(mesh, spec("x"))
        stored = "float32" if dtype == "tensorfloat32" else dtype
        precision = "high" if dtype == "tensorfloat32" else "highest"
        left = self._filled((num_devices, m, k), stored, sharding)
        right = self._filled((num_devices, k, n), stored, sharding)
        run = self._jax.jit(
            lambda a, b: jnp.einsum("dmk,dkn->dmn", a, b, precision=precision),
            out_shardings=sharding,
        )
        return self._time(lambda: run(left, right))

    def elementwise(self, size: int, dtype: str) -> float:
        left, right = self._filled((size,), dtype), self._filled((size,), dtype)
        run = self._jax.jit(lambda a, b: a * b + 1)
        return self._time(lambda: run(left, right))

    def collective(self, kind: str, bytes: int, num_devices: int) -> float:
        lax = self._jax.lax
        mesh, spec = self._mesh(num_devices)
        sharding = self._jax.sharding.NamedSharding(mesh, spec("x"))
        count = max(num_devices, bytes // 4 // num_devices * num_devices)
        ring = [(i, (i + 1) % num_devices) for i in range(num_devices)]
        bodies: dict[str, tuple[int, Callable[[Any], Any]]] = {
            "all-reduce": (count, lambda a: lax.psum(a, "x")),
            "all-gather": (count // num_devices, lambda a: lax.all_gather(a, "x", tiled=True)),
            "reduce-scatter": (count, lambda a: lax.psum_scatter(a, "x", tiled=True)),
            "all-to-all": (count, lambda a: lax.all_to_all(a, "x", 0, 0, tiled=True)),
            "collective-permute": (count, lambda a: lax.ppermute(a, "x", ring)),
        }
        local, body = bodies[kind]
        buffer = self._filled((local * num_devices,), "float32", sharding)
        mapped = self._jax.shard_map(
            body, mesh=mesh, in_specs=spec("x"), out_specs=spec("x"), check_vma=False
        )
        run = self._jax.jit(mapped)
        return self._time(lambda: run(buffer))

    def to_device(self, bytes: int) -> float:
        numpy = importlib.import_module("numpy")
        source = numpy.ones(bytes // 4, numpy.float32)
        device = self._jax.devices()[0]
        return self._time(lambda: self._jax.device_put(source, device, may_alias=False))

    def layer(self, hidden: int, seq: int, batch: int, dtype: str) -> tuple[float, float]:
        jnp, jax = self._numpy, self._jax
        heads = max(1, hidden // 64)
        shapes = [
            (hidden, 3 * hidden),
            (hidden, hidden),
            (hidden, 4 * hidden),
            (4 * hidden, hidden),
        ]
        weights = [self._filled(shape, dtype) for shape in shapes]
        states = self._filled((batch, seq, hidden), dtype)

        def normalised(x: Any) -> Any:
            centred = x - x.mean(-1, keepdims=True)
            return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)

        def layer(weights: Any, x: Any) -> Any:
            qkv, out, up, down = weights
            q, k, v = jnp.split(normalised(x) @ qkv, 3, axis=-1)
            q, k, v = (t.reshape(batch, seq, heads, -1).swapaxes(1, 2) for t in (q, k, v))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / (q.shape[-1] ** 0.5)
            mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
            x = x + mixed.swapaxes(1, 2).reshape(batch, seq, hidden) @ out
            return x + jax.nn.gelu(normalised(x) @ up) @ down

        def loss(weights: Any, x: Any) -> Any:
            return layer(weights, x).astype(jnp.float32).sum()

        forward = jax.jit(layer)
        both = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return (
            self._time(lambda: forward(weights, states)),
            self._time(lambda: both(weights, states)),
        )

    def _mesh(self, num_devices: int) -> tuple[Any, Any]:
        numpy = importlib.import_module("numpy")
        devices = numpy.array(self._jax.local_devices()[:num_devices])
        return self._jax.sharding.Mesh(devices, ("x",)), self._jax.sharding.PartitionSpec

    def _filled(self, shape: tuple[int, ...], dtype: str, sharding: Any = None) -> Any:
        jnp = self._numpy
        make = self._jax.jit(lambda: jnp.full(shape, 0.01, dtype), out_shardings=sharding)
        return make()

    def _time(self, run: Callable[[], Any]) -> float:
        for _ in range(2):
            self._jax.block_until_ready(run())
        times: list[float] = []
        stop = time.perf_counter() + self._seconds
        while len(times) < self._repeats and (len(times) < 2 or time.perf_counter() < stop):
            start = time.perf_counter()
            self._jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
        return min(times)
