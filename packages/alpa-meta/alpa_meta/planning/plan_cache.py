"""Plans of earlier searches: the same program, cluster and options are not searched twice.

A plan is kept under a hash of all that a search depends on:

    program    the traced step with its constants' values, names and paths  -> `program_hash`
    operators  the record of every primitive in it: users may register their own
    cluster    its document, and every calibration profile of the user
    options    all but those that only running a plan depends on
    versions   of all packages and of jax, and a hash of our sources, so that a change in a checkout
               counts as well

A plan that is found is restored as a saved plan is, which checks that it was made for this program
and that every operator still has the strategy that it names; a damaged one is searched again and
replaced, with a warning. What a search found that ran out of time is kept as well: its gap stands
in the plan. `Options(cache=False)` and ALPA_PLAN_CACHE=0 always search.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import jax
from attrs import evolve, fields

from alpa_interchange import ClusterSpec, ParallelPlan, ShardingRule, to_json
from alpa_meta.compat import Jaxpr, JaxprEqn, open_jaxpr, trace_settings
from alpa_meta.operators import operator_of, sharding_rule
from alpa_meta.operators.regions import bodies, is_region
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.planning.plan_identity import files_hash
from alpa_meta.planning.plan_store import PlanStore, is_switched_off, plan_directory
from alpa_meta.planning.plan_summary import provenance
from alpa_meta.planning.program_hash import program_hash, text_of
from alpa_meta.step.program import Step
from cost_model.profile import profile_directory

_LOG = logging.getLogger("alpa_meta")
_ONLY_RUNNING = (
    "plan",
    "progress",
    "donate",
    "trace",
    "cache",
    "dynamic_dims",
    "runtime",
    "on_nan",
    "checkpoints",
    "checkpoint_every",
)
_SOURCES = (
    "alpa_interchange",
    "alpa_meta",
    "cost_model",
    "ilp_sharding",
    "stage_dp",
)


def searched_once(
    step: Step,
    cluster: ClusterSpec,
    options: Options,
    *,
    search: Callable[[], Planned],
    restore: Callable[[ParallelPlan], Planned],
) -> Planned:
    """Return the plan of an earlier search made ready by `restore`, else of `search`, kept."""
    if not options.cache or is_switched_off():
        return search()
    store = PlanStore(plan_directory())
    key = plan_key(step, cluster, options)
    found = _found(store, key, restore)
    if found is not None:
        options.progress("cache", 1, 1)
        _LOG.info("the plan was taken from %s", store.folder)
        return found
    planned = search()
    try:
        store.save(key, planned.plan, planned.kept_menu())
    except OSError as error:
        _LOG.warning("the plan cannot be kept in %s: %s", store.folder, error)
    return planned


def _found(
    store: PlanStore, key: str, restore: Callable[[ParallelPlan], Planned]
) -> Planned | None:
    try:
        plan = store.load(key)
        return None if plan is None else evolve(restore(plan), cached=True, menu=store.menu(key))
    # DocumentError and PlanError are ValueErrors; the others are what odd values lead to
    except (ValueError, LookupError, TypeError, OSError) as error:
        warnings.warn(
            f"a plan kept in {store.folder} cannot be used, so that the step is planned anew: "
            f"{error}",
            stacklevel=2,
        )
        return None


def plan_key(step: Step, cluster: ClusterSpec, options: Options) -> str:
    """Return a hash of everything that the search for a plan depends on, equal in every process."""
    program = step.traced(None)[0]
    parts = {
        "program": program_hash(program, values=True),
        "inputs": [(leaf.path, leaf.role, str(leaf.aval)) for leaf in step.leaves],
        "outputs": step.output_tree[3],
        "operators": sorted(_operators(open_jaxpr(program))),
        "cluster": to_json(cluster),
        "profiles": files_hash(profile_directory(), "*.json"),
        "options": {
            one.name: text_of(getattr(options, one.name))
            for one in fields(Options)
            if one.name not in _ONLY_RUNNING
        },
        "versions": provenance(),
        "sources": _sources_hash(),
        "settings": [str(setting) for setting in trace_settings()],
        "backend": jax.default_backend(),  # whose lowering `executor_choice` asks
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _operators(jaxpr: Jaxpr) -> set[str]:
    """Return what is known of the primitives of a program: their records and sharding rules."""
    records: dict[str, str] = {}
    rules: set[tuple[str, ShardingRule | None]] = set()
    for eqn in _all_eqns(jaxpr):
        name = eqn.primitive.name
        if name not in records:
            records[name] = text_of(operator_of(eqn))
        rules.add((name, sharding_rule(eqn)))
    return {f"{name}: {record}" for name, record in records.items()} | {
        f"{name}: {rule!r}" for name, rule in rules
    }


def _all_eqns(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all operators of a program, those in the bodies of regions instead of the regions."""
    for eqn in jaxpr.eqns:
        if not is_region(eqn):
            yield eqn
        for body in bodies(eqn):
            yield from _all_eqns(open_jaxpr(body))


@functools.cache
def _sources_hash() -> str:
    """Return a hash of the sources of the packages that plan, and of their tables."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        spec = find_spec(name)
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            for pattern in ("**/*.py", "**/*.json", "**/*.toml"):
                digest.update(files_hash(Path(folder), pattern).encode())
    return digest.hexdigest()
