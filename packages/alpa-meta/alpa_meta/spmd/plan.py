"""How every equation of a jaxpr runs on a mesh."""

from __future__ import annotations

from attrs import frozen

from alpa_interchange import ShardingSpec, Strategy


@frozen
class JaxprPlan:
    """One strategy per equation of an inlined jaxpr, and the specs of its inputs and outputs.

    Constants of the jaxpr are whole on every device. Between equations, a value has the spec its
    producer's strategy gives it and is converted to the spec its reader's strategy asks for.
    """

    inputs: tuple[ShardingSpec, ...]
    strategies: tuple[Strategy | RegionPlan, ...]
    outputs: tuple[ShardingSpec, ...]


@frozen
class RegionPlan:
    """How a region (scan, while, cond, recomputation) runs: its border specs, its bodies' plans.

    `bodies` are (body,) for scan and recomputation, (cond, body) for while, the branches for cond.
    A carry has one spec, and the leading dim of scanned inputs is never sharded. Where a body of a
    scan or recomputation leaves a sum unreduced, be it a carry, `results` have it after its
    completion, behind the region.
    """

    operands: tuple[ShardingSpec, ...]
    results: tuple[ShardingSpec, ...]
    bodies: tuple[JaxprPlan, ...]


def stacked(spec: ShardingSpec) -> ShardingSpec:
    """Return the spec of values of this spec stacked along a new leading dim."""
    return ShardingSpec(((), *spec.dims), spec.partial)
