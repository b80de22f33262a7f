import json

import pytest

from cost_model.measured_run import measured_run, read_measured_runs

# rows as in the project's data; figures from VIA-Research/vTrain (MIT), arXiv 2205.05198 and
# kwai/Megatron-Kwai
VTRAIN = {
    "source": "vtrain_multi", "id": "v", "measured": {"step_time_s": 17.4136},
    "model": {"kind": "gpt", "hidden": 8192, "heads": 64, "layers": 48, "seq": 2048},
    "hardware": {"gpu": "A100", "n": 512, "gpus_per_node": 8},
    "parallel": {"tp": 4, "dp": 16, "pp": 8, "global_batch": 1536, "micro_batch": 4},
}  # fmt: skip
MEMORY = {
    "source": "seqsel_tab5", "id": "m",
    "measured": {"params_grads_opt_gib": 45.5625, "activations_gib": 9.5625},
    "model": {"kind": "gpt", "hidden": 6144, "feedforward": 24576, "seq_size": 2048,
              "attn_heads": 64, "num_blocks": 48},
    "hardware": {"gpu": "A100-80GB", "n": 8},
    "parallel": {"tp": 8, "pp": 1, "dp": 1, "micro_batch": 4, "recompute": "attn_only",
                 "pp_interleave": 1},
}  # fmt: skip
KWAI = {
    "source": "kwai_atc24", "id": "k", "measured": {"step_time_s_derived": 17.15},
    "model": {"kind": "llama", "name": "Llama2-70B", "seq": 8192},
    "hardware": {"gpu": "H800-80GB", "n": 128, "gpus_per_node": 8},
    "parallel": {"tp": 2, "cp": 2, "pp": 8, "vpp": 2, "dp": 4, "global_batch": 256,
                 "ckpt": "ours"},
}  # fmt: skip


def test_a_row_becomes_a_configuration():
    row = measured_run(VTRAIN)
    assert row.step_seconds == 17.4136
    assert (row.run.tensor, row.run.pipeline, row.run.data) == (4, 8, 16)
    assert row.run.num_microbatches == 24
    assert row.run.recompute == "full"  # the source's note: every layer is checkpointed
    assert row.run.cluster.num_devices == 512


def test_single_node_rows_of_the_same_project_do_not_recompute():
    parallel = VTRAIN["parallel"] | {"dp": 1, "tp": 4, "pp": 2}
    hardware = VTRAIN["hardware"] | {"n": 8}
    row = VTRAIN | {"source": "vtrain_single", "parallel": parallel, "hardware": hardware}
    assert measured_run(row).run.recompute == "none"


def test_memory_rows_become_configurations_too():
    row = measured_run(MEMORY)
    assert row.activation_bytes == 9.5625 * 2**30
    assert row.run.recompute == "selective" and row.run.sequence_parallel


def test_models_known_by_name_have_their_published_shape():
    run = measured_run(KWAI).run
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
    assert measured_run(row).run.cluster.host_groups[0].device.name == device


def test_newer_devices_are_taken_to_run_newer_software_unless_the_row_says_otherwise():
    row = VTRAIN | {"source": "elsewhere", "hardware": {"gpu": "H100", "n": 512}}
    run = measured_run(row).run
    assert run.fused_attention and run.zero_stage == 1 and run.dtype == "bfloat16"
    said = row | {"parallel": VTRAIN["parallel"] | {"flash_attention": False, "dtype": "float16"}}
    assert not measured_run(said).run.fused_attention
    assert measured_run(said).run.dtype == "float16"


def test_throughputs_become_step_times():
    tokens = VTRAIN | {"measured": {"tokens_per_s": 1536 * 2048 / 4.0}}
    assert measured_run(tokens).step_seconds == pytest.approx(4.0)
    samples = VTRAIN | {"measured": {"samples_per_s": 1536 / 5.0}}
    assert measured_run(samples).step_seconds == pytest.approx(5.0)


def test_a_missing_data_parallel_size_is_what_the_devices_leave():
    parallel = {name: value for name, value in VTRAIN["parallel"].items() if name != "dp"}
    assert measured_run(VTRAIN | {"parallel": parallel}).run.data == 16
