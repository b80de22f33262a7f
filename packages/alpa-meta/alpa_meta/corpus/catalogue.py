"""The corpus and the published models by name. A module is imported only to build its model."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType

from attrs import evolve, fields_dict

from alpa_meta.corpus.model import SIZES, CorpusModel
from alpa_meta.extras import named
from alpa_meta.published_models import PUBLISHED
from alpa_meta.types import Fields


def _with(module: str, **options: object) -> tuple[str, Fields]:
    return module, options


_MODULES: MappingProxyType[str, tuple[str, Fields]] = MappingProxyType(
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

DTYPES = ("float32", "bfloat16", "float16")

_SHAPES: MappingProxyType[str, str] = MappingProxyType(
    {
        "bottleneck_resnet": "BottleneckResNetShape",
        "llama": "LlamaShape",
        "swin": "SwinShape",
        "t5": "T5Shape",
        "transformer": "TransformerShape",
        "vit": "ViTShape",
    }
)
"""The class of the shapes of each module that makes published models."""


def published(name: str, **changed: object) -> CorpusModel:
    """Return the published model `name`, some fields of its shape changed; nothing is allocated."""
    if name not in PUBLISHED:
        raise ValueError(
            f"there is no published model {name!r}; there are {', '.join(PUBLISHED)}. Pass one of "
            "these names."
        )
    record = PUBLISHED[name]
    try:
        module = import_module(f"alpa_meta.corpus.{record.program}")
    except ModuleNotFoundError as error:
        raise named(error, f"model {name!r}") from None
    shape = getattr(module, _SHAPES[record.program])
    if changed.get("dtype", "float32") not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {changed['dtype']!r}")
    for field, value in changed.items():
        if field not in fields_dict(shape):
            raise ValueError(
                f"the shape of {name} has no {field!r}, got {value!r} for it; it has "
                f"{', '.join(fields_dict(shape))}"
            )
    made: CorpusModel = module.of_shape(name, shape(**{**record.shape, **changed}))
    return evolve(made, exact=record.exact)


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
