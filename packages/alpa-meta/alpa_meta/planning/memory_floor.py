"""The least memory that the state of a step takes under any plan, known before any search.

State lives through the whole step, each array once at least over all devices; an array of a single
stage is cut into at most as many parts as the mesh has devices and its dims allow. Gradients,
activations and temporaries come on top and are not counted here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
from attrs import frozen

from alpa_interchange import ClusterSpec
from alpa_meta.errors import InfeasibleError
from alpa_meta.inter_op.meshes import divisors, memory_per_device, usable_memory
from alpa_meta.options import Options
from alpa_meta.step.arguments import abstract_leaf, is_array
from alpa_meta.step.pure_call import flat_objects
from alpa_meta.types import PyTree

if TYPE_CHECKING:  # the command refuses what cannot fit before it imports the planner
    from alpa_meta.step.program import Step

_MOST_DEVICES = 1 << 20  # up to which the number that would hold the state is searched
_NARROW = 2  # bytes of an element of bfloat16
# Of a state, what its optimiser does not keep for itself: with bfloat16 parameters, of which it has
# copies in float32 and two moments, 2 of 14 bytes.
_LEAST_NEAR = 1 / 8


@frozen
class Room:
    """What a cluster has for a program, summed and of its smallest device."""

    num_devices: int
    total: float
    least: float


def room(cluster: ClusterSpec, options: Options) -> Room:
    """Return the bytes that plans may use on a cluster."""
    each = [
        (group.num_devices, usable_memory(cluster, number, options.memory))
        for number, group in enumerate(cluster.host_groups)
    ]
    total = sum(count * limit for count, limit in each)
    return Room(cluster.num_devices, total, min(limit for _, limit in each))


def check_state_fits(step: Step, cluster: ClusterSpec, options: Options) -> None:
    """Raise InfeasibleError if the state alone takes more memory than there is.

    Tracing a large step takes seconds. What is no batch by its shapes is looked at before.
    """
    check_arguments_fit(step.args, cluster, options)
    leaves = step.program(1).inputs if step.offloads else step.leaves
    held = [leaf.aval for leaf in leaves if leaf.role == "state" and leaf.memory == "device"]
    _check(held, cluster, options)


def check_arguments_fit(args: Sequence[PyTree], cluster: ClusterSpec, options: Options) -> None:
    """Raise InfeasibleError if arguments that cannot be the batch take more memory than there is:
    those whose arrays differ in their first dims."""
    found: list[jax.ShapeDtypeStruct] = []
    for number, argument in enumerate(args):
        if number in options.static_argnums or number in (options.batch_argnums or ()):
            continue
        arrays = [abstract_leaf(leaf) for leaf in flat_objects(argument)[0] if is_array(leaf)]
        if len({array.shape[:1] for array in arrays}) > 2:
            found += arrays
    # What may be kept in the memory of the hosts is not known before tracing.
    elsewhere = options.offload != "none" and any(one.host_link for one in cluster.host_groups)
    _check(found, cluster, options, _LEAST_NEAR if elsewhere else 1.0)


def _check(
    state: list[jax.ShapeDtypeStruct], cluster: ClusterSpec, options: Options, share: float = 1.0
) -> None:
    """Raise InfeasibleError if this share of the state is more than there is memory."""
    has = room(cluster, options)
    needed = _per_device(state, has.num_devices, options)
    limit = has.total / has.num_devices
    if share * needed <= limit:
        return
    least = math.ceil(needed - limit)
    raise InfeasibleError(
        f"no plan fits the memory: the state alone takes {_size(state):,.0f} bytes, at least "
        f"{needed:,.0f} on each of {has.num_devices} devices; each device has {limit:,.0f} bytes "
        f"for the program and lacks at least {least:,} more on cluster {cluster.name!r}; "
        f"cheapest remedy: {', or '.join(_remedies(state, cluster, options, limit))}",
        float(least),
    )


def _remedies(
    state: list[jax.ShapeDtypeStruct], cluster: ClusterSpec, options: Options, limit: float
) -> Iterator[str]:
    """Yield what would hold the state, with the bytes per device that it would then take."""
    own = min(memory_per_device(cluster, n) for n in range(len(cluster.host_groups)))
    needed = _per_device(state, cluster.num_devices, options)
    if options.memory is not None and needed <= own:
        yield f"allow the {own:,.0f} bytes that a device has (memory)"
    narrow = _per_device(state, cluster.num_devices, options, _narrowed)
    if narrow <= limit:
        yield f"keep its wider floats in bfloat16 (then {narrow:,.0f} bytes on each device)"
    count = enough_devices(
        lambda number: _per_device(state, number, options), cluster.num_devices, limit
    )
    needed = _per_device(state, count, options)
    if needed <= limit:
        yield f"use at least {count} devices (then {needed:,.0f} bytes of state on each)"
    else:
        yield f"use devices with at least {needed:,.0f} bytes: that much of the state is not cut"


def enough_devices(needed: Callable[[int], float], least: int, limit: float) -> int:
    """Return `least` doubled until `needed` bytes on each device are within `limit`, or the most
    devices that are looked at."""
    count = least
    while needed(count) > limit and count < _MOST_DEVICES:
        count *= 2
    return count


def array_bytes(array: jax.ShapeDtypeStruct) -> float:
    """Return the bytes of an array; 8 an element for extended dtypes such as keys."""
    return float(math.prod(array.shape) * getattr(array.dtype, "itemsize", 8))


def _narrowed(array: jax.ShapeDtypeStruct) -> float:
    """Return the bytes of an array with its floats in bfloat16."""
    kind = getattr(array.dtype, "kind", "")
    width = min(_NARROW, array.dtype.itemsize) if kind == "f" else None
    return array_bytes(array) if width is None else float(math.prod(array.shape) * width)


def _size(state: list[jax.ShapeDtypeStruct]) -> float:
    return sum(map(array_bytes, state))


def _per_device(
    state: list[jax.ShapeDtypeStruct],
    num_devices: int,
    options: Options,
    size_of: Callable[[jax.ShapeDtypeStruct], float] = array_bytes,
) -> float:
    """Return the least bytes of state per device.

    Several stages hold arrays on fewer devices each, so that there only the sum counts.
    """
    if options.num_stages != 1:
        return sum(map(size_of, state)) / num_devices
    return sum(size_of(array) / most_parts(tuple(array.shape), num_devices) for array in state)


@functools.lru_cache(maxsize=1 << 14)
def most_parts(shape: tuple[int, ...], num_devices: int) -> int:
    """Return the most equal parts of an array, one dim of which is cut by each prime of a mesh of
    `num_devices`: the largest product of divisors of dims that divides it."""
    reached = {1}
    for size in shape:
        parts = [part for part in divisors(num_devices) if size % part == 0]
        reached = {a * b for a in reached for b in parts if num_devices % (a * b) == 0}
    return max(reached)
