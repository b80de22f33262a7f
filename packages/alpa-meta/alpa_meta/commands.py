"""The commands `alpa train`, `plan` and `show`. What each needs is imported when it runs."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from alpa_meta.command_options import (
    SIZES,
    Cluster,
    Memory,
    Microbatches,
    OwnProgram,
    Recompute,
    Schedule,
    Seed,
    Stages,
    TokenSlices,
)
from alpa_meta.errors import PlanError
from alpa_meta.extras import require
from alpa_meta.published_models import PUBLISHED
from alpa_meta.types import Fields, Function
from alpa_meta.writable import check_file

if TYPE_CHECKING:
    from rich.console import Console

    from alpa_meta.trainer.planning import Parallelism
    from alpa_meta.trainer.settings import TrainSettings
    from mesh_runtime import RayOptions

WIDTH = 120  # of the output where it is no terminal

_FIELDS = {"layers": "num_layers", "heads": "num_heads"}  # of GptOptions, where named otherwise
_PUBLISHED_SIZES: Mapping[str, str] = MappingProxyType(
    {"layers": "num_layers", "context": "length", "batch": "batch", "dtype": "dtype"}
)
"""The options that change a published model, with the fields of its shape."""

NO_SIZES: Mapping[str, object] = MappingProxyType({})


def with_sizes(command: Function[None]) -> Function[None]:
    """Return a command that takes the options `SIZES` in place of its parameter `sizes`, which gets
    those that are given, by name."""
    own = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(k, kind, default=None, annotation=o) for k, o in SIZES.items()]
    parameters: list[inspect.Parameter] = []
    for one in own.parameters.values():
        parameters += options if one.name == "sizes" else [one.replace(kind=kind)]

    @functools.wraps(command)
    def run(**given: object) -> None:
        sizes = _given(**{name: given.pop(name) for name in SIZES})
        command(sizes=sizes, **given)

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@with_sizes
def train(
    cluster: Cluster = "host:8",
    stages: Stages = None,
    microbatches: Microbatches = None,
    token_slices: TokenSlices = None,
    schedule: Schedule = None,
    recompute: Recompute = None,
    memory: Memory = None,
    plan: Annotated[
        Path | None, typer.Option(help="Run this saved plan; refused if made for another program.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, from its checkpoint.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for what the run writes.")] = Path("run"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many steps in all.", show_default="400")
    ] = None,
    schedule_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the learning-rate schedule.", show_default="--steps"),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Highest learning rate.", show_default="0.01")
    ] = None,
    sizes: Mapping[str, object] = NO_SIZES,
    seed: Seed = None,
    compare: Annotated[
        int,
        typer.Option(min=0, help="Run the first so many steps again on one device and compare."),
    ] = 20,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    step: OwnProgram = None,
    on_nan: Annotated[
        str | None,
        typer.Option(
            help="Where a microbatch gives NaN or infinity, raise (end the run, its state saved) "
            "or skip the step; left out, nothing is looked at."
        ),
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(
            help="File for the newest step in Prometheus' text format.",
            show_default="OUT/metrics.prom",
        ),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Run on processes of a Ray cluster started here, one for each mesh; with two "
            "stages, unless --stages, --plan or --resume say otherwise.",
        ),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Run on the Ray cluster at this address (auto: that of this machine)."),
    ] = None,
) -> None:
    """Plan and train the bundled GPT, or a program of your own.

    The GPT is byte-level and trains on the source of Python's standard library; a program of your
    own (--step) on its one batch, or on those that its iterator gives. Both write checkpoints, from
    which --resume goes on.
    """
    if ray and ray_address is None and plan is None and resume is None:
        stages = stages or 2
    parallelism = _parallelism(
        stages, microbatches, token_slices, schedule, recompute, memory, on_nan
    )
    workers = _ray_options(ray, ray_address)
    optimiser = _given(learning_rate=learning_rate, schedule_steps=schedule_steps)
    fixed = {**sizes, **optimiser, **_given(seed=seed)}
    if resume is not None and step is None:
        from alpa_meta.trainer.own_training import own_program

        step = own_program(resume)
    if step is not None:
        if fixed:
            raise PlanError(
                f"{_options(fixed)} is of the bundled GPT and cannot be given with --step; leave "
                "it out and set it in the program"
            )
        from alpa_meta.trainer.own_training import OwnRequest, run_own_training

        own = OwnRequest(
            step=step,
            cluster=cluster,
            parallelism=parallelism,
            plan=plan,
            out=out,
            resume=resume,
            steps=steps,
            comparison_steps=compare,
            checkpoint_every=checkpoint_every,
            ray=workers,
            on_nan=on_nan,
            metrics=metrics,
        )
        _use_devices(cluster, workers)
        run_own_training(own, console())
        return
    from alpa_meta.trainer.job import TrainRequest, run_training

    if resume is not None and fixed:
        raise PlanError(
            f"--resume goes on with the settings of the run, so {_options(fixed)} cannot be given "
            "with it; leave them out or train anew with --out"
        )
    request = TrainRequest(
        settings=_settings(
            sizes,
            {**_given(schedule_steps=steps), **optimiser},
            _given(seed=seed),
        ),
        steps=steps,
        cluster=cluster,
        parallelism=parallelism,
        plan=plan,
        out=out,
        resume=resume,
        comparison_steps=compare,
        checkpoint_every=checkpoint_every,
        ray=workers,
        on_nan=on_nan,
        metrics=metrics,
    )
    _use_devices(cluster, workers)
    run_training(request, console())


@with_sizes
def plan(
    cluster: Cluster = "host:8",
    stages: Stages = None,
    microbatches: Microbatches = None,
    token_slices: TokenSlices = None,
    schedule: Schedule = None,
    recompute: Recompute = None,
    memory: Memory = None,
    sizes: Mapping[str, object] = NO_SIZES,
    model: Annotated[
        str | None,
        typer.Option(
            help="Plan this model instead of the bundled GPT: a published one, listed below, with "
            "its dtype, optimiser and batch (--layers, --context, --batch and --dtype change it), "
            "or one of the corpus, e.g. moe-sort:small."
        ),
    ] = None,
    step: OwnProgram = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan into this PNG file.")] = None,
    schedule_csv: Annotated[
        Path | None,
        typer.Option(help="Write the schedule to this CSV file of torch.distributed.pipelining."),
    ] = None,
) -> None:
    """Plan a training step for any cluster, without its devices.

    Nothing is executed: what is planned is the bundled GPT, a published or a corpus model
    (--model), or a program of your own (--step).
    """
    from alpa_meta.trainer.planning import PlanRequest, make_plan

    if model is not None and step is not None:
        raise PlanError("--model and --step both name the program to plan; give one of them")
    changed: Fields = {}
    if model in PUBLISHED and set(sizes) <= set(_PUBLISHED_SIZES):
        changed = {_PUBLISHED_SIZES[name]: size for name, size in sizes.items()}
        sizes = NO_SIZES
    if (model or step) is not None and sizes:
        raise PlanError(
            "--model and --step name programs, which have their own sizes; a model of the corpus "
            "has several: name:size, and a published one takes --layers, --context, --batch and "
            "--dtype"
        )
    own = model is None and step is None
    request = PlanRequest(
        settings=_settings(sizes, {}, {}) if own else None,
        model=model,
        model_sizes=changed,
        step=step,
        cluster=cluster,
        parallelism=_parallelism(stages, microbatches, token_slices, schedule, recompute, memory),
    )
    _use_one_cpu()
    make_plan(request, console(), out=out, picture=picture, schedule_csv=schedule_csv)


def show(
    plan: Annotated[
        Path, typer.Argument(help="A plan.json written by `alpa plan` or `alpa train`.")
    ],
    picture: Annotated[
        Path | None, typer.Option(help="Draw the plan into this PNG file as well.")
    ] = None,
    parameters: Annotated[
        bool, typer.Option("--all", help="List every parameter instead of classes of equal ones.")
    ] = False,
) -> None:
    """Show a saved plan as tables, and as a picture."""
    from alpa_interchange import load
    from alpa_interchange.plan import ParallelPlan
    from alpa_meta.report.plan_table import print_plan

    check_file(picture, "--picture")
    loaded = load(plan, ParallelPlan)
    terminal = console()
    print_plan(loaded, terminal, every_parameter=parameters)
    if picture is not None:
        from alpa_interchange import DocumentError, load_menu, menu_path
        from alpa_meta.report.plan_picture import write_picture

        beside = menu_path(plan)
        menu = None
        if beside.exists():
            try:
                menu = load_menu(loaded, beside)
            except DocumentError as error:
                terminal.print(f"other settings are not drawn: {error}")
        write_picture(picture, loaded, menu, terminal)


def _options(given: Mapping[str, object]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def _given(**options: object) -> Fields:
    return {name: value for name, value in options.items() if value is not None}


def _settings(sizes: Mapping[str, object], optimiser: Fields, other: Fields) -> TrainSettings:
    from alpa_meta.trainer.model import GptOptions
    from alpa_meta.trainer.settings import TrainSettings
    from alpa_meta.trainer.step import OptimiserOptions

    model: Fields = {
        _FIELDS.get(name, name): size for name, size in sizes.items() if name != "batch"
    }
    batch = _given(batch_size=sizes.get("batch"))
    try:
        return TrainSettings(
            model=GptOptions(**model), optimiser=OptimiserOptions(**optimiser), **batch, **other
        )
    except ValueError as error:  # attrs puts more than the sentence into args
        raise PlanError(str(error.args[0])) from None


def _parallelism(
    stages: int | None,
    microbatches: int | None,
    token_slices: str | None,
    schedule: str | None,
    recompute: str | None,
    memory: str | None,
    on_nan: str | None = None,
) -> Parallelism:
    from alpa_meta.options import Options
    from alpa_meta.trainer.planning import Parallelism

    kinds = recompute.split(",") if recompute and "," in recompute else recompute
    try:
        sliced = _slices(token_slices)
        given = _given(schedule=schedule, on_nan=on_nan, **sliced)
        options = Options(memory=memory, recompute=kinds, **given)
    except PlanError as error:
        raise PlanError(_of_command_line(error)) from None
    return Parallelism(
        num_stages=stages,
        num_microbatches=microbatches,
        num_token_slices=options.num_token_slices,
        token_slices=options.token_slices,
        schedule=schedule,
        recompute=options.recompute,
        memory=options.memory,
    )


def _of_command_line(error: PlanError) -> str:
    """Return what a refused field of `Options` is called on the command line."""
    names = re.sub(r"Options\.(num_)?(\w+)", lambda m: f"--{m[2].replace('_', '-')}", str(error))
    for of_the_library in (
        ", or None for the planner's choice",
        ", or None",
        ", a mapping from layers to them",
    ):
        names = names.replace(of_the_library, "")
    return names


def _slices(text: str | None) -> Fields:
    """Return the options that "3" slices, or those of "512,384" tokens, stand for."""
    if text is None:
        return {}
    try:
        lengths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise PlanError(
            f"--token-slices must be a number of slices such as 3, or the tokens of each such as "
            f"512,384, got {text!r}"
        ) from None
    return {"token_slices": lengths} if "," in text else {"num_token_slices": lengths[0]}


def _ray_options(wanted: bool, address: str | None) -> RayOptions | None:
    """Return how to run on Ray, None to run in this process."""
    if not wanted and address is None:
        return None
    require("alpa train --ray", "ray")
    from mesh_runtime import RayOptions, WorkerError, check_reachable

    try:
        options = RayOptions(address="local" if address is None else address)
        check_reachable(options.address)
    except (ValueError, WorkerError) as error:
        raise PlanError(f"--ray-address: {error}") from None
    return options


def _use_devices(cluster: str, workers: RayOptions | None) -> None:
    """Make as many host devices as the cluster `host:<n>` has; other clusters bring their own.

    Where other processes have the devices, this one only needs a CPU.
    """
    if workers is not None:
        _use_one_cpu()
        return
    preset, _, number = cluster.partition(":")
    if preset.lower() == "host":
        from alpa_meta.trainer.host_devices import use_host_devices

        use_host_devices(int(number) if number.isdecimal() and int(number) else 1)


def _use_one_cpu() -> None:
    """Keep planning off accelerators: it only needs shapes."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def console(stderr: bool = False) -> Console:
    """Return where commands print."""
    from rich.console import Console

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else WIDTH
    return Console(width=width, highlight=False, stderr=stderr)
