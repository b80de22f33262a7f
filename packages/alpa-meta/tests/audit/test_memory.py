"""Memory of compiled programs against predictions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alpa_meta.audit.memory import WORKSPACE, MemoryCheck, memory_check


def test_a_compiled_step_s_arguments_are_exact_and_donated_ones_are_not_counted_twice():
    weights = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    step = jax.jit(lambda w: w * 2, donate_argnums=0).lower(weights).compile()
    check = memory_check(step, predicted_argument_bytes=64 * 64 * 4)
    assert check.argument_bytes == check.alias_bytes == 64 * 64 * 4
    assert check.peak_bytes == check.argument_bytes + check.temporary_bytes
    assert check.ok


def sizes(**more):
    found = {"argument_bytes": 100, "output_bytes": 50, "alias_bytes": 40, "temporary_bytes": 30}
    return MemoryCheck(**{**found, **more})


def test_the_peak_is_arguments_fresh_results_and_temporaries():
    assert sizes().peak_bytes == 100 + (50 - 40) + 30


def test_a_tenth_more_than_predicted_passes_and_more_does_not():
    large = {"temporary_bytes": 10 * WORKSPACE}
    assert sizes(predicted_peak_bytes=9 * WORKSPACE, **large).ok  # a tenth, and a workspace
    assert not sizes(predicted_peak_bytes=8 * WORKSPACE, **large).ok
    assert not sizes(predicted_argument_bytes=90).ok


def test_a_backend_without_real_temporaries_is_shown_and_not_judged():
    check = sizes(predicted_peak_bytes=10, judge_peak=False)
    assert check.ok
    assert check.text() == (
        "memory per device: arguments 100 B, peak 140 B (predicted 10 B); "
        "this backend's temporaries are not judged"
    )
    large = sizes(predicted_peak_bytes=10, temporary_bytes=2 * WORKSPACE)
    assert large.text().endswith("TOO MUCH")
