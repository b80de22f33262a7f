"""The options that several commands of `alpa` take."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import typer

Cluster = Annotated[
    str,
    typer.Option(
        help="Preset and devices (host:8, h100:16, h100:2x8; see `alpa clusters`), or a TOML file; "
        "h100:16@90% plans for what kernels and links reach nine times out of ten."
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(min=1, help="Number of pipeline stages; left out, the planner chooses."),
]
Microbatches = Annotated[
    int | None, typer.Option(min=1, help="Microbatches per step; left out, the planner chooses.")
]
TokenSlices = Annotated[
    str | None,
    typer.Option(
        help="Cut sequences into slices of tokens that pass through the stages one after another: "
        "how many, or the tokens of each, with commas; for causal models.",
        show_default="whole sequences",
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        help="Pipeline schedule: 1f1b, gpipe, eager-1f1b, adaptive, interleaved-1f1b (several "
        "stages per mesh) or zero-bubble-h1.",
        show_default="chosen",
    ),
]
Recompute = Annotated[
    str | None,
    typer.Option(
        help="What the backward pass computes again instead of keeping it: none, selective or "
        "full, for all layers or one for each, with commas.",
        show_default="chosen where memory is short",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory per device a plan may use, e.g. 16GiB; default: all of it."),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Transformer layers.", show_default="4")]
Hidden = Annotated[int | None, typer.Option(min=1, help="Width of the model.", show_default="64")]
Heads = Annotated[int | None, typer.Option(min=1, help="Attention heads.", show_default="4")]
Context = Annotated[int | None, typer.Option(min=1, help="Bytes in a window.", show_default="128")]
Batch = Annotated[int | None, typer.Option(min=1, help="Windows per step.", show_default="16")]
Dtype = Annotated[
    str | None, typer.Option(help="Arithmetic: float32 or bfloat16.", show_default="float32")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of weights and data.", show_default="0")
]

OwnProgram = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="A program of your own: the function takes no arguments and returns (step, state, "
        "batch).",
    ),
]

SIZES: Mapping[str, object] = MappingProxyType(
    {
        "layers": Layers,
        "hidden": Hidden,
        "heads": Heads,
        "context": Context,
        "batch": Batch,
        "dtype": Dtype,
    }
)
"""The options that say how large the bundled GPT and its batch are."""
