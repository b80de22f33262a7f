"""A stage of several programs holds what each reads until it ends, and its results from its
start."""

import jax
import jax.numpy as jnp
from attrs import evolve

from alpa_interchange import SubmeshSpec
from alpa_meta.compat import open_jaxpr
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.program_borders import borders
from alpa_meta.intra_op.selection import build
from alpa_meta.intra_op.stage_problem import StageEqns
from cost_model import CostModel, cluster

SIZE = 4.0 * 64 * 64


def stage(tasks=()):
    """Three products, of which the last reads what the first made."""

    def run(x, w):
        y = x @ w
        z = y @ w
        return (z @ w) @ y

    jaxpr = open_jaxpr(jax.make_jaxpr(run)(*[jnp.zeros((64, 64), "float32")] * 2))
    count = len(jaxpr.eqns)
    return StageEqns(
        eqns=jaxpr.eqns,
        phases=["forward"] * count,
        keys=[None] * count,
        state=frozenset(),
        carried=(),
        kept=frozenset(),
        accumulated=frozenset(),
        num_microbatches=1,
        tasks=tasks,
    )


def usage(of):
    model = CostModel(cluster("h100:1"))
    mesh = model.logical_mesh(SubmeshSpec(num_hosts=1, devices_per_host=1), (1,), ("d",))
    selection = build(of, MeshCosts(mesh, model), "test")
    held = selection.memory.usage([0] * len(selection.problem.num_strategies)).sum(axis=0)
    return [held[time] / SIZE for time in selection.times]


def test_operands_live_until_their_program_ends_and_results_from_its_start():
    assert usage(stage()) == [1, 2, 3, 3]
    # y of the first program; in the second z lives to its end, and y, the result was set aside
    assert usage(stage([0, 1, 2, 2])) == [1, 2, 3, 4]


def test_programs_read_what_others_made():
    of = stage([0, 1, 2, 2])
    y, z = of.eqns[0].outvars[0], of.eqns[1].outvars[0]
    found = borders(of)
    assert found[1].results == (y,) and found[2].results == (z,)
    assert y in found[2].operands and {y, z} <= {*found[4].operands}
    assert borders(evolve(of, tasks=())) == {}
