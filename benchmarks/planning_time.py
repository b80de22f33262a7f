"""How long planning takes: CPU seconds of each pass, for one stage on one mesh.

    .venv/bin/python benchmarks/planning_time.py               # GPT, 48 layers of 8192
    .venv/bin/python benchmarks/planning_time.py --model all   # every corpus model at `large`
    .venv/bin/python benchmarks/planning_time.py --memory 24e9 --model gpt-remat
    .venv/bin/python benchmarks/planning_time.py --again 9     # memory of repeated planning

Seconds are CPU seconds of this process, so that other work on the machine does not count; on an
idle core they are wall seconds. Caches of earlier models are cleared. Imports are not counted,
except of what the solver loads when it is first needed. `jax` is what `jax.make_jaxpr` of the step
takes by itself, whoever plans it: what this machine's seconds are worth.
"""

from __future__ import annotations

import gc
import resource
import time
from typing import Annotated, Any

import jax
import typer
from attrs import define, field
from rich.console import Console
from rich.table import Table

import alpa_meta
from alpa_meta.corpus import NAMES, CorpusModel, build
from alpa_meta.inter_op.candidates import Outlook
from alpa_meta.inter_op.meshes import logical_meshes, usable_memory, whole_cluster
from alpa_meta.inter_op.stage_selection import stage_scope
from alpa_meta.intra_op.memory_limit import solve, solve_within
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.selection import build as build_problem
from alpa_meta.options import Options
from alpa_meta.planning.collection_pause import collections_paused
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.step.program import Step
from cost_model import CostModel, cluster

PASSES = ("trace", "program", "layers", "problem", "solve", "memory")


@define
class _Clock:
    """CPU seconds by name of pass."""

    seconds: dict[str, float] = field(factory=dict)
    last: float = field(factory=time.process_time)

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = now - self.last
        self.last = now


def measure(
    name: str, size: str, devices: str, shape: tuple[int, ...], memory: float | None
) -> Any:
    """Return (seconds by pass, facts for the table) of planning one model on one mesh."""
    model = build(name, size)
    state, batch = model.state, model.batch
    described = cluster(devices)
    costs = CostModel(described)
    options = Options(num_stages=1, num_microbatches=1, memory=memory)
    submesh = whole_cluster(described)
    assert submesh is not None
    meshes = logical_meshes(costs, submesh, len(shape), ordered=True)
    mesh = next(one for one in meshes if one.shape == shape)
    limit = usable_memory(described, 0, memory)
    alone = _seconds_of_jax(model)
    jax.clear_caches()
    gc.collect()
    with collections_paused():
        clock = _Clock()
        step = Step(model.train_step, (state, batch))
        step.traced(None)
        clock.lap("trace")
        program = step.program(1)
        clock.lap("program")
        outlook: Outlook = outlook_of(program, options, described)[0]
        clock.lap("layers")
        scope = stage_scope(program, outlook.staging, 0, 1)
        selection = build_problem(scope.eqns, MeshCosts(mesh, costs), name)
        clock.lap("problem")
        free = solve(selection.problem, options, classes=selection.classes)
        clock.lap("solve")
        found = solve_within(selection, options, limit, free)
        clock.lap("memory")
    assert free.choice is not None
    facts = {
        "operations": len(program.jaxpr.eqns),
        "nodes": selection.problem.num_nodes,
        "free": (free.objective, selection.memory.peak(free.choice).total),
        "limited": None
        if found.choice is None
        else (found.objective, selection.memory.peak(found.choice).total),
        "status": found.status,
    }
    return {"jax": alone, **clock.seconds}, facts


def _seconds_of_jax(model: CorpusModel) -> float:
    """Return the CPU seconds that jax needs to trace the step."""
    jax.clear_caches()
    gc.collect()
    with collections_paused():
        clock = _Clock()
        jax.make_jaxpr(model.train_step)(model.state, model.batch)
        clock.lap("jax")
    return clock.seconds["jax"]


def show_held(console: Console, name: str, again: int) -> None:
    """Print the most memory that this process held, after each of so many plannings of a model at
    size small on eight H100."""
    for number in range(1, again + 1):
        model = build(name, "small")
        options = alpa_meta.Options(cache=False)
        step = alpa_meta.parallelize(model.train_step, cluster="h100:8", options=options)
        step.plan_for(model.state, model.batch)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        console.print(f"{name} planned {number} times: {held / 1e6:,.0f} MB held at most")


def main(
    model: Annotated[list[str] | None, typer.Option(help="Corpus model, or all.")] = None,
    size: Annotated[str, typer.Option(help="tiny, small or large.")] = "large",
    devices: Annotated[str, typer.Option(help="Cluster to plan for.")] = "h100:64",
    mesh: Annotated[str, typer.Option(help="Shape of the logical mesh, as 8x8.")] = "8x8",
    memory: Annotated[float | None, typer.Option(help="Bytes per device; default: all.")] = None,
    again: Annotated[int, typer.Option(help="Print what so many plannings hold instead.")] = 0,
) -> None:
    """Print CPU seconds per pass, and what the memory limit costs."""
    if again:
        show_held(Console(), (model or ["gpt"])[0], again)
        return
    names = model or ["gpt", "gpt-tied", "gpt-remat", "gpt-scan"]
    shape = tuple(int(part) for part in mesh.split("x"))
    table = Table(title=f"planning one stage at {size} on {devices}, mesh {mesh}: CPU seconds")
    numbers = ("operations", "nodes", "jax", *PASSES, "all", "step", "with limit")
    for column in ("model", *numbers, "status"):
        table.add_column(column, justify="left" if column in ("model", "status") else "right")
    console = Console(width=160)
    with console.status("planning") as status:
        for name in NAMES if "all" in names else names:
            status.update(f"planning {name}")
            seconds, facts = measure(name, size, devices, shape, memory)
            table.add_row(
                name,
                str(facts["operations"]),
                str(facts["nodes"]),
                *(f"{seconds[one]:.2f}" for one in ("jax", *PASSES)),
                f"{sum(seconds[one] for one in PASSES):.2f}",
                _amounts(facts["free"]),
                _amounts(facts["limited"]),
                facts["status"],
            )
    console.print(table)


def _amounts(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.4g} s, {pair[1] / 1e9:.1f} GB"


if __name__ == "__main__":
    typer.run(main)
