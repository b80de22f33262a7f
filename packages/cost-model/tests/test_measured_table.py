import pytest

from cost_model.measured_run import read_measured_runs
from cost_model.measured_table import read_measured_table

# excerpts of the published tables: Ultra-Scale Playbook, SimuMax v1.2 and Megatron-Bridge
# (Apache-2.0), eth-easl/sailor (MIT), mosaicml/llm-foundry (Apache-2.0)
ULTRASCALE = """\
model,params_billion,layers,hidden,heads,ffn,tied_embeddings,sequence_length,vocabulary,\
gpus,nodes,dp,pp,tp,zero_stage,micro_batch,grad_accumulation,global_batch_sequences,\
status,tokens_per_s_per_gpu,tokens_per_s,mfu_percent,gpu_memory_gb
1B,1.34,16,2048,32,8192,1,4096,131072,8,1.0,1,2,4,0,1,256,256,ok,12013.0,96104.0,13.7,7.6
1B,1.34,16,2048,32,8192,1,4096,131072,8,1.0,1,2,4,0,32,8,256,failed,,,,
1B,1.34,16,2048,32,8192,1,4096,131072,8,1.0,1,2,4,0,32,4,256,failed,,,,
8B,8.86,32,4096,32,14336,0,4096,131072,32,4.0,8,2,2,1,1,32,256,ok,6430,205760.0,40.0,41.3
"""
SIMUMAX = """\
case,model,parallel,layer_num,mbc,vp_size,perf_ms,perf_alloc_gib,real_ms,real_alloc_gib
llama3_70b_tp2_pp1_dp4_l12_mbc4_cef,llama3-70b,tp2pp1,12,4,1,698.81,60.51,725.5,60.68
deepseekv2_tp1_ep4_pp2_dp4_l4_mbc8_cef,deepseekv2,tp1ep4pp2,4,8,1,435.14,44.37,492.6,44.7
llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef,llama3-70b,tp2cp4pp1,12,4,1,1595,68.16,1757,68.2
"""
SAILOR = """\
source,site,model,gpu_kinds,nodes,num_gpus,pp,dp,tp,micro_batch,global_batch,\
iteration_seconds,gradient_sync_seconds,max_memory_bytes,stages
a/N2_D1.json,clariden,OPT-350,GH-96,2,8,2,1/1,4,8,32,0.65705,0.00414,26942111744,"[{""layers"":\
[0,12],""replicas"":[{""gpus"":[""GH-96x4""],""tp"":4}]},{""layers"":[12,26],""replicas"":[{""g\
pus"":[""GH-96x4""],""tp"":4}]}]"
a/mixed.json,cloud,OPT-350,A100-40/V100-16,2,8,2,1/1,4,8,32,0.65705,,,"[{""layers"":[0,20],""re\
plicas"":[{""gpus"":[""A100-40x4""],""tp"":4}]},{""layers"":[20,26],""replicas"":[{""gpus"":[""\
V100-16x4""],""tp"":4}]}]"
"""
BRIDGE = """\
release,section,model,System,#-GPUs,Precision,GBS,MBS,Sequence Length,TP,PP,CP,VP,EP,\
Tokens / sec / GPU,Model TFLOP / sec / GPU,FSDP
26.06.01,Pre-Training,DeepSeekV3,DGX-GB200,256,MXFP8,4096,1,4096,1,4,1,4,64,4912,1276,
26.02,Pre-Training,LLAMA3_70B,DGX-GB200,64,FP8,256,2,8192,1,1,1,n/a,n/a,4040,1815,64
26.02,Pre-Training,LLAMA3_70B,DGX-H100,64,NVFP4,256,1,8192,4,8,1,5,n/a,1621,728,0
26.08,LoRA Performance,LLAMA3_70B,DGX-H100,8,FP8,32,1,4096,2,4,1,20,n/a,2643,735,
26.04,Pre-Training,Nemotron_3_Nano,DGX-H100,16,FP8,1024,1,8192,1,1,1,n/a,8,14336,321,0
"""
MPT = """\
section,Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,GlobalBatchSize,Throughput (T/s/GPU),\
Precision,Sharding Strategy,Activation Checkpointing
A100 80GB,7b,2048,8,a100_80gb,6,96,4641,amp_bf16,FULL_SHARD,False
A100 80GB,30b,8192,8,a100_80gb,1,168,574,amp_bf16,FULL_SHARD,True
"""


@pytest.fixture
def table(tmp_path):
    def write(text):
        path = tmp_path / "rows.csv"
        path.write_text(text, encoding="utf-8")
        return read_measured_runs(path)

    return write


def test_nanotron_rows_give_time_memory_and_failures(table):
    fast, failed, wrong, large = table(ULTRASCALE)
    assert fast.step_seconds == pytest.approx(256 * 4096 / 96104)
    assert fast.peak_bytes == pytest.approx(7.6 * 2**30) and not fast.failed
    assert failed.failed and failed.step_seconds is None and failed.run is not None
    assert wrong.run is None and "is not the global batch" in wrong.skipped
    assert (large.run.zero_stage, large.run.executor, large.run.cluster.num_devices) == (
        1, "nanotron", 32,
    )  # fmt: skip


def test_key_value_heads_follow_from_the_stated_parameters(table):
    small, *_, large = table(ULTRASCALE)
    assert small.run.model.parameters == pytest.approx(1.34e9, rel=0.01)
    assert large.run.model.parameters == pytest.approx(8.86e9, rel=0.01)


def test_simumax_rows_have_experts_and_context_parallelism(table):
    dense, sparse, ring = table(SIMUMAX)
    assert dense.others["SimuMax"] == pytest.approx(0.69881)
    assert dense.run.model.layers == 12 and dense.run.model.vocab == 128256
    assert (sparse.run.expert, sparse.run.pipeline, sparse.run.data) == (4, 2, 4)
    assert (ring.run.context, ring.run.model.seq) == (4, 32768)


def test_sailor_rows_keep_their_stages_on_unlike_devices_too(table):
    staged, mixed = table(SAILOR)
    # the source counts embedding and head as layers
    assert staged.run.stage_layers == (11, 13)
    first, second = mixed.run.placements
    kinds = [group.device.name for group in mixed.run.cluster.host_groups]
    assert (first.layers, kinds[first.replicas[0][0]]) == (19, "a100-40gb")
    assert (second.layers, kinds[second.replicas[0][0]]) == (5, "v100-16gb")


def test_bridge_rows_have_their_precision_or_say_why_not(table):
    sparse, sharded, impossible, adapters, unknown = table(BRIDGE)
    assert sparse.run.dtype == "mxfp8" and sparse.run.expert == 64
    assert sharded.run.zero_stage == 3 and sharded.run.data == 64
    assert sparse.run.program.fused_experts > sharded.run.program.fused_experts  # from 26.06 on
    assert "needs float4_e2m1fn" in impossible.skipped and "'h100'" in impossible.skipped
    assert "LoRA" in adapters.skipped
    assert "'nemotron_3_nano' is not known" in unknown.skipped


def test_mpt_rows_shard_everything(table):
    plain, checkpointed = table(MPT)
    assert plain.run.zero_stage == 3 and plain.run.recompute == "none"
    assert plain.run.model.parameters == pytest.approx(6658859008, rel=0.005)
    assert checkpointed.run.recompute == "full"


def test_unknown_columns_are_refused_by_name(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"known table .*got a, b"):
        read_measured_table(path)
