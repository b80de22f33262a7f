import json
from typing import Any

import pytest

from cost_model import TrainingRun
from cost_model.measured_run import measured_run, read_measured_runs

# rows as in the project's data; figures from VIA-Research/vTrain (MIT), arXiv 2205.05198 and
# kwai/Megatron-Kwai
VTRAIN: dict[str, Any] = {
    "source": "vtrain_multi", "id": "v", "measured": {"step_time_s": 17.4136},
    "model": {"kind": "gpt", "hidden": 8192, "heads": 64, "layers": 48, "seq": 2048},
    "hardware": {"gpu": "A100", "n": 512, "gpus_per_node": 8},
    "parallel": {"tp": 4, "dp": 16, "pp": 8, "global_batch": 1536, "micro_batch": 4},
}  # fmt: skip
MEMORY: dict[str, Any] = {
    "source": "seqsel_tab5", "id": "m",
    "measured": {"params_grads_opt_gib": 45.5625, "activations_gib": 9.5625},
    "model": {"kind": "gpt", "hidden": 6144, "feedforward": 24576, "seq_size": 2048,
              "attn_heads": 64, "num_blocks": 48},
    "hardware": {"gpu": "A100-80GB", "n": 8},
    "parallel": {"tp": 8, "pp": 1, "dp": 1, "micro_batch": 4, "recompute": "attn_only",
                 "pp_interleave": 1},
}  # fmt: skip
KWAI: dict[str, Any] = {
    "source": "kwai_atc24", "id": "k", "measured": {"step_time_s_derived": 17.15},
    "model": {"kind": "llama", "name": "Llama2-70B", "seq": 8192},
    "hardware": {"gpu": "H800-80GB", "n": 128, "gpus_per_node": 8},
    "parallel": {"tp": 2, "cp": 2, "pp": 8, "vpp": 2, "dp": 4, "global_batch": 256,
                 "ckpt": "ours"},
}  # fmt: skip


def run_of(row: dict[str, Any]) -> TrainingRun:
    run = measured_run(row).run
    assert run is not None
    return run


def test_a_row_becomes_a_configuration():
    run = run_of(VTRAIN)
    assert measured_run(VTRAIN).step_seconds == 17.4136
    assert (run.tensor, run.pipeline, run.data) == (4, 8, 16)
    assert run.num_microbatches == 24
    assert run.recompute == "full"  # the source's note: every layer is checkpointed
    assert run.cluster.num_devices == 512


def test_single_node_rows_of_the_same_project_do_not_recompute():
    parallel = VTRAIN["parallel"] | {"dp": 1, "tp": 4, "pp": 2}
    hardware = VTRAIN["hardware"] | {"n": 8}
    row = VTRAIN | {"source": "vtrain_single", "parallel": parallel, "hardware": hardware}
    assert run_of(row).recompute == "none"


def test_memory_rows_become_configurations_too():
    run = run_of(MEMORY)
    assert measured_run(MEMORY).activation_bytes == 9.5625 * 2**30
    assert run.recompute == "selective" and run.sequence_parallel


def test_models_known_by_name_have_their_published_shape():
    run = run_of(KWAI)
    assert (run.model.hidden, run.model.kv_heads, run.context, run.chunks) == (8192, 8, 2, 2)
    assert run.fused_attention and run.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"measured": {}}, "no step time or memory"),
        ({"parallel": {"plan": "unknown"}}, "does not give the parallel configuration"),
        ({"model": {"name": "13B"}}, "does not give the model's shape"),
        ({"hardware": {"gpu": "Z1", "n": 512}}, "device 'Z1' is not in the catalogue"),
        ({"hardware": {"gpu": "A100", "n": 500}}, "500 devices do not fill hosts of 8"),
        ({"hardware": {"gpu": "A100", "n": 256}}, "is 512, but cluster 'A100:256' has 256"),
        ({"parallel": VTRAIN["parallel"] | {"recompute": "some"}}, "'some' is not known"),
    ],
)
def test_rows_that_say_too_little_are_skipped_with_the_reason(change, reason):
    row = measured_run(VTRAIN | change)
    assert row.run is None and reason in row.skipped


def test_rows_of_equal_model_devices_and_batch_are_one_group():
    other = VTRAIN | {"parallel": VTRAIN["parallel"] | {"tp": 8, "dp": 8}}
    assert measured_run(VTRAIN).group == measured_run(other).group
    larger = VTRAIN | {"parallel": VTRAIN["parallel"] | {"global_batch": 3072}}
    assert measured_run(VTRAIN).group != measured_run(larger).group


def test_files_are_read_and_malformed_ones_named(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"rows": [VTRAIN, MEMORY]}))
    assert [row.id for row in read_measured_runs(path)] == ["v", "m"]
    path.write_text(json.dumps({"rows": [VTRAIN, {"source": "x"}]}))
    with pytest.raises(ValueError, match=r"runs\.json: row 1: .*'measured'"):
        read_measured_runs(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object with 'rows'"):
        read_measured_runs(path)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("H100", "h100"),
        ("H100-80GB-SXM", "h100"),
        ("A100-40GB", "a100-40gb"),
        ("A100", "a100-80gb"),
        ("TPUv4", "tpu-v4"),
        ("TPU v5p", "tpu-v5p"),
        ("B200", "b200"),
    ],
)
def test_device_names_are_found_in_the_catalogue(name, device):
    row = VTRAIN | {"source": "elsewhere", "hardware": {"gpu": name, "n": 512}}
    assert run_of(row).cluster.host_groups[0].device.name == device


def test_newer_devices_are_taken_to_run_newer_software_unless_the_row_says_otherwise():
    row = VTRAIN | {"source": "elsewhere", "hardware": {"gpu": "H100", "n": 512}}
    run = run_of(row)
    assert run.fused_attention and run.zero_stage == 1 and run.dtype == "bfloat16"
    said = row | {"parallel": VTRAIN["parallel"] | {"flash_attention": False, "dtype": "float16"}}
    assert not run_of(said).fused_attention
    assert run_of(said).dtype == "float16"


def test_throughputs_become_step_times():
    tokens = VTRAIN | {"measured": {"tokens_per_s": 1536 * 2048 / 4.0}}
    assert measured_run(tokens).step_seconds == pytest.approx(4.0)
    samples = VTRAIN | {"measured": {"samples_per_s": 1536 / 5.0}}
    assert measured_run(samples).step_seconds == pytest.approx(5.0)


def test_a_missing_data_parallel_size_is_what_the_devices_leave():
    parallel = {name: value for name, value in VTRAIN["parallel"].items() if name != "dp"}
    assert run_of(VTRAIN | {"parallel": parallel}).data == 16
