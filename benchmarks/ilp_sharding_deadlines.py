"""What `ilp_sharding.solve` returns at deadlines of 1 ms to 1 s, and how late.

    python benchmarks/ilp_sharding_deadlines.py [--clock cpu] [--repeats 3] [--classes forbidden]

Per class of problems and deadline: the share of solves with an answer, with a bound, the worst
overrun in percent and milliseconds, the median gap of the answers with one. Then, without a
deadline (60 s at most): median and worst CPU seconds and the share proved optimal. The classes:

    forbidden   layer-sized chains with residual edges, a quarter of the pairs forbidden
    limited     the same under 0.8 of the memory of the optimum without a limit
    wide        random graphs too wide for elimination
    layer       the planner's problem for one GPT layer on an 8x8 mesh, also under memory limits
    step        the planner's problem for a whole GPT step of 12 layers on 8x8, also under limits
    step3       likewise on a 2x4x8 mesh: tables of up to 169 x 169

The last three need `alpa_meta`. With `--clock cpu` the solver's clock counts the CPU seconds of the
process, which on a busy machine says what an idle one would do; worker processes are not used at
deadlines this short. Loops are compiled before, unless `--cold`: then every class runs in a process
of its own with an empty cache of compiled loops.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from attrs import evolve

from alpa_interchange import ShardingProblem, ShardingSolution
from ilp_sharding import SolveOptions, check, solve, warm_up

DEADLINES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
LIMITS = (1.0, 0.9, 0.7, 0.5)  # of the peak memory of the optimum without a limit
CLASSES = ("forbidden", "limited", "wide", "layer", "step", "step3")


def layer_like(num_nodes: int, size: int, seed: int) -> ShardingProblem:
    """Return a chain with residual edges; neighbours follow each other one to one or convert."""
    random = np.random.default_rng(seed)
    same = np.eye(size, dtype=bool)
    edges, tables = [], []
    for node in range(1, num_nodes):
        for source in [node - 1] + ([node - 7] if node % 7 == 0 else []):
            if random.random() < 0.6 and source == node - 1:
                table = np.where(same, 0.0, np.inf)
            else:
                table = random.random((size, size)) * 1e-3
                table[(random.random((size, size)) < 0.25) & ~same] = np.inf
            edges.append((source, node))
            tables.append(table.ravel())
    return ShardingProblem(
        num_strategies=np.full(num_nodes, size),
        node_cost=random.random(num_nodes * size) * 1e-3,
        node_memory=random.integers(1, 2**20, num_nodes * size),
        live=np.stack([np.arange(num_nodes), np.arange(num_nodes) + 5], axis=1),
        edges=np.array(edges),
        edge_cost=np.concatenate(tables),
        name=f"chain of {num_nodes} x {size}",
    )


def wide(num_nodes: int, size: int, seed: int) -> ShardingProblem:
    """Return a random graph in which every node has about ten neighbours."""
    random = np.random.default_rng(seed)
    chance = 10 / num_nodes
    pairs = [(i, j) for i in range(num_nodes) for j in range(i) if random.random() < chance]
    return ShardingProblem(
        num_strategies=np.full(num_nodes, size),
        node_cost=random.integers(0, 1000, num_nodes * size),
        node_memory=random.integers(1, 100, num_nodes * size),
        live=np.tile([0, 10], (num_nodes, 1)),
        edges=np.array(pairs),
        edge_cost=random.integers(0, 1000, len(pairs) * size * size),
        memory_limit=40.0 * num_nodes,
        name=f"random graph of {num_nodes} x {size}",
    )


def planner_problems(shape: tuple[int, ...], num_layers: int) -> Iterator[ShardingProblem]:
    """Yield what the planner solves for a GPT of width 768 on 64 H100s in a mesh of `shape`.

    First without a limit, then with the row of the time at which the free optimum's memory peaks,
    limited to shares of that peak.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    from alpa_meta.corpus import gpt
    from alpa_meta.inter_op.candidates import input_pins
    from alpa_meta.inter_op.meshes import logical_meshes, whole_cluster
    from alpa_meta.inter_op.stage_selection import stage_scope
    from alpa_meta.intra_op.memory_profile import limited_problem
    from alpa_meta.intra_op.mesh_costs import MeshCosts
    from alpa_meta.intra_op.selection import build
    from alpa_meta.options import Options
    from alpa_meta.planning.outlooks import outlook_of
    from alpa_meta.step.program import Step
    from cost_model import CostModel, cluster

    shapes = dict(gpt.SHAPES)
    gpt.SHAPES["small"] = evolve(shapes["small"], num_layers=num_layers)
    model = gpt.build("small")
    program = Step(model.train_step, (model.state, model.batch)).program(1)
    gpt.SHAPES.update(shapes)
    options = Options(max_mesh_axes=len(shape))
    costs = CostModel(cluster("h100:64"))
    outlook, _ = outlook_of(program, options, costs.cluster)
    submesh = whole_cluster(costs.cluster)
    assert submesh is not None
    meshes = logical_meshes(costs, submesh, len(shape), ordered=True)
    mesh = next(mesh for mesh in meshes if mesh.shape == shape)
    pins = input_pins(outlook.program, mesh, options)
    scope = stage_scope(outlook.program, outlook.staging, 0, 1, pins)
    name = f"GPT of {num_layers} layers on {shape}"
    selection = build(scope.eqns, MeshCosts(mesh, costs, submesh.host_group), name)
    yield selection.problem
    free = solve(selection.problem, SolveOptions(deadline=60.0))
    assert free.choice is not None
    peak = selection.memory.peak(free.choice)
    for share in LIMITS:
        limit = share * peak.total
        limited = limited_problem(selection.problem, selection.memory, {peak.time: 0.0}, limit)
        yield evolve(limited, name=f"{name}, {share} of its memory")


