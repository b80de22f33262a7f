"""The command line: `ilp-sharding solve | check | stats | warm-up`, on files of the contest format.

`solve` ends with the contest's bracketed list on its last line, so the contest's own checker can
read the output; everything for people goes to the error stream.
"""

from __future__ import annotations

import json
import math
import sys
import typing
from pathlib import Path
from typing import Annotated

import typer

from alpa_interchange.selection import ShardingProblem
from ilp_sharding.compiled_loops import warm_up as compile_loops
from ilp_sharding.contest_file import ContestFileError, parse_choice, read_problem
from ilp_sharding.evaluation import check as evaluate
from ilp_sharding.options import Progress, SolveOptions
from ilp_sharding.solver import solve as solve_problem
from ilp_sharding.statistics import problem_statistics

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Choose one strategy per operator at least cost under a memory limit, with a proof.",
)
_LARGE_BYTES = 500_000  # of a file, from which on reading takes a second
_File = Annotated[Path, typer.Argument(help="Problem in the contest's JSON, .json or .json.gz.")]


@app.command()
def solve(
    file: _File,
    deadline: Annotated[
        float, typer.Option(help="Seconds of wall-clock time after the file is read; 0 for none.")
    ] = 60.0,
    workers: Annotated[int, typer.Option(help="Processes for large problems.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0,
    rounds: Annotated[
        int | None, typer.Option(help="Search so many rounds, without worker processes.")
    ] = None,
    gap: Annotated[float, typer.Option(help="Stop at this relative gap.")] = 0.0,
    warm_start: Annotated[
        Path | None, typer.Option(help="File whose last bracketed line is a previous solution.")
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="NODE=STRATEGY to fix; may be repeated.")
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(help="NODE=STRATEGY to exclude; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the solution only.")] = False,
) -> None:
    """Solve FILE and print the chosen strategies as a bracketed list on the last line."""
    problem = _problem(file)
    try:
        options = SolveOptions(
            deadline=deadline or math.inf,
            num_workers=workers,
            seed=seed,
            rounds=rounds,
            gap_tolerance=gap,
            warm_start=None if warm_start is None else _choice(warm_start),
            pins=dict(_pair(text, "--pin") for text in pin or ()),
            forbid=frozenset(_pair(text, "--forbid") for text in forbid or ()),
        )
        solution = _solve_with_bar(problem, options, quiet)
    except ValueError as error:
        _fail(str(error))
    if solution.choice is None:
        reason = solution.status
        if solution.status == "infeasible" and solution.smallest_memory is not None:
            reason += f": the smallest feasible memory limit is {solution.smallest_memory:.17g}"
        elif solution.status == "infeasible":
            reason += ": the forbidden pairs or the memory limit leave no choice"
        _fail(reason)
    if not quiet:
        gap_text = "unknown" if solution.gap is None else f"{100 * solution.gap:.4g} %"
        print(
            f"{solution.status}: cost {_number(solution.objective)}, bound "
            f"{_number(solution.lower_bound)}, gap {gap_text}, {solution.seconds:.2f} s",
            file=sys.stderr,
        )
    print(json.dumps(list(solution.choice)))


@app.command()
def check(
    file: _File,
    solution: Annotated[
        Path,
        typer.Argument(
            help="Text whose last bracketed line is the solution; - for standard input."
        ),
    ],
) -> None:
    """Evaluate SOLUTION on FILE independently of the solver; exit status 1 if infeasible."""
    problem = _problem(file)
    try:
        result = evaluate(problem, _choice(solution))
    except ValueError as error:
        _fail(str(error))
    print(f"cost          {result.cost}")
    limit = "none" if result.memory_limit is None else _number(result.memory_limit)
    print(
        f"peak memory   {result.peak_memory} of {limit}"
        + ("" if result.peak_time is None else f", first at time {result.peak_time}")
    )
    print(f"feasible      {'yes' if result.feasible else 'no'}")
    if result.forbidden:
        print(f"forbidden     {result.forbidden} entries of infinite cost used")
    if not result.feasible:
        raise typer.Exit(1)


@app.command()
def warm_up() -> None:
    """Compile the solver's loops ahead, so that no `solve` on this machine waits for that."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("compiling", total=1.0)

        def report(name: str, share: float) -> None:
            bar.update(task, completed=share, description=f"compiling {name}")

        compile_loops(report)
    print("ilp-sharding: the loops are compiled", file=sys.stderr)


@app.command()
def stats(file: _File) -> None:
    """Describe FILE before and after reduction: sizes, components, width, how binding memory is."""
    from rich.console import Console
    from rich.table import Table

    numbers = problem_statistics(_problem(file))
    table = Table("", "as given", "after reduction", title=str(file))
    for label, before, after in numbers.rows():
        table.add_row(label, before, after)
    Console().print(table)


def main() -> None:
    """Run the command line."""
    app()


def _solve_with_bar(problem: ShardingProblem, options: SolveOptions, quiet: bool):  # type: ignore[no-untyped-def]
    """Return the solution; show incumbent and bound on the error stream while it is searched."""
    from attrs import evolve
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    if quiet:
        return solve_problem(problem, options)
    total = options.deadline if math.isfinite(options.deadline) else None
    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("start", total=total)

        def report(progress: Progress) -> None:
            best = "none" if progress.objective is None else _number(progress.objective)
            bar.update(
                task,
                completed=progress.seconds,
                description=f"cost {best}  bound {_number(progress.lower_bound)}  {progress.phase}",
            )

        return solve_problem(problem, evolve(options, progress=report))


def _problem(file: Path) -> ShardingProblem:
    """Return the problem in `file`; a large one is read under a line that says so."""
    from rich.console import Console

    try:
        if not file.is_file() or file.stat().st_size < _LARGE_BYTES:
            return read_problem(file)
        with Console(stderr=True).status(f"reading {file}"):
            return read_problem(file)
    except ContestFileError as error:
        _fail(str(error))


def _choice(file: Path) -> tuple[int, ...]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"{file}: cannot be read: {error}")
    return parse_choice(text, source=str(file))


def _pair(text: str, option: str) -> tuple[int, int]:
    node, equals, strategy = text.partition("=")
    if not equals or not node.strip().isdigit() or not strategy.strip().isdigit():
        _fail(f"{option} must be NODE=STRATEGY like 12=3, got {text!r}")
    return int(node), int(strategy)


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "none"
    return str(int(value)) if float(value).is_integer() else f"{value:.9g}"


def _fail(message: str) -> typing.NoReturn:
    print(f"ilp-sharding: {message}", file=sys.stderr)
    raise typer.Exit(2)
