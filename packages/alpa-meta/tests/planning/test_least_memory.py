"""What every plan of a step holds at least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from alpa_meta.errors import InfeasibleError
from alpa_meta.options import Options
from alpa_meta.planning.least_memory import check_step_fits, least_bytes
from alpa_meta.planning.planner import make_plan
from alpa_meta.step.program import Step
from cost_model import calibrated_model, cluster

LAYERS, WIDTH, INNER, BATCH, DEVICES = 4, 32, 64, 64, 4
CLUSTER = cluster(f"h100:{DEVICES}")
MODEL = calibrated_model(CLUSTER)


def make_step(couple=lambda x: x, size=BATCH):
    def train_step(params, batch):
        def value(params):
            x = batch
            for weights in params:
                x = couple(x) + jnp.tanh(jnp.tanh(x @ weights["up"]) @ weights["down"])
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(value)(params))

    layer = {
        "up": jax.ShapeDtypeStruct((WIDTH, INNER), jnp.float32),
        "down": jax.ShapeDtypeStruct((INNER, WIDTH), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)
    return Step(train_step, ([layer] * LAYERS, batch))


def least(step, **options):
    """Return what one operator holds beside the state, and what the step does, more closely."""
    roughly = closely = least_bytes(step, MODEL, Options(**options), enough=0.0)
    while (more := least_bytes(step, MODEL, Options(**options), enough=closely)) > closely:
        closely = more
    return roughly, closely


def refusal(step, **options):
    with pytest.raises(InfeasibleError) as caught:
        check_step_fits(step, MODEL, Options(**options))
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 1, "num_microbatches": 1},
        {"num_stages": 1, "num_microbatches": 64},
        {"num_stages": 1, "num_microbatches": 4, "recompute": "full", "num_layers": LAYERS},
        {"num_stages": 2, "num_microbatches": 4, "num_layers": LAYERS},
    ],
    ids=str,
)
def test_no_plan_holds_less(options):
    step = make_step()
    plan = make_plan(step, CLUSTER, Options(**options, cache=False)).plan
    held = sum(
        peak * stage.candidate.submesh.num_devices
        for peak, stage in zip(plan.stage_plan.peak_bytes, plan.stage_plan.stages, strict=True)
    )
    roughly, closely = least(step, **options)
    assert 0 < roughly < closely <= held
    assert max(least(step, num_layers=LAYERS)) <= closely


def test_one_operator_s_operands_and_results_are_held_beside_the_state():
    step = make_step()
    state = 4.0 * LAYERS * 2 * WIDTH * INNER
    largest = 4.0 * (WIDTH * INNER + WIDTH + INNER)  # of one example: a gradient and what makes it
    assert least(step)[0] == state + largest


def test_what_cannot_fit_is_refused_before_any_search(monkeypatch):
    monkeypatch.setattr("alpa_meta.planning.planner._from_menu", lambda *_: pytest.fail("searched"))
    state = 4.0 * LAYERS * 2 * WIDTH * INNER
    with pytest.raises(InfeasibleError, match="in up to 64 microbatches and with every array cut"):
        make_plan(make_step(), CLUSTER, Options(memory=1.05 * state / DEVICES, cache=False))


def test_other_microbatches_than_those_named_would_fit():
    step = make_step(size=16 * BATCH)
    (named, _), (_, free) = least(step, num_microbatches=1), least(step)
    assert free < named
    check_step_fits(step, MODEL, Options(num_microbatches=1, memory=free / DEVICES))


def test_a_step_that_is_not_cut_is_told_of_a_smaller_batch():
    step = make_step(couple=lambda x: x / x.std(0))
    state = 4.0 * LAYERS * 2 * WIDTH * INNER
    message = refusal(step, memory=1.05 * state / DEVICES)
    assert "in up to 1 microbatch and" in message and "a smaller batch" in message
    assert "a smaller batch" not in refusal(make_step(), memory=1.05 * state / DEVICES)
