"""Accounting on real compiled programs: hand-written shard_map bodies over 8 host devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from alpa_meta.audit.account import account
from alpa_meta.audit.hlo import CompiledCollective, compiled_collectives
from alpa_meta.audit.planned import PlannedCollective

AXES = {"data": 2, "model": 4}
BY_ROWS = PartitionSpec("data")
ROWS = jax.ShapeDtypeStruct((16, 32), jnp.float32)
KB = 1024  # bytes of one device's 8 x 32 float32 shard of ROWS


def compiled(body, *shapes):
    """Return the collectives of `body` run on every device of the mesh, its input split by rows."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 host devices")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(AXES))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=BY_ROWS, out_specs=PartitionSpec(), check_vma=False
    )
    text = jax.jit(mapped).lower(*(shapes or (ROWS,))).compile().as_text()
    return compiled_collectives(text or "")


def planned(kind, axes, size, dtype="float32", **more):
    return PlannedCollective(kind=kind, axes=axes, bytes=size, dtype=dtype, **more)


ALL_KINDS = {
    "all-reduce": (lambda x: lax.psum(x, "model"), ("model",), KB),
    "all-gather": (lambda x: lax.all_gather(x, "data", tiled=True), ("data",), 2 * KB),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "model", tiled=True), ("model",), KB // 4),
    "all-to-all": (lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True), ("model",), KB),
    "collective-permute": (
        lambda x: lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)]),
        ("model",),
        KB,
    ),
}


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_planned_collective_of_each_kind_is_accounted_for_exactly(kind):
    body, axes, size = ALL_KINDS[kind]
    report = account([planned(kind, axes, size)], compiled(body), AXES)
    assert report.ok and report.equal and report.exit_status == 0
    assert [line.verdict for line in report.lines] == ["as planned"]
    assert report.dropped == ()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_collective_of_each_kind_that_is_not_planned_fails(kind):
    body, _, _ = ALL_KINDS[kind]
    report = account([], compiled(body), AXES)
    assert not report.ok and report.exit_status == 1
    added = "UNPLANNED: added: no planned collective was emitted under its name"
    assert [line.verdict for line in report.lines] == [added]


def test_a_second_collective_needs_a_second_plan():
    collectives = compiled(lambda x: jnp.tanh(lax.psum(jnp.tanh(lax.psum(x, "model")), "model")))
    one = planned("all-reduce", ("model",), KB)
    assert account([one, one], collectives, AXES).equal
    report = account([one], collectives, AXES)
    assert [line.ok for line in report.lines].count(False) == 1


def test_another_kind_than_planned_fails_even_with_fewer_bytes():
    collectives = compiled(lambda x: lax.psum_scatter(x, "model", tiled=True))
    report = account([planned("all-reduce", ("model",), KB)], collectives, AXES)
    assert not report.ok
    assert [one.planned.kind for one in report.dropped] == ["all-reduce"]


def test_other_axes_than_planned_fail():
    collectives = compiled(lambda x: lax.psum(x, "model"))
    assert not account([planned("all-reduce", ("data",), KB)], collectives, AXES).ok
    assert not account([planned("all-reduce", ("data", "model"), KB)], collectives, AXES).ok


def test_groups_that_follow_no_axis_fail_by_name():
    def body(x):
        return lax.psum(x, "model", axis_index_groups=[[0, 1], [2, 3]])

    report = account([planned("all-reduce", ("model",), KB)], compiled(body), AXES)
    assert not report.ok
    assert "not along mesh axes" in report.lines[0].verdict


def test_more_bytes_than_planned_fail():
    collectives = compiled(lambda x: lax.psum(x, "model"))
    report = account([planned("all-reduce", ("model",), KB - 4)], collectives, AXES)
    assert not report.ok
    assert report.lines[0].unplanned_bytes == KB


