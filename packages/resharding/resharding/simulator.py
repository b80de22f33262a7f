"""The referee: what a plan takes in the fluid model of `course`, and whether it is valid.

The bytes an operation sends must be on its sender when it starts, and every target tile must be
complete at the end: `PlanError` otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from alpa_interchange.reshard import ReshardingTask, Transfer
from alpa_interchange.tensor import dtype_bytes
from resharding.course import course, demand_of
from resharding.coverage import Ledger
from resharding.network import Links, Network
from resharding.slices import hosts_of
from resharding.traffic import edge_bytes, edges


@frozen(kw_only=True)
class Simulation:
    """What a plan took: `seconds` in all, (start, stop) per transfer, bytes between hosts."""

    seconds: float
    intervals: tuple[tuple[float, float], ...]
    bytes_out: Mapping[int, float]  # per host, over its cards
    bytes_in: Mapping[int, float]


def simulate(task: ReshardingTask, transfers: tuple[Transfer, ...], network: Network) -> Simulation:
    """Return the course of `transfers`; PlanError if they do not do `task`."""
    host_of, element = hosts_of(task), dtype_bytes(task.tensor.dtype)
    ledger = Ledger(task, transfers)
    links = Links(network, host_of)
    demands = [demand_of(transfer, element, links, transfers) for transfer in transfers]
    intervals = course(transfers, demands, links, ledger)
    ledger.check_end()
    bytes_out: dict[int, float] = {}
    bytes_in: dict[int, float] = {}
    for transfer in transfers:
        amount = edge_bytes(transfer, element, transfers)
        for sender, receiver in edges(transfer):
            source, target = host_of[sender], host_of[receiver]
            if source != target:
                bytes_out[source] = bytes_out.get(source, 0.0) + amount
                bytes_in[target] = bytes_in.get(target, 0.0) + amount
    return Simulation(
        seconds=max((end for _, end in intervals), default=0.0),
        intervals=intervals,
        bytes_out=bytes_out,
        bytes_in=bytes_in,
    )
