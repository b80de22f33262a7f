"""Numbers as people read them; everywhere else quantities are plain SI."""

from __future__ import annotations

import math
import re


def format_bytes(number: float) -> str:
    """Return bytes as "1.5 MiB"."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def format_seconds(number: float | None) -> str:
    """Return seconds as "3.2 ms"; None is unknown."""
    if number is None or not math.isfinite(number):
        return "unknown"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(number) >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number / 1e-9:.3g} ns" if number else "0 s"


def format_flops(number: float) -> str:
    """Return flop/s as "989 Tflop/s"."""
    unit, scale = ("T", 1e12) if number >= 1e12 else ("G", 1e9)
    return f"{number / scale:.3g} {unit}flop/s"


def format_duration(number: float) -> str:
    """Return a longer time as "2 min 05 s"."""
    if not math.isfinite(number):
        return "unknown"
    minutes, seconds = divmod(round(number), 60)
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def parse_bytes(text: str) -> float:
    """Return the bytes in "16GiB", "500 MB" or "1e9"; ValueError for anything else."""
    units = {
        "": 1, "b": 1,
        "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
        "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    }  # fmt: skip
    body = text.strip().lower().replace(" ", "")
    number = body.rstrip("kmgtib")
    try:
        value = float(number) * units[body[len(number) :]]
    except (ValueError, KeyError):
        raise ValueError(
            f"an amount of memory must look like 16GiB or 500MB, got {text!r}"
        ) from None
    if not 0 < value < math.inf:
        raise ValueError(f"an amount of memory must be finite and above 0, got {text!r}")
    return value


def parse_bandwidth(text: str) -> float:
    """Return the bytes/s in "100Gb/s" (bits), "12.5 GB/s" (bytes) or "1e9"; ValueError
    otherwise."""
    body = text.strip().replace(" ", "")
    found = re.fullmatch(r"([0-9.eE+-]+?)(?:([kKMGT]?)(i?)(b|bit|B)(?:/s|ps)?)?", body)
    try:
        assert found is not None
        value = float(found[1])
    except (AssertionError, ValueError):
        raise ValueError(
            f"a bandwidth must look like 100Gb/s (bits) or 12.5GB/s (bytes), got {text!r}"
        ) from None
    base = 1024 if found[3] else 1000
    value *= base ** "kMGT".index(found[2].replace("K", "k")) * base if found[2] else 1
    value /= 1 if found[4] in (None, "B") else 8
    if not 0 < value < math.inf:
        raise ValueError(f"a bandwidth must be above 0, got {text!r}")
    return value


def format_bandwidth(number: float) -> str:
    """Return bytes/s as "12.5 GB/s"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}/s"
    return f"{number / 1e3:.3g} kB/s"


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return "1 stage" or "3 stages"."""
    return f"{count} {one if count == 1 else many or one + 's'}"
