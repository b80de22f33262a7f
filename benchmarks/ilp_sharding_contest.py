"""How good `ilp_sharding` is on the public contest instances, and how fast on layer-sized problems.

    python benchmarks/ilp_sharding_contest.py --data DIR --deadline 60 [--instances AGKMSV]

DIR holds `asplos-2025-iopddl-?.json.gz` and `reference.json` (best known costs of all contest
entries); the environment variable IOPDDL_DATA serves as well. Points are best contest cost / ours,
as the contest scores. Reading is timed apart, as in the contest. CPU seconds and the machine's load
are printed beside the wall-clock time: on a busy machine compare those.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from alpa_interchange.selection import ShardingProblem
from ilp_sharding import SolveOptions, check, read_problem, solve


def load_reference(data: Path) -> dict[str, dict[str, Any]]:
    """Return {instance letter: facts} of the instances that are present in `data`."""
    facts = json.loads((data / "reference.json").read_text())["instances"]
    return {
        name.rsplit("-", 1)[1]: {**values, "file": data / f"{name}.json.gz"}
        for name, values in facts.items()
        if (data / f"{name}.json.gz").exists()
    }


def run_instance(file: Path, best: int, deadline: float, workers: int, seed: int) -> dict[str, Any]:
    """Return one line of the table: what `solve` reached on `file` within `deadline` seconds."""
    started = time.perf_counter()
    problem = read_problem(file)
    reading = time.perf_counter() - started
    before = _cpu_seconds()
    solution = solve(problem, SolveOptions(deadline=deadline, num_workers=workers, seed=seed))
    feasible = solution.choice is not None and check(problem, solution.choice).feasible
    return {
        "cost": solution.objective,
        "points": best / solution.objective if feasible and solution.objective else 0.0,
        "bound": solution.lower_bound,
        "gap": solution.gap,
        "status": solution.status,
        "reading_s": reading,
        "seconds": solution.seconds,
        "cpu_s": _cpu_seconds() - before,
        "memory_mb": _peak_megabytes(),
        "load": os.getloadavg()[0],
    }


def layer_like(num_nodes: int, size: int, seed: int) -> ShardingProblem:
    """Return a problem shaped like a transformer layer's: a chain with residual edges.

    Strategies of neighbours mostly follow each other one to one; conversions cost up to 1 ms and a
    quarter of the pairs is forbidden.
    """
    rng = np.random.default_rng(seed)
    count = np.full(num_nodes, size)
    edges, tables = [], []
    for i in range(1, num_nodes):
        sources = [i - 1] + ([i - 7] if i % 7 == 0 else [])
        for source in sources:
            if rng.random() < 0.6 and source == i - 1:
                table = np.where(np.eye(size, dtype=bool), 0.0, np.inf)
            else:
                table = rng.random((size, size)) * 1e-3
                table[(rng.random((size, size)) < 0.25) & ~np.eye(size, dtype=bool)] = np.inf
            edges.append((source, i))
            tables.append(table.ravel())
    return ShardingProblem(
        num_strategies=count,
        node_cost=rng.random(num_nodes * size) * 1e-3,
        node_memory=rng.integers(1, 2**20, num_nodes * size),
        live=np.stack([np.arange(num_nodes), np.arange(num_nodes) + 2], axis=1),
        edges=np.array(edges),
        edge_cost=np.concatenate(tables),
    )


def run_layers(repeats: int = 20) -> dict[str, float]:
    """Return median and worst seconds, and the share proved optimal, of layer-sized problems."""
    sizes = ((40, 16), (80, 64), (200, 64), (300, 32))
    cases = [layer_like(n, k, seed) for seed in range(repeats // len(sizes)) for n, k in sizes]
    solve(cases[0])
    seconds, proved = [], 0
    for problem in cases:
        solution = solve(problem)
        seconds.append(solution.seconds)
        proved += solution.status == "optimal"
    return {
        "median_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "proved": proved / len(cases),
    }


def warm_up() -> None:
    """Compile the loops once, so that no instance pays for it."""
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(60) for j in range(i + 1, 60) if rng.random() < 0.15]
    problem = ShardingProblem(
        num_strategies=np.full(60, 12),
        node_cost=rng.integers(0, 1000, 720),
        node_memory=rng.integers(1, 100, 720),
        live=np.tile([0, 10], (60, 1)),
        edges=np.array(pairs),
        edge_cost=rng.integers(0, 1000, len(pairs) * 144),
        memory_limit=1200,
    )
    solve(problem, SolveOptions(deadline=90.0, gap_tolerance=0.5))


def _cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _peak_megabytes() -> float:
    """Return the peak of this process plus twice the largest worker's, MiB."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (own.ru_maxrss + 2 * children.ru_maxrss) / 1024


def _in_own_process(arguments: argparse.Namespace, letter: str) -> dict[str, Any]:
    """Return `run_instance` of one instance in a fresh process, so memory peaks are its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "line.json"
        command = [sys.executable, __file__, "--data", str(arguments.data), "--one", letter]
        command += ["--deadline", str(arguments.deadline), "--workers", str(arguments.workers)]
        command += ["--seed", str(arguments.seed), "--json", str(out)]
        subprocess.run(command, check=True)
        line: dict[str, Any] = json.loads(out.read_text())
        return line


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("IOPDDL_DATA"))
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="seconds; 0: the contest's own"
    )
    parser.add_argument("--instances", default="AGKMSV")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is None:
        layers = run_layers()
        print(
            f"layer-sized problems: median {1e3 * layers['median_s']:.1f} ms, worst "
            f"{1e3 * layers['worst_s']:.1f} ms, {100 * layers['proved']:.0f} % proved optimal"
        )
    if arguments.data is None:
        print("no contest data: give --data DIR or set IOPDDL_DATA; only the layers were run")
        return 0
    reference = load_reference(arguments.data)
    if arguments.one is not None:
        facts = reference[arguments.one]
        deadline = arguments.deadline or float(facts["timeout_s"])
        line = run_instance(
            facts["file"], facts["best_cost"], deadline, arguments.workers, arguments.seed
        )
        arguments.json.write_text(json.dumps(line))
        return 0
    warm_up()
    print(
        "| instance | cost | points | bound | gap | status | wall s | CPU s | read s | MB | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    results = {}
    for letter in arguments.instances:
        if letter not in reference:
            print(f"| {letter} | not in {arguments.data} |")
            continue
        line = results[letter] = _in_own_process(arguments, letter)
        gap = "-" if line["gap"] is None else f"{100 * line['gap']:.3g} %"
        cost = "-" if line["cost"] is None else f"{line['cost']:.0f}"
        bound = "-" if line["bound"] is None else f"{line['bound']:.10g}"
        print(
            f"| {letter} | {cost} | {line['points']:.5f} | {bound} | {gap} | {line['status']} "
            f"| {line['seconds']:.1f} | {line['cpu_s']:.0f} | {line['reading_s']:.1f} "
            f"| {line['memory_mb']:.0f} | {line['load']:.1f} |",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
