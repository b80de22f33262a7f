"""Measured training runs in the project's data format, as configurations that can be predicted.

A JSON file holds `{"rows": [...]}`; a row has `source`, `id`, `model`, `hardware`, `parallel` and
`measured`. What a source leaves out is filled in here, and each assumption is written beside it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from alpa_interchange.cluster import ClusterSpec
from cost_model.catalogue import HOSTS
from cost_model.measured_row import NAMED_MODELS, MeasuredRun, preset_of
from cost_model.measured_table import read_measured_table
from cost_model.training_run import TrainingRun
from cost_model.transformer import TransformerSpec

_RECOMPUTE = {
    "none": "none", "no": "none", "false": "none", "full": "full", "yes": "full", "true": "full",
    "attn_only": "selective", "selective": "selective",
    "ours": "none",  # Megatron-Kwai's own checkpointing repeats only cheap kernels
}  # fmt: skip


def read_measured_runs(path: str | os.PathLike[str]) -> tuple[MeasuredRun, ...]:
    """Return the rows of the file at `path`; ValueError names a malformed row.

    Tables that end in .csv are read by `measured_table`.
    """
    if str(path).endswith(".csv"):
        return read_measured_table(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = document["rows"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: must be a JSON object with 'rows': {error}") from None
    runs = []
    for index, row in enumerate(rows):
        try:
            runs.append(measured_run(row))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: row {index}: missing or malformed field {error}") from None
    return tuple(runs)


def measured_run(row: Mapping[str, Any]) -> MeasuredRun:
    """Return one row as a configuration with its measurement."""
    source, measured = str(row["source"]), row["measured"]
    seconds = _step_seconds(row)
    gib = float(1 << 30)
    memory = (measured.get("params_grads_opt_gib"), measured.get("activations_gib"))
    others = {
        name.removesuffix("_s"): float(value)
        for name, value in row.get("other_predictions", {}).items()
        if name.endswith("_s")
    }
    run, skipped = None, ""
    if seconds is None and memory[0] is None:
        skipped = "no step time or memory of a known configuration"
    else:
        try:
            run = _training_run(row)
        except ValueError as unknown:
            skipped = str(unknown)
    return MeasuredRun(
        id=str(row.get("id", "")),
        source=source,
        group=_group(row),
        run=run,
        step_seconds=None if seconds is None else float(seconds),
        state_bytes=None if memory[0] is None else memory[0] * gib,
        activation_bytes=None if memory[1] is None else memory[1] * gib,
        others=others,
        skipped=skipped,
    )


def _step_seconds(row: Mapping[str, Any]) -> float | None:
    """Return the measured step time, from a throughput where that is what was measured."""
    measured, batch = row["measured"], row["parallel"].get("global_batch")
    seq = row["model"].get("seq", row["model"].get("seq_size"))
    for name in ("step_time_s", "step_time_s_derived"):
        if measured.get(name):
            return float(measured[name])
    if batch and measured.get("samples_per_s"):
        return float(batch) / float(measured["samples_per_s"])
    if batch and seq and measured.get("tokens_per_s"):
        return float(batch) * float(seq) / float(measured["tokens_per_s"])
    return None


def _group(row: Mapping[str, Any]) -> str:
    model, parallel = row["model"], row["parallel"]
    parts = (
        model.get("name") or model.get("hidden"),
        model.get("layers", model.get("num_blocks")),
        model.get("seq", model.get("seq_size")),
        row["hardware"].get("n"),
        parallel.get("global_batch"),
    )
    return "/".join(str(part) for part in parts)


def _training_run(row: Mapping[str, Any]) -> TrainingRun:
    source, parallel = str(row["source"]), row["parallel"]
    tensor = parallel.get("tp", parallel.get("tp_remembered"))
    pipeline = parallel.get("pp", parallel.get("pp_remembered"))
    context = parallel.get("cp", 1)
    if tensor is None or pipeline is None:
        raise ValueError("the row does not give the parallel configuration")
    cluster = _cluster(row["hardware"], source)
    data = parallel.get("dp") or cluster.num_devices // (tensor * pipeline * context)
    chunks = int(parallel.get("pp_interleave", parallel.get("vpp", 1)) or 1)
    micro_batch = parallel.get("micro_batch")
    if micro_batch is None:
        # Megatron 2021: the paper tuned it and does not list it; 4 without, 1 with pipelining.
        # Megatron-Kwai: one sequence per microbatch
        micro_batch = 4 if source == "megatron_sc21" and pipeline == 1 else 1
    batch = parallel.get("global_batch")
    if batch is None:  # memory rows: any batch that fills the pipeline
        batch = micro_batch * data * pipeline * chunks
    # software of the devices' time: FlashAttention and sharded optimisers came with Hopper
    recent = not cluster.host_groups[0].device.name.startswith(("v100", "a100", "rtx"))
    fused = recent or source in ("seqsel_tab5", "megatron_sc21")
    return TrainingRun(
        model=_model(row["model"]),
        cluster=cluster,
        global_batch=int(batch),
        micro_batch=int(micro_batch),
        tensor=int(tensor),
        context=int(context),
        data=int(data),
        pipeline=int(pipeline),
        chunks=chunks,
        recompute=_recompute(parallel, source),
        sequence_parallel=bool(
            parallel.get("sequence_parallel", recent or _sequence_parallel_memory(row))
        ),
        fused_attention=bool(parallel.get("flash_attention", recent)),
        fused_elementwise=fused,
        zero_stage=int(bool(parallel.get("sharded_optimizer", recent))),
        executor="xla" if cluster.host_groups[0].device.platform == "tpu" else "megatron-deepspeed",
        dtype=str(parallel.get("dtype", "bfloat16" if recent else "float16")),
    )


def _sequence_parallel_memory(row: Mapping[str, Any]) -> bool:
    """Figure 1 of arXiv 2205.05198: its selective-recompute bars use sequence parallelism."""
    return "activations_gib" in row["measured"] and row["parallel"].get("recompute") == "attn_only"


def _recompute(parallel: Mapping[str, Any], source: str) -> str:
    given = parallel.get("recompute", parallel.get("ckpt"))
    if given is None:
        # per the sources: vTrain's multi-node runs checkpoint every layer, single-node runs do not
        return "full" if source == "vtrain_multi" else "none"
    if str(given).lower() not in _RECOMPUTE:
        raise ValueError(f"recomputation {given!r} is not known")
    return _RECOMPUTE[str(given).lower()]


def _model(model: Mapping[str, Any]) -> TransformerSpec:
    seq = model.get("seq", model.get("seq_size"))
    # Llama2-70B, Llama-2-70b and Llama3-70B have one shape but for the vocabulary
    name = re.sub(r"^llama-?[23](\.\d)?", "llama", str(model.get("name", "")).lower())
    if name in NAMED_MODELS and seq is not None:
        return TransformerSpec(seq=int(seq), **NAMED_MODELS[name])
    layers = model.get("layers", model.get("num_blocks"))
    if "hidden" not in model or layers is None or seq is None:
        raise ValueError("the row does not give the model's shape")
    heads = model.get("heads", model.get("attn_heads", model.get("heads_remembered")))
    return TransformerSpec(
        hidden=int(model["hidden"]),
        layers=int(layers),
        heads=int(heads or max(1, model["hidden"] // 128)),
        seq=int(seq),
        feedforward=model.get("feedforward"),
        kv_heads=model.get("kv_heads"),
        gated=model.get("kind") == "llama",
        tied=model.get("kind") != "llama",
        vocab=int(model.get("vocab") or 51200),
    )


def _cluster(hardware: Mapping[str, Any], source: str) -> ClusterSpec:
    gpu = str(hardware["gpu"])
    host = HOSTS[preset_of(gpu)]
    if source.startswith("vtrain"):
        host = evolve(host, num_nics=4)  # 800 Gbit/s per host, four HDR interfaces
    count = int(hardware["n"])
    per_host = min(int(hardware.get("gpus_per_node") or host.devices_per_host), count)
    if count % per_host:
        raise ValueError(f"{count} devices do not fill hosts of {per_host}")
    group = evolve(host, num_hosts=count // per_host, devices_per_host=per_host)
    return ClusterSpec(name=f"{gpu}:{count}", host_groups=(group,))
