"""The corpus by name. A model's module is imported only when it is built."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

from alpa_meta.corpus.model import SIZES, CorpusModel
from alpa_meta.extras import named


def _with(module: str, **options: Any) -> tuple[str, dict[str, Any]]:
    return module, options


_MODULES: MappingProxyType[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "convnet": ("convnet", {}),
        "diffusion": ("diffusion", {}),
        "dlrm": ("dlrm", {}),
        "dropout-mlp": ("dropout_mlp", {}),
        "equinox-mlp": ("equinox_mlp", {}),
        "gpt": ("gpt", {}),
        "gpt-remat": _with("gpt_stacked", scan=False, remat=True),
        "gpt-scan": _with("gpt_stacked", scan=True, remat=True),
        "gpt-tied": _with("gpt_stacked", scan=False, remat=False),
        "llama": ("llama", {}),
        "mamba": _with("mamba", scan="associative"),
        "mamba-sequential": _with("mamba", scan="sequential"),
        "moe-einsum": _with("moe", sorts=False),
        "moe-sort": _with("moe", sorts=True),
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
