"""What becomes of changed plans: refused, shown, run as what they say, but never a crash."""

import io
import json
import random
import time
from collections import Counter

import jax
import jax.numpy as jnp
from counting_step import BATCH, STATE, step
from mutations import mutated
from rich.console import Console

import alpa_meta as alpa
from alpa_interchange import DocumentError, ParallelPlan, from_json, to_json
from alpa_meta.report.plan_table import print_plan


def small_plan():
    """Return a plan of one stage, two devices and two microbatches."""
    parallel = alpa.parallelize(step, cluster="host:2", num_stages=1, num_microbatches=2)
    return parallel.plan_for(STATE, BATCH)


def meaning(plan):
    """Return what of a plan says how the step runs."""
    operators = [one.operators for one in plan.shardings]
    return operators, [one.state_specs for one in plan.shardings], plan.stage_plan.schedule


def outcomes(plan, count, seed=0, runs=0, sealed=False):
    """Return how often what became of `count` changes of a plan, and the slowest one's seconds.

    Of the first `runs` that are run, the result is compared with the plain step's. Unless `sealed`,
    plans have no hash of their content, as those that somebody forged.
    """
    text, draw = to_json(plan), random.Random(seed)
    found: Counter[str] = Counter()
    if not sealed:
        text = json.dumps({k: one for k, one in json.loads(text).items() if k != "sha256"})
    slowest = 0.0
    for _ in range(count):
        changed = mutated(text, draw)
        if sealed and '"sha256":' not in changed:
            continue
        begun = time.process_time()
        what = _outcome(plan, changed, found["restored"] < runs)
        slowest = max(slowest, time.process_time() - begun)
        found[what] += 1
    return found, slowest


def _outcome(plan, text, is_run):
    try:
        changed = from_json(text, ParallelPlan)
    except DocumentError:
        return "refused"
    if changed == plan:
        return "the same"
    print_plan(changed, Console(file=io.StringIO(), width=120), every_parameter=True)
    try:
        parallel = alpa.parallelize(step, plan=changed)
        restored = parallel.plan_for(STATE, BATCH)
    except alpa.PlanError:
        return "refused for the step"
    assert meaning(restored) == meaning(changed)
    if is_run:
        state = {"w": jnp.eye(4), "count": jnp.zeros((), jnp.int32)}
        batch = {"x": jnp.arange(32.0).reshape(8, 4) / 32}
        expected = step(state, batch)
        got = parallel.gather(parallel(state, batch))
        jax.tree.map(lambda a, b: _assert_close(a, b), got, expected)
    return "restored"


def _assert_close(found, expected):
    assert jnp.allclose(found, expected, rtol=1e-5), json.dumps([str(found), str(expected)])
