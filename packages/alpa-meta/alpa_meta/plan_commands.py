"""The commands `alpa explain` and `alpa what-if`, and the comparison of two plans: of saved plans,
without their programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from alpa_interchange import KeptMenu, ParallelPlan, load, load_menu, menu_path
from alpa_interchange.amounts import parse_bandwidth, parse_bytes
from alpa_meta.errors import PlanError
from alpa_meta.writable import check_file

if TYPE_CHECKING:
    from rich.console import Console

Plan = Annotated[Path, typer.Argument(help="A plan.json written by `alpa plan` or `alpa train`.")]
Menu = Annotated[
    Path | None,
    typer.Option(
        help="The menu the plan was chosen from.", show_default="plan.menu.json beside plan.json"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def explain_command(
    plan: Plan,
    menu: Menu = None,
    json: Json = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw what the alternatives cost into this PNG file.")
    ] = None,
) -> None:
    """Say what the next best alternative of each decision costs.

    Of a saved plan, with its menu (plan.menu.json), without its program.
    """
    from alpa_meta.planning.explanation import explain
    from alpa_meta.report import plan_changes
    from alpa_meta.report.progress import stages_progress

    check_file(picture, "--picture")
    loaded, kept = _loaded(plan, menu)
    with stages_progress(_console(stderr=json)) as progress:
        found = explain(loaded, kept, progress)
    if json:
        typer.echo(plan_changes.as_json(found))
    else:
        plan_changes.print_explanation(found, _console())
    if picture is not None:
        plan_changes.draw_explanation(picture, found)
        typer.echo(f"wrote {picture}", err=json)


def what_if_command(
    plan: Plan,
    memory: Annotated[
        str | None, typer.Option(help="Memory per device a plan may use, e.g. 40GiB.")
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(help="Number of hosts, e.g. 4; of one of several host groups 1=4."),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="A link's bandwidth, e.g. inter-host=100Gb/s or intra-host=300GB/s; repeatable."
        ),
    ] = None,
    menu: Menu = None,
    thresholds: Annotated[
        bool,
        typer.Option(help="Look for the values of the given options at which the plan changes."),
    ] = True,
    json: Json = False,
) -> None:
    """Re-plan a saved plan for other memory, links or hosts.

    From its menu (plan.menu.json), in seconds, without its program. With other hosts, what of the
    state must move is listed.
    """
    from alpa_meta.planning import replanning
    from alpa_meta.planning.state_moves import state_moves
    from alpa_meta.planning.thresholds import Threshold, is_used, link_thresholds, memory_thresholds
    from alpa_meta.report import plan_changes
    from alpa_meta.report.progress import stages_progress

    loaded, kept = _loaded(plan, menu)
    limit = _amount("--memory", memory) if memory is not None else None
    links = dict(_links(link or []))
    cluster = replanning.changed_cluster(loaded.cluster, _hosts(hosts or []), links)
    changes: list[Threshold] = []
    with stages_progress(_console(stderr=json)) as progress:
        progress("replan", 0, 1)
        found = replanning.replan(loaded, kept, cluster, limit)
        progress("replan", 1, 1)
        asked: list[Callable[[], Iterable[Threshold]]] = [
            functools.partial(link_thresholds, found, name) for name in links
        ]
        if memory is not None:
            asked.insert(0, functools.partial(memory_thresholds, found))
        for number, look in enumerate(asked if thresholds else []):
            progress("thresholds", number, len(asked))
            changes += look()
            progress("thresholds", number + 1, len(asked))
    moves = state_moves(loaded, kept, found) if hosts else None
    if json:
        typer.echo(plan_changes.replanned_json(found, changes, moves))
        return
    console = _console()
    plan_changes.print_replanned(found, console)
    for name in links:
        if not is_used(found, name):
            console.print(f"{name}: the cluster has no such link between its devices")
    if thresholds and (memory is not None or links):
        plan_changes.print_thresholds(changes, console)
    if moves is not None:
        plan_changes.print_moves(moves, console)


def compare_plans(first: Path, second: Path, json: bool) -> None:
    """Print what differs between two saved plans of one program."""
    from alpa_meta.report import plan_changes
    from alpa_meta.report.plan_difference import plan_difference

    found = plan_difference(load(first, ParallelPlan), load(second, ParallelPlan))
    if json:
        typer.echo(plan_changes.as_json(found))
    else:
        plan_changes.print_difference((str(first), str(second)), found, _console())


def _loaded(plan: Path, menu: Path | None) -> tuple[ParallelPlan, KeptMenu]:
    """Return a plan and its menu; PlanError where there is none."""
    loaded = load(plan, ParallelPlan)
    beside = menu_path(plan) if menu is None else menu
    if not beside.exists():
        raise PlanError(
            f"{beside}: there is no menu of {plan}, which a plan has that was searched with "
            "pipelines (not one of one device, of num_stages=1, or of a model without equal layers "
            "that bounds alone prove the best); plan anew with `alpa plan --out`, or name its file "
            "with --menu"
        )
    return loaded, load_menu(loaded, beside)


def _hosts(given: list[str]) -> dict[int, int]:
    found = {}
    for text in given:
        group, equals, count = text.rpartition("=")
        if not count.isdecimal() or int(count) < 1 or (equals and not group.isdecimal()):
            raise PlanError(f"--hosts must be a number of hosts such as 4, or 1=4, got {text!r}")
        found[int(group or 0)] = int(count)
    return found


def _links(given: list[str]) -> list[tuple[str, float]]:
    found = []
    for text in given:
        name, equals, amount = text.partition("=")
        if not equals:
            raise PlanError(f"--link must look like inter-host=100Gb/s, got {text!r}")
        try:
            found.append((name, parse_bandwidth(amount)))
        except ValueError as error:
            raise PlanError(f"--link {text}: {error}") from None
    return found


def _amount(option: str, text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise PlanError(f"{option}: {error}") from None


def _console(stderr: bool = False) -> Console:
    from alpa_meta.commands import console

    return console(stderr)