def test_fewer_bytes_than_planned_pass_and_are_named_but_are_not_equal():
    collectives = compiled(lambda x: lax.psum(x[:4], "model"))
    report = account([planned("all-reduce", ("model",), KB)], collectives, AXES)
    assert report.ok and not report.equal
    assert report.ratio == pytest.approx(0.5)
    assert report.lines[0].verdict == "512 bytes where the plan says 1024"


def test_collectives_that_xla_s_combiner_merges_are_paid_for_one_by_one():
    def body(x):
        return lax.psum(x, "data"), lax.psum(x[:2], "data"), lax.psum(2 * x, "data")

    collectives = compiled(body)
    assert len(collectives) == 1
    plan = [planned("all-reduce", ("data",), size) for size in (KB, KB // 4, KB)]
    report = account(plan, collectives, AXES)
    assert report.equal
    assert report.lines[0].planned == tuple(plan)
    assert report.lines[0].verdict == "merged 3"
    assert not account(plan[:2], collectives, AXES).ok


def test_a_common_subexpression_is_dropped_and_named():
    collectives = compiled(lambda x: (lax.psum(x, "data"), lax.psum(x, "data")))
    plan = [planned("all-reduce", ("data",), KB)] * 2
    report = account(plan, collectives, AXES)
    assert report.ok and not report.equal
    assert [one.executions for one in report.dropped] == [1]
    assert "planned, dropped by XLA" in report.text()


def test_a_loop_s_collective_counts_as_often_as_the_loop_runs():
    def body(x):
        return lax.scan(lambda c, _: (jnp.tanh(lax.psum(c, "model")), None), x, None, length=5)[0]

    collectives = compiled(body)
    assert account([planned("all-reduce", ("model",), KB, trips=5)], collectives, AXES).equal
    assert not account([planned("all-reduce", ("model",), KB, trips=4)], collectives, AXES).ok
    longer = account([planned("all-reduce", ("model",), KB, trips=7)], collectives, AXES)
    assert longer.ok and longer.dropped[0].executions == 2
    assert longer.lines[0].verdict == "runs 5 times where the plan says 7"


def test_an_unrolled_loop_spends_the_trips_of_its_plan():
    def body(x):
        for _ in range(3):
            x = jnp.tanh(lax.psum(x, "model"))
        return x

    collectives = compiled(body)
    assert account([planned("all-reduce", ("model",), KB, trips=3)], collectives, AXES).equal
    assert not account([planned("all-reduce", ("model",), KB, trips=2)], collectives, AXES).ok


def test_a_peeled_loop_spends_the_trips_of_its_plan():
    def sums(name, trips, count):
        return CompiledCollective(
            name=name,
            kind="all-reduce",
            parts=(KB,) * count,
            dtypes=("float32",) * count,
            groups=((0, 1, 2, 3), (4, 5, 6, 7)),
            channel=1,
            op_name="",  # XLA for GPUs forgets the names of some that it merges
            source="",
            trips=trips,
            promoted=False,
        )

    found = [sums("first", 1, 4), sums("rest", 11, 3)]
    body = [planned("all-reduce", ("model",), KB, trips=12, scope=f"body.{k}") for k in range(3)]
    once = planned("all-reduce", ("model",), KB, scope="once")
    report = account([once, *body], found, AXES, backend="cuda")
    assert report.ok and report.dropped == ()
    assert not account(body, found, AXES, backend="cuda").ok


def test_a_loop_of_unknown_length_is_paid_for_by_one_planned_without_length():
    def body(x):
        return lax.while_loop(
            lambda c: jnp.sum(c) > 1, lambda c: 0.1 * lax.psum(c, "model"), lax.psum(x, "data")
        )

    collectives = compiled(body)
    plan = [
        planned("all-reduce", ("data",), KB),
        planned("all-reduce", ("model",), KB, trips=None),
    ]
    assert account(plan, collectives, AXES).equal
    assert not account(plan[:1], collectives, AXES).ok


def test_both_branches_of_a_conditional_are_read():
    def body(x):
        return lax.cond(
            jnp.sum(x) > 0, lambda: lax.psum(x, "model"), lambda: lax.pmax(x * 2, "data")
        )

    collectives = compiled(body)
    plan = [planned("all-reduce", ("model",), KB), planned("all-reduce", ("data",), KB)]
    assert account(plan, collectives, AXES).equal
    assert not account(plan[1:], collectives, AXES).ok


def test_bfloat16_widened_by_the_cpu_backend_is_counted_at_16_bits():
    def body(x):
        return (
            lax.psum(x, "model"),
            lax.all_gather(x, "data", tiled=True),
            lax.psum_scatter(x, "model", tiled=True),
        )

    shape = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)
    collectives = compiled(body, shape)
    plan = [
        planned("all-reduce", ("model",), KB // 2, "bfloat16"),
        planned("all-gather", ("data",), KB, "bfloat16"),
        planned("reduce-scatter", ("model",), KB // 8, "bfloat16"),
    ]
    report = account(plan, collectives, AXES, backend="cpu")
    assert report.equal
    assert all("sent as float32 by the CPU backend" in line.verdict for line in report.lines)
    assert not account(plan, collectives, AXES, backend="cuda").ok


def test_what_the_cpu_backend_merges_into_a_widened_sum_is_counted_at_its_own_width():
    def body(x):
        return lax.psum(x, "model"), lax.psum(x.astype(jnp.float32)[:4], "model")

    collectives = compiled(body, jax.ShapeDtypeStruct((16, 32), jnp.bfloat16))
    plan = [
        planned("all-reduce", ("model",), KB // 2, "bfloat16"),
        planned("all-reduce", ("model",), KB // 2, "float32"),
    ]
    assert account(plan, collectives, AXES).equal
    assert not account(plan[:1], collectives, AXES).ok


def test_float32_is_not_paid_for_by_bfloat16_of_a_quarter_of_its_bytes():
    collectives = compiled(lambda x: lax.psum(x, "model"))
    plan = [planned("all-reduce", ("model",), KB // 4, "bfloat16")]
    assert not account(plan, collectives, AXES).ok


def test_an_all_reduce_along_two_axes_may_stand_for_one_along_each():
    collectives = compiled(lambda x: lax.psum(x, ("data", "model")))
    plan = [planned("all-reduce", (axis,), KB) for axis in AXES]
    report = account(plan, collectives, AXES)
    assert report.ok and "folded" in report.lines[0].verdict
    assert not account(plan[:1], collectives, AXES).ok


def test_axes_of_one_device_ask_for_nothing():
    one_wide = {**AXES, "expert": 1}
    plan = [
        planned("all-reduce", ("expert", "model"), KB),
        planned("all-gather", ("expert",), KB),
    ]
    report = account(plan, compiled(lambda x: lax.psum(x, "model")), one_wide)
    assert report.equal and len(report.planned) == 1


def test_an_axis_the_mesh_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"\['stage'\], but the mesh has \['data', 'model'\]"):
        account([planned("all-reduce", ("stage",), KB)], [], AXES)


def test_among_equals_the_one_emitted_in_the_compiled_op_s_scope_is_taken():
    def body(x):
        with jax.named_scope("second"):
            return lax.psum(x, "model")

    plan = [
        planned("all-reduce", ("model",), KB, source="first.py:1", scope="first"),
        planned("all-reduce", ("model",), KB, source="second.py:2", scope="second"),
    ]
    report = account(plan, compiled(body), AXES)
    assert report.lines[0].source == "second.py:2"


def test_a_partitioner_s_own_reshard_is_found_out():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 host devices")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(AXES))
    split = jax.sharding.NamedSharding(mesh, PartitionSpec("data", "model"))
    moved = jax.sharding.NamedSharding(mesh, PartitionSpec("model", "data"))
    step = jax.jit(lambda x: 2 * x, in_shardings=split, out_shardings=moved)
    collectives = compiled_collectives(step.lower(ROWS).compile().as_text() or "")
    report = account([], collectives, AXES)
    assert not report.ok
