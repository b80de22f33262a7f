"""Planning under a limit of the memory peak, against all choices of a small problem."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from attrs import evolve

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.corpus import build as corpus_model
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.memory_limit import solve, solve_within
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.options import Options
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.planning.planner import make_plan
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster
from ilp_sharding import check

MESH = LogicalMesh(axes=(MeshAxis(name="x", size=4, bandwidth=1e9, latency=1e-6),))


def selection():
    def step(weight, batch):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weight)
        return weight - gradient, loss

    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = Step(step, shapes).program(1)
    scope = stage_scope(program, outlook_of(program, Options(), cluster("h100:8"))[0].staging, 0, 1)
    return build(scope.eqns, MeshCosts(MESH, CostModel(cluster("h100:4"))), "small")


def test_the_answer_is_the_cheapest_of_all_choices_that_fit():
    found = selection()
    choices = list(itertools.product(*map(range, found.problem.num_strategies)))
    assert len(choices) < 20_000
    costs = {choice: check(found.problem, choice).cost for choice in choices}
    finite = [choice for choice in choices if costs[choice] < float("inf")]
    peaks = {choice: found.memory.peak(choice).total for choice in finite}
    free = solve(found.problem, Options())
    for share in (1.0, 0.8, 0.6, 0.5):
        limit = share * found.memory.peak(free.choice).total
        fitting = [costs[choice] for choice in finite if peaks[choice] <= limit]
        answer = solve_within(found, Options(), limit, free)
        if answer.choice is None:
            assert not fitting
        else:
            assert peaks[answer.choice] <= limit
            assert answer.lower_bound is not None
            assert answer.lower_bound <= min(fitting) * (1 + 1e-12)
            if answer.status == "optimal":
                assert answer.objective == pytest.approx(min(fitting))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_without_solver_seconds_the_clock_changes_nothing(monkeypatch, share):
    found = selection()
    free = solve(found.problem, Options())
    limit = share * found.memory.peak(free.choice).total
    answer = solve_within(found, Options(), limit, free)
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    slow = solve_within(found, Options(), limit, solve(found.problem, Options()))
    assert evolve(slow, seconds=0.0) == evolve(answer, seconds=0.0)


@pytest.mark.sample(shape=1)
@pytest.mark.parametrize("shape", [(2, 4), (8,)])
def test_a_scanned_model_costs_what_the_unrolled_one_costs(shape):
    """But for the update, whose kernels are launched for all layers at once: at most 15 % here."""
    found = []
    for name in ("gpt-scan", "gpt-remat"):
        model = corpus_model(name, "tiny")
        options = Options(num_stages=1, num_microbatches=1, mesh_shape=shape)
        step = Step(model.train_step, (model.state, model.batch))
        found.append(make_plan(step, cluster("h100:8"), options).plan.step_seconds)
    assert found[0] <= found[1] <= 1.15 * found[0]