def problems(name: str, repeats: int) -> Iterator[ShardingProblem]:
    """Yield the problems of a class."""
    sizes = ((40, 16), (80, 64), (200, 64), (300, 32))
    if name in ("forbidden", "limited"):
        for seed in range(repeats):
            for num_nodes, size in sizes:
                problem = layer_like(num_nodes, size, seed)
                yield problem if name == "forbidden" else _limited(problem, 0.8)
    elif name == "wide":
        yield from (wide(60, 12, seed) for seed in range(repeats))
        yield from (wide(400, 20, seed) for seed in range(repeats))
    else:
        shape = (2, 4, 8) if name == "step3" else (8, 8)
        yield from planner_problems(shape, 1 if name == "layer" else 12)


def _limited(problem: ShardingProblem, share: float) -> ShardingProblem:
    """Return `problem` with a memory limit: the peak of its optimum without one, times `share`."""
    free = solve(problem, SolveOptions(deadline=30.0))
    assert free.choice is not None
    peak = check(problem, free.choice).peak_memory
    return evolve(problem, memory_limit=share * peak, name=f"{problem.name}, {share} of its memory")


def timed(problem: ShardingProblem, deadline: float) -> tuple[ShardingSolution, float]:
    """Return the solution and the seconds it took by the clock in use."""
    began = time.perf_counter()
    solution = solve(problem, SolveOptions(deadline=deadline))
    return solution, time.perf_counter() - began


def run_deadline(cases: list[ShardingProblem], deadline: float) -> str:
    """Return the cells of one deadline's line."""
    late, gaps, answers, bounds = [], [], 0, 0
    for problem in cases:
        solution, seconds = timed(problem, deadline)
        late.append(seconds - deadline)
        proved = solution.status == "infeasible"
        answers += solution.choice is not None or proved
        bounds += solution.lower_bound is not None or proved
        if solution.gap is not None:
            gaps.append(solution.gap)
        if solution.choice is not None:
            assert check(problem, solution.choice).feasible
    worst = max(0.0, *late)
    gap = f"{100 * statistics.median(gaps):.3g} %" if gaps else "-"
    return (
        f"{100 * answers / len(cases):.0f} % | {100 * bounds / len(cases):.0f} % | "
        f"{100 * worst / deadline:.0f} % | {1e3 * worst:.1f} ms | {gap}"
    )


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the worker processes that ended."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def run_class(
    name: str, repeats: int, deadlines: list[float], longest: float, *, count_cpu: bool
) -> None:
    """Print the lines of one class."""
    cases = list(problems(name, repeats))
    wall_clock = time.perf_counter
    if count_cpu:
        time.perf_counter = time.process_time
    for deadline in deadlines:
        print(f"| {name} | {1e3 * deadline:g} ms | {run_deadline(cases, deadline)} |", flush=True)
    time.perf_counter = wall_clock
    if not longest:
        return
    seconds, proved = [], 0
    for problem in cases:
        began = cpu_seconds()
        solution = solve(problem, SolveOptions(deadline=longest))
        seconds.append(cpu_seconds() - began)
        proved += solution.status in ("optimal", "infeasible")
        if solution.status not in ("optimal", "infeasible"):
            print(f"not proved: {problem.name}: gap {solution.gap}", file=sys.stderr)
    print(
        f"| {name} | no | median {1e3 * statistics.median(seconds):.0f} ms | worst "
        f"{1e3 * max(seconds):.0f} ms | proved {100 * proved / len(cases):.0f} % | | |",
        flush=True,
    )


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--deadlines", default=",".join(map(str, DEADLINES)), help="seconds")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds; 0: deadlines only")
    parser.add_argument("--cold", action="store_true", help="compile nothing ahead")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        print("| class | deadline | answer | bound | worst overrun | in ms | median gap |")
        print("|---|---|---|---|---|---|---|", flush=True)
    if given.cold and not given.inside:
        for name in given.classes.split(","):
            with tempfile.TemporaryDirectory() as cache:
                subprocess.run(
                    [sys.executable, *sys.argv, "--classes", name, "--inside"],
                    env={**os.environ, "NUMBA_CACHE_DIR": cache},
                    check=True,
                )
        return 0
    if not given.cold:
        warm_up()
    for name in given.classes.split(","):
        deadlines = [float(deadline) for deadline in given.deadlines.split(",")]
        count_cpu = given.clock == "cpu"
        run_class(name, given.repeats, deadlines, given.longest, count_cpu=count_cpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
