"""Plans for cross-mesh resharding, side by side under one referee: time over the lower bound.

    python benchmarks/resharding_plans.py [--issue host|device|none] [--random N]
    python benchmarks/resharding_plans.py --pairs N [--cards N]

The 16 cases of arXiv 2211.05322 on p3.8xlarge hosts (card 10 Gbit/s) and N random tasks. `naive`
is the paper's broadcast with the first holder in tile order, `load` with the least-loaded host;
both, and the strategies without broadcast, are what the planner is compared with. `ms` is
processor time of one plan.

`--pairs N` is about the planner alone: N random pairs of meshes up to 4 hosts x 8 devices with 1 KB
to 1 GB, by issue model and latency; hosts have one network card, or `--cards`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time

from rich.console import Console
from rich.progress import track
from rich.table import Table

from alpa_interchange.reshard import ReshardingTask, Transfer
from resharding import Network, cut_slices, plan, simulate
from resharding.cases import paper_cases, random_pair, random_task

NAMED = ("send_recv", "local_all_gather", "global_all_gather")


def unordered_broadcast(task: ReshardingTask, network: Network, *, balance: bool) -> float:
    """Return the seconds of broadcasts in tile order, from the first or the least-loaded host."""
    load: dict[int, float] = {}
    transfers = []
    for piece in cut_slices(task):
        sender = piece.holders[0]
        if balance:
            sender = min(piece.holders, key=lambda device: load.get(device // 100, 0.0))
            load[sender // 100] = load.get(sender // 100, 0.0) + piece.num_bytes
        chain = (sender, *piece.receivers)
        rates = [
            min(network.nic_bandwidth, network.device_bandwidth)
            if a // 100 != b // 100
            else network.device_bandwidth
            for a, b in itertools.pairwise(chain)
        ]
        transfers.append(
            Transfer(
                method="broadcast",
                start=piece.box.start,
                stop=piece.box.stop,
                sender=sender,
                receivers=piece.receivers,
                num_chunks=network.num_chunks(piece.num_bytes, rates),
            )
        )
    return simulate(task, tuple(transfers), network).seconds


def measure(task: ReshardingTask, network: Network) -> tuple[int, float, dict[str, float], str]:
    """Return slices, lower bound, ratio to it by method (and ms), and the chosen strategy."""
    plan(task, network)
    begin = time.process_time()
    best = plan(task, network)
    elapsed = time.process_time() - begin
    ratios = {
        "naive": unordered_broadcast(task, network, balance=False) / best.lower_bound,
        "load": unordered_broadcast(task, network, balance=True) / best.lower_bound,
        "plan": best.seconds / best.lower_bound,
    }
    for name in NAMED:
        ratios[name] = plan(task, network, name).seconds / best.lower_bound
    return len(cut_slices(task)), best.lower_bound, {**ratios, "ms": elapsed * 1e3}, best.strategy


def report(name: str, tasks: dict[str, ReshardingTask], network: Network) -> None:
    """Print the table of `tasks` and the geometric means."""
    columns = [*NAMED, "naive", "load", "plan"]
    table = Table(title=name)
    for title in ("case", "slices", "bound s", *columns, "strategy", "ms"):
        table.add_column(title.replace("_", " "), justify="right")
    rows = []
    for case, task in track(tasks.items(), description=name, transient=True):
        num_slices, bound, numbers, strategy = measure(task, network)
        rows.append(numbers)
        shown = [f"{numbers[column]:.3f}" for column in columns]
        table.add_row(
            case, str(num_slices), f"{bound:.3g}", *shown, strategy, f"{numbers['ms']:.1f}"
        )
    for label, merge in (
        ("geometric mean", lambda values: math.exp(sum(map(math.log, values)) / len(values))),
        ("worst", max),
    ):
        merged = [f"{merge([row[column] for row in rows]):.3f}" for column in columns]
        slowest = f"{max(row['ms'] for row in rows):.1f}" if label == "worst" else ""
        table.add_row(label, "", "", *merged, "", slowest, style="bold")
    Console(width=150).print(table)


def report_pairs(count: int, num_cards: int) -> None:
    """Print ratios to the bound and planning time of random pairs of meshes."""
    tasks = [random_pair(seed) for seed in range(count)]
    table = Table(title=f"{count} random pairs of meshes, 1 KB to 1 GB, cards: {num_cards} a host")
    for title in ("issue", "latency us", "1 MB on", "mean", "95 %", "worst", "> 1.02", "> 1.15"):
        table.add_column(title, justify="right")
    for title in ("ms mean", "ms 95 %", "ms worst"):
        table.add_column(title, justify="right")
    for latency, issue in itertools.product((0.0, 10e-6), ("host", "device", "none")):
        network = Network(issue=issue, latency=latency, num_nics=num_cards)
        ratios, elapsed, large = [], [], []
        for task in track(tasks, description=f"{issue} {latency}", transient=True):
            begin = time.process_time()
            made = plan(task, network)
            elapsed.append((time.process_time() - begin) * 1e3)
            ratios.append(made.seconds / made.lower_bound if made.lower_bound else 1.0)
            if task.tensor.bytes >= 2**20:
                large.append(ratios[-1])
        shown = [f"{statistics.mean(large):.4f}", f"{statistics.mean(ratios):.4f}"]
        shown += [f"{quantile(ratios, 0.95):.3f}", f"{max(ratios):.3f}"]
        shown += [str(sum(ratio > limit for ratio in ratios)) for limit in (1.02, 1.15)]
        shown += [f"{statistics.mean(elapsed):.1f}", f"{quantile(elapsed, 0.95):.1f}"]
        shown.append(f"{max(elapsed):.1f}")
        table.add_row(issue, f"{latency * 1e6:g}", *shown)
    Console(width=150).print(table)


def quantile(values: list[float], share: float) -> float:
    """Return the value that `share` of `values` do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--issue", choices=("host", "device", "none"), default="host")
    parser.add_argument("--random", type=int, default=20, help="number of random tasks")
    parser.add_argument("--pairs", type=int, default=0, help="number of random pairs of meshes")
    parser.add_argument("--cards", type=int, default=1, help="network cards of a host, for pairs")
    given = parser.parse_args()
    if given.pairs:
        report_pairs(given.pairs, given.cards)
        return
    network = Network(issue=given.issue)
    report(f"paper cases, issue={given.issue}", paper_cases(), network)
    tasks = {}
    for seed in range(given.random):
        task = random_task(seed, longest=2000)
        if task.tensor.size > 10_000:
            tasks[f"random {seed}"] = task
    if tasks:
        report(f"random tasks, issue={given.issue}", tasks, network)


if __name__ == "__main__":
    main()
