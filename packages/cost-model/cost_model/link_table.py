"""What collectives of n devices reach on a link, and the line fitted to measured ones."""

from __future__ import annotations

import functools
from importlib import resources

import numpy as np
from attrs import field, frozen

from alpa_interchange.check import positive
from alpa_interchange.cluster import LinkSpec
from alpa_interchange.document import from_json


@frozen(kw_only=True)
class LinkFit:
    """One fitted table: seconds = latency + bus factor * bytes / bandwidth."""

    link: str
    collective: str
    devices: int
    latency: float = field(validator=positive)  # seconds of a small collective
    bandwidth: float = field(validator=positive)  # bytes/s on the bottleneck link
    num_rows: int
    mape: float  # of the fit on its own rows
    source: str


@frozen(kw_only=True)
class LinkTable:
    """All fitted tables."""

    fits: tuple[LinkFit, ...]


def bus_factor(collective: str, devices: int) -> float:
    """Return the bytes that cross the bottleneck link per byte of the collective's buffer."""
    share = (devices - 1) / devices
    return 2 * share if collective == "all-reduce" else share


def fit_line(bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """Return (latency, seconds per byte, MAPE) of the relative least-squares line, both above 0."""
    columns = np.stack([np.ones_like(bytes), bytes], axis=1) / seconds[:, None]
    latency, slope = np.linalg.lstsq(columns, np.ones_like(bytes), rcond=None)[0]
    latency = max(float(latency), 1e-7)
    error = np.abs((latency + slope * bytes) / seconds - 1)
    return latency, float(slope), float(error.mean())


@functools.cache
def link_table() -> LinkTable:
    """Return the table shipped with the package (`python -m cost_model.link_fit` made it)."""
    text = resources.files("cost_model").joinpath("data/links.json").read_text("utf-8")
    return from_json(text, LinkTable, source="cost_model/data/links.json")


def link_rate(link: LinkSpec, devices: int) -> tuple[float, float]:
    """Return (bandwidth, latency per ring step) that `devices` devices on `link` reach.

    Fitted all-reduces of as many devices where there are any, else of the next smaller number,
    else of the next larger; links without a fit give their effective bandwidth and stated latency.
    The fitted latency of the whole all-reduce is spread over the 2 (n - 1) steps of a ring.
    """
    fits = _all_reduces().get(link.name)
    if not fits:
        return link.effective_bandwidth, link.latency
    known = [count for count in fits if count <= devices]
    count = max(known) if known else min(fits)
    fit = fits[count]
    # a link may be described with another bandwidth under the same name: keep the fitted share
    share = fit.bandwidth / _STATED.get(link.name, link.bandwidth)
    return link.bandwidth * min(share, 1.0), fit.latency / (2 * (count - 1))


_STATED = {"nvlink2": 150e9, "nvlink2-32gb": 150e9, "nvlink3": 300e9}  # bytes/s the fits are of


@functools.cache
def _all_reduces() -> dict[str, dict[int, LinkFit]]:
    found: dict[str, dict[int, LinkFit]] = {}
    for fit in link_table().fits:
        if fit.collective == "all-reduce":
            found.setdefault(fit.link, {})[fit.devices] = fit
    return found
