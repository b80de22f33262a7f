"""The command `alpa audit`. Mounted by `app.command()(audit)`; heavy imports wait for the call."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from alpa_meta.errors import PlanError
from alpa_meta.published_models import PUBLISHED

if TYPE_CHECKING:
    from alpa_meta.audit.random_plans import RandomAudits
    from alpa_meta.own_step import Runnable


def audit(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|PLAN.json",
            help="Corpus model to audit, with its size if not tiny (gpt, llama:small), or a saved "
            "plan, whose program --model or --step names.",
        ),
    ] = None,
    corpus: Annotated[bool, typer.Option("--corpus", help="Audit every corpus model.")] = False,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="With --corpus: only this model; repeatable. With PLAN.json: the plan's model.",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="A program of your own as module:function; the function takes no arguments and "
            "returns (step, state, batch)."
        ),
    ] = None,
    random: Annotated[
        int, typer.Option(min=0, help="Audit so many random plans per model as well.")
    ] = 0,
    planner: Annotated[bool, typer.Option(help="Audit the planner's plan.")] = True,
    mesh: Annotated[str, typer.Option(help="Logical mesh of the random plans.")] = "2x4",
    target: Annotated[
        str | None,
        typer.Option(help="Compile for these GPUs, without having them: h100:8, a100:16."),
    ] = None,
    numerics: Annotated[
        bool, typer.Option(help="Run each plan and compare with one device.")
    ] = True,
    all_lines: Annotated[
        bool, typer.Option("--all", help="Show every collective, not only what differs.")
    ] = False,
) -> None:
    """Check that compiled programs are their plans.

    Exit status 0 only if all of them are. Every collective of the compiled program is accounted for
    by planned ones: XLA may merge them or drop redundant ones, but not add one, change its kind or
    axes, or move more bytes.
    """
    shape = _mesh_shape(mesh)
    num_devices = math.prod(shape)
    prepare_environment(num_devices)
    jobs, plan = _jobs(what, corpus, models or [], step, random, planner)

    from alpa_meta.audit.target import parse_target, target_devices

    devices: jax.Device = None
    if target is not None:
        gpu, count = parse_target(target)
        devices = target_devices(gpu, count)
        if count < num_devices:
            shape = (count,)
    console = Console(highlight=False, soft_wrap=True)
    all_ok = True
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    prepared: RandomAudits | None = None
    one: Runnable | None = None
    with progress:
        bar = progress.add_task("audit", total=len(jobs))
        for number, (name, seed) in enumerate(jobs):
            kind = "planner's plan" if seed is None else f"random plan {seed}"
            progress.update(bar, description=f"{name} {kind}")
            try:
                if one is None or jobs[number - 1][0] != name:
                    one, prepared = _built(name), None
                if seed is None:
                    cluster = target or f"host:{num_devices}"
                    ok, lines = _audit_planned(one, cluster, plan, numerics, all_lines)
                else:
                    prepared = prepared or _prepared(one, numerics and target is None)
                    ok, lines = _audit_random(prepared, seed, shape, devices, all_lines)
            except Exception as error:  # one program of many: a finding, not the end
                if not corpus:
                    raise
                ok, lines = False, iter([f"FAIL {name} {kind}: {type(error).__name__}: {error}"])
            all_ok &= ok
            for line in lines:
                console.print(line, markup=False)
            progress.advance(bar)
    if not all_ok:
        raise typer.Exit(1)


def _prepared(model: Runnable, numerics: bool) -> RandomAudits:
    from alpa_meta.audit.random_plans import random_audits

    return random_audits(model, numerics=numerics)


def _jobs(
    what: str | None,
    corpus: bool,
    models: list[str],
    step: str | None,
    random: int,
    planner: bool,
) -> tuple[list[tuple[str, int | None]], Path | None]:
    """Return (program, seed of a random plan or None) of every audit, and the saved plan if any."""
    from alpa_meta.corpus import NAMES

    plan = Path(what) if what is not None and what.endswith(".json") else None
    if plan is not None:
        programs = models + ([] if step is None else [step])
        if corpus or len(programs) != 1:
            raise PlanError(
                f"alpa audit {what} needs the program of the plan: --model NAME of the corpus or "
                "--step module:function, and one of them only"
            )
        if not planner:
            raise PlanError(f"--no-planner leaves out {what}, the plan to audit; drop it")
    elif step is not None:
        if what is not None or corpus:
            raise PlanError("--step names the program to audit; give no model and no --corpus")
        programs = [step]
    elif (what is None) == (not corpus):
        raise PlanError(
            "alpa audit needs either a corpus model (alpa audit gpt) or --corpus, and not both; "
            f"the corpus has {', '.join(NAMES)}"
        )
    elif models and not corpus:
        raise PlanError(f"--model {models[0]} restricts --corpus; give --corpus or only the name")
    else:
        programs = [what] if what is not None else models or list(NAMES)
    for program in programs:
        name = program.partition(":")[0]
        if program != step and name not in NAMES and program not in PUBLISHED:
            raise PlanError(f"the corpus has no model {name!r}; it has {', '.join(NAMES)}")
    jobs: list[tuple[str, int | None]] = []
    for program in programs:
        jobs += [(program, None)] if planner else []
        jobs += [(program, seed) for seed in range(random)]
    if not jobs:
        raise PlanError("nothing to audit: --no-planner needs --random N with N above 0")
    return jobs, plan


def _built(program: str) -> Runnable:
    """Return the program that a model's name (gpt, llama:small) or module:function stands for."""
    from alpa_meta.corpus import NAMES
    from alpa_meta.own_step import load_step, named_model

    known = program.partition(":")[0] in NAMES or program in PUBLISHED
    return named_model(program) if known else load_step(program)


def _mesh_shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes) or len(sizes) > 4:
        raise PlanError(f"--mesh must be 1 to 4 sizes such as 2x4, got {text!r}")
    return tuple(int(size) for size in sizes)


def prepare_environment(num_devices: int) -> None:
    """Ask for host devices before jax is imported; on a machine with a GPU, do not use it.

    The CUDA plugin registers its compiler without a driver only where jax runs on the CPU.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_force_host_platform_device_count={num_devices}".strip()
        )
    jax: ModuleType = import_module("jax")
    jax.config.update("jax_platforms", "cpu")


def _audit_random(
    prepared: RandomAudits, seed: int, shape: tuple[int, ...], devices: jax.Device, all_lines: bool
) -> tuple[bool, Iterator[str]]:
    import jax

    from alpa_meta.audit.random_plans import mesh_of_shape

    found = prepared.audit(
        mesh_of_shape(shape), jax.devices() if devices is None else devices, seed
    )
    report = found.audit.collectives
    details = [] if report.ok and not all_lines else [report.text(all_lines=all_lines)]
    return found.audit.ok, iter([found.text(), *details])


def _audit_planned(
    model: Runnable, cluster: str, plan: Path | None, numerics: bool, all_lines: bool
) -> tuple[bool, Iterator[str]]:
    from alpa_interchange import ParallelPlan, load
    from alpa_meta.audit.planner_plans import audit_planned
    from alpa_meta.options import Options

    options = Options(plan=None if plan is None else load(plan, ParallelPlan))
    found = audit_planned(model, cluster, options, numerics=numerics)
    whose = "planner's plan" if plan is None else plan.name
    line = f"{'ok  ' if found.ok else 'FAIL'} {model.name} {whose}: {found.summary()}"
    numbers = [] if found.numerics is None else [found.numerics.text()]
    details = [found.text(all_lines=all_lines)] if all_lines or not found.ok else []
    return found.ok, iter(["; ".join([line, *numbers]), *details])
