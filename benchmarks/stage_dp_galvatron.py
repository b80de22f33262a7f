"""Galvatron's searches beside the joint search, on Galvatron's own inputs and costs.

    .venv/bin/python benchmarks/stage_dp_galvatron.py             # all three tables, two minutes
    .venv/bin/python benchmarks/stage_dp_galvatron.py partitions  # or recent, searches

`partitions`: the 8 searches of 2022 of which the best partition together with the best strategies
is known. `recent`: the 4 searches of 2026. `searches`: all 32 searches of 2022, every batch size
and number of stages. Throughputs are samples/s as predicted; theirs are the programs' own figures.
Their seconds of 2022 are wall seconds of a busy machine, with its recurrence rewritten in numpy
(unmodified it took 394 to 1,108); all others are CPU seconds. The inputs and the costs are those
of packages/stage-dp/tests/galvatron_*. The exit status is 1 where a plan is slower than theirs.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

import stage_dp
from alpa_interchange.menu import JointPlan, JointProblem

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "stage-dp" / "tests"))

import galvatron_costs
import galvatron_recent

CASES = galvatron_costs.CASES
SAME = 1e-6  # of a throughput: the figures were kept with ten digits


@frozen
class Found:
    """The best plan of a search, and what it took."""

    batch: int
    plan: JointPlan
    cpu_seconds: float
    problems: int

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.plan.step_seconds

    @property
    def cut(self) -> list[int]:
        """Layers of each stage."""
        return [stage.layer_stop - stage.layer_start for stage in self.plan.stages]


def named(case: dict[str, Any]) -> str:
    """Return the name of a search of 2022."""
    return f"{case['model']}{sum(case['layers'])}-{case['memory_gb']}GB"


def search(case: dict[str, Any]) -> Found | None:
    """Return the best plan of a search of 2022: batches grow by 8 until nothing fits."""
    started = time.process_time()
    best: tuple[int, JointPlan] | None = None
    batch, problems, fits = 8, 0, True
    while fits:
        fits = False
        for stages in (1, 2, 4, 8):
            try:
                plan = stage_dp.solve_joint(galvatron_costs.joint_problem(case, batch, stages))
            except stage_dp.InfeasibleError:
                continue
            fits, problems = True, problems + 1
            if best is None or batch / plan.step_seconds > best[0] / best[1].step_seconds:
                best = batch, plan
        batch += 8
    if best is None:
        return None
    return Found(*best, time.process_time() - started, problems)


def show_partitions() -> int:
    """Print the searches whose best free partition is known; return how many are missed."""
    print("\nPartition and strategies together: the best there is (an exact search of the same")
    print("tables, up to 4 stages) and ours")
    searches = {named(case): case for case in CASES["searches"]}
    missed = 0
    for row in CASES["partitions"]:
        found = search(searches[row["case"]])
        ours = found.throughput if found else 0.0
        missed += ours < row["free"] * (1 - SAME)
        print(
            f"{row['case']:11s} theirs "
            f"{row['engine']:8.4f}, best {row['free']:8.4f} ({row['free'] / row['engine'] - 1:.2%} "
            f"more), ours {ours:8.4f} ({ours / row['engine'] - 1:.2%}), "
            f"{found.cpu_seconds if found else 0.0:.2f} CPU s",
            flush=True,
        )
    return missed


def best_of(problems: Sequence[JointProblem]) -> JointPlan:
    """Return the fastest plan of several problems."""
    found = []
    for problem in problems:
        with contextlib.suppress(stage_dp.InfeasibleError):
            found.append(stage_dp.solve_joint(problem))
    return min(found, key=lambda plan: plan.step_seconds)


def show_recent() -> int:
    """Print the searches of 2026 beside ours; return how many are slower."""
    print("\nSearches of 2026 for a model of 7e9 parameters on 8 GPUs, samples/s. Its own figure")
    print("counts the last stage as the slowest; both plans by the longest path of 1F1B, with")
    print("transitions; ours with counts (but where it had one), stages and partition free")
    columns = "theirs  by path     ours   ratio    gap  count, layers per stage  their CPU s  CPU s"
    print(f"GB  batch  count, stages   {columns}")
    slower = 0
    for case in CASES["recent"]:
        count, batch = case["best"]["count"], case["batch"]
        stages = galvatron_recent.their_stages(case)
        order = stage_dp.order("1f1b", len(stages), count)
        path = stage_dp.pipeline_time(order, *zip(*stages, strict=True)).step_seconds
        started = time.process_time()
        plan = best_of(galvatron_recent.joint_problems(case))
        seconds = time.process_time() - started
        ratio = path / plan.step_seconds
        slower += ratio < 1 - SAME
        cut = [stage.layer_stop - stage.layer_start for stage in plan.stages]
        took = f"{case['cpu_seconds']:.1f}" if case["cpu_seconds"] else "unknown"
        print(
            f"{case['memory_gb']:2d} {batch:6d} {count:6d}, {len(stages):d} "
            f"{case['best']['samples_per_second']:14.3f} {batch / path:8.3f} "
            f"{batch / plan.step_seconds:8.3f} {ratio:7.4f} {plan.gap:6.2%} "
            f"{plan.num_microbatches:5d}, {cut!s:17s} {took:>12s} {seconds:6.2f}",
            flush=True,
        )
    return slower


def show_searches() -> int:
    """Print the searches of 2022 beside ours; return how many are slower."""
    print("\nSearches of 2022 on 8 GPUs, samples/s")
    columns = "theirs  batch, stages     ours  batch, layers per stage"
    print(f"search         {columns}             ratio  their s  CPU s  problems")
    slower = 0
    for case in CASES["searches"]:
        theirs, found = case["best"], search(case)
        if theirs is None or found is None:
            slower += theirs is not None
            words = ("nothing fits", "fits")
            print(f"{named(case):12s}  theirs: {words[theirs is not None]}, ", end="")
            print(f"ours: {words[found is not None]}")
            continue
        ratio = found.throughput / theirs["samples_per_second"]
        slower += ratio < 1 - SAME
        print(
            f"{named(case):12s} {theirs['samples_per_second']:8.3f}  {theirs['batch']:5d}, "
            f"{theirs['stages']:d}      {found.throughput:8.3f}  {found.batch:5d}, "
            f"{found.cut!s:26s} {ratio:6.4f} {case['wall_seconds']:8.2f} "
            f"{found.cpu_seconds:6.2f} {found.problems:9d}",
            flush=True,
        )
    return slower


PARTS = {"partitions": show_partitions, "recent": show_recent, "searches": show_searches}

if __name__ == "__main__":
    failed = sum(PARTS[part]() for part in sys.argv[1:] or PARTS)
    print(f"\n{failed} below theirs" if failed else "\nnone is below theirs")
    raise SystemExit(1 if failed else 0)
