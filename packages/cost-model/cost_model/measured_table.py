"""Tables of measured training runs as their sources publish them, read as `MeasuredRun`s.

Which source a table is from follows from its columns:

    nanotron          Ultra-Scale Playbook (Hugging Face, Apache-2.0): tokens/s, memory or failure
                      on H100 hosts with EFA; sequence parallel, FlashAttention, no recomputation
    SimuMax           MooreThreads/SimuMax (Apache-2.0): Megatron-LM iterations on 8 B200
    Sailor            eth-easl/sailor (MIT): iterations on hosts of 4 GH200
    Megatron Bridge   NVIDIA-NeMo/Megatron-Bridge (Apache-2.0): tokens/s per GPU, H100 to GB300
    MPT               mosaicml/llm-foundry (Apache-2.0): tokens/s per GPU under FSDP on A100

Rows are in one group where model, devices and batch are equal: fitting and testing never share one.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from alpa_interchange.cluster import ClusterSpec, HostGroup
from cost_model.catalogue import HOSTS, LINKS
from cost_model.measured_row import NAMED_MODELS, MeasuredRun, preset_of
from cost_model.training_run import StagePlacement, TrainingRun
from cost_model.transformer import TransformerSpec

Row = Mapping[str, str]
_GIB = float(1 << 30)


def read_measured_table(path: str | os.PathLike[str]) -> tuple[MeasuredRun, ...]:
    """Return the rows of the CSV file at `path`; ValueError names a malformed row."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = set(rows[0]) if rows else set()
    found = [read for column, read in _READERS.items() if column in columns]
    if not found:
        raise ValueError(
            f"{path}: the columns must be those of a known table (with one of "
            f"{', '.join(_READERS)}), got {', '.join(sorted(columns))}"
        )
    measured = []
    for index, row in enumerate(rows):
        try:
            measured.append(found[0](row))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(f"{path}: row {index}: missing or malformed field {error}") from None
    return tuple(measured)


def _measured(
    source: str, name: str, group: str, run: Callable[[], TrainingRun], **measurement: Any
) -> MeasuredRun:
    """Return the row with its configuration, or with the reason why there is none."""
    try:
        return MeasuredRun(id=name, source=source, group=group, run=run(), **measurement)
    except ValueError as unknown:
        return MeasuredRun(
            id=name, source=source, group=group, run=None, skipped=str(unknown), **measurement
        )


def _host(device: str) -> HostGroup:
    return HOSTS[preset_of(device)]


def _number(text: str) -> float:
    """Return the number that `text` begins with; footnotes and thousands' commas are dropped."""
    found = re.match(r"[\d,]+(\.\d+)?", text)
    if found is None:
        raise ValueError(f"{text!r} is not a number")
    return float(found.group().replace(",", ""))


