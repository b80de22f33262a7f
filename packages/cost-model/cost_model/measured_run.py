"""Measured training runs in the project's data format, as configurations that can be predicted.

A file holds `{"rows": [...]}`; a row has `source`, `id`, `model`, `hardware`, `parallel` and
`measured`. What a source leaves out is filled in here, and each assumption is written beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from alpa_interchange.cluster import ClusterSpec
from cost_model.catalogue import HOSTS
from cost_model.training_run import TrainingRun
from cost_model.transformer import TransformerSpec

# the hardware of each GPU name in the data
_HOSTS = {
    "A100": "a100-80gb",
    "A100-80GB": "selene",
    "A100-40GB": "a100-40gb",
    "H800-80GB": "h800",
    "H100": "h100",
    "V100-32GB": "v100-32gb",
    "V100": "v100-16gb",
}

_LLAMA = {"gated": True, "tied": False, "vocab": 32000}
# Llama shapes: Touvron et al. 2023; the 175B one has the width that gives 175e9 parameters
_NAMED_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-65B": {"hidden": 8192, "layers": 80, "heads": 64, "feedforward": 22016, **_LLAMA},
    "Llama2-70B": {
        "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "feedforward": 28672, **_LLAMA,
    },
    "Llama-175B": {"hidden": 12288, "layers": 96, "heads": 96, "feedforward": 32768, **_LLAMA},
}  # fmt: skip


@frozen(kw_only=True)
class MeasuredRun:
    """One row of measurements; `run` is None where the row does not say what was run."""

    id: str
    source: str
    group: str  # rows of equal model, devices and batch; fitting and testing never share one
    run: TrainingRun | None
    step_seconds: float | None = None
    state_bytes: float | None = None  # parameters, gradients and optimiser per device
    activation_bytes: float | None = None  # per device, first stage
    others: Mapping[str, float] = field(factory=dict)  # seconds that other tools predicted
    skipped: str = ""  # why there is no run


def read_measured_runs(path: str | os.PathLike[str]) -> tuple[MeasuredRun, ...]:
    """Return the rows of the file at `path`; ValueError names a malformed row."""
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
    seconds = measured.get("step_time_s", measured.get("step_time_s_derived"))
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
        except _Unknown as unknown:
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


class _Unknown(ValueError):
    """A row does not say enough to be predicted."""


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
    model = _model(row["model"], source)
    tensor = parallel.get("tp", parallel.get("tp_remembered"))
    pipeline = parallel.get("pp", parallel.get("pp_remembered"))
    data = parallel.get("dp")
    if tensor is None or pipeline is None or data is None:
        raise _Unknown("the row does not give the parallel configuration")
    context = parallel.get("cp", 1)
    batch = parallel.get("global_batch")
    micro_batch = parallel.get("micro_batch")
    if micro_batch is None:
        # Megatron 2021: the paper tuned it and does not list it; 4 without, 1 with pipelining.
        # Megatron-Kwai: one sequence per microbatch
        micro_batch = 4 if source == "megatron_sc21" and pipeline == 1 else 1
    if batch is None:  # memory rows: any batch that fills the pipeline
        batch = micro_batch * data * pipeline * parallel.get("pp_interleave", 1)
    recompute = _recompute(parallel, source)
    recent = source in ("kwai_atc24",)
    fused = recent or source in ("seqsel_tab5", "megatron_sc21")
    return TrainingRun(
        model=model,
        cluster=_cluster(row["hardware"], source),
        global_batch=int(batch),
        micro_batch=int(micro_batch),
        tensor=int(tensor),
        context=int(context),
        data=int(data),
        pipeline=int(pipeline),
        chunks=int(parallel.get("pp_interleave", parallel.get("vpp", 1)) or 1),
        recompute=recompute,
        sequence_parallel=bool(
            parallel.get("sequence_parallel", recent or _sequence_parallel_memory(row))
        ),
        fused_attention=recent,
        fused_elementwise=fused,
        sharded_optimizer=recent,
        dtype="bfloat16" if recent else "float16",
    )


def _sequence_parallel_memory(row: Mapping[str, Any]) -> bool:
    """Figure 1 of arXiv 2205.05198: its selective-recompute bars use sequence parallelism."""
    return "activations_gib" in row["measured"] and row["parallel"].get("recompute") == "attn_only"


def _recompute(parallel: Mapping[str, Any], source: str) -> str:
    given = parallel.get("recompute", parallel.get("ckpt"))
    names = {
        "none": "none", "no": "none", "full": "full", "yes": "full",
        "attn_only": "selective", "selective": "selective",
        # Megatron-Kwai's own checkpointing repeats only cheap kernels
        "ours": "none",
    }  # fmt: skip
    if given is None:
        # per the sources: vTrain's multi-node runs checkpoint every layer, single-node runs do not
        return "full" if source == "vtrain_multi" else "none"
    if given not in names:
        raise _Unknown(f"recomputation {given!r} is not known")
    return names[given]


def _model(model: Mapping[str, Any], source: str) -> TransformerSpec:
    seq = model.get("seq", model.get("seq_size"))
    name = model.get("name")
    if name is not None and name in _NAMED_MODELS and seq is not None:
        return TransformerSpec(seq=int(seq), **_NAMED_MODELS[name])
    if "hidden" not in model or seq is None:
        raise _Unknown("the row does not give the model's shape")
    heads = model.get("heads", model.get("attn_heads", model.get("heads_remembered")))
    return TransformerSpec(
        hidden=int(model["hidden"]),
        layers=int(model.get("layers", model.get("num_blocks"))),
        heads=int(heads or max(1, model["hidden"] // 128)),
        seq=int(seq),
        feedforward=model.get("feedforward"),
        vocab=int(model.get("vocab", 51200)),
    )


def _cluster(hardware: Mapping[str, Any], source: str) -> ClusterSpec:
    gpu = str(hardware["gpu"])
    if gpu not in _HOSTS:
        raise _Unknown(f"GPU {gpu!r} is not in the catalogue")
    host = HOSTS[_HOSTS[gpu]]
    if source.startswith("vtrain"):
        host = evolve(host, num_nics=4)  # 800 Gbit/s per host, four HDR interfaces
    count = int(hardware["n"])
    per_host = min(int(hardware.get("gpus_per_node", 8)), count)
    if count % per_host:
        raise _Unknown(f"{count} devices do not fill hosts of {per_host}")
    group = evolve(host, num_hosts=count // per_host, devices_per_host=per_host)
    return ClusterSpec(name=f"{gpu}:{count}", host_groups=(group,))
