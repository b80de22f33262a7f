"""Our plan beside hand-written baselines, for every corpus model, in one run on 8 host devices.

    .venv/bin/python benchmarks/baselines.py --model gpt --model moe-einsum

Baselines are the presets (dp, zero3, megatron) compiled by stock jax from input shardings; with
`--strategy parallax` and the package google-parallax installed, also the shardings it chooses
(`parallax.sharding.auto_shard` on the whole step). Version 0.0.2 of it installs beside jax 0.10.2
but takes one of the 18 corpus steps, equinox-mlp: the others stop at an AssertionError for a
primitive or parameter it does not know (conv_general_dilated, stack, scan, top_k, pad, random_wrap,
a broadcast between dims of different names). The line printed for such a model says which.

The loss of a baseline is its own check. On convnet megatron's is wrong: where the batch is cut over
one of two axes, XLA's partitioner sums the gradient of a depthwise convolution's kernel over all
devices instead of those along that axis (jax 0.10.2; on 2 x 4 devices 4 times too much).

Columns: predicted seconds of the step under the cost model (of a baseline: the planner's best plan
under the preset's constraints on the baselines' mesh), collectives of the compiled program, bytes
one device sends per step (ring algorithms, read from the compiled HLO), the seconds these take
under the cost model, memory of the arguments, median step time of interleaved runs on this
machine, median processor time of a step over all devices (steady where other jobs keep the
machine busy, and blind to waiting), loss of the last step. Below: ours over the best baseline, per
model. Exit status 1 if ours is predicted to be slower than a preset.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )

import jax
import numpy as np
import typer
from attrs import asdict, define
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table

import alpa_meta
from alpa_interchange import SubmeshSpec
from alpa_meta.audit.hlo import CompiledCollective, compiled_collectives
from alpa_meta.audit.replica_groups import axes_of_groups, axes_of_pairs
from alpa_meta.audit.report import format_bytes
from alpa_meta.corpus import NAMES, CorpusModel, build
from alpa_meta.presets import PRESETS, preset_specs
from alpa_meta.step.program import Step
from cost_model import CostModel
from cost_model import cluster as cluster_by_name

AXES = {"data": 2, "model": 4}
OURS = "ours"
PARALLAX = "parallax"
WHOLE: dict[str, Any] = {"num_stages": 1, "num_microbatches": 1, "cache": False}


@define
class Result:
    """One model under one strategy."""

    model: str
    strategy: str
    predicted_seconds: float
    collectives: int
    sent_bytes: float
    modelled_seconds: float
    argument_bytes: int
    compile_seconds: float
    step_seconds: float = float("nan")
    processor_seconds: float = float("nan")
    loss: float = float("nan")


def modelled_seconds(one: CompiledCollective, axis_sizes: Mapping[str, int], cluster: str) -> float:
    """Return the seconds a collective takes in a step; over all devices if no axes fit."""
    sizes = tuple(axis_sizes.values())
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=math.prod(sizes))
    model = CostModel(cluster_by_name(cluster))
    mesh = model.logical_mesh(submesh, sizes, tuple(axis_sizes))
    read = axes_of_pairs if one.kind == "collective-permute" else axes_of_groups
    names = read(one.groups, axis_sizes) or tuple(axis_sizes)
    axes = tuple(axis for axis in mesh.axes if axis.name in names)
    larger = one.bytes * (mesh.size(names) if one.kind == "reduce-scatter" else 1)
    return float(model.collective_seconds(one.kind, larger, axes)) * (one.trips or 1)


def predicted_seconds(model: CorpusModel, preset: str, cluster: str) -> float:
    """Return the seconds of a step by the best plan under a preset's constraints on `AXES`."""
    step = alpa_meta.parallelize(
        model.train_step,
        cluster=cluster,
        preset=preset,
        mesh_shape=tuple(AXES.values()),
        **WHOLE,
    )
    return step.plan_for(model.state, model.batch).step_seconds


def parallax_specs(model: CorpusModel, mesh: Mesh) -> tuple[Any, Any]:
    """Return the partition specs of state and batch that google-parallax chooses."""
    from parallax.sharding import auto_shard

    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            specs, _ = auto_shard.get_shardings(model.train_step, model.state, model.batch)
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:80]
        raise UnfitError(f"{model.name}: parallax stops at line {where.lineno}: {text}") from error
    state, batch = specs
    return state, batch


