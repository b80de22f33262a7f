"""Pipelines with given stages: priced as the joint search prices them."""

import pytest
from attrs import evolve

from alpa_interchange import DeviceGroup, LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from stage_dp import InfeasibleError, Known, best_known, device_bytes, price_stages, solve_joint


def _problem(memory=100.0):
    def mesh(devices, scale):
        rows = (
            LayerRow(  # keeps 8 bytes per microbatch
                forward=Affine(scale),
                backward_input=Affine(2 * scale),
                activation_bytes=Affine(8.0),
            ),
            LayerRow(  # computes a quarter again and keeps 2
                forward=Affine(scale),
                backward_input=Affine(3 * scale),
                activation_bytes=Affine(2.0),
                recomputation="full",
            ),
        )
        return MeshMenu(
            submesh=SubmeshSpec(num_hosts=1, devices_per_host=devices),
            logical=LogicalMesh(axes=(MeshAxis(name="x", size=devices),)),
            rows=(rows,),
        )

    return JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * 4, meshes=(mesh(1, 1.0), mesh(2, 0.6))),
        batch_size=8,
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=2, memory=memory),),
        counts=(1, 2, 4, 8),
        schedules=("1f1b",),
    )


def test_the_stages_that_were_found_cost_what_the_search_says():
    problem = _problem()
    found = solve_joint(problem)
    stages = [(stage.layer_start, stage.layer_stop, stage.mesh) for stage in found.stages]
    priced = price_stages(problem, stages, found.num_microbatches, found.schedule)
    assert priced.step_seconds == pytest.approx(found.step_seconds)
    assert priced.peak_bytes == found.peak_bytes


def test_a_pipeline_of_equal_stages_takes_its_paces_and_its_ramp():
    # two stages of 2 layers: 2 forward, 4 backward; 8 microbatches: (8 + 1) * 6
    priced = price_stages(_problem(), [(0, 2, 0), (2, 4, 0)], 8, "1f1b")
    assert priced.step_seconds == pytest.approx(54.0)
    assert priced.peak_bytes == (32.0, 16.0)  # two and one microbatches in flight of 2 x 8 bytes


def test_memory_chooses_rows_and_is_an_error_only_where_none_fit():
    tight = _problem(memory=26.0)  # 32 needed: one of the first stage's layers keeps less
    priced = price_stages(tight, [(0, 2, 0), (2, 4, 0)], 8, "1f1b")
    assert sorted(priced.stages[0].rows) == [0, 1] and priced.stages[1].rows == (0, 0)
    free = price_stages(tight, [(0, 2, 0), (2, 4, 0)], 8, "1f1b", any_memory=True)
    assert free.peak_bytes == (32.0, 16.0)
    with pytest.raises(InfeasibleError, match="within the memory"):
        price_stages(_problem(memory=3.0), [(0, 2, 0), (2, 4, 0)], 8, "1f1b")


def test_stages_that_need_more_devices_than_there_are_are_refused():
    with pytest.raises(InfeasibleError):
        price_stages(_problem(), [(0, 2, 1), (2, 4, 1)], 8, "1f1b")


def test_many_stages_are_improved_one_by_one():
    problem = evolve(
        _problem(), device_groups=(DeviceGroup(num_hosts=2, devices_per_host=2, memory=100.0),)
    )
    priced = price_stages(problem, [(k, k + 1, 0) for k in range(4)], 8, "1f1b")
    assert priced.step_seconds == pytest.approx(11 * 3.0)


def test_a_search_from_a_known_pipeline_is_no_slower_and_proves_as_much():
    problem = _problem()
    alone = solve_joint(problem)
    known = Known(stages=((0, 4, 1),), num_microbatches=1, schedule="1f1b")
    found = solve_joint(problem, known)
    assert found.step_seconds <= price_stages(problem, *_of(known)).step_seconds
    assert found.step_seconds == alone.step_seconds
    assert found.lower_bound == pytest.approx(alone.lower_bound)
    quick = solve_joint(evolve(problem, proof=False), known)
    assert quick.lower_bound <= found.step_seconds <= quick.step_seconds


def test_an_interleaved_pipeline_is_priced_and_started_from_as_others_are():
    problem = evolve(_problem(memory=50.0), schedules=("interleaved-1f1b",), counts=(8,))
    found = solve_joint(problem)
    assert found.num_meshes == 2 and len(found.stages) == 4
    known = Known.of(found)
    priced = price_stages(problem, *_of(known), num_meshes=known.num_meshes)
    assert priced.step_seconds == pytest.approx(found.step_seconds)
    assert priced.peak_bytes == found.peak_bytes
    first = priced.peak_bytes[0] + priced.peak_bytes[2]  # of the same device
    assert device_bytes(priced)[0] == first <= 50.0 < sum(priced.peak_bytes)
    quick = solve_joint(evolve(problem, proof=False), known)
    assert quick.step_seconds <= found.step_seconds * (1 + 1e-9)
    with pytest.raises(InfeasibleError, match="within the memory"):
        price_stages(problem, *_of(known), num_meshes=3)  # 4 stages


def _of(known):
    return known.stages, known.num_microbatches, known.schedule


def test_the_best_of_known_pipelines_is_the_fastest_that_fits():
    problem = evolve(_problem(memory=26.0), schedules=("1f1b", "interleaved-1f1b"))
    known = [
        Known(((0, 4, 1),), 8, "1f1b"),
        Known(((0, 2, 0), (2, 4, 0)), 8, "1f1b"),
        Known(tuple((k, k + 1, 0) for k in range(4)), 8, "interleaved-1f1b", 2),
        Known(((0, 2, 1), (2, 4, 1)), 8, "1f1b"),  # on more devices than there are
    ]
    prices = []
    for one in known[:3]:
        priced = price_stages(problem, *_of(one), num_meshes=one.num_meshes)
        prices.append(priced.step_seconds)
        alone = best_known(problem, [one])
        assert alone is not None and alone.step_seconds == priced.step_seconds
    for order in (known, known[::-1]):
        best = best_known(problem, order)
        assert best is not None and best.step_seconds == min(prices)
    assert best_known(problem, known[3:]) is None


def test_rivals_are_the_best_of_other_counts_and_schedules():
    problem = evolve(
        _problem(), schedules=("gpipe", "1f1b", "interleaved-1f1b"), counts=(4, 8), num_stages=2
    )
    found = solve_joint(problem)
    rivals = Known.rivals(found, 4.0)
    prices = [price_stages(problem, *_of(o), num_meshes=o.num_meshes).step_seconds for o in rivals]
    assert prices[0] == pytest.approx(found.step_seconds) and len(rivals) > 1
    assert prices == sorted(prices) and prices[-1] <= 4.0 * found.step_seconds * (1 + 1e-9)
    assert len({(one.num_microbatches, one.schedule) for one in rivals}) == len(rivals)
