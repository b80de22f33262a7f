"""Random training steps under random options, against the plain step in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import evolve, frozen
from jax.tree_util import PyTreeDef

import alpa_meta as alpa
from alpa_interchange import from_json, to_json
from alpa_meta.options import EXECUTORS, SCHEDULES
from alpa_meta.presets import PRESETS
from random_steps import chains, losses, scans, structures

PROGRAMS = {"losses": losses, "scans": scans, "chains": chains, "structures": structures}
SEEDS = 150
"""Of each kind of program with --full."""

TOLERANCE = 1e-8
"""Largest allowed difference as a share of an array's largest element: some ten million roundings.
Steep losses take that many in two steps: seed 102 of scans differs by 1.1e-9 in two microbatches on
one mesh, of which its first step has 4e-16."""


@frozen(kw_only=True)
class Case:
    """A training step and how it is run; its text is a program that makes it again."""

    program: str
    seed: int
    parts: tuple[str, ...]
    """What the step is made of; leaving parts out gives smaller steps."""
    options: dict[str, Any]
    plan_seed: int | None = None
    """Of a random plan; None: the planner's."""
    evaluated: bool = False


def random_case(program: str, seed: int) -> Case:
    rng = np.random.default_rng(seed + 10_000)
    num_devices = int(rng.choice([2, 4, 8]))
    num_stages = int(rng.choice([n for n in (1, 1, 2, 2, 3, 4) if n <= num_devices]))
    examples = PROGRAMS[program].num_examples(seed)
    options: dict[str, Any] = {
        "cluster": f"host:{num_devices}",
        "num_stages": num_stages,
        "num_microbatches": math.gcd(
            examples, int(rng.choice([1, 2, 4, 8], p=[0.15, 0.4, 0.3, 0.15]))
        ),
        "max_mesh_axes": int(rng.choice([1, 2])),
        "executor": str(rng.choice(EXECUTORS)),
    }
    plan_seed = seed if rng.random() < 0.4 else None
    if num_stages > 1 and rng.random() < 0.7:
        options["schedule"] = str(rng.choice(SCHEDULES))
        if options["schedule"] == "interleaved-1f1b":
            options["num_stages"], plan_seed = 4, None  # two on each mesh, which no random plan has
    if rng.random() < 0.4:
        options["recompute"] = str(rng.choice(["none", "full", "selective"]))
    if rng.random() < 0.1:
        options["offload"] = "moments"
    if plan_seed is None and rng.random() < 0.15:
        options["preset"] = str(rng.choice(PRESETS))
    if rng.random() < 0.1:
        options["donate"] = False
    if rng.random() < 0.1:
        options["num_layers"] = int(rng.integers(num_stages, 7))
    if program == "scans" and rng.random() < 0.15:
        options["num_token_slices"] = 2
    return Case(
        program=program,
        seed=seed,
        parts=PROGRAMS[program].choose(seed),
        options=options,
        plan_seed=plan_seed,
        evaluated=bool(rng.random() < 0.3),
    )


def refusal_of(case: Case) -> str | None:
    """Run a case; return why the planner refuses it, None where the results are right.

    Raises: AssertionError where a result is wrong; what the planner or the run raises.
    """
    with jax.enable_x64(True):
        step, state, batches = PROGRAMS[case.program].training(case.seed, case.parts)
        try:
            parallel = alpa.parallelize(step, **case.options)
            if case.plan_seed is not None:
                plan = parallel.random_plan(state, batches[0], seed=case.plan_seed)
                plan = from_json(to_json(plan), alpa.ParallelPlan)
                given = {k: v for k, v in case.options.items() if k in ("executor", "offload")}
                parallel = alpa.parallelize(step, plan=plan, **given)
            parallel.plan_for(state, batches[0])
        except alpa.PlanError as refusal:
            return str(refusal)
        plain = jax.jit(step)
        expected, got = state, jax.tree.map(jnp.copy, state)
        for number, batch in enumerate(batches):
            if case.evaluated and number:
                _compare_evaluation(parallel, got, batch, plain(expected, batch)[1])
            expected, right = plain(expected, batch)
            got, found = parallel(got, batch)
            _compare((parallel.gather(got), found), (expected, right), f"batch {number}: ")
    return None


def _compare_evaluation(parallel: Any, state: Any, batch: Any, right: Any) -> None:
    before, evaluated = parallel.gather(state), parallel.evaluate(state, batch)[1]
    sides = [
        jax.tree.leaves(side, is_leaf=lambda leaf: leaf is None) for side in (evaluated, right)
    ]
    known = [(one, other) for one, other in zip(*sides, strict=True) if one is not None]
    # Of a step that looks at gradients before its loss, nothing may be known.
    _compare([one for one, _ in known], [other for _, other in known], "evaluation: ")
    _compare(parallel.gather(state), before, "state after an evaluation: ")


def _words(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _compare(found: Any, right: Any, place: str) -> None:
    structures: list[PyTreeDef] = [jax.tree.structure(found), jax.tree.structure(right)]
    assert structures[0] == structures[1], place
    wrong = []
    leaves = jax.tree_util.tree_leaves_with_path(right)
    for (path, one), other in zip(leaves, jax.tree.leaves(found), strict=True):
        one, other = _words(one), _words(other)
        name = place + jax.tree_util.keystr(path)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), (
            f"{name}: {other.dtype}{other.shape} instead of {one.dtype}{one.shape}"
        )
        if not np.issubdtype(one.dtype, np.inexact):
            if not np.array_equal(one, other):
                wrong.append(f"{name}: {other} instead of {one}")
            continue
        scale = max(float(np.abs(one).max(initial=0.0)), 1e-6)
        error = float(np.abs(one - other).max(initial=0.0)) / scale
        if not error <= TOLERANCE:
            wrong.append(f"{name} differs by {error:.2e} of its largest element")
    assert not wrong, "\n".join(wrong)


def require_right(case: Case) -> None:
    """Require that a case gives what the plain step does; one that the planner refuses must do so
    on one mesh in one microbatch. A failure says the smallest case found that fails so, too.
    """
    error = _failure(case)
    if error is None:
        return
    least, trials = case, smaller(case)
    while (trial := next(trials, None)) is not None:
        found = _failure(trial)
        if found is not None and type(found) is type(error):
            least, error, trials = trial, found, smaller(trial)
    raise AssertionError(f"{error}\nrandom_steps.cases.require_right({least})") from error


def _failure(case: Case) -> Exception | None:
    try:
        refused = refusal_of(case)
        if refused is not None:
            whole = {"cluster": case.options["cluster"], "num_stages": 1, "num_microbatches": 1}
            refused = refusal_of(evolve(case, options=whole, plan_seed=None))
            assert refused is None, f"refused whole: {refused}"
    except Exception as error:
        return error
    return None


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one part or one option less."""
    for place in range(len(case.parts)):
        yield evolve(case, parts=case.parts[:place] + case.parts[place + 1 :])
    for name in case.options:
        if name not in ("cluster", "num_stages", "num_microbatches"):
            left = {key: value for key, value in case.options.items() if key != name}
            yield evolve(case, options=left)
    if case.options.get("num_stages", 1) > 2:
        yield evolve(case, options=case.options | {"num_stages": 2})
    if case.options["num_microbatches"] > 2:
        yield evolve(case, options=case.options | {"num_microbatches": 2})
    if case.plan_seed is not None:
        yield evolve(case, plan_seed=None)
    if case.evaluated:
        yield evolve(case, evaluated=False)
