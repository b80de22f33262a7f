"""What the planner says of measured runs: their steps traced, their plans forced.

    python benchmarks/cost_traced.py [--rows N] [--seed S] [--source NAME]... [--json OUT]

For a sample of rows of each source the step of that shape is made (`measured_step`, traced on
shapes only), planned with everything forced that the row says (stages, microbatches, schedule,
mesh, and the preset that shards as the row does; what it recomputes and where it divides
activations is written into the step), and the printed step time and memory are set beside

    measured   the row; it ran under another program than ours, most with FlashAttention
    cached     the same from layer costs, traced once for every mesh and microbatch and added up by
               the schedule: the fast form of the planner (`megatron_grid.Grid`)
    fast       `cost_model.predict` for the row's executor, by constants not fitted on its group
    as ours    the same for executor `xla` without FlashAttention: our program, by constants of
               Megatron-DeepSpeed

A second table splits each planned step by what its devices do, on average over the stages
(`PARTS`); what is left is bubble, transfers between stages, and layers that wait for launches.

Ends with an error where |cached / planned - 1| of a row is above 2 % (`MOST_APART`). Planning takes
5 to 60 s of processor time a row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from attrs import asdict, evolve, frozen
from cost_accuracy import default_data
from jax.sharding import PartitionSpec
from measured_step import StepShape, measured_step
from megatron_grid import Few, Grid, Point
from rich.console import Console
from rich.table import Table

from alpa_interchange import ClusterSpec, ShardingSolution, StageCandidate
from alpa_meta.compat import JaxprEqn, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.intra_op.memory_limit import solve_within
from alpa_meta.intra_op.selection import Selection
from alpa_meta.operators import kernel_kind
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned, finish
from alpa_meta.planning.outlooks import outlook_of
from alpa_meta.planning.planner import make_plan
from alpa_meta.presets import preset_specs
from alpa_meta.step.program import Step
from alpa_meta.types import Spec
from cost_model import TrainingRun, calibrated_model, predict
from cost_model.accuracy import unseen_model
from cost_model.measured_row import MeasuredRun
from cost_model.measured_run import read_measured_runs
from cost_model.prediction import step_model
from cost_model.program import cluster_of_run
from cost_model.training_run import stage_layers

MOST_DEVICES = 64
ENOUGH = 1e15  # bytes: plans are forced, whether they fit is not the question
PARTS = ("products", "attention's products", "attention's others", "others", "links", "update")
MOST_APART = 0.02  # of a planned step: how far layer costs traced once may be off it
DROPPING = ("megatron-deepspeed", "sailor")  # programs whose GPT drops elements; MPT has no dropout
UNTRACED = 3  # layers of the model whose costs are cached: the first, an inner one, the last


@frozen(kw_only=True)
class TracedRow:
    """One row, in seconds and bytes per device of the stage that needs most."""

    id: str
    source: str
    configuration: str
    measured: float
    planned: float
    cached: float | None
    fast: float
    as_ours: float
    planned_bytes: float
    cached_bytes: float | None
    fast_bytes: float
    measured_bytes: float | None
    cpu_seconds: float
    parts: Mapping[str, float]


def refusal(run: TrainingRun) -> str:
    """Return why the corpus or the planner has no such run, "" where it has."""
    model = run.model
    depth = model.head_size or model.depth
    if model.experts or model.kv_rank or depth * model.heads != model.hidden:
        return "the corpus has no such layers"
    if run.placements or len(run.cluster.host_groups) > 1:
        return "stages on unlike devices are not forced"
    if run.context > 1 or run.chunks > 1:
        return "context parallelism and interleaving are not forced"
    if run.recompute == "full" and run.recompute_share < 1:
        return "recomputation of a share of the layers is not forced"
    if run.dtype not in ("float16", "bfloat16"):
        return f"the corpus does not compute in {run.dtype}"
    if run.cluster.num_devices > MOST_DEVICES:
        return f"more than {MOST_DEVICES} devices"
    return ""


def stepped(run: TrainingRun, layers: int) -> Step:
    """Return the step of the run's shape with as many layers, as its program writes it."""
    model = run.model
    shape = StepShape(
        layers=layers,
        hidden=model.hidden,
        heads=model.heads,
        groups=max(model.kv_heads or model.heads, run.tensor),  # a device has one of its own
        inner=model.mlp_width,
        vocab=model.vocab,
        length=model.seq,
        batch=run.global_batch,
        dtype=run.width_dtype,
        gated=model.gated,
        data="x" if run.data > 1 else None,
        tensor=("y" if run.data > 1 else "x") if run.tensor > 1 else None,
        sequence=run.sequence_parallel,
        recompute=run.recompute,
        dropout=not model.gated and run.executor in DROPPING,
    )
    return Step(*measured_step(shape))