class UnfitError(RuntimeError):
    """A strategy cannot run a model."""


class Baseline:
    """A preset, compiled by stock jax from the shardings of its inputs."""

    def __init__(self, model: CorpusModel, strategy: str, cluster: str) -> None:
        mesh = Mesh(
            np.array(jax.devices()[:8]).reshape(tuple(AXES.values())),
            tuple(AXES),
            axis_types=(AxisType.Auto,) * len(AXES),
        )
        if strategy == PARALLAX:
            specs, predicted = parallax_specs(model, mesh), float("inf")
        else:
            given = Step(model.train_step, (model.state, model.batch))
            specs = preset_specs(strategy, given, AXES)
            predicted = predicted_seconds(model, strategy, cluster)
        place = [self._shardings(mesh, one) for one in specs]
        start = time.perf_counter()
        jitted = jax.jit(
            model.train_step,
            in_shardings=tuple(place),
            out_shardings=(place[0], NamedSharding(mesh, PartitionSpec())),
            donate_argnums=0,
        )
        self.step = jitted.lower(model.state, model.batch).compile()
        found = compiled_collectives(self.step.as_text() or "")
        memory = self.step.memory_analysis()
        assert memory is not None
        self.result = Result(
            model=model.name,
            strategy=strategy,
            predicted_seconds=predicted,
            collectives=sum(one.trips or 1 for one in found),
            sent_bytes=sum(one.link_bytes for one in found),
            modelled_seconds=sum(modelled_seconds(one, AXES, cluster) for one in found),
            argument_bytes=int(memory.argument_size_in_bytes),
            compile_seconds=time.perf_counter() - start,
        )
        self.state = jax.jit(model.make_state, out_shardings=place[0])(jax.random.key(0))
        self.batch = jax.device_put(model.make_batch(jax.random.key(1)), place[1])

    @staticmethod
    def _shardings(mesh: Mesh, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    def run(self) -> float:
        """Run one step; return its loss."""
        self.state, metrics = self.step(self.state, self.batch)
        return float(metrics["loss"])


class Ours:
    """The planner's plan, one stage, through `alpa_meta.parallelize`."""

    def __init__(self, model: CorpusModel, strategy: str, cluster: str) -> None:
        start = time.perf_counter()
        self.step = alpa_meta.parallelize(model.train_step, cluster=cluster, **WHOLE)
        plan = self.step.plan_for(model.state, model.batch)
        executable = self.step.executable
        audit = executable.audit()
        if not audit.ok:
            raise RuntimeError(f"{model.name}: {audit.text()}")
        self.result = Result(
            model=model.name,
            strategy=strategy,
            predicted_seconds=plan.step_seconds,
            collectives=sum(
                line.compiled.trips or 1 for report in audit.tasks.values() for line in report.lines
            ),
            sent_bytes=sum(report.compiled_bytes for report in audit.tasks.values()),
            modelled_seconds=sum(
                modelled_seconds(line.compiled, report.axis_sizes, cluster)
                for report in audit.tasks.values()
                for line in report.lines
            ),
            argument_bytes=max(check.argument_bytes for check in audit.memory.values()),
            compile_seconds=time.perf_counter() - start,
        )
        self.state = self.step.init(model.make_state, jax.random.key(0))
        batch = jax.jit(model.make_batch)(jax.random.key(1))
        leaves = [leaf for leaf in executable.planned.program.inputs if leaf.role == "batch"]
        places = [executable.input_sharding(leaf.path) for leaf in leaves]
        values = [
            value if place is None else jax.device_put(value, place)
            for value, place in zip(jax.tree.leaves(batch), places, strict=True)
        ]
        self.batch = jax.tree.unflatten(jax.tree.structure(batch), values)

    def run(self) -> float:
        """Run one step; return its loss."""
        self.state, metrics = self.step(self.state, self.batch)
        return float(metrics["loss"])


def measure(
    model: CorpusModel, strategies: list[str], num_steps: int, cluster: str
) -> list[Result]:
    """Return the results of all strategies; steps are interleaved, the first is not measured."""
    runs = []
    for name in strategies:
        try:
            runs.append((Ours if name == OURS else Baseline)(model, name, cluster))
        except UnfitError as error:
            print(error, file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in strategies}
    busy: dict[str, list[float]] = {name: [] for name in strategies}
    for step in range(num_steps + 1):
        for run in runs:
            start, used = time.perf_counter(), time.process_time()
            run.result.loss = run.run()
            if step > 0:
                seconds[run.result.strategy].append(time.perf_counter() - start)
                busy[run.result.strategy].append(time.process_time() - used)
    for run in runs:
        run.result.processor_seconds = statistics.median(busy[run.result.strategy])
        run.result.step_seconds = statistics.median(seconds[run.result.strategy])
    return [run.result for run in runs]


def table(results: list[Result]) -> Table:
    """Return the results side by side."""
    shown = Table()
    for name in ("model", "strategy"):
        shown.add_column(name)
    for name in (
        "predicted",
        "collectives",
        "sent per device",
        "modelled",
        "arguments",
        "compile",
        "step",
        "processor",
        "loss",
    ):
        shown.add_column(name, justify="right")
    for one in results:
        shown.add_row(
            one.model,
            one.strategy,
            f"{one.predicted_seconds * 1e3:.2f} ms",
            str(one.collectives),
            format_bytes(one.sent_bytes),
            f"{one.modelled_seconds * 1e6:.0f} us",
            format_bytes(one.argument_bytes),
            f"{one.compile_seconds:.1f} s",
            f"{one.step_seconds * 1e3:.1f} ms",
            f"{one.processor_seconds * 1e3:.1f} ms",
            f"{one.loss:.4f}",
            end_section=one.strategy == results[-1].strategy,
        )
    return shown


def ratios(results: list[Result]) -> Table:
    """Return ours over the best baseline, per model; below 1 is better."""
    shown = Table(title="ours / best baseline", title_justify="left")
    shown.add_column("model")
    for name in ("predicted", "collectives' seconds", "measured step", "processor time"):
        shown.add_column(name, justify="right")
    for ours, others in _contests(results):
        pairs = [
            (ours.predicted_seconds, min(one.predicted_seconds for one in others)),
            (ours.modelled_seconds, min(one.modelled_seconds for one in others)),
            (ours.step_seconds, min(one.step_seconds for one in others)),
            (ours.processor_seconds, min(one.processor_seconds for one in others)),
        ]
        cells = [f"{mine / best:.2f}" if best else f"{mine:.1e} s / 0" for mine, best in pairs]
        shown.add_row(ours.model, *cells)
    return shown


def slower_than_a_preset(results: list[Result]) -> list[str]:
    """Return a line per model whose plan is predicted to be slower than a preset."""
    return [
        f"{ours.model}: predicted {ours.predicted_seconds:.3e} s, {best.strategy} "
        f"{best.predicted_seconds:.3e} s"
        for ours, others in _contests(results)
        for best in [min(others, key=lambda one: one.predicted_seconds)]
        if ours.predicted_seconds > best.predicted_seconds * (1 + 1e-9)
    ]


def _contests(results: list[Result]) -> list[tuple[Result, list[Result]]]:
    found = []
    for name in dict.fromkeys(one.model for one in results):
        ours = [one for one in results if (one.model, one.strategy) == (name, OURS)]
        others = [one for one in results if one.model == name and one.strategy != OURS]
        if ours and others:
            found.append((ours[0], others))
    return found


def main(
    model: Annotated[list[str] | None, typer.Option(help="Corpus model; repeatable.")] = None,
    size: Annotated[str, typer.Option(help="tiny or small.")] = "tiny",
    strategy: Annotated[
        list[str] | None,
        typer.Option(help=f"{OURS}, {PARALLAX} or one of {', '.join(PRESETS)}; repeatable."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 10,
    cluster: Annotated[
        str, typer.Option(help="8 devices to plan for and to price; runs on host devices.")
    ] = "host:8",
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure hand-written baselines and our plan side by side."""
    strategies = strategy or ["dp", "zero3", "megatron", OURS]
    results: list[Result] = []
    console = Console(width=None if sys.stdout.isatty() else 120)
    for name in track(model or list(NAMES), console=Console(stderr=True), transient=True):
        results += measure(build(name, size), strategies, steps, cluster)
        jax.clear_caches()
    console.print(table(results))
    console.print(ratios(results))
    if out is not None:
        out.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    slower = slower_than_a_preset(results)
    for line in slower:
        console.print(f"PLANNER: {line}")
    raise typer.Exit(1 if slower else 0)


if __name__ == "__main__":
    typer.run(main)
