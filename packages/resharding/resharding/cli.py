"""The command line: `resharding plan` says and draws who sends what to whom, and when."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from alpa_interchange.amounts import format_bytes, format_seconds
from alpa_interchange.cluster import ClusterSpec
from alpa_interchange.document import load, save, why_unwritable
from alpa_interchange.reshard import ReshardingPlan, ReshardingTask, Transfer
from resharding.network import ISSUE_MODELS, Network, network_of
from resharding.notation import parse_network, parse_placed, parse_tensor
from resharding.planner import plan
from resharding.simulator import Simulation, simulate
from resharding.slices import Box, hosts_of
from resharding.strategies import STRATEGIES

_EPILOG = """\
layouts    2x4:S0,R      2 hosts x 4 devices, dim 0 cut over hosts, dim 1 whole
           3x8@2:S10,R   on hosts 2, 3, 4; dim 0 cut over devices, then over hosts
           2x4:S0,R+device   dim 0 cut over hosts, of which each device holds a summand (or +host)
           S0 over hosts, S1 over the devices of each host, S01 and S10 over all, R whole
networks   nic=1.25e9,device=25e9,latency=1e-5,nics=2   bytes/s and seconds, or a JSON file with
           the ClusterSpec of alpa-interchange

example    resharding plan --tensor int32[1024,1024] --from 2x4:S0,R --to 3x4:R,S0 --picture p.png
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="resharding", description="Moves sharded tensors between meshes of devices."
    )
    commands = parser.add_subparsers(required=True)
    planning = commands.add_parser(
        "plan",
        help="print and draw the transfers between two layouts",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    planning.add_argument("--tensor", required=True, help="dtype and shape: float32[1024,512]")
    planning.add_argument("--from", dest="source", required=True, help="layout that it has")
    planning.add_argument("--to", dest="target", required=True, help="layout that it gets")
    planning.add_argument("--cluster", default="", help="network or file; default: 10 Gbit/s cards")
    planning.add_argument(
        "--issue",
        choices=ISSUE_MODELS,
        default="device",
        help="what works off operations one by one: a worker per host, a stream per device, or "
        "none, all at once (default: %(default)s)",
    )
    planning.add_argument(
        "--strategy",
        choices=("auto", *STRATEGIES),
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(STRATEGIES)}; auto compares them by simulation (default)",
    )
    planning.add_argument("--picture", type=Path, help="PNG file to draw the transfers into")
    planning.add_argument("--save", type=Path, help="JSON file to write the plan into")
    given = parser.parse_args(arguments)
    try:
        _plan(given)
    except (ValueError, OSError) as error:
        print(f"resharding: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(given: argparse.Namespace) -> None:
    for option, path in (("--picture", given.picture), ("--save", given.save)):
        why = None if path is None else why_unwritable(path, makes_folder=option == "--save")
        if why is not None:
            raise ValueError(f"{path}: cannot be written: {why}; choose another file with {option}")
    source = parse_placed(given.source)
    target = parse_placed(given.target, first_host=max(source.hosts) + 1)
    task = ReshardingTask(tensor=parse_tensor(given.tensor), source=source, target=target)
    network = _network(given.cluster, given.issue)
    made = plan(task, network, given.strategy)
    course = simulate(task, made.transfers, network)
    print(*report(made, course), sep="\n")
    if given.save is not None:
        save(made, given.save)
    if given.picture is not None:
        try:
            from resharding.picture import draw
        except ModuleNotFoundError:
            raise ValueError(
                "--picture needs matplotlib: pip install 'resharding[picture]'"
            ) from None
        draw(made, course, given.picture)
        print(f"drawn into {given.picture}")


def _network(text: str, issue: str) -> Network:
    if Path(text).suffix == ".json":
        return network_of(load(text, ClusterSpec), issue)
    return parse_network(text, issue)


def report(made: ReshardingPlan, course: Simulation) -> list[str]:
    """Return the lines that say what a plan does: its time, its transfers and its cards."""
    tensor, host_of = made.task.tensor, hosts_of(made.task)
    size = tensor.bytes / max(1, tensor.size)
    ratio = made.seconds / made.lower_bound if made.lower_bound else 1.0
    lines = [
        f"{tensor.dtype}{list(tensor.shape)}, {format_bytes(tensor.bytes)}: {made.strategy}, "
        f"{format_seconds(made.seconds)}, {ratio:.3f} x the lower bound "
        f"{format_seconds(made.lower_bound)}",
        "",
        f"{'start':>9} {'end':>9} {'bytes':>9}  transfer",
    ]
    order = sorted(range(len(made.transfers)), key=lambda k: (course.intervals[k], k))
    for k in order:
        transfer, (begin, end) = made.transfers[k], course.intervals[k]
        amount = Box(transfer.start, transfer.stop).size * size
        times = f"{format_seconds(begin):>9} {format_seconds(end):>9}"
        lines.append(f"{times} {format_bytes(amount):>9}  {_said(transfer, host_of)}")
    lines.append("")
    for host in sorted({*course.bytes_out, *course.bytes_in}):
        out, into = course.bytes_out.get(host, 0.0), course.bytes_in.get(host, 0.0)
        lines.append(f"host {host}: {format_bytes(out)} out, {format_bytes(into)} in")
    return lines


def _said(transfer: Transfer, host_of: dict[int, int]) -> str:
    """Return "broadcast [0:4, 8:16] 0:1 -> 2:0 2:1"; devices are HOST:DEVICE."""
    box = ", ".join(f"{a}:{b}" for a, b in zip(transfer.start, transfer.stop, strict=True))
    names = [f"{host_of[d]}:{d % 100}" for d in (transfer.sender, *transfer.receivers)]
    if transfer.method == "local":
        return f"local [{box}] stays on {names[0]}"
    if transfer.method == "gather":
        return f"gather [{box}] among {' '.join(names[1:])}"
    chunks = f" in {transfer.num_chunks} chunks" if transfer.num_chunks > 1 else ""
    return f"{transfer.method} [{box}] {names[0]} -> {' '.join(names[1:])}{chunks}"
