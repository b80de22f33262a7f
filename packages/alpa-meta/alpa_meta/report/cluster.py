"""A cluster as a table."""

from __future__ import annotations

from rich.table import Table

from alpa_interchange import ClusterSpec, LinkSpec
from alpa_interchange.amounts import format_bytes, format_flops, format_seconds


def cluster_table(spec: ClusterSpec) -> Table:
    """Return the host groups of a cluster, one row each."""
    table = Table(title=f"cluster {spec.name}", title_justify="left", title_style="bold")
    for column in ("hosts", "devices per host", "device", "memory", "peak", "links"):
        table.add_column(column)
    for group in spec.host_groups:
        device = group.device
        dtype = "float32" if device.platform == "cpu" else "bfloat16"
        if dtype not in device.peak_flops:
            dtype = next(iter(device.peak_flops))
        links = f"{_link(group.intra_host)} inside"
        if group.num_hosts > 1:
            links += f"\n{group.num_nics} x {_link(group.inter_host)} between hosts"
        note = "\nthe devices share it all" if group.shared_compute else ""
        table.add_row(
            str(group.num_hosts),
            str(group.devices_per_host),
            device.name + note,
            format_bytes(device.memory),
            f"{format_flops(device.peak_flops[dtype])} {dtype}",
            links,
        )
    return table


def _link(link: LinkSpec) -> str:
    return f"{link.name} {link.bandwidth / 1e9:.3g} GB/s {format_seconds(link.latency)}"
