"""Collectives read from HLO text as XLA's CPU, GPU and older versions write it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.audit.hlo import compiled_collectives, parse_result

GPU = """HloModule jit_f, is_scheduled=true, num_partitions=8

FileNames
1 "/home/user/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%joined (p: f32[256], q: f32[32]) -> f32[288] {
  %p = f32[256]{0} parameter(0)
  %q = f32[32]{0} parameter(1)
  ROOT %cat = f32[288]{0} concatenate(%p, %q), dimensions={0}
}

%scattering (x: f32[8,32]) -> f32[2,32] {
  %x = f32[8,32]{1,0} parameter(0)
  ROOT %rs = f32[2,32]{1,0} reduce-scatter(%x), channel_id=5, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}

%body (t: (s32[], f32[8,32])) -> (s32[], f32[8,32]) {
  %t = (s32[], f32[8,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[8,32]{1,0} get-tuple-element(%t), index=1
  %ars = f32[8,32]{1,0} all-reduce-start(%v), channel_id=3, replica_groups={{0,4},{1,5},{2,6},\
{3,7}}, to_apply=%add, metadata={op_name="jit(f)/while/body/psum" stack_frame_id=1}
  %ard = f32[8,32]{1,0} all-reduce-done(%ars)
  ROOT %u = (s32[], f32[8,32]{1,0}) tuple(%i, %ard)
}

%condition (t.1: (s32[], f32[8,32])) -> pred[] {
  %t.1 = (s32[], f32[8,32]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%left (x.1: f32[8,32]) -> f32[8,32] {
  %x.1 = f32[8,32]{1,0} parameter(0)
  ROOT %cp = (f32[8,32]{1,0}, f32[8,32]{1,0}, u32[], u32[]) collective-permute-start(%x.1), \
channel_id=6, source_target_pairs={{0,1},{1,0}}
}

%right (x.2: f32[8,32]) -> f32[8,32] {
  ROOT %x.2 = f32[8,32]{1,0} parameter(0)
}

ENTRY %main (arg: f32[8,32], key: bf16[4,8]) -> f32[8,32] {
  %arg = f32[8,32]{1,0} parameter(0)
  %key = bf16[4,8]{1,0} parameter(1)
  %both = f32[288]{0} fusion(%arg, %arg), kind=kLoop, calls=%joined
  %ar = f32[288]{0} all-reduce-start(%both), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  %ags = ((f32[8,32]{1,0}, bf16[4,8]{1,0}), (f32[32,32]{1,0}, bf16[16,8]{1,0})) \
all-gather-start(%arg, %key), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %agd = (f32[32,32]{1,0}, bf16[16,8]{1,0}) all-gather-done(%ags)
  %async = ((f32[8,32]{1,0}), f32[2,32]{1,0}, s32[]) async-start(%arg), calls=%scattering
  %done = f32[2,32]{1,0} async-done(%async)
  %init = (s32[], f32[8,32]{1,0}) tuple(%arg, %arg)
  %loop = (s32[], f32[8,32]{1,0}) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %open = (s32[], f32[8,32]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %cond = f32[8,32]{1,0} conditional(%arg, %arg, %arg), branch_computations={%left, %right}
}
"""


@pytest.fixture
def gpu():
    return compiled_collectives(GPU)


def test_every_computation_the_entry_reaches_is_read_in_program_order(gpu):
    assert [one.kind for one in gpu] == [
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "all-reduce",
        "collective-permute",
    ]


def test_a_known_trip_count_multiplies_and_an_unknown_one_is_none(gpu):
    assert [one.trips for one in gpu] == [1, 1, 1, 12, None, 1]
    assert gpu[3].link_bytes == 12 * gpu[4].link_bytes == 12 * 2 * 1024 / 2


def test_asynchronous_starts_count_their_results_only(gpu):
    assert gpu[1].parts == (32 * 32 * 4, 16 * 8 * 2)
    assert gpu[1].dtypes == ("float32", "bfloat16")
    assert gpu[2].bytes == 2 * 32 * 4
    assert gpu[5].bytes == 8 * 32 * 4


def test_an_all_reduce_of_a_concatenation_has_its_parts(gpu):
    assert gpu[0].parts == (256 * 4, 32 * 4)
    assert gpu[0].group_size == 4


def test_the_innermost_frame_is_the_source(gpu):
    assert gpu[3].source == "model.py:17 (step)"
    assert gpu[3].op_name == "jit(f)/while/body/psum"


def test_older_metadata_with_file_and_line_is_the_source():
    text = GPU.replace("stack_frame_id=1}", 'source_file="/a/b.py" source_line=5}')
    assert compiled_collectives(text)[3].source == "b.py:5"


def test_nested_loops_multiply_their_trip_counts():
    nested = GPU.replace(
        "  %ard = ",
        "  %inner = (s32[], f32[8,32]{1,0}) while(%t), condition=%condition, body=%scattering, "
        'backend_config={"known_trip_count":{"n":"3"}}\n  %ard = ',
    )
    trips = [one.trips for one in compiled_collectives(nested) if one.kind == "reduce-scatter"]
    assert trips == [1, 12 * 3, None]


def test_host_transfers_are_no_collectives_and_other_sends_are():
    send = "  %s = (f32[8]{0}, u32[], token[]) send(%arg, %arg), channel_id=9, is_host_transfer="
    to_device = GPU.replace("  ROOT %cond", f"{send}false\n  ROOT %cond")
    to_host = GPU.replace("  ROOT %cond", f"{send}true\n  ROOT %cond")
    assert [one.kind for one in compiled_collectives(to_device)].count("send") == 1
    assert [one.kind for one in compiled_collectives(to_host)].count("send") == 0


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="must have an ENTRY computation, got 'hello"):
        compiled_collectives("hello\n")


def test_result_types_are_read_with_layouts_comments_and_odd_dtypes():
    assert parse_result("(f32[2,3]{1,0:T(8,128)}, /*index=1*/pred[], s4[3]{0}, token[])") == (
        ("float32", 24),
        ("bool", 1),
        ("int4", 2),
    )


def test_a_program_of_one_device_has_none():
    step = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))).compile()
    assert compiled_collectives(step.as_text() or "") == ()
