"""The command `alpa`: train, plan, show, clusters, and what other parts mount here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from alpa_interchange import DocumentError
from alpa_meta.audit.cli import audit
from alpa_meta.cache_command import cache
from alpa_meta.compare import compare_command
from alpa_meta.errors import PlanError
from cost_model import cli as cost_model_commands

EXIT_USER_ERROR = 2
WIDTH = 120  # of the output where it is no terminal

app = typer.Typer(
    name="alpa",
    help="Plans how a JAX training step runs fastest on a cluster, and runs it there.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Cluster = Annotated[
    str,
    typer.Option(
        help="Preset and number of devices (host:8, h100:16; see `alpa clusters`), or a TOML file."
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(min=1, help="Number of pipeline stages; left out, the planner chooses."),
]
Microbatches = Annotated[
    int | None, typer.Option(min=1, help="Microbatches per step; left out, the planner chooses.")
]
Schedule = Annotated[
    str | None,
    typer.Option(help="Pipeline schedule: 1f1b, gpipe, ...; left out, the planner chooses."),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory per device a plan may use, e.g. 16GiB; default: all of it."),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Transformer layers.", show_default="4")]
Hidden = Annotated[int | None, typer.Option(min=1, help="Width of the model.", show_default="64")]
Heads = Annotated[int | None, typer.Option(min=1, help="Attention heads.", show_default="4")]
Context = Annotated[int | None, typer.Option(min=1, help="Bytes in a window.", show_default="128")]
Batch = Annotated[int | None, typer.Option(min=1, help="Windows per step.", show_default="16")]
Dtype = Annotated[
    str | None, typer.Option(help="Arithmetic: float32 or bfloat16.", show_default="float32")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of weights and data.", show_default="0")
]


@app.command()
def train(
    cluster: Cluster = "host:8",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
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
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    context: Context = None,
    batch: Batch = None,
    dtype: Dtype = None,
    seed: Seed = None,
    compare: Annotated[
        int,
        typer.Option(min=0, help="Run the first so many steps again on one device and compare."),
    ] = 20,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
) -> None:
    """Plan and train the bundled byte-level GPT on the standard library's source text."""
    from alpa_meta.trainer.job import TrainRequest, run_training

    model = _given(num_layers=layers, hidden=hidden, num_heads=heads, context=context, dtype=dtype)
    optimiser = _given(learning_rate=learning_rate, schedule_steps=schedule_steps or steps)
    other = _given(batch_size=batch, seed=seed)
    if resume is not None:
        fixed = {
            **model,
            **_given(learning_rate=learning_rate, schedule_steps=schedule_steps),
            **other,
        }
        if fixed:
            names = ", ".join(sorted(fixed))
            raise PlanError(
                f"--resume goes on with the settings of the run, so {names} cannot be given with "
                "it; leave them out or train anew with --out"
            )
    request = TrainRequest(
        settings=_settings(model, optimiser, other),
        steps=steps,
        cluster=cluster,
        parallelism=_parallelism(stages, microbatches, schedule, memory),
        plan=plan,
        out=out,
        resume=resume,
        comparison_steps=compare,
        checkpoint_every=checkpoint_every,
    )
    _use_devices(cluster)
    run_training(request, _console())


@app.command()
def plan(
    cluster: Cluster = "host:8",
    stages: Stages = None,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    memory: Memory = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    context: Context = None,
    batch: Batch = None,
    dtype: Dtype = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Plan this model of the corpus instead of the bundled GPT, e.g. moe:tiny."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the plan into this PNG file.")] = None,
) -> None:
    """Plan a training step for any cluster, without executing it and without its devices."""
    from alpa_meta.trainer.planning import PlanRequest, make_plan

    sizes = _given(num_layers=layers, hidden=hidden, num_heads=heads, context=context, dtype=dtype)
    other = _given(batch_size=batch)
    if model is not None and (sizes or other):
        raise PlanError(
            "--model names a model of the corpus, which has its own sizes: use name:size"
        )
    request = PlanRequest(
        settings=_settings(sizes, {}, other),
        model=model,
        cluster=cluster,
        parallelism=_parallelism(stages, microbatches, schedule, memory),
    )
    _use_one_cpu()
    make_plan(request, _console(), out=out, picture=picture)


@app.command()
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
    from alpa_meta.report.plan_figure import draw_plan
    from alpa_meta.report.plan_table import print_plan

    loaded = load(plan, ParallelPlan)
    console = _console()
    print_plan(loaded, console, every_parameter=parameters)
    if picture is not None:
        draw_plan(picture, loaded)
        console.print(f"wrote {picture}")


app.command()(audit)
app.command("compare")(compare_command)
app.command()(cache)
app.command()(cost_model_commands.clusters)
app.command()(cost_model_commands.calibrate)


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Return the exit status of a command line; a user's mistake prints one message and gives 2."""
    try:
        app(list(arguments), prog_name="alpa")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except (PlanError, DocumentError) as error:
        _error_console().print(f"alpa: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_USER_ERROR
    return 0


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _settings(model: dict[str, Any], optimiser: dict[str, Any], other: dict[str, Any]) -> Any:
    from alpa_meta.trainer import GptOptions, OptimiserOptions, TrainSettings

    try:
        return TrainSettings(
            model=GptOptions(**model), optimiser=OptimiserOptions(**optimiser), **other
        )
    except ValueError as error:
        raise PlanError(str(error)) from None


def _parallelism(
    stages: int | None, microbatches: int | None, schedule: str | None, memory: str | None
) -> Any:
    from alpa_meta.report.amounts import parse_bytes
    from alpa_meta.trainer.planning import Parallelism

    try:
        memory_bytes = None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise PlanError(f"--memory: {error}") from None
    return Parallelism(
        num_stages=stages, num_microbatches=microbatches, schedule=schedule, memory=memory_bytes
    )


def _use_devices(cluster: str) -> None:
    """Make as many host devices as the cluster `host:<n>` has; other clusters bring their own."""
    preset, _, number = cluster.partition(":")
    if preset.lower() == "host":
        from alpa_meta.trainer.host_devices import use_host_devices

        use_host_devices(int(number) if number.isdecimal() and int(number) else 1)


def _use_one_cpu() -> None:
    """Keep planning off accelerators: it only needs shapes."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _console() -> Console:
    width = None if sys.stdout.isatty() else WIDTH
    return Console(width=width, highlight=False)


def _error_console() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
