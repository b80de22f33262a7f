"""Measured seconds of transformer layers by device, shape, microbatch and tensor parallelism.

    python -m cost_model.layer_table sailor_layer_seconds.csv[.gz]

makes `data/layers.json` from eth-easl/sailor's profiles (MIT): forward and backward pass of a
layer, collectives of tensor parallelism included, on GH200, A100, V100 and three consumer GPUs.
Between measured microbatches times are interpolated in the logarithm; beyond the largest they grow
with the microbatch. The profiles of GPT-Neo on GH200 are left out: the source repeats those of
OPT-350 there.
"""

from __future__ import annotations

import bisect
import csv
import functools
import gzip
import math
import statistics
import sys
from importlib import resources
from pathlib import Path

from attrs import evolve, frozen

from alpa_interchange.document import from_json, save
from cost_model.transformer import TransformerSpec


@frozen(kw_only=True)
class LayerTime:
    """Forward and backward seconds of one microbatch under tensor parallelism."""

    device: str
    hidden: int
    layers: int
    tensor: int
    micro_batch: int
    seconds: float  # of one layer
    first: float  # of the embedding
    last: float  # of the output matrix and loss


@frozen(kw_only=True)
class LayerTable:
    """All measured layers."""

    source: str
    times: tuple[LayerTime, ...]


@functools.cache
def layer_table() -> LayerTable:
    """Return the table shipped with the package."""
    text = resources.files("cost_model").joinpath("data/layers.json").read_text("utf-8")
    return from_json(text, LayerTable, source="cost_model/data/layers.json")


@functools.lru_cache(maxsize=4096)
def measured_layer(
    device: str, model: TransformerSpec, tensor: int, micro_batch: int
) -> tuple[float, float, float] | None:
    """Return seconds of (a layer, the embedding, the head) of `model`; None if none is measured."""
    times = _by_shape().get((device, model.hidden, model.layers, tensor))
    if not times:
        return None
    sizes = [time.micro_batch for time in times]
    place = bisect.bisect_left(sizes, micro_batch)
    if place < len(sizes) and sizes[place] == micro_batch:
        low = high = times[place]
    elif place == 0:
        low = high = times[0]  # smaller microbatches wait for the host just as long
    else:
        low, high = times[place - 1], times[min(place, len(times) - 1)]
    if low is high:
        scale = max(1.0, micro_batch / low.micro_batch)
        return low.seconds * scale, low.first * scale, low.last * scale
    share = math.log(micro_batch / low.micro_batch) / math.log(high.micro_batch / low.micro_batch)

    def between(first: float, second: float) -> float:
        return math.exp((1 - share) * math.log(first) + share * math.log(second))

    return (
        between(low.seconds, high.seconds),
        between(low.first, high.first),
        between(low.last, high.last),
    )


@functools.cache
def _by_shape() -> dict[tuple[str, int, int, int], list[LayerTime]]:
    found: dict[tuple[str, int, int, int], list[LayerTime]] = {}
    for time in sorted(layer_table().times, key=lambda time: time.micro_batch):
        key = (time.device, time.hidden, time.layers, time.tensor)
        found.setdefault(key, []).append(time)
    # alone, layers of small microbatches wait for the host longer than in a step: a microbatch
    # takes at most what a larger one takes
    for times in found.values():
        for place in range(len(times) - 2, -1, -1):
            if times[place].seconds > times[place + 1].seconds:
                times[place] = evolve(times[place], seconds=times[place + 1].seconds)
    return found


_MODELS = {"OPT-350": (1024, 24), "OPT-30": (7168, 48), "GPT-Neo-2.7": (2560, 32),
           "LLAMA-3-8": (4096, 32)}  # fmt: skip
_DEVICES = {
    "GH-96": "gh200", "A100-40": "a100-40gb", "A100-80": "a100-80gb", "V100-16": "v100-16gb",
    "RTX-3090": "rtx-3090", "RTX-2080": "rtx-2080ti", "Titan-RTX": "rtx-titan",
}  # fmt: skip


def read_layers(path: Path) -> LayerTable:
    """Return the table of a CSV file with one row per layer, plain or compressed."""
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open()
    gathered: dict[tuple[str, str, int, int], list[tuple[int, float]]] = {}
    with opened as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["gpu"], int(row["micro_batch"]), int(row["tp"]))
            both = float(row["forward_seconds"]) + float(row["backward_seconds"])
            gathered.setdefault(key, []).append((int(row["layer"]), both))
    times = []
    for (model, gpu, micro_batch, tensor), rows in sorted(gathered.items()):
        if (model, gpu) == ("GPT-Neo-2.7", "GH-96"):
            continue
        hidden, layers = _MODELS[model]
        seconds = [both for _, both in sorted(rows)]
        times.append(
            LayerTime(
                device=_DEVICES[gpu],
                hidden=hidden,
                layers=layers,
                tensor=tensor,
                micro_batch=micro_batch,
                seconds=round(statistics.median(seconds[1:-1]), 7),
                first=round(seconds[0], 7),
                last=round(seconds[-1], 7),
            )
        )
    return LayerTable(source="eth-easl/sailor, MIT: layer profiles", times=tuple(times))


if __name__ == "__main__":
    save(read_layers(Path(sys.argv[1])), Path(__file__).parent / "data" / "layers.json")
