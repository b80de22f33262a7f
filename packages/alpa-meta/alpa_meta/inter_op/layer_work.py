"""The forward equations as the ops that layers are clustered from, with their seconds.

An op weighs what it takes on one device by the cluster's constants, without this machine's
calibration: a saved plan names its layers, and its cluster gives the same ones again anywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import stage_dp
from alpa_interchange import ClusterSpec, SubmeshSpec
from alpa_meta.compat import JaxprEqn, Literal, Var
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.arithmetic import arithmetic
from alpa_meta.intra_op.folding import eqn_signature
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.operators import flops, kernel_kind, traffic_bytes
from alpa_meta.region_bindings import bindings, trips
from cost_model import CostModel


def op_sequence(eqns: Sequence[JaxprEqn], cluster: ClusterSpec) -> stage_dp.OpSequence:
    """Return the equations as ops of seconds on one device of the cluster's first kind."""
    number: dict[Var, int] = {}

    def of(var: Var) -> int:
        return number.setdefault(var, len(number))

    operands = [[of(a) for a in eqn.invars if not isinstance(a, Literal)] for eqn in eqns]
    results = [[of(var) for var in eqn.outvars] for eqn in eqns]
    signatures = [eqn_signature(eqn) for eqn in eqns]
    costs = one_device(cluster)
    known: dict[Hashable, float] = {}
    for eqn, signature in zip(eqns, signatures, strict=True):
        if signature not in known:
            known[signature] = eqn_seconds(eqn, costs)
    return stage_dp.OpSequence(
        seconds=[known[signature] for signature in signatures],
        operands=operands,
        results=results,
        value_bytes={place: tensor_bytes(var) for var, place in number.items()},
        signatures=signatures,
    )


def one_device(cluster: ClusterSpec) -> MeshCosts:
    """Return the costs on one device of the cluster's first kind."""
    model = CostModel(cluster)
    mesh = model.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=1), (1,), ("x",))
    return MeshCosts(mesh, model)


def eqn_seconds(eqn: JaxprEqn, costs: MeshCosts) -> float:
    """Return the seconds of one equation on one device, of a region those of its bodies."""
    bound = bindings(eqn)
    if bound is not None:
        inner = sum(eqn_seconds(one, costs) for body in bound.bodies for one in body.eqns)
        return inner * trips(eqn)
    dtype, passes = arithmetic(eqn, costs.platform)
    return costs.compute_seconds(kernel_kind(eqn), passes * flops(eqn), traffic_bytes(eqn), dtype)
