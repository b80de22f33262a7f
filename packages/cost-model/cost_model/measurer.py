"""Timing programs through JAX: the only module that imports jax, and only when it is used.

An accelerator runs behind the host that gives it work, so a program is timed there by many runs
between two looks at the clock, and a kernel that is shorter than giving it out is repeated by a
loop inside its program; what the loop itself takes is measured by an empty one and taken off.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

Measurement = tuple[str, tuple[Any, ...]]
"""A method of a measurer and its arguments."""

# seconds that the kernels of one program should take on an accelerator, and between two looks at
# the clock there: a thousand times the microseconds that starting and waiting take
_LONG = 0.01
_MOST_REPEATS = 500  # of the smallest kernels, which take microseconds: some milliseconds in all
# of a current GPU, to tell how often a kernel has to be repeated; only the order matters
_FLOPS = {"float32": 5e13, "tensorfloat32": 3e14, "bfloat16": 6e14}
_BANDWIDTH = 3e12
_SCALE = 1 / 64  # of float8 operands: what is timed is up to 1/16, and e4m3 is finest near one
_COMPILERS = 8  # at once: each takes a processor and up to a gigabyte


class Measurer(Protocol):
    """What calibration needs timed; every method returns the seconds of one run."""

    def describe(self) -> tuple[str, str, str, float]:
        """Return (platform, device kind, versions, bytes of memory per device)."""

    def num_devices(self) -> int:
        """Return how many devices collectives run on."""

    def prepare(self, measurements: Sequence[Measurement]) -> None:
        """Make ready the programs of measurements, so that timing them takes less."""

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
        """Time one transformer layer on one device: (forward, forward and backward).

        float8 is that of the operands of its four products; the rest is bfloat16.
        """


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
        self._ready: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
        self._empty: float | None = None  # seconds of a turn of a loop

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

    def prepare(self, measurements: Sequence[Measurement]) -> None:
        """Compile what is timed, several programs at once: compilers of GPUs try kernels out."""
        kinds = {"matmul": 1, "elementwise": 1, "collective": 1, "layer": 2}
        programs = [("loop", ())] + [
            (f"layer_{part}" if method == "layer" else method, arguments)
            for method, arguments in measurements
            if method in kinds
            for part in ("forward", "both")[: kinds[method]]
        ]
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda each: self._compiled(*each), programs))

    def matmul(self, m: int, n: int, k: int, dtype: str, num_devices: int) -> float:
        turns = self._turns(2.0 * m * n * k / _FLOPS.get(dtype, 1e15))
        return self._looped(self._seconds_of("matmul", (m, n, k, dtype, num_devices)), turns, 2)

    def elementwise(self, size: int, dtype: str) -> float:
        turns = self._turns(12.0 * size / _BANDWIDTH)
        return self._looped(self._seconds_of("elementwise", (size, dtype)), turns, 1)

    def collective(self, kind: str, bytes: int, num_devices: int) -> float:
        return self._seconds_of("collective", (kind, bytes, num_devices))

    def to_device(self, bytes: int) -> float:
        numpy = importlib.import_module("numpy")
        source = numpy.ones(bytes // 4, numpy.float32)
        device = self._jax.devices()[0]
        return self._time(lambda: self._jax.device_put(source, device, may_alias=False), alone=True)

    def layer(self, hidden: int, seq: int, batch: int, dtype: str) -> tuple[float, float]:
        given = (hidden, seq, batch, dtype)
        return self._seconds_of("layer_forward", given), self._seconds_of("layer_both", given)

    # ------------------------------------------------------------------ programs

    def _matmul(
        self, m: int, n: int, k: int, dtype: str, num_devices: int
    ) -> tuple[Callable[..., Any], list[Any]]:
        jax, jnp = self._jax, self._numpy
        mesh, spec = self._mesh(num_devices)
        sharding = jax.sharding.NamedSharding(mesh, spec("x"))
        stored = "float32" if dtype == "tensorfloat32" else dtype
        precision = "high" if dtype == "tensorfloat32" else "highest"
        turns = self._turns(2.0 * m * n * k / _FLOPS.get(dtype, 1e15))
        made = stored if _bytes_of(stored) > 1 else "bfloat16"

        def product(a: Any, b: Any) -> Any:
            if _bytes_of(stored) == 1:
                return _scaled_product(jnp, "dmk,dkn->dmn", a, b)
            return jnp.einsum("dmk,dkn->dmn", a, b, precision=precision)

        def run(a: Any, b: Any) -> Any:
            if turns == 1:
                return product(a, b)

            def turn(_: Any, carried: Any) -> Any:
                left, _ = carried
                result = product(left, b)
                return left.at[0, 0, 0].set(result[0, 0, 0].astype(stored)), result

            return jax.lax.fori_loop(0, turns, turn, (a, jnp.zeros((num_devices, m, n), made)))[1]

        shapes = [(num_devices, m, k), (num_devices, k, n)]
        return jax.jit(run, out_shardings=sharding), [(shape, stored, sharding) for shape in shapes]

    def _elementwise(self, size: int, dtype: str) -> tuple[Callable[..., Any], list[Any]]:
        turns = self._turns(12.0 * size / _BANDWIDTH)

        def run(a: Any, b: Any) -> Any:
            if turns == 1:
                return a * b + 1
            return self._jax.lax.fori_loop(0, turns, lambda _, x: x * b + 1, a)

        return self._jax.jit(run), [((size,), dtype, None)] * 2

    def _loop(self) -> tuple[Callable[..., Any], list[Any]]:
        """Return a loop of which each turn is one kernel, as is what counts the turns."""
        loop = self._jax.lax.fori_loop
        run = self._jax.jit(lambda x: loop(0, _MOST_REPEATS, lambda _, y: y * 0.5 + 1, x))
        return run, [((), "float32", None)]

    def _collective(
        self, kind: str, bytes: int, num_devices: int
    ) -> tuple[Callable[..., Any], list[Any]]:
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
        mapped = self._jax.shard_map(
            body, mesh=mesh, in_specs=spec("x"), out_specs=spec("x"), check_vma=False
        )
        return self._jax.jit(mapped), [((local * num_devices,), "float32", sharding)]

    def _layer_forward(self, *given: Any) -> tuple[Callable[..., Any], list[Any]]:
        layer, shapes = self._layer(*given)
        return self._jax.jit(layer), shapes

    def _layer_both(self, *given: Any) -> tuple[Callable[..., Any], list[Any]]:
        layer, shapes = self._layer(*given)

        def loss(weights: Sequence[Any], x: Any) -> Any:
            return layer(x, *weights).astype(self._numpy.float32).sum()

        both = self._jax.grad(loss, argnums=(0, 1))
        return self._jax.jit(lambda x, *weights: both(weights, x)), shapes

    def _layer(
        self, hidden: int, seq: int, batch: int, dtype: str
    ) -> tuple[Callable[..., Any], list[Any]]:
        jnp, jax = self._numpy, self._jax
        heads = max(1, hidden // 64)
        stored = dtype if _bytes_of(dtype) > 1 else "bfloat16"
        product = jnp.matmul if stored == dtype else _narrow_product(jax, jnp)

        def normalised(x: Any) -> Any:
            centred = x - x.mean(-1, keepdims=True)
            return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)

        def layer(x: Any, qkv: Any, out: Any, up: Any, down: Any) -> Any:
            q, k, v = jnp.split(product(normalised(x), qkv), 3, axis=-1)
            q, k, v = (t.reshape(batch, seq, heads, -1).swapaxes(1, 2) for t in (q, k, v))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / (q.shape[-1] ** 0.5)
            mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
            x = x + product(mixed.swapaxes(1, 2).reshape(batch, seq, hidden), out)
            return x + product(jax.nn.gelu(product(normalised(x), up)), down)

        widths = [(hidden, 3 * hidden), (hidden, hidden)]
        widths += [(hidden, 4 * hidden), (4 * hidden, hidden)]
        return layer, [(shape, stored, None) for shape in [(batch, seq, hidden), *widths]]

    def _compiled(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """Return a compiled program and (shape, dtype, sharding) of what it takes."""
        key = (method, *arguments)
        if key not in self._ready:
            run, shapes = getattr(self, f"_{method}")(*arguments)
            structs = [
                self._jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                for shape, dtype, sharding in shapes
            ]
            self._ready[key] = run.lower(*structs).compile(), shapes
        return self._ready[key]

    # ------------------------------------------------------------------ timing

    def _seconds_of(self, method: str, arguments: tuple[Any, ...]) -> float:
        run, shapes = self._compiled(method, arguments)
        given = [self._filled(*shape) for shape in shapes]
        return self._time(lambda: run(*given))

    def _turns(self, seconds: float) -> int:
        """Return how often a kernel of about so many seconds is repeated in its program."""
        if self._on_cpu:
            return 1
        return max(1, min(_MOST_REPEATS, round(_LONG / seconds)))

    def _looped(self, seconds: float, turns: int, loops: int) -> float:
        """Return the seconds of one turn without `loops` kernels of the loop itself."""
        if turns == 1:
            return seconds
        if self._empty is None:
            self._empty = self._seconds_of("loop", ()) / _MOST_REPEATS / 2
        return max(seconds / turns - loops * self._empty, 1e-7)  # a kernel takes more than that

    @property
    def _on_cpu(self) -> bool:
        return bool(self._jax.devices()[0].platform == "cpu")

    def _mesh(self, num_devices: int) -> tuple[Any, Any]:
        numpy = importlib.import_module("numpy")
        devices = numpy.array(self._jax.local_devices()[:num_devices])
        return self._jax.sharding.Mesh(devices, ("x",)), self._jax.sharding.PartitionSpec

    def _filled(self, shape: tuple[int, ...], dtype: str, sharding: Any = None) -> Any:
        """Return numbers of all signs and mantissas: processors are faster on equal ones."""
        jnp, lax = self._numpy, self._jax.lax

        def numbers() -> Any:
            total = jnp.zeros(shape, jnp.uint32)
            for dim in range(len(shape)):
                place = lax.broadcasted_iota(jnp.uint32, shape, dim)
                total = total * jnp.uint32(40503) + place
            mixed = (total * jnp.uint32(2654435761)) >> 8
            return (mixed.astype(jnp.float32) / 2**23 - 1).astype(dtype) / 16

        return self._jax.jit(numbers, out_shardings=sharding)()

    def _time(self, run: Callable[[], Any], alone: bool = False) -> float:
        """Return the seconds of a run; on accelerators, if not `alone`, of one among many."""
        for _ in range(2):
            self._jax.block_until_ready(run())
        start = time.perf_counter()
        self._jax.block_until_ready(run())
        times = [time.perf_counter() - start]
        many = 1 if alone or self._on_cpu else max(1, min(50, int(_LONG / times[0])))
        stop = time.perf_counter() + self._seconds
        while len(times) < self._repeats and (len(times) < 2 or time.perf_counter() < stop):
            start = time.perf_counter()
            for _ in range(many - 1):
                run()
            self._jax.block_until_ready(run())
            times.append((time.perf_counter() - start) / many)
        return min(times)


def _bytes_of(dtype: str) -> int:
    """Return the bytes of an element of a dtype by name."""
    return 1 if dtype.startswith("float8") else 2 if dtype.endswith("16") else 4


def _scaled_product(jnp: Any, equation: str, a: Any, b: Any) -> Any:
    """Return a product of float8 operands in the form in which XLA knows one: operands that are
    widened and scaled (openxla.org/xla, fp8 matmuls on Hopper)."""
    wide = [each.astype(jnp.bfloat16) * jnp.bfloat16(_SCALE) for each in (a, b)]
    return jnp.einsum(equation, *wide)


def _narrow_product(jax: Any, jnp: Any) -> Callable[[Any, Any], Any]:
    """Return x @ w by float8 operands, forward (e4m3) and backward (gradients in e5m2), with
    scales that are given, as delayed scaling has them (arXiv 2209.05433)."""

    def narrow(x: Any, dtype: Any) -> Any:
        return (x * jnp.bfloat16(1 / _SCALE)).astype(dtype)

    def forward(x: Any, w: Any) -> Any:
        kept = narrow(x, jnp.float8_e4m3fn), narrow(w, jnp.float8_e4m3fn)
        return _scaled_product(jnp, "bsi,io->bso", *kept), kept

    def backward(kept: Any, gradient: Any) -> Any:
        given = narrow(gradient, jnp.float8_e5m2)
        return (
            _scaled_product(jnp, "bso,io->bsi", given, kept[1]),
            _scaled_product(jnp, "bsi,bso->io", kept[0], given),
        )

    product = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    product.defvjp(forward, backward)
    wrapped: Callable[[Any, Any], Any] = product
    return wrapped