def preset_of(run: TrainingRun) -> str | None:
    """Return the preset that shards as the run does, None on one device a stage."""
    if run.tensor > 1:
        return "2d" if run.zero_stage == 3 else "megatron"
    if run.data == 1:
        return None
    return {0: "dp", 3: "zero3"}.get(run.zero_stage, "zero2")


def state_pins(run: TrainingRun, step: Step) -> dict[str, Spec]:
    """Return the pins of optimiser state, by path, that are cut over replicas beside a preset for
    tensor parallelism, which has it as the weights."""
    if run.tensor == 1 or run.data == 1 or run.zero_stage not in (1, 2):
        return {}
    cut = preset_specs("2d", step, {"x": run.data, "y": run.tensor})
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        cut[0], is_leaf=lambda one: isinstance(one, PartitionSpec)
    )
    paths = {"state" + jax.tree_util.keystr(path): tuple(spec) for path, spec in leaves}
    return {path: spec for path, spec in paths.items() if "weights" not in path and spec}


def forced(run: TrainingRun, step: Step, again: str = "none") -> Options:
    """Return the options under which nothing of the row's configuration is left to choose; what it
    repeats is in the step. `again`: what the planner's own recomputation repeats."""
    mesh = tuple(size for size in (run.data, run.tensor) if size > 1) or (1,)
    return Options(
        num_stages=run.pipeline,
        num_microbatches=run.num_microbatches,
        schedule="1f1b" if run.pipeline > 1 else None,
        preset=preset_of(run),
        pins=state_pins(run, step),
        mesh_shape=mesh,
        recompute=again,
        num_token_slices=1,
        memory=ENOUGH,
        cache=False,
    )


def stage_cuts(run: TrainingRun, num_layers: int) -> list[int] | None:
    """Return where the program cuts a model, clustered into its blocks and at most a head of its
    own, into stages [stages + 1]; None where it has stages of other parts."""
    counts = stage_layers(run)
    whole = len(counts) == run.pipeline and all(count == int(count) for count in counts)
    if not whole or num_layers - run.model.layers not in (0, 1):
        return None
    return [*(int(sum(counts[:k])) for k in range(run.pipeline)), num_layers]


def planned_run(run: TrainingRun, under: ClusterSpec, again: str = "none") -> Planned:
    """Return the run's plan on a cluster, its step traced whole, with what is repeated `again` by
    the planner; its stages are those of the program, which no option names."""
    step = stepped(run, run.model.layers)
    options = forced(run, step, again)
    planned = make_plan(step, under, options)
    if run.pipeline == 1:
        return planned
    outlook, layering = outlook_of(step.program(run.num_microbatches), options, under)
    cuts, plan = stage_cuts(run, outlook.num_layers), planned.plan.stage_plan
    if cuts is None:
        return planned
    stages = tuple(
        evolve(stage, candidate=evolve(stage.candidate, layer_start=start, layer_stop=stop))
        for stage, (start, stop) in zip(plan.stages, itertools.pairwise(cuts), strict=True)
    )

    def choose(_: StageCandidate, selection: Selection, memory: float) -> ShardingSolution:
        return solve_within(selection, options, memory)

    model = calibrated_model(under)
    plan = evolve(plan, stages=stages)
    found = finish(plan, outlook, layering, 0.0, step, model, options, choose)
    assert isinstance(found, Planned)
    return found


