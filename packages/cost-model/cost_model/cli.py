"""Commands `clusters` and `calibrate`, as a typer application that a larger one mounts.

Needs the extra `cost-model[cli]`; `calibrate` needs jax as well (`cost-model[calibrate]`).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from alpa_interchange.cluster import ClusterSpec, LinkSpec
from alpa_interchange.document import DocumentError, load, why_unwritable
from cost_model.calibration import NARROW, ON_ACCELERATORS
from cost_model.calibration import calibrate as run_calibration
from cost_model.catalogue import HOSTS
from cost_model.cluster_name import cluster, cluster_names
from cost_model.kernel_table import device_efficiency
from cost_model.layer_prediction import layer_seconds
from cost_model.measurer import JaxMeasurer
from cost_model.profile import Profile, store_profile
from cost_model.profile_difference import profile_differences, sample_label

app = typer.Typer(no_args_is_help=True, help="Hardware: what is known about it, and measuring it.")
_console = Console()


@app.command()
def clusters(
    name: Annotated[
        str | None, typer.Argument(help="Preset, preset:devices, or a TOML file; none lists all.")
    ] = None,
) -> None:
    """List the clusters known by name, or show one in detail.

    In detail: each constant with its unit and source.
    """
    if name is None:
        _console.print(_preset_table())
        return
    try:
        spec = cluster(name)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    for index in range(len(spec.host_groups)):
        _console.print(_group_table(spec, index))


@app.command()
def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write the profile to.", show_default="NAME.json in the user's profiles"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the profile.", show_default="the kind of device")
    ] = None,
    devices: Annotated[
        int,
        typer.Option(help="XLA host devices for collectives, without an accelerator."),
    ] = 4,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.json B.json", help="Compare two stored profiles instead of measuring."
        ),
    ] = None,
) -> None:
    """Measure this machine for the planner (under a minute).

    The profile of its kernels and collectives is stored; later plans use it.
    """
    if diff is not None:
        _console.print(_difference_table(_read(diff[0]), _read(diff[1])))
        return
    if devices < 1:
        raise typer.BadParameter(f"--devices must be at least 1, got {devices}")
    why = None if out is None else why_unwritable(out)
    if why is not None:
        raise typer.BadParameter(f"{out}: cannot be written: {why}; give another file to --out")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):  # read when jax starts its first device
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={devices}".strip()
    try:
        profile = _measured(name)
    except ImportError as error:
        raise typer.BadParameter(str(error)) from None
    path = store_profile(profile, out)
    _console.print(_profile_table(profile))
    _console.print(f"written to {path}", soft_wrap=True)


def _measured(name: str | None) -> Profile:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=_console) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, position: int, count: int) -> None:
            bar.update(task, description=what, completed=position, total=count)
            if not _console.is_terminal:  # where no bar is drawn
                _console.print(f"{position}/{count} {what}")

        return run_calibration(JaxMeasurer(), name, show)


def _read(path: Path) -> Profile:
    try:
        return load(path, Profile)
    except DocumentError as error:
        raise typer.BadParameter(str(error)) from None


def _preset_table() -> Table:
    table = Table("preset", "device", "per host", "inside", "between", title="Clusters by name")
    for preset, group in HOSTS.items():
        table.add_row(
            preset,
            group.device.name,
            str(group.devices_per_host),
            f"{group.intra_host.name} {_short(group.intra_host.bandwidth)}B/s",
            f"{group.num_nics} x {group.inter_host.name} {_short(group.inter_host.bandwidth)}B/s",
        )
    table.add_row("host", "this machine", "any", "memory", "")
    table.caption = f"{len(cluster_names())} presets; write PRESET:DEVICES, as in h100:16"
    return table


def _group_table(spec: ClusterSpec, index: int) -> Table:
    group = spec.host_groups[index]
    device = group.device
    table = Table("what", "value", "source", title=f"{spec.name}, host group {index}")
    table.add_row("hosts x devices", f"{group.num_hosts} x {group.devices_per_host}", "")
    table.add_row("device", device.name, device.source)
    table.add_row("memory", f"{_short(device.memory)}B", "")
    table.add_row("memory bandwidth", f"{_short(device.memory_bandwidth)}B/s", "")
    for dtype, peak in device.peak_flops.items():
        table.add_row(f"peak {dtype}", f"{_short(peak)}flop/s", "")
    table.add_row("sustained share", f"{device.sustained:.2f}", "")
    efficiency = device_efficiency(device)
    table.add_row(
        "large matmuls",
        f"{efficiency.compute['matmul']:.0%} of that, error {efficiency.error('matmul'):.0%}",
        f"based on: {efficiency.source}",
    )
    links: tuple[tuple[str, LinkSpec | None], ...] = (
        ("inside the host", group.intra_host),
        (f"between hosts ({group.num_nics}{' rails' if group.rail else ' shared'})",
         group.inter_host),
        ("to host memory", group.host_link),
    )  # fmt: skip
    for label, link in links:
        if link is not None:
            value = (
                f"{link.name}: {_short(link.bandwidth)}B/s, {link.efficiency:.0%} reached, "
                f"{_short(link.latency)}s"
            )
            table.add_row(label, value, link.source)
    return table


def _profile_table(profile: Profile) -> Table:
    table = Table("what", "measured", "predicted", title=f"Profile {profile.name}, {profile.date}")
    for dtype in ("float32", *ON_ACCELERATORS, "bfloat16", NARROW):
        if any(sample.dtype == dtype for sample in profile.samples):
            table.add_row(f"peak {dtype}", f"{_short(profile.device.peak_flops[dtype])}flop/s", "")
    table.add_row("memory bandwidth", f"{_short(profile.device.memory_bandwidth)}B/s", "")
    table.add_row("link", f"{_short(profile.intra_host.effective_bandwidth)}B/s", "")
    for sample in profile.samples:
        if sample.name.startswith("layer"):
            predicted = layer_seconds(profile, sample)
            table.add_row(
                sample_label(sample), f"{_short(sample.seconds)}s", f"{_short(predicted)}s"
            )
    return table


def _difference_table(first: Profile, second: Profile) -> Table:
    table = Table("what", "first", "second", "ratio", title=f"{first.name} / {second.name}")
    table.add_row("date", first.date, second.date, "")
    table.add_row("versions", first.driver, second.driver, "")
    for row in profile_differences(first, second):
        style = "bold" if abs(math.log(row.ratio or 1e-9)) > 0.1 else ""
        first_text, second_text = (
            f"{value:.2f} {row.unit}" if row.unit == "of peak" else f"{_short(value)}{row.unit}"
            for value in (row.first, row.second)
        )
        table.add_row(row.name, first_text, second_text, f"{row.ratio:.2f}", style=style)
    return table


def _short(value: Any) -> str:
    """Return a number with an SI prefix, for people."""
    if value == 0:
        return "0 "
    exponent = max(-4, min(5, math.floor(math.log10(abs(value)) / 3)))
    prefix = {-4: "p", -3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}
    return f"{value / 1000**exponent:.4g} {prefix[exponent]}"


if __name__ == "__main__":
    app()
