import pytest

from cost_model import TransformerSpec
from cost_model.transformer import activation_bytes, layer_flops, layer_work, step_flops

GPT3 = TransformerSpec(hidden=12288, layers=96, heads=96, seq=2048)
LLAMA = TransformerSpec(
    hidden=8192, layers=80, heads=64, kv_heads=8, feedforward=28672, seq=4096, vocab=32000,
    gated=True, tied=False,
)  # fmt: skip


def test_parameters_of_known_models():
    assert GPT3.parameters == pytest.approx(174.6e9, rel=1e-3)
    assert LLAMA.parameters == pytest.approx(68.98e9, rel=1e-3)


def test_model_flops_follow_the_formula_of_megatron():
    # Narayanan et al. 2021, equation 3 without the repeated forward pass: 72 B s l h^2 (...)
    s, l, h, v = 2048, 96, 12288, 51200
    expected = 72 * 8 * s * l * h * h * (1 + s / (6 * h) + v / (12 * l * h))
    useful, executed = step_flops(GPT3, 8)
    assert useful == executed == pytest.approx(expected)


def test_hardware_flops_add_what_is_repeated():
    useful, full = step_flops(GPT3, 8, "full")
    assert full == pytest.approx(useful + 96 * layer_flops(GPT3, 8))
    # Narayanan et al. 2021 count 96 B s l h^2 (1 + s / 6 h + v / 16 l h) with full recomputation
    s, l, h, v = 2048, 96, 12288, 51200
    assert full == pytest.approx(96 * 8 * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h)))
    assert useful < step_flops(GPT3, 8, "selective")[1] < full


def test_activations_follow_the_table_of_korthikanti():
    # arXiv 2205.05198, table 2, bytes per layer: s b h (...)
    s, b, h, a, t = 2048, 1, 12288, 96, 8
    sbh, ratio = s * b * h, 5 * a * s / h
    assert activation_bytes(GPT3, 1) == pytest.approx(sbh * (34 + ratio))
    assert activation_bytes(GPT3, 1, t) == pytest.approx(sbh * (10 + (24 + ratio) / t))
    parallel = activation_bytes(GPT3, 1, t, sequence_parallel=True)
    assert parallel == pytest.approx(sbh / t * (34 + ratio))
    selective = activation_bytes(GPT3, 1, t, sequence_parallel=True, recompute="selective")
    assert selective == pytest.approx(sbh / t * 34)
    assert activation_bytes(GPT3, 1, recompute="full") == pytest.approx(2 * sbh)


def test_the_kernels_of_a_layer_do_its_flops():
    for tensor in (1, 4):
        work = layer_work(GPT3, 2, tensor)
        assert sum(m.flops for m in work.matmuls) * tensor == pytest.approx(layer_flops(GPT3, 2))
    work = layer_work(LLAMA, 1)
    assert sum(m.flops for m in work.matmuls) == pytest.approx(layer_flops(LLAMA, 1))


def test_fused_attention_skips_masked_blocks_and_the_score_matrix():
    plain, fused = layer_work(GPT3, 1), layer_work(GPT3, 1, fused_attention=True)
    assert fused.attention_flops == plain.attention_flops / 2
    assert fused.attention_bytes == 0 < plain.attention_bytes
    assert all(m.kind == "matmul" for m in fused.matmuls)


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole():
    whole = layer_work(GPT3, 1, 8).memory_bytes
    assert layer_work(GPT3, 1, 8, sequence_parallel=True).memory_bytes < whole
