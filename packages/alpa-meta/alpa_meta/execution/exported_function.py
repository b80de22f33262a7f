"""Functions of arrays as programs for other processes (`jax.export`); random keys travel as words.

Keys are of dtypes that only jax knows, so a program takes and gives their words, and wraps them
inside. Handles of such words stand for the keys again (`RemoteArray.as_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from alpa_meta.compat import no_mesh
from alpa_meta.errors import PlanError
from alpa_meta.types import Function, HostArray, PyTree
from mesh_runtime import ExportedProgram, RemoteArray

_EXPORT_PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}
_ANY_CUSTOM_CALL = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
"""Programs run in the version of jax that exported them (the workers' handshake), so that it does
not matter which targets another version may lack: layouts of Fourier transforms, Triton kernels."""


def key_impl(array: PyTree) -> str | None:
    """Return the name of the implementation of random keys (or their shape), None of others."""
    dtype = getattr(array, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    found: list[str] = []
    jax.eval_shape(
        lambda keys: found.append(str(jax.random.key_impl(keys))), jax.ShapeDtypeStruct((), dtype)
    )
    return found[0]


def as_keys(value: PyTree, like: PyTree) -> PyTree:
    """Return a handle of words as random keys, if `like` is an array or shape of keys."""
    impl = key_impl(like)
    return value.as_keys(impl) if impl and isinstance(value, RemoteArray) else value


def words(value: PyTree) -> PyTree:
    """Return an array as it travels: random keys as their words."""
    if isinstance(value, RemoteArray) or key_impl(value) is None:
        return value
    return jax.random.key_data(value)


def exported(
    function: Function[Sequence[jax.Array]],
    arguments: Sequence[jax.ShapeDtypeStruct],
    in_shardings: Sequence[NamedSharding],
    out_shardings: Sequence[NamedSharding],
    platform: str,
    *,
    donated: tuple[str, ...] = (),
    options: Mapping[str, str | bool | int | float] | None = None,
) -> ExportedProgram:
    """Return `function` of arrays on the mesh of the shardings as bytes."""
    impls = [key_impl(argument) for argument in arguments]

    def on_words(*given: jax.Array) -> tuple[jax.Array, ...]:
        values = [
            value if impl is None else jax.random.wrap_key_data(value, impl=impl)
            for value, impl in zip(given, impls, strict=True)
        ]
        return tuple(map(words, function(*values)))

    jitted = jax.jit(on_words, in_shardings=tuple(in_shardings), out_shardings=tuple(out_shardings))
    shapes = [
        argument if impl is None else jax.eval_shape(jax.random.key_data, argument)
        for argument, impl in zip(arguments, impls, strict=True)
    ]
    taken = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
        for one, sharding in zip(shapes, in_shardings, strict=True)
    ]
    with no_mesh():
        try:
            export = jax.export.export(
                jitted,
                platforms=[_EXPORT_PLATFORMS[platform]],
                disabled_checks=_ANY_CUSTOM_CALL,
            )
            program = export(*taken)
        except (ValueError, NotImplementedError) as error:
            raise PlanError(
                f"a program of the step cannot be sent to workers on Ray: {error} Host callbacks "
                "(jax.debug.print, jax.pure_callback, checks of values while a step runs) stay in "
                "their process: take them out of the step, or use runtime='in-process'"
            ) from error
    mesh: AbstractMesh = [*in_shardings, *out_shardings][0].mesh.abstract_mesh
    return ExportedProgram(
        program=bytes(program.serialize()),
        donated=donated,
        options=dict(options or {}),
        shape=tuple(mesh.axis_sizes),
        axis_names=tuple(mesh.axis_names),
    )


def as_host_array(value: PyTree) -> HostArray:
    """Return an argument as it is sent: an array of the host, in a dtype of this jax."""
    array = np.asarray(words(value))
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
