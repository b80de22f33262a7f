"""The selection problem of a stage, and what a choice costs and holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_interchange import SubmeshSpec
from alpa_meta.compat import Literal
from alpa_meta.execution.tasks import build_tasks
from alpa_meta.inter_op.layer_costs import solved_costs
from alpa_meta.inter_op.layering import assign_layers
from alpa_meta.inter_op.meshes import logical_meshes
from alpa_meta.inter_op.split_backward import with_split_backward
from alpa_meta.inter_op.stage_selection import boundary_bytes, stage_scope
from alpa_meta.inter_op.staging import Staging, assign_stages
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build
from alpa_meta.step.program import Program, Step
from cost_model import CostModel, cluster
from ilp_sharding import solve
from stage_dp import SCHEDULE_RULES, emit

SHAPE = jax.ShapeDtypeStruct
WIDTH, BATCH, LAYERS = 8, 16, 3


def step(weights, batch):
    def loss(weights):
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    gradients = jax.grad(loss)(weights)
    return [w - g for w, g in zip(weights, gradients)], None


def by_products(eqns, inputs):
    layers, layer = [], -1
    for eqn in eqns:
        layer += eqn.primitive.name == "dot_general"
        layers.append(max(layer, 0))
    return layers


def staged(num_stages=1, num_microbatches=1) -> tuple[Program, Staging]:
    weights = [SHAPE((WIDTH, WIDTH), jnp.float32)] * LAYERS
    program = Step(step, (weights, SHAPE((BATCH, WIDTH), jnp.float32))).program(num_microbatches)
    layering = assign_layers(program, by_products)
    cuts = list(range(1, num_stages))
    return program, assign_stages(layering, cuts, program.jaxpr.outvars)


def selection(scope, devices=4):
    model = CostModel(cluster(f"host:{devices}"))
    (mesh,) = logical_meshes(model, SubmeshSpec(num_hosts=1, devices_per_host=devices), 1)
    return build(scope.eqns, MeshCosts(mesh, model), "test")


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_stage_sends_what_others_read_and_receives_what_others_make(num_stages):
    program, staging = staged(num_stages, 2)
    pairs = list(zip(staging.eqns, staging.stages, strict=True))
    for stage in range(num_stages):
        made = {var for eqn, home in pairs if home == stage for var in eqn.outvars}
        read = {atom for eqn, home in pairs if home == stage for atom in eqn.invars if is_var(atom)}
        others = {a for eqn, home in pairs if home != stage for a in eqn.invars if is_var(a)}
        theirs = {var for eqn, home in pairs if home != stage for var in eqn.outvars}
        scope = stage_scope(program, staging, stage, 2)
        assert scope.eqns.eqns == [eqn for eqn, home in pairs if home == stage]
        assert scope.eqns.sent == made & others
        assert scope.eqns.received == (read & theirs) - made


def most_received(program, staging, schedule, in_flight):
    """Return the most buffers that each mesh holds at a time of what it received: of the one
    forward, of the one backward, read off the emitted programs."""
    graph = build_tasks(program, staging).graph
    forward = {v for task in graph.tasks if task.phase == "forward" for v in task.outputs}
    emitted = emit(graph, schedule, program.num_microbatches, warmups=in_flight)
    found = []
    for instructions in emitted.programs:
        alive: dict[bool, set[str]] = {True: set(), False: set()}
        most = {True: 0, False: 0}
        for one in instructions:
            for buffer in one.outputs if one.kind == "receive" else ():
                if "@" in buffer:  # what is sent once a step is not of a microbatch
                    alive[buffer.split("@")[0] in forward].add(buffer)
            for way, buffers in alive.items():
                most[way] = max(most[way], len(buffers))
                if one.kind == "free":
                    buffers.difference_update(one.inputs)
        found.append((most[True], most[False]))
    return found


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ("1f1b", (3, 2, 1)),
        ("gpipe", (16, 16, 16)),
        ("zero-bubble-h1", (3, 3, 3)),
        ("eager-1f1b", (5, 3, 1)),
        ("adaptive", (16, 15, 1)),
        ("adaptive", (9, 3, 1)),
    ],
)
def test_stages_hold_what_emitted_programs_do_of_what_they_receive(schedule, in_flight):
    program, staging = staged(3, 16)
    rule = SCHEDULE_RULES[schedule]
    delayed = [0, 0, 0]
    if rule.splits_backward:
        staging = with_split_backward(staging)
        delayed = [held - least for held, least in zip(in_flight, (3, 2, 1), strict=True)]
    most = most_received(program, staging, schedule, in_flight)
    early = in_flight if rule.receives_early else ()
    for stage, (forward, backward) in enumerate(most):
        eqns = stage_scope(
            program, staging, stage, in_flight[stage], num_delayed=delayed[stage], early=early
        ).eqns
        kept_late = eqns.returned & eqns.delayed
        if stage > 0:
            # The last stage takes some of what another has ahead before that has run all of it.
            spare = 1 + in_flight[stage - 1] // 4
            assert forward <= eqns.in_flight + eqns.num_ahead <= forward + spare
        if stage < 2:
            counted = 1 + eqns.num_waiting + (eqns.num_delayed if kept_late else 0)
            assert backward <= counted <= backward + 1
        assert len(eqns.returned) == (stage < 2)


def is_var(atom):
    return not isinstance(atom, Literal)


def test_the_scope_of_a_stage_names_its_state_residuals_and_what_leaves_it():
    program, staging = staged(2, 2)
    first = stage_scope(program, staging, 0, 2)
    assert len(first.eqns.state) == 1
    assert len(first.boundary_out) == 1
    assert first.residuals
    assert first.eqns.kept == first.residuals
    assert first.eqns.in_flight == 2
    whole = stage_scope(*staged(), 0, 1)
    assert len(whole.eqns.state) == LAYERS
    assert not whole.boundary_out
    assert not whole.eqns.kept  # one program: the compiler stores what it wants


def test_inner_layers_share_their_nodes():
    scope = stage_scope(*staged(), 0, 1)
    found = selection(scope)
    products = [name for name in found.problem.node_names if name == "dot_general"]
    assert len(products) < 3 * LAYERS


def test_the_replicated_choice_holds_everything_and_communicates_nothing():
    scope = stage_scope(*staged(), 0, 1)
    found = selection(scope)
    choice = [0] * found.problem.num_nodes
    costs = solved_costs(scope, found, choice, LAYERS)
    assert costs.state.sum() == LAYERS * WIDTH * WIDTH * 4
    assert costs.state.tolist() == [WIDTH * WIDTH * 4] * LAYERS
    for var in scope.eqns.state:
        assert found.spec(var, choice).dims == ((), ())


def test_seconds_by_layer_add_up_to_the_objective():
    scope = stage_scope(*staged(), 0, 1)
    found = selection(scope)
    solution = solve(found.problem)
    assert solution.choice is not None and solution.objective is not None
    costs = solved_costs(scope, found, solution.choice, LAYERS)
    total = costs.forward.sum() + costs.backward.sum() + costs.update.sum()
    assert total <= solution.objective * (1 + 1e-9)
    assert (costs.floor.sum() <= total * (1 + 1e-9)).all()


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_choice_never_beats_its_floor(devices):
    scope = stage_scope(*staged(), 0, 1)
    found = selection(scope, devices)
    generator = np.random.default_rng(0)
    for _ in range(5):
        choice = [int(generator.integers(count)) for count in found.problem.num_strategies]
        costs = solved_costs(scope, found, choice, LAYERS)
        spent = costs.forward + costs.backward + costs.update
        assert (spent >= costs.floor.sum(1) - 1e-15).all()


def test_between_layers_one_activation_crosses():
    program, staging = staged()
    crossing = boundary_bytes(program, staging, LAYERS)
    assert crossing[:-1].tolist() == [BATCH * WIDTH * 4] * (LAYERS - 1)
    assert crossing[-1] == 0