def cached_point(run: TrainingRun, under: ClusterSpec, again: str = "none") -> Point | None:
    """Return the run's point from the costs of a model with three layers on a cluster, which the
    planner repeats `again`."""
    step = stepped(run, min(UNTRACED, run.model.layers))
    few = Few(sizes={}, repeats=max(1, run.model.layers - UNTRACED + 1))
    grid = Grid("measured", calibrated_model(under), few, step, run.global_batch, True, ENOUGH)
    zero = 3 if run.zero_stage == 3 else 1
    of = (run.tensor, run.data, zero, run.num_microbatches)
    pins = state_pins(run, step)
    layers = grid.num_layers(run.num_microbatches)
    cuts = stage_cuts(run, layers) if run.pipeline > 1 else None
    found = grid.points_of(*of, preset_of(run) or "dp", (again,), pins=pins, cuts=cuts)
    return next(found, None)


def parts_of(planned: Planned, length: int) -> dict[str, float]:
    """Return the seconds of a step that a device spends on each of `PARTS`, the mean over stages.

    Operators that read or make score matrices, of `length` by `length`, are attention's.
    """
    found = dict.fromkeys(PARTS, 0.0)
    num_stages = len(planned.selections)
    for selection, sharding in zip(planned.selections, planned.plan.shardings, strict=True):
        stage = selection.stage
        choice = sharding.solution.choice
        assert choice is not None
        seconds = selection.seconds.under(choice)
        sent = selection.sent.under(len(seconds), choice).sum(axis=(1, 2))
        sent = np.minimum(sent, seconds)
        operators = zip(stage.eqns, stage.phases, seconds - sent, sent, strict=True)
        for eqn, phase, own, links in operators:
            found["links"] += links / num_stages
            found[_part(eqn, phase, length)] += own / num_stages
    return found


