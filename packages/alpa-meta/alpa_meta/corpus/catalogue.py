"""The corpus by name. A model's module is imported only when it is built."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

from alpa_meta.corpus.model import SIZES, CorpusModel
from alpa_meta.extras import named

_MODULES: MappingProxyType[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "convnet": ("convnet", {}),
        "diffusion": ("diffusion", {}),
        "dlrm": ("dlrm", {}),
        "dropout-mlp": ("dropout_mlp", {}),
        "equinox-mlp": ("equinox_mlp", {}),
        "gpt": ("gpt", {}),
        "gpt-remat": ("gpt_stacked", {"scan": False, "remat": True}),
        "gpt-scan": ("gpt_stacked", {"scan": True, "remat": True}),
        "gpt-tied": ("gpt_stacked", {"scan": False, "remat": False}),
        "llama": ("llama", {}),
        "mamba": ("mamba", {"scan": "associative"}),
        "mamba-sequential": ("mamba", {"scan": "sequential"}),
        "moe-einsum": ("moe", {"dispatch": "einsum"}),
        "moe-sort": ("moe", {"dispatch": "sort"}),
        "t5": ("t5", {}),
        "unet": ("unet", {}),
        "vit": ("vit", {}),
        "wide-resnet": ("wide_resnet", {}),
    }
)

NAMES = tuple(_MODULES)
"""The models of the corpus."""


def build(name: str, size: str = "tiny") -> CorpusModel:
    """Return the corpus model `name` at `size`; only shapes are computed."""
    if name not in _MODULES:
        raise ValueError(
            f"the corpus has no model {name!r}; it has {', '.join(NAMES)}. Pass one of these names."
        )
    if size not in SIZES:
        raise ValueError(
            f"size of corpus model {name!r} must be one of {', '.join(SIZES)}, got {size!r}"
        )
    module, options = _MODULES[name]
    try:
        model: CorpusModel = import_module(f"alpa_meta.corpus.{module}").build(size, **options)
    except ModuleNotFoundError as error:
        raise named(error, f"corpus model {name!r}") from None
    return model
