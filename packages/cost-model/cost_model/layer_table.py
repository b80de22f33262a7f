"""Measured seconds of transformer layers by device, shape, microbatch and tensor parallelism.

Of eth-easl/sailor's profiles (-> layer_profiles.py). Between measured microbatches times are
interpolated in the logarithm; beyond the largest they grow with the microbatch.
"""

from __future__ import annotations

import bisect
import functools
import math
from importlib import resources

from attrs import evolve, frozen

from alpa_interchange.document import from_json
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
    """Return the table shipped with the package (`python -m cost_model.layer_profiles` made it)."""
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
