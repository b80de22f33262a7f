"""Each way a program can leave its plan is found out: mutations of a real compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from alpa_interchange import LogicalMesh, MeshAxis, ShardingSpec, Strategy
from alpa_meta import compat
from alpa_meta.audit.account import account
from alpa_meta.audit.hlo import compiled_collectives
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.program import audit_program, compile_plan
from alpa_meta.operators import sharding_rule
from alpa_meta.spmd import JaxprPlan, planned_collectives, random_plan
from alpa_meta.step.trace import trace
from ilp_sharding.strategies import Conversions

SIZES = {"x": 2, "y": 4}
MESH = LogicalMesh(axes=tuple(MeshAxis(name=n, size=s) for n, s in SIZES.items()))
CONVERSIONS = Conversions(MESH, lambda kind, bytes, axes: 1e-6 + bytes / 1e9)
SHAPE = jax.ShapeDtypeStruct((16, 32), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((32, 32), jnp.float32)

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 host devices")


def step(x, weight):
    def body(carry, _):
        return jnp.tanh(carry @ weight), carry.sum()

    final, sums = lax.scan(body, x, None, length=3)
    return jax.nn.softmax(final @ weight), sums


@pytest.fixture(scope="module")
def program():
    """Return a jaxpr, a random plan of it, what that plans, and what it compiles to."""
    jaxpr, _ = trace(step, SHAPE, WEIGHT)
    plan = random_plan(jaxpr, MESH, 1)
    devices = jax.devices()[:8]
    text = compile_plan(jaxpr, plan, MESH, CONVERSIONS, devices, SIZES).as_text()
    planned = planned_collectives(jaxpr, plan, MESH, CONVERSIONS)
    return jaxpr, plan, planned, compiled_collectives(text or "")


def test_every_compiled_collective_carries_the_name_of_a_planned_one(program):
    _, _, planned, compiled = program
    report = account(planned, compiled, SIZES)
    assert report.ok, report.text()
    assert len({one.scope for one in planned}) == len(planned) > 10
    assert {one.trips for one in planned} == {1, 3}
    for line in report.lines:
        assert all(one.scope in line.compiled.op_name for one in line.planned)


GROUPS = {("x",): ((0, 4), (1, 5), (2, 6), (3, 7)), ("y",): ((0, 1, 2, 3), (4, 5, 6, 7))}
KINDS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")


def _other_axes(one):
    return next(groups for groups in GROUPS.values() if set(groups) != set(one.groups))


MUTATIONS = {
    "added: ": lambda one: evolve(one, op_name="jit(step)/dot_general", parts=(4,)),
    "runs again: ": lambda one: one,
    "kind changed: ": lambda one: evolve(one, kind=KINDS[KINDS.index(one.kind) - 1]),
    "axes changed: ": lambda one: evolve(one, groups=_other_axes(one)),
    "more bytes: ": lambda one: evolve(one, parts=(one.bytes + 4,)),
}
ADDING = ("added: ", "runs again: ")


@pytest.mark.parametrize("found", MUTATIONS)
@settings(max_examples=20, derandomize=True, deadline=None)
@given(data=st.data())
def test_each_deviation_of_the_program_is_found_and_named(program, found, data):
    _, _, planned, compiled = program
    single = [
        k
        for k, one in enumerate(compiled)
        if one.kind in KINDS and len(one.parts) == 1 and one.op_name.count("collective.") == 1
    ]
    k = data.draw(st.sampled_from(single))
    one = compiled[k]
    (origin,) = account(planned, [one], SIZES).lines[0].planned
    if found == "runs again: " and one.trips != origin.trips:
        return  # hoisted out of its loop: it may run as often as the loop
    mutated = list(compiled)
    changed = MUTATIONS[found](one)
    mutated[k : k + (found not in ADDING)] = [changed]
    report = account(planned, mutated, SIZES)
    assert not report.ok and report.exit_status == 1
    assert found in report.text(all_lines=False)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(data=st.data())
def test_each_collective_left_out_of_the_plan_is_found(program, data):
    _, _, planned, compiled = program
    used = [one for line in account(planned, compiled, SIZES).lines for one in line.planned]
    left_out = data.draw(st.sampled_from(used))
    report = account([one for one in planned if one is not left_out], compiled, SIZES)
    assert not report.ok


def test_a_small_collective_does_not_hide_behind_a_dropped_large_one(program):
    _, _, planned, compiled = program
    large = max((one for one in compiled if len(one.parts) == 1), key=lambda one: one.bytes)
    small = evolve(large, op_name="jit(step)/add", parts=(4,))
    report = account(planned, [small if one is large else one for one in compiled], SIZES)
    assert not report.ok
    assert report.ratio < 1


def test_where_cuda_s_passes_lose_a_name_only_the_exact_bytes_pay(program):
    _, _, planned, compiled = program
    (one,) = [one for one in compiled if len(one.parts) == 1 and one.trips == 1][:1]
    nameless = evolve(one, op_name="")
    assert not account(planned, [nameless], SIZES, backend="cpu").ok
    assert account(planned, [nameless], SIZES, backend="cuda").ok
    smaller = evolve(nameless, parts=(4 if one.bytes > 4 else 2,))
    sizes = {p.bytes for p in planned if p.kind == one.kind}
    assert smaller.bytes in sizes or not account(planned, [smaller], SIZES, backend="cuda").ok


def test_an_all_reduce_compiled_to_a_reduce_scatter_fails_by_name():
    plan = PlannedCollective(
        kind="all-reduce", axes=("y",), bytes=1024, dtype="float32", scope="collective.0"
    )
    text = """HloModule m, num_partitions=8

