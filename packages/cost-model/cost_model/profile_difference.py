"""What changed between two calibration profiles."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from cost_model.profile import Profile, Sample


@frozen(kw_only=True)
class Difference:
    """One quantity in two profiles; `ratio` is second / first."""

    name: str
    unit: str
    first: float
    second: float

    @property
    def ratio(self) -> float:
        return self.second / self.first if self.first else float("inf")


def profile_differences(first: Profile, second: Profile) -> tuple[Difference, ...]:
    """Return the constants of both profiles, then the seconds of every sample in both."""
    return (*_constants(first, second), *_samples(first, second))


def _constants(first: Profile, second: Profile) -> Iterator[Difference]:
    def both(name: str, unit: str, one: float, two: float) -> Difference:
        return Difference(name=name, unit=unit, first=one, second=two)

    for dtype in sorted(set(first.device.peak_flops) & set(second.device.peak_flops)):
        yield both(
            f"peak {dtype}", "flop/s",
            first.device.peak_flops[dtype], second.device.peak_flops[dtype],
        )  # fmt: skip
    one, two = first.device, second.device
    yield both("memory bandwidth", "bytes/s", one.memory_bandwidth, two.memory_bandwidth)
    yield both("launch latency", "s", one.launch_latency, two.launch_latency)
    yield both(
        "link bandwidth", "bytes/s",
        first.intra_host.effective_bandwidth, second.intra_host.effective_bandwidth,
    )  # fmt: skip
    yield both("link latency", "s", first.intra_host.latency, second.intra_host.latency)
    for kind in sorted(set(first.efficiency.compute) & set(second.efficiency.compute)):
        yield both(
            f"{kind} share", "of peak",
            first.efficiency.compute[kind], second.efficiency.compute[kind],
        )  # fmt: skip


def _samples(first: Profile, second: Profile) -> Iterator[Difference]:
    taken = {_key(sample): sample.seconds for sample in second.samples}
    for sample in first.samples:
        if _key(sample) in taken:
            yield Difference(
                name=sample_label(sample), unit="s", first=sample.seconds,
                second=taken[_key(sample)],
            )  # fmt: skip


def sample_label(sample: Sample) -> str:
    """Return a short name of what a sample ran."""
    parts = [sample.name, sample.dtype, "x".join(map(str, sample.shape))]
    if not sample.shape and sample.bytes:
        parts.append(f"{sample.bytes:.0f} B")
    if sample.num_devices > 1:
        parts.append(f"on {sample.num_devices}")
    return " ".join(part for part in parts if part)


def _key(sample: Sample) -> tuple[object, ...]:
    return (sample.name, sample.dtype, sample.shape, sample.bytes, sample.num_devices)