def _part(eqn: JaxprEqn, phase: str, length: int) -> str:
    if phase == "update":
        return "update"
    product = kernel_kind(eqn) != "elementwise"
    shapes = [shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    if any(len(shape) > 3 and shape.count(length) > 1 for shape in shapes):
        return "attention's products" if product else "attention's others"
    return "products" if product else "others"


def traced(row: MeasuredRun, run: TrainingRun) -> TracedRow:
    """Return the row with what the planner and the fast forms say of it."""
    started = time.process_time()
    under = cluster_of_run(run, step_model(run.executor).fold(row.source, row.group))
    planned = planned_run(run, under)
    plan = planned.plan
    elapsed = time.process_time() - started
    point = cached_point(run, under)
    fast = predict(run, unseen_model(row))
    ours = predict(evolve(run, executor="xla", fused_attention=False))
    sharding = f"tp{run.tensor} dp{run.data} pp{run.pipeline} m{run.num_microbatches}"
    return TracedRow(
        id=row.id,
        source=row.source,
        configuration=f"{sharding} {preset_of(run) or ''} {run.recompute}",
        measured=row.step_seconds or 0.0,
        planned=plan.step_seconds,
        cached=point.seconds if point else None,
        fast=fast.step_seconds,
        as_ours=ours.step_seconds,
        planned_bytes=max(sum(stage.memory.values()) for stage in plan.shardings),
        cached_bytes=point.peak_bytes if point else None,
        fast_bytes=fast.memory_bytes,
        measured_bytes=row.peak_bytes,
        cpu_seconds=elapsed,
        parts=parts_of(planned, run.model.seq),
    )


def sample(
    rows: list[MeasuredRun], count: int, seed: int
) -> Iterator[tuple[MeasuredRun, TrainingRun]]:
    """Yield up to `count` rows of each source that can be traced."""
    for source in dict.fromkeys(row.source for row in rows):
        mine = [
            (row, row.run)
            for row in rows
            if row.source == source and row.run and row.step_seconds and not refusal(row.run)
        ]
        yield from random.Random(f"{seed}|{source}").sample(mine, min(count, len(mine)))


def _gap(one: float | None, other: float | None) -> str:
    return f"{one / other - 1:+.0%}" if one and other else ""


def report(rows: list[TracedRow], console: Console) -> None:
    """Print the rows and, by source, the mean size of each difference."""
    table = Table(
        "row", "configuration", "measured", "planned", "cached", "fast", "as ours",
        "planned / measured", "fast / measured", "cached / planned", "as ours / planned", "CPU s",
        title="Step time in seconds",
    )  # fmt: skip
    for row in rows:
        cached = f"{row.cached:.3f}" if row.cached else ""
        table.add_row(
            f"{row.source} {row.id}", row.configuration, f"{row.measured:.3f}",
            f"{row.planned:.3f}", cached, f"{row.fast:.3f}", f"{row.as_ours:.3f}",
            _gap(row.planned, row.measured), _gap(row.fast, row.measured),
            _gap(row.cached, row.planned), _gap(row.as_ours, row.planned), f"{row.cpu_seconds:.0f}",
        )  # fmt: skip
    console.print(table)
    table = Table("row", "measured", "planned", *PARTS, "rest", title="Planned seconds by part")
    for row in rows:
        shares = [*row.parts.values(), row.planned - sum(row.parts.values())]
        table.add_row(
            f"{row.source} {row.id}", f"{row.measured:.3f}", f"{row.planned:.3f}",
            *(f"{share:.3f}" for share in shares),
        )  # fmt: skip
    console.print(table)
    table = Table(
        "row", "measured", "planned", "cached", "fast", title="Peak memory of a device in GB"
    )
    for row in rows:
        parts = (row.measured_bytes, row.planned_bytes, row.cached_bytes, row.fast_bytes)
        table.add_row(row.id, *(f"{part / 1e9:.2f}" if part else "" for part in parts))
    console.print(table)
    table = Table(
        "source", "rows", "planned / measured", "fast / measured", "cached / planned", "worst",
        "cached / planned, bytes", "as ours / planned", title="Mean of |ratio - 1|",
    )  # fmt: skip
    for source in [*dict.fromkeys(row.source for row in rows), None]:
        mine = [row for row in rows if source in (None, row.source)]
        near = [abs(row.cached / row.planned - 1) for row in mine if row.cached]
        table.add_row(
            source or "all", str(len(mine)),
            _mean([abs(row.planned / row.measured - 1) for row in mine]),
            _mean([abs(row.fast / row.measured - 1) for row in mine]),
            _mean(near), f"{max(near):.1%}" if near else "",
            _mean(
                [abs(row.cached_bytes / row.planned_bytes - 1) for row in mine if row.cached_bytes]
            ),
            _mean([abs(row.as_ours / row.planned - 1) for row in mine]),
        )  # fmt: skip
    console.print(table)


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.1%}" if values else ""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=3, help="rows of each source")
    parser.add_argument("--seed", type=int, default=2026, help="which rows")
    parser.add_argument("--source", action="append", help="only these; may be given several times")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    options = parser.parse_args()
    paths = [path for path in default_data() if path.exists()]
    if not paths:
        parser.exit(0, f"no data in {default_data()[0].parent}\n")
    rows = [row for path in paths for row in read_measured_runs(path)]
    if options.source:
        rows = [row for row in rows if row.source in options.source]
    console = Console(width=200)
    console.print(f"{options.rows} rows of each source that can be traced, seed {options.seed}")
    found = []
    for row, run in sample(rows, options.rows, options.seed):
        try:
            found.append(traced(row, run))
        except PlanError as error:
            console.print(f"not planned, {row.source} {row.id}: {error}")
    report(found, console)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    apart = [
        one.id for one in found if one.cached and abs(one.cached / one.planned - 1) > MOST_APART
    ]
    if apart:
        parser.exit(1, f"layer costs are more than {MOST_APART:.0%} off: {', '.join(apart)}\n")


if __name__ == "__main__":
    main()
