"""The automatic plan beside the named parallelisms: planned, priced, and if asked run and audited.

`compare` is the function, `compare_command` the command `alpa compare`, mounted by
`app.command("compare")(compare_command)`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import evolve, frozen
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.plan_commands import compare_plans
from alpa_meta.types import Fields

if TYPE_CHECKING:
    from alpa_meta.api import AnyStep
    from alpa_meta.own_step import Runnable
    from alpa_meta.planning.chosen_plan import Planned
    from alpa_meta.presets import Coverage

AUTOMATIC = "automatic"
WIDTH = 120  # of the table where the output is no terminal
MOST = 0.95  # a preset that divides less is noted; norms and biases, left whole, are never so many
DEFAULT_PRESETS = ("dp", "zero2", "zero3", "megatron", "megatron-sp", "2d")


@frozen(kw_only=True)
class Compared:
    """One model under one parallelism; seconds per step, bytes per device.

    `sent_bytes` are sent by the busiest device of any stage per step (ring algorithms). What was
    not measured is None; `covered` is what a preset divides, `note` says what it does not, or why
    there is no plan.
    """

    strategy: str
    mesh: str = ""
    step_seconds: float | None = None
    sent_bytes: float | None = None
    memory_bytes: float | None = None
    num_collectives: int | None = None
    measured_seconds: float | None = None
    audited: bool | None = None
    covered: Coverage | None = None
    note: str = ""


def compare(
    model: Runnable,
    cluster: str,
    presets: Sequence[str] = DEFAULT_PRESETS,
    *,
    num_steps: int = 0,
    progress: Callable[[str], None] = lambda what: None,
    **settings: object,
) -> list[Compared]:
    """Return the automatic plan and each preset's, in this order.

    With `num_steps` each also runs on this process's devices: steps are interleaved and their
    median taken, and the compiled programs are audited. `settings` are fields of `Options`, for all
    of them; by default one stage and whole batches.
    """
    from alpa_meta.api import parallelize

    settings = {"num_stages": 1, "num_microbatches": 1, **settings}
    found: list[Compared] = []
    steps: dict[str, AnyStep] = {}
    for name in (AUTOMATIC, *presets):
        progress(f"plan {name}")
        chosen: Fields = settings if name == AUTOMATIC else {**settings, "preset": name}
        step = parallelize(model.train_step, cluster=cluster, **chosen)
        try:
            planned = step.lower(model.state, model.batch).planned
        except InfeasibleError as error:
            found.append(Compared(strategy=name, note=f"does not fit: {error}"))
            continue
        found.append(evolve(priced(name, planned), **_covered(name, planned)))
        steps[name] = step
    if not num_steps:
        return found
    measured = _measure(model, steps, num_steps, progress)
    return [
        evolve(one, measured_seconds=measured[one.strategy][0], audited=measured[one.strategy][1])
        if one.strategy in measured
        else one
        for one in found
    ]


def _covered(name: str, planned: Planned) -> Fields:
    """Return what a preset covers of a planned step, with a note where that is not all."""
    from alpa_meta.presets import WITH_MODEL_AXIS, coverage

    if name == AUTOMATIC:
        return {}
    sharding = planned.plan.shardings[0]
    found = coverage(name, planned.program, sharding.mesh.logical)
    note = ""
    if name in WITH_MODEL_AXIS and min(found.parameters, found.flops) < MOST:
        note = (
            f"divides {found.parameters:.0%} of the parameters and {found.flops:.0%} of the flops "
            "of products over the last axis; the rest is whole on every device of it"
        )
    return {"covered": found, "note": note}


def priced(name: str, planned: Planned) -> Compared:
    """Return what a plan is predicted to cost."""
    from alpa_meta.execution.compiled_task import compile_task

    plan = planned.plan
    sent = [0.0] * len(plan.shardings)
    count = 0
    for task in planned.tasks.tasks:
        stage = task.spec.stage
        per_step = task.spec.phase in ("start", "update") or plan.num_microbatches == 1
        runs = 1 if per_step else plan.num_microbatches
        mesh = plan.shardings[stage].mesh.logical
        sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
        for one in compile_task(planned, task, None).planned:
            sent[stage] += one.link_bytes(sizes) * runs
            count += (one.trips or 1) * runs
    shapes = dict.fromkeys(
        "x".join(map(str, sharding.mesh.logical.shape)) for sharding in plan.shardings
    )
    return Compared(
        strategy=name,
        mesh=" | ".join(shapes),
        step_seconds=plan.step_seconds,
        sent_bytes=max(sent),
        memory_bytes=max(plan.device_bytes),
        num_collectives=count,
    )


def _measure(
    model: Runnable, steps: dict[str, AnyStep], num_steps: int, progress: Callable[[str], None]
) -> dict[str, tuple[float, bool]]:
    """Return median step seconds and whether the audit holds; the first step is not measured."""
    import jax

    from alpa_meta.own_step import after_step

    states, audited = {}, {}
    for name, step in steps.items():
        progress(f"compile {name}")
        state, batch = model.arguments()
        states[name] = step.place(state)
        audited[name] = step.executable.audit().ok
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_steps + 1):
        for name, step in steps.items():
            progress(f"run {name}")
            start = time.perf_counter()
            states[name], metrics = after_step(states[name], step(states[name], batch))
            jax.block_until_ready((states[name], metrics))
            if number > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(seconds[name]), audited[name]) for name in steps}


def comparison_table(model: str, cluster: str, found: Sequence[Compared]) -> Table:
    """Return the comparison for a terminal; the fastest predicted and measured are bold."""
    ran = any(one.measured_seconds is not None for one in found)
    table = Table(title=f"{model} on {cluster}", title_justify="left")
    table.add_column("parallelism")
    table.add_column("mesh")
    table.add_column("divided: parameters, flops", justify="right")
    for name in ("predicted step", "collectives", "sent per device", "memory per device"):
        table.add_column(name, justify="right")
    if ran:
        table.add_column("measured step", justify="right")
        table.add_column("audit")
    for row in _rows(found, ran):
        table.add_row(*row)
    return table


def _rows(found: Sequence[Compared], ran: bool) -> Iterator[tuple[str, ...]]:
    from alpa_interchange.amounts import format_bytes, format_seconds

    fastest = min((one.step_seconds for one in found if one.step_seconds is not None), default=None)
    quickest = min(
        (one.measured_seconds for one in found if one.measured_seconds is not None), default=None
    )

    def bold(text: str, is_best: bool) -> str:
        return f"[bold]{text}[/bold]" if is_best else text

    for one in found:
        if one.step_seconds is None or one.sent_bytes is None or one.memory_bytes is None:
            yield (one.strategy, "-", "", "no plan", "", "", "", *(("", one.note) if ran else ()))
            continue
        row: tuple[str, ...] = (
            one.strategy,
            one.mesh,
            f"{one.covered.parameters:.0%}, {one.covered.flops:.0%}" if one.covered else "",
            bold(format_seconds(one.step_seconds), one.step_seconds == fastest),
            str(one.num_collectives),
            format_bytes(one.sent_bytes),
            format_bytes(one.memory_bytes),
        )
        if ran and one.measured_seconds is not None:
            best = one.measured_seconds == quickest
            row += (
                bold(format_seconds(one.measured_seconds), best),
                "ok" if one.audited else "NOT the plan",
            )
        yield row


def compare_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Published model, as `alpa plan --help` lists them, or one of the corpus with its "
            "size if not tiny: gpt-39b, gpt, llama:small. Or a saved plan, a .json file."
        ),
    ] = None,
    other: Annotated[
        Path | None, typer.Argument(help="Another saved plan, to be compared with the first.")
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="Instead of a model, a program of your own as module:function; the function "
            "takes no arguments and returns (step, state, batch)."
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="Cluster to plan for, as in `alpa plan`.")
    ] = "host:8",
    preset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Parallelism to compare with; repeatable: dp, zero2, zero3 (fsdp), megatron, "
            "megatron-sp, 2d or expert.",
            show_default=", ".join(DEFAULT_PRESETS),
        ),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Also run every plan, on host devices, and audit it.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps with --run.")] = 5,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of all plans.")] = 1,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of all plans.")] = 1,
    json: Annotated[
        bool, typer.Option("--json", help="Of two saved plans: print JSON instead of tables.")
    ] = False,
) -> None:
    """Compare a model's plan with named parallelisms, or two plans.

    The planner's plan of a model stands beside those of data parallelism, ZeRO, Megatron and 2D
    parallelism; of two saved plans of one program all differences are told. Exit status 1 if, with
    --run, a compiled program is not its plan.
    """
    if other is not None or (model or "").endswith(".json"):
        if model is None or other is None or step is not None:
            raise PlanError(
                "alpa compare of saved plans needs two of them: alpa compare a.json b.json"
            )
        compare_plans(Path(model), other, json)
        return
    if json:
        raise PlanError("--json is for two saved plans: alpa compare a.json b.json --json")
    from alpa_meta.audit.cli import prepare_environment
    from alpa_meta.presets import check_preset
    from cost_model import cluster as cluster_by_name

    try:
        count = cluster_by_name(cluster).num_devices
    except ValueError as error:
        raise PlanError(str(error)) from None
    if (model is None) == (step is None):
        raise PlanError("alpa compare needs a model or --step module:function, not both")
    prepare_environment(count if run else 1)
    from alpa_meta.own_step import load_step, named_model

    if model is not None:
        program: Runnable = named_model(model)
    else:
        assert step is not None
        program = load_step(step)
    presets = tuple(preset or DEFAULT_PRESETS)
    for preset_name in presets:
        check_preset(preset_name)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    plans = len(presets) + 1
    with bar:
        total = plans * (2 + steps + 1) if run else plans
        task = bar.add_task("compare", total=total)

        def progress(what: str) -> None:
            bar.update(task, description=what, advance=1)

        found = compare(
            program,
            cluster,
            presets,
            num_steps=steps if run else 0,
            progress=progress,
            num_stages=stages,
            num_microbatches=microbatches,
            exact=program.exact,
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(comparison_table(model or program.name, cluster, found))
    for one in found:
        if one.note:
            console.print(f"{one.strategy}: {one.note}", markup=False)
    if any(one.audited is False for one in found):
        raise typer.Exit(1)