ENTRY %main (p: f32[256]) -> f32[64] {
  %p = f32[256]{0} parameter(0)
  ROOT %r = f32[64]{0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, \
dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/jvp(collective.0)/psum"}
}
"""
    report = account([plan], compiled_collectives(text), SIZES)
    assert not report.ok and report.ratio < 1
    assert "kind changed: the plan says all-reduce of 1024 bytes" in report.text()


def test_one_buffer_carries_the_names_of_all_its_collectives():
    plans = [
        PlannedCollective(
            kind="all-reduce", axes=("y",), bytes=size, dtype="float32", scope=f"collective.{k}"
        )
        for k, size in enumerate((256, 768))
    ]
    text = """HloModule m, num_partitions=8

ENTRY %main (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  ROOT %r = f32[256]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, \
to_apply=%add, metadata={op_name="jit(step)/collective.0+collective.1/psum"}
}
"""
    report = account(plans, compiled_collectives(text), SIZES)
    assert report.equal and report.lines[0].verdict == "merged 2"
    assert not account(plans[:1], compiled_collectives(text), SIZES).ok


def test_buffers_that_were_merged_are_paid_for_each_by_its_own_collectives():
    plans = [
        PlannedCollective(
            kind="all-reduce", axes=("y",), bytes=256, dtype="float32", scope=f"collective.{k}"
        )
        for k in range(4)
    ]
    text = """HloModule m, num_partitions=8

ENTRY %main (p: f32[128], q: f32[128]) -> (f32[128], f32[128]) {
  %p = f32[128]{0} parameter(0)
  %q = f32[128]{0} parameter(1)
  ROOT %r = (f32[128]{0}, f32[128]{0}) all-reduce(%p, %q), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, metadata={op_name="jit(step)/\
(while/body/collective.0/collective.0+collective.2/psum:collective.1+collective.3/psum)"}
}
"""
    report = account(plans, compiled_collectives(text), SIZES)
    assert report.equal, report.text()
    assert not account(plans[:3], compiled_collectives(text), SIZES).ok


@pytest.mark.parametrize(
    ("kind", "size", "holds"),
    [("all-gather", 64, True), ("all-gather", 128, False), ("all-reduce", 64, False)],
)
def test_truth_values_may_be_sent_before_they_become_numbers(kind, size, holds):
    plan = PlannedCollective(
        kind=kind, axes=("y",), bytes=256, dtype="float32", scope="collective.0"
    )
    text = f"""HloModule m, num_partitions=8

ENTRY %main (p: pred[{size}]) -> pred[{size}] {{
  %p = pred[{size}]{{0}} parameter(0)
  ROOT %r = pred[{size}]{{0}} {kind}(%p), channel_id=1, \
replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, dimensions={{0}}, \
metadata={{op_name="jit(step)/collective.0/{kind}"}}
}}
"""
    report = account([plan], compiled_collectives(text), SIZES)
    assert report.ok is holds, report.text()


def test_a_needed_collective_that_is_not_sent_shows_in_the_results(monkeypatch):
    jaxpr, _ = trace(lambda x, weight: (x @ weight,), SHAPE, WEIGHT)
    (eqn,) = compat.open_jaxpr(jaxpr).eqns
    rule = sharding_rule(eqn)
    assert rule is not None
    summed = next(f.name for f in rule.factors if f.kind == "reduction")
    by_columns, by_rows = ShardingSpec(((), ("y",))), ShardingSpec((("y",), ()))
    whole = ShardingSpec.replicated(2)
    split = Strategy(
        assignment=((summed, ("y",)),), operands=(by_columns, by_rows), results=(whole,)
    )
    plan = JaxprPlan(inputs=(by_columns, by_rows), strategies=(split,), outputs=(whole,))
    values = [jax.random.normal(jax.random.key(0), shape.shape) for shape in (SHAPE, WEIGHT)]

    def audit():
        return audit_program(jaxpr, plan, MESH, CONVERSIONS, jax.devices()[:8], values)

    right = audit()
    assert right.ok and right.collectives.equal, right.text()
    monkeypatch.setattr(lax, "psum", lambda value, axes: value)
    broken = audit()
    assert [one.planned.kind for one in broken.collectives.dropped] == ["all-reduce"]
    assert not broken.numerics.ok and not broken.ok