def _cluster(host: HostGroup, count: int, per_host: int) -> ClusterSpec:
    per_host = min(per_host, count)
    if count % per_host:
        raise ValueError(f"{count} devices do not fill hosts of {per_host}")
    group = evolve(host, num_hosts=count // per_host, devices_per_host=per_host)
    return ClusterSpec(name=f"{host.device.name}:{count}", host_groups=(group,))


def _ultrascale(row: Row) -> MeasuredRun:
    data, tensor, pipeline = int(row["dp"]), int(row["tp"]), int(row["pp"])
    batch, seq, gpus = (
        int(row["global_batch_sequences"]),
        int(row["sequence_length"]),
        int(row["gpus"]),
    )
    micro_batch = int(row["micro_batch"])

    def run() -> TrainingRun:
        if data * micro_batch * int(row["grad_accumulation"]) != batch:
            raise ValueError("data x micro_batch x grad_accumulation is not the global batch")
        hidden, layers = int(row["hidden"]), int(row["layers"])
        heads, tied = int(row["heads"]), row["tied_embeddings"] == "1"
        # the table gives no key-value heads: those that make the stated parameters
        model = TransformerSpec(
            hidden=hidden, layers=layers, heads=heads, seq=seq, vocab=int(row["vocabulary"]),
            feedforward=int(row["ffn"]), gated=True, tied=tied,
        )  # fmt: skip
        stated = float(row["params_billion"]) * 1e9
        choices = [evolve(model, kv_heads=heads // d) for d in (1, 4, 8) if heads % d == 0]
        model = min(choices, key=lambda choice: abs(choice.parameters - stated))
        return TrainingRun(
            model=model, cluster=_cluster(HOSTS["p5.48xlarge"], gpus, 8), global_batch=batch,
            micro_batch=micro_batch, tensor=tensor, data=data, pipeline=pipeline,
            sequence_parallel=tensor > 1, fused_attention=True, fused_elementwise=True,
            zero_stage=int(row["zero_stage"]), executor="nanotron", dtype="bfloat16",
        )  # fmt: skip

    ok = row["status"] == "ok"
    return _measured(
        "ultrascale",
        f"{row['model']}/{gpus}/dp{data}-pp{pipeline}-tp{tensor}-mb{micro_batch}",
        f"{row['model']}/{gpus}",
        run,
        step_seconds=batch * seq / float(row["tokens_per_s"]) if ok else None,
        # the table's GB are the tracker's GiB
        peak_bytes=float(row["gpu_memory_gb"]) * _GIB if ok and row["gpu_memory_gb"] else None,
        measured_stage=0,  # what the first stage holds explains the figures, what others hold not
        failed=not ok,
    )


_SIMUMAX_MODELS = {
    "deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3", "deepseekv2-lite": "deepseek-v2-lite",
}  # fmt: skip


def _simumax(row: Row) -> MeasuredRun:
    sizes = {
        name: int(size) for name, size in re.findall(r"(tp|pp|cp|ep|dp|seq)(\d+)", row["case"])
    }
    # as in configs/system/b200_bf16_ceperm.json
    system = re.sub(r".*/", "", row.get("system_rel") or "b200").removesuffix(".json")

    def run() -> TrainingRun:
        name = re.sub(r"^llama[23]?-", "llama-", row["model"].lower()).removesuffix("_padding_128")
        shape = dict(_known(_SIMUMAX_MODELS.get(name, name)))
        if row["model"].lower().startswith("llama3"):
            shape["vocab"] = 128256
        shape["layers"] = int(row["layer_num"])
        model = TransformerSpec(seq=sizes.get("seq", 4096), **shape)
        tensor, pipeline, context = (sizes.get(key, 1) for key in ("tp", "pp", "cp"))
        data = sizes.get("dp", 8 // (tensor * pipeline * context))
        host = _host(system.partition("_")[0])
        return TrainingRun(
            model=model,
            cluster=_cluster(host, tensor * pipeline * context * data, host.devices_per_host),
            global_batch=int(row["mbc"]) * data, micro_batch=1, tensor=tensor, context=context,
            data=data, pipeline=pipeline, expert=sizes.get("ep", 1),
            chunks=int(row["vp_size"] or 1) if pipeline > 1 else 1, sequence_parallel=tensor > 1,
            fused_attention=True, fused_elementwise=True, zero_stage=1, executor="megatron",
            dtype="float8" if "fp8" in system else "bfloat16",
        )  # fmt: skip

    seconds = float(row["real_ms"]) * 1e-3 if row["real_ms"] else None
    others = {"SimuMax": float(row["perf_ms"]) * 1e-3} if row["perf_ms"] else {}
    return _measured(
        "simumax",
        row["case"],
        # batches differ in nothing but the number of microbatches: they are one group
        f"{row['model']}/{row['layer_num']}/{sizes.get('seq', 4096)}",
        run,
        step_seconds=seconds,
        peak_bytes=float(row["real_alloc_gib"]) * _GIB if row["real_alloc_gib"] else None,
        others=others,
    )


_SAILOR_MODELS = {
    "OPT-350": "opt-350m", "OPT-30": "opt-30b", "GPT-Neo-2.7": "gpt-neo-2.7b",
    "LLAMA-3-8": "llama-8b",
}  # fmt: skip
_SAILOR_DEVICES = {
    "GH-96": "gh200", "A100-40": "a100-40gb", "A100-80": "a100-80gb", "V100-16": "v100-16gb",
    "RTX-3090": "rtx-3090", "RTX-2080": "rtx-2080ti", "Titan-RTX": "rtx-titan",
}  # fmt: skip


def _sailor_devices(gpus: Sequence[str]) -> str:
    """Return the preset of a replica's devices, which the source gives as KINDxCOUNT each."""
    kinds = {gpu.rpartition("x")[0] for gpu in gpus}
    if len(kinds) > 1 or not kinds <= set(_SAILOR_DEVICES):
        raise ValueError(f"a replica on {', '.join(sorted(kinds))} is not predicted")
    return _SAILOR_DEVICES[kinds.pop()]


def _placed(
    row: Row,
    model: TransformerSpec,
    kinds: Sequence[str],
    layers: Sequence[int],
    replicas: Sequence[Sequence[tuple[str, int]]],
) -> TrainingRun:
    """Return a run with stages on unlike devices; hosts are taken as of 4 devices."""
    if len({len(stage) for stage in replicas}) > 1:
        raise ValueError("stages with unlike numbers of replicas are not predicted")
    counts = {
        kind: sum(tensor for stage in replicas for name, tensor in stage if name == kind)
        for kind in kinds
    }
    groups = tuple(_cluster(HOSTS[kind], counts[kind], 4).host_groups[0] for kind in kinds)
    return TrainingRun(
        model=model, cluster=ClusterSpec(name="+".join(kinds), host_groups=groups),
        global_batch=int(row["global_batch"]), micro_batch=int(row["micro_batch"]),
        tensor=replicas[0][0][1], data=len(replicas[0]), pipeline=len(replicas),
        placements=tuple(
            StagePlacement(
                layers=count,
                replicas=tuple((kinds.index(kind), tensor) for kind, tensor in stage),
            )
            for count, stage in zip(layers, replicas, strict=True)
        ),
        executor="sailor", dtype="float16",
    )  # fmt: skip


def _sailor(row: Row) -> MeasuredRun:
    pipeline, count = int(row["pp"]), int(row["num_gpus"])

    def run() -> TrainingRun:
        stages = json.loads(row["stages"])
        replicas = [
            [(_sailor_devices(replica["gpus"]), int(replica["tp"])) for replica in s["replicas"]]
            for s in stages
        ]
        layers = [stop - start for start, stop in (s["layers"] for s in stages)]
        model = TransformerSpec(seq=2048, **_known(_SAILOR_MODELS.get(row["model"], row["model"])))
        # the source counts the embedding as the first layer and the head as the last
        layers[0] -= 1
        layers[-1] -= 1
        kinds = sorted({kind for stage in replicas for kind, _ in stage})
        same = len(kinds) == 1 and len({replica for stage in replicas for replica in stage}) == 1
        if not same or len({len(stage) for stage in replicas}) > 1:
            return _placed(row, model, kinds, layers, replicas)
        data, (kind, tensor) = len(replicas[0]), replicas[0][0]
        host = HOSTS[kind]
        return TrainingRun(
            model=model, cluster=_cluster(host, count, count // int(row["nodes"])),
            global_batch=int(row["global_batch"]), micro_batch=int(row["micro_batch"]),
            tensor=tensor, data=data, pipeline=pipeline,
            stage_layers=tuple(layers) if pipeline > 1 else (), executor="sailor",
            dtype="float16",
        )  # fmt: skip

    return _measured(
        "sailor",
        row["source"].removesuffix(".json").rpartition("/")[2] + "-" + row["model"],
        f"{row['model']}/{row['gpu_kinds']}/{count}/{row['global_batch']}",
        run,
        step_seconds=float(row["iteration_seconds"]),
        peak_bytes=float(row["max_memory_bytes"]) if row["max_memory_bytes"] else None,
    )


_PRECISIONS = {"BF16": "bfloat16", "FP8": "float8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
_BRIDGE_MODELS = {
    "llama3_8b": "llama-8b", "llama3_70b": "llama-70b", "llama3.1_405b": "llama-405b",
    "gpt3_175b": "gpt-175b", "nemotron4_15b": "nemotron-15b", "nemotron4_340b": "nemotron-340b",
    "mixtral_8x7b": "mixtral-8x7b", "mixtral_8x22b": "mixtral-8x22b",
    "qwen3_30b_a3b": "qwen3-30b", "qwen3_235b_a22b": "qwen3-235b", "deepseekv3": "deepseek-v3",
    "gpt oss 20b": "gpt-oss-20b", "gpt oss 120b": "gpt-oss-120b", "kimi_k2": "kimi-k2",
    "kimi k2": "kimi-k2",
}  # fmt: skip


def _bridge(row: Row) -> MeasuredRun:
    count, batch, seq = int(row["#-GPUs"]), int(row["GBS"]), int(row["Sequence Length"])
    seconds = batch * seq / (_number(row["Tokens / sec / GPU"]) * count)

    def size(name: str) -> int:
        text = row.get(name) or ""
        return int(text) if text.isdecimal() else 1

    def run() -> TrainingRun:
        if row["section"].startswith("LoRA"):
            raise ValueError("only adapters are trained (LoRA)")
        name = row["model"].lower()
        shape = dict(_known(_BRIDGE_MODELS.get(name, name)))
        if name.startswith("llama3"):
            shape["vocab"] = 128256
        tensor, pipeline, context = size("TP"), size("PP"), size("CP")
        data = count // (tensor * pipeline * context)
        sharded = int(row.get("FSDP") or 0) > 1
        layers = int(shape["layers"])
        stages: tuple[int, ...] = ()
        if layers % pipeline and (layers + 2) % pipeline == 0:
            # the recipes count embedding and loss as a layer each (Llama 405B, Qwen3 235B)
            each = (layers + 2) // pipeline
            stages = (each - 1, *[each] * (pipeline - 2), each - 1)
        device = row["System"].lower().removeprefix("dgx-")
        if row["Precision"] not in _PRECISIONS:
            raise ValueError(f"precision {row['Precision']!r} is not known")
        recent = _number(row.get("release") or "0") >= 26.06
        # hosts of one NVLink domain of 72 are filled with 64 devices, as the counts divide
        per_host = 64 if device.startswith("gb") else 8
        return TrainingRun(
            model=TransformerSpec(seq=seq, **shape),
            cluster=_cluster(_host(device), count, per_host),
            global_batch=batch, micro_batch=int(row["MBS"]), tensor=tensor, context=context,
            data=data, pipeline=pipeline, expert=size("EP"),
            chunks=size("VP") if pipeline > 1 else 1, stage_layers=stages,
            sequence_parallel=tensor > 1, fused_attention=True, fused_elementwise=True,
            zero_stage=3 if sharded else 1,
            executor="megatron-bridge-2606" if recent else "megatron-bridge",
            dtype=_PRECISIONS[row["Precision"]],
        )  # fmt: skip

    return _measured(
        "megatron_bridge",
        f"{row['model']}/{row['System']}/{count}/{row['Precision']}",
        f"{row['model']}/{row['System']}/{count}",
        run,
        step_seconds=seconds,
    )


def _mpt(row: Row) -> MeasuredRun:
    count, seq, batch = int(row["# GPUs"]), int(row["SeqLen (T)"]), int(row["GlobalBatchSize"])
    link = evolve(LINKS["infiniband-200"], name="roce-200")  # 8 interfaces of 200 Gbit/s a host

    def run() -> TrainingRun:
        host = _host(row["GPU"])
        if host.device.name.startswith("a100"):
            host = evolve(host, inter_host=link)
        precision = row["Precision"].removeprefix("amp_")
        if precision not in ("bf16", "fp16", "fp8"):
            raise ValueError(f"precision {row['Precision']!r} is not known")
        return TrainingRun(
            model=TransformerSpec(seq=seq, **_known(f"mpt-{row['Model']}")),
            cluster=_cluster(host, count, 8),
            global_batch=batch, micro_batch=int(row["MicroBatchSize"]), data=count,
            recompute="full" if row["Activation Checkpointing"] == "True" else "none",
            fused_attention=True, zero_stage=3, executor="fsdp",
            dtype={"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}[precision],
        )  # fmt: skip

    return _measured(
        "mpt_fsdp",
        f"{row['Model']}/{seq}/{row['GPU']}/{count}/mb{row['MicroBatchSize']}",
        f"{row['Model']}/{seq}/{row['GPU']}/{count}",
        run,
        step_seconds=batch * seq / (_number(row["Throughput (T/s/GPU)"]) * count),
    )


def _known(name: str) -> Mapping[str, Any]:
    shape = NAMED_MODELS.get(name)
    if shape is None:
        raise ValueError(f"the shape of model {name!r} is not known")
    return shape


# a column that only this source has -> how a row of it is read
_READERS: Mapping[str, Callable[[Row], MeasuredRun]] = {
    "grad_accumulation": _ultrascale,
    "perf_alloc_gib": _simumax,
    "gradient_sync_seconds": _sailor,
    "Model TFLOP / sec / GPU": _bridge,
    "Sharding Strategy": _mpt,
}
