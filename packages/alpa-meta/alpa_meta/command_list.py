"""The command `alpa` as a list of its commands, each with its line and examples; what a command
needs is imported only to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Annotated

import typer

from alpa_meta.commands import plan, show, train
from alpa_meta.published_models import PUBLISHED
from alpa_meta.versions import installed_versions

MOUNTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "audit": (
            "alpa_meta.audit.cli:audit",
            "Check that compiled programs are their plans.",
        ),
        "compare": (
            "alpa_meta.compare:compare_command",
            "Compare a model's plan with named parallelisms, or two plans.",
        ),
        "explain": (
            "alpa_meta.plan_commands:explain_command",
            "Say what the next best alternative of each decision costs.",
        ),
        "what-if": (
            "alpa_meta.plan_commands:what_if_command",
            "Re-plan a saved plan for other memory, links or hosts.",
        ),
        "trace": (
            "alpa_meta.report.run_commands:trace",
            "Write a run's last step for Perfetto or Chrome.",
        ),
        "top": (
            "alpa_meta.report.run_commands:top",
            "Watch a run: what its steps' time goes to, slow meshes.",
        ),
        "clusters": (
            "cost_model.cli:clusters",
            "List the clusters known by name, or show one in detail.",
        ),
        "calibrate": (
            "cost_model.cli:calibrate",
            "Measure this machine for the planner (under a minute).",
        ),
        "cache": (
            "alpa_meta.cache_command:cache",
            "Say where plans of earlier searches are kept.",
        ),
    }
)
"""Commands that stand elsewhere: module:function, imported only to run it, and its first line."""

EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "train": (
            "alpa train",
            "alpa train --stages 2 --microbatches 4 --steps 100 --out two",
            "alpa train --resume two --steps 200",
            "alpa train --step mymodel:program --cluster host:4",
        ),
        "plan": (
            "alpa plan --stages 2 --out plan.json --picture plan.png",
            "alpa plan --model gpt-1.3b --cluster h100:2x8 --memory 40GiB",
            "alpa plan --step mymodel:program --cluster a100-80gb:8",
        ),
        "show": ("alpa show plan.json --all --picture plan.png",),
        "audit": (
            "alpa audit gpt",
            "alpa audit llama:small --random 5 --mesh 2x4",
            "alpa audit plan.json --step mymodel:program",
        ),
        "compare": (
            "alpa compare llama:small --cluster h100:8",
            "alpa compare gpt --preset dp --preset zero3 --run",
            "alpa compare a.json b.json",
        ),
        "explain": ("alpa explain plan.json --picture alternatives.png",),
        "what-if": (
            "alpa what-if plan.json --memory 12GiB",
            "alpa what-if plan.json --hosts 1 --link intra-host=300GB/s",
        ),
        "trace": ("alpa trace run --out trace.json",),
        "top": ("alpa top run",),
        "clusters": ("alpa clusters", "alpa clusters h100:2x8"),
        "calibrate": ("alpa calibrate", "alpa calibrate --diff old.json new.json"),
        "cache": ("alpa cache --clear",),
    }
)
"""Of each command, what its help shows of its use."""


def application(arguments: Sequence[str]) -> typer.Typer:
    """Return the command `alpa`, of what stands elsewhere only what `arguments` run."""
    app = typer.Typer(
        name="alpa",
        help="Plans how a JAX training step runs fastest on a cluster, and runs it there.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(alpa)
    models = f"Published models (--model): {', '.join(PUBLISHED)}."
    app.command(epilog=_examples("train"))(train)
    app.command(epilog=f"{_examples('plan')}\n\n{models}")(plan)
    app.command(epilog=_examples("show"))(show)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, (place, line) in MOUNTED.items():
        if name == chosen:
            module, _, function = place.partition(":")
            app.command(name, epilog=_examples(name))(getattr(import_module(module), function))
        else:
            app.command(name, help=line)(_elsewhere)
    return app


def _examples(command: str) -> str:
    """Return what the help of a command ends with."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])))


def _elsewhere() -> None:
    """Stand for a command in the list of them."""


def _print_versions(wanted: bool) -> None:
    if wanted:
        for name, number in installed_versions().items():
            typer.echo(f"{name} {number}")
        raise typer.Exit


def alpa(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_versions,
            help="Print the versions of all packages.",
        ),
    ] = False,
) -> None:
    """Plans how a JAX training step runs fastest on a cluster, and runs it there."""
