import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attrs import evolve

import alpa_meta as alpa
import stage_dp
from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup
from alpa_meta.corpus import published
from alpa_meta.planning import finished_search, planner, slice_choice
from alpa_meta.planning.sliced_menu import whole_in_slices
from alpa_meta.token_slices.places import Slices

ROW = LayerRow(
    forward=Affine(0.5, 2.0),
    backward_input=Affine(0.25, 4.0),
    step_seconds=3.0,
    state_bytes=5.0,
    activation_bytes=Affine(1.0, 7.0),
    transient_bytes=Affine(1.0, 2.0),
)


def problem(batch=2, layers=4):
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=1),
        logical=LogicalMesh(axes=(MeshAxis(name="data", size=1),)),
        rows=((ROW,),),
    )
    return JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * layers, meshes=(mesh,)),
        batch_size=batch,
        counts=(1, batch),
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=layers, memory=1e9),),
        boundary=lambda a, y, b, x, link: Affine(0.125, 1.0),
    )


def test_slices_share_what_a_row_takes_per_sample_and_each_take_what_it_takes_anyway():
    sliced = whole_in_slices(problem(), 4, 0.75)
    ((row,),) = sliced.menu.meshes[0].rows
    assert row.forward == Affine(0.5, 2.0 * 0.75 / 4)
    assert row.backward_input == Affine(0.25, 4.0 * 0.75 / 4)
    assert row.activation_bytes == Affine(0.25, 7.0 / 4)
    assert row.transient_bytes == Affine(1.0, 0.5)
    assert (row.step_seconds, row.state_bytes) == (3.0, 5.0)
    assert (sliced.batch_size, sliced.counts) == (8, (4, 8))
    assert sliced.boundary(0, 0, 0, 0, "host") == Affine(0.125, 0.25)


def test_a_pipeline_of_slices_is_that_of_as_many_microbatches_where_nothing_is_fixed():
    row = evolve(ROW, forward=Affine(0.0, 2.0), backward_input=Affine(0.0, 4.0))
    base = problem(batch=8)
    menu = evolve(base.menu, meshes=(evolve(base.menu.meshes[0], rows=((row,),)),))
    base = evolve(
        base, menu=menu, counts=(1, 8), boundary=lambda *place: Affine(0.0, 0.0), num_stages=4
    )
    eight = stage_dp.solve_joint(evolve(base, counts=(8,), schedules=("gpipe",)))
    sliced = stage_dp.solve_joint(whole_in_slices(evolve(base, counts=(1,)), 8, 1.0))
    assert sliced.num_microbatches == 8
    assert sliced.step_seconds == pytest.approx(eight.step_seconds)


def steps(batch, **options):
    """Return the plans made on the way to that of a GPT of 4 layers on 4 V100, the last one."""
    model = published("gpt-125m", num_layers=4, length=2048, batch=batch)
    made, make = [], planner._make_plan

    def noted(step, cluster, told):
        made.append(make(step, cluster, told))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_make_plan", noted)
        step = alpa.parallelize(
            model.train_step, cluster="p3.16xlarge:4", cache=False, exact=model.exact, **options
        )
        return made, step.plan_for(model.state, model.batch)


def test_one_sequence_on_many_stages_is_cut_into_slices():
    (whole, sliced), plan = steps(1, num_stages=4)
    assert len(plan.program.token_slices) > 1 and sum(plan.program.token_slices) == 2048
    assert plan.step_seconds == sliced.plan.step_seconds < 0.9 * whole.plan.step_seconds
    assert plan.lower_bound <= plan.step_seconds


def decoder(batch, tokens=512, width=256, heads=4, layers=8):
    """Return the step of a small decoder, its state and a batch, as shapes."""

    def loss(params, given):
        x = params["embed"][given[:, :-1]]
        for layer in params["layers"]:
            q, k, v = (
                part.reshape(*x.shape[:2], heads, -1) for part in jnp.split(x @ layer["qkv"], 3, -1)
            )
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        scores = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.take_along_axis(scores, given[:, 1:, None], -1).mean()

    def step(params, given):
        value, found = jax.value_and_grad(loss)(params, given)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, found), value

    def made(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    sizes = {"qkv": (width, 3 * width), "up": (width, 4 * width), "down": (4 * width, width)}
    layer = {name: made(*size) for name, size in sizes.items()}
    params = {"embed": made(512, width), "layers": [layer] * layers}
    return step, params, jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32)


@pytest.mark.parametrize(
    ("batch", "slices", "recompute"), [(1, 4, "none"), (4, 2, "none"), (1, 8, "full")]
)
def test_the_search_counts_what_slices_keep_for_one_another(batch, slices, recompute):
    """Keys that are made once more, gradients of keys, sums of weights' gradients; and as many
    microbatches as 1F1B has in flight, not all."""
    found, solve = [], finished_search.Finish._solved
    step, params, given = decoder(batch)
    options = {"num_microbatches": batch, "num_token_slices": slices, "recompute": recompute}

    def noted(finish, search):
        found.append(search.stage_plan().peak_bytes)
        return solve(finish, search)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished_search.Finish, "_solved", noted)
        parallel = alpa.parallelize(
            step, cluster="p3.16xlarge:2", cache=False, num_stages=2, schedule="1f1b", **options
        )
        plan = parallel.plan_for(params, given)
    (searched,) = found
    assert searched == pytest.approx(plan.stage_plan.peak_bytes, rel=0.08)


def test_slices_that_the_menu_predicts_to_be_slower_are_not_planned():
    made, plan = steps(1)
    assert len(made) == 1 and plan.program.token_slices == ()


def test_slices_are_no_shorter_than_what_fills_the_pipeline():
    table = np.triu(np.subtract.outer(np.arange(9), np.arange(9)).T.astype(float), 1)
    plan = stage_dp.solve_joint(whole_in_slices(evolve(problem(1), num_stages=4), 8, 1.0))
    slices = Slices((32, 32))
    for most in (2, 4, 8):
        lengths = slice_choice._lengths(table, slices, plan, most)
        assert 1 < len(lengths) <= most and sum(lengths) == 64
