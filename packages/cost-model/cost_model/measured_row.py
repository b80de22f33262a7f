"""One measured training run, and the shapes of published models and devices by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from cost_model.catalogue import HOSTS
from cost_model.training_run import TrainingRun

# device names of the data that are not the beginning of a preset's name
_PRESETS = {"a100": "a100-80gb", "a100-80gb": "selene", "v100": "v100-16gb"}

_LLAMA = {"gated": True, "tied": False, "vocab": 32000}
# Touvron et al. 2023 (1 and 2) and the Llama 3 report; the 175B one is Megatron-Kwai's, with the
# width that gives 175e9 parameters
NAMED_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-7b": {"hidden": 4096, "layers": 32, "heads": 32, "feedforward": 11008, **_LLAMA},
    "llama-13b": {"hidden": 5120, "layers": 40, "heads": 40, "feedforward": 13824, **_LLAMA},
    "llama-65b": {"hidden": 8192, "layers": 80, "heads": 64, "feedforward": 22016, **_LLAMA},
    "llama-70b": {
        "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "feedforward": 28672, **_LLAMA,
    },
    "llama-8b": {
        "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "feedforward": 14336,
        **_LLAMA | {"vocab": 128256},
    },
    "llama-405b": {
        "hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "feedforward": 53248,
        **_LLAMA | {"vocab": 128256},
    },
    "llama-175b": {"hidden": 12288, "layers": 96, "heads": 96, "feedforward": 32768, **_LLAMA},
    # MosaicML's MPT family (llm-foundry, scripts/train/yamls); ALiBi, no biases
    **{
        f"mpt-{name}": {"hidden": hidden, "layers": layers, "heads": heads, "vocab": 50368}
        for name, hidden, layers, heads in (
            ("125m", 768, 12, 12), ("350m", 1024, 24, 16), ("760m", 1536, 24, 12),
            ("1b", 2048, 24, 16), ("3b", 2560, 32, 20), ("7b", 4096, 32, 32),
            ("13b", 5120, 40, 40), ("30b", 7168, 48, 56), ("70b", 8192, 80, 64),
        )
    },
    "gpt-175b": {"hidden": 12288, "layers": 96, "heads": 96, "vocab": 51200},
    "nemotron-15b": {
        "hidden": 6144, "layers": 32, "heads": 48, "kv_heads": 8, "feedforward": 24576,
        "vocab": 256000, "tied": False,
    },
    "nemotron-340b": {
        "hidden": 18432, "layers": 96, "heads": 96, "kv_heads": 8, "feedforward": 73728,
        "vocab": 256000, "tied": False,
    },
    "mixtral-8x7b": {
        "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "feedforward": 14336,
        "experts": 8, "experts_per_token": 2, "expert_width": 14336, **_LLAMA,
    },
    "mixtral-8x22b": {
        "hidden": 6144, "layers": 56, "heads": 48, "kv_heads": 8, "feedforward": 16384,
        "experts": 8, "experts_per_token": 2, "expert_width": 16384, **_LLAMA,
    },
    "qwen3-32b": {
        "hidden": 5120, "layers": 64, "heads": 64, "kv_heads": 8, "head_size": 128,
        "feedforward": 25600, **_LLAMA | {"vocab": 151936},
    },
    "qwen3-30b": {
        "hidden": 2048, "layers": 48, "heads": 32, "kv_heads": 4, "head_size": 128,
        "experts": 128, "experts_per_token": 8, "expert_width": 768, **_LLAMA | {"vocab": 151936},
    },
    "qwen3-235b": {
        "hidden": 4096, "layers": 94, "heads": 64, "kv_heads": 4, "head_size": 128,
        "experts": 128, "experts_per_token": 8, "expert_width": 1536, **_LLAMA | {"vocab": 151936},
    },
    "gpt-oss-20b": {
        "hidden": 2880, "layers": 24, "heads": 64, "kv_heads": 8, "head_size": 64, "window": 128,
        "experts": 32, "experts_per_token": 4, "expert_width": 2880, **_LLAMA | {"vocab": 201088},
    },
    "gpt-oss-120b": {
        "hidden": 2880, "layers": 36, "heads": 64, "kv_heads": 8, "head_size": 64, "window": 128,
        "experts": 128, "experts_per_token": 4, "expert_width": 2880, **_LLAMA | {"vocab": 201088},
    },
    "deepseek-v2-lite": {
        "hidden": 2048, "layers": 27, "heads": 16, "head_size": 128, "feedforward": 10944,
        "experts": 64, "experts_per_token": 6, "expert_width": 1408, "shared_width": 2816,
        "dense_layers": 1, "kv_rank": 512, "rotary_size": 64, **_LLAMA | {"vocab": 102400},
    },
    "deepseek-v2": {
        "hidden": 5120, "layers": 60, "heads": 128, "head_size": 128, "feedforward": 12288,
        "experts": 160, "experts_per_token": 6, "expert_width": 1536, "shared_width": 3072,
        "dense_layers": 1, "query_rank": 1536, "kv_rank": 512, "rotary_size": 64,
        **_LLAMA | {"vocab": 102400},
    },
    "deepseek-v3": {
        "hidden": 7168, "layers": 61, "heads": 128, "head_size": 128, "feedforward": 18432,
        "experts": 256, "experts_per_token": 8, "expert_width": 2048, "shared_width": 2048,
        "dense_layers": 3, "query_rank": 1536, "kv_rank": 512, "rotary_size": 64,
        **_LLAMA | {"vocab": 129280},
    },
    "kimi-k2": {
        "hidden": 7168, "layers": 61, "heads": 64, "head_size": 128, "feedforward": 18432,
        "experts": 384, "experts_per_token": 8, "expert_width": 2048, "shared_width": 2048,
        "dense_layers": 1, "query_rank": 1536, "kv_rank": 512, "rotary_size": 64,
        **_LLAMA | {"vocab": 163840},
    },
    # Zhang et al. 2022, GPT-Neo (EleutherAI)
    "opt-350m": {"hidden": 1024, "layers": 24, "heads": 16, "vocab": 50272},
    "opt-30b": {"hidden": 7168, "layers": 48, "heads": 56, "vocab": 50272},
    "gpt-neo-2.7b": {"hidden": 2560, "layers": 32, "heads": 20, "vocab": 50257},
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
    peak_bytes: float | None = None  # most memory in use on a device
    measured_stage: int | None = None  # which stage that device is of; None: the fullest
    failed: bool = False  # whether the run stopped, most likely out of memory
    others: Mapping[str, float] = field(factory=dict)  # seconds that other tools predicted
    skipped: str = ""  # why there is no run


def preset_of(gpu: str) -> str:
    """Return the preset whose name a device's name is or begins with: H100-80GB is h100."""
    name = re.sub(r"^tpu-?", "tpu-", gpu.lower().replace(" ", "-").replace("_", "-"))
    if name in _PRESETS:
        return _PRESETS[name]
    found = [preset for preset in HOSTS if name.startswith(preset)]
    if not found:
        raise ValueError(f"device {gpu!r} is not in the catalogue")
    return max(found, key=len)
