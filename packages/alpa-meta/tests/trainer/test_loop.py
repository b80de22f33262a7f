from typing import Any

import jax
import numpy as np

import alpa_meta as alpa
from alpa_meta.trainer.comparison import compare_with_one_device, difference
from alpa_meta.trainer.loop import OneDeviceStep, host_batches, run_steps
from alpa_meta.trainer.model import GptOptions
from alpa_meta.trainer.settings import TrainSettings
from alpa_meta.trainer.step import OptimiserOptions, make_optimiser, make_state_maker

SETTINGS = TrainSettings(
    model=GptOptions(num_layers=1, hidden=16, num_heads=2, context=16),
    optimiser=OptimiserOptions(schedule_steps=40, warmup_steps=2),
    batch_size=8,
)
PART = np.frombuffer(b"def function(argument): return argument\n" * 50, dtype=np.uint8)


MAKE_STATE = make_state_maker(SETTINGS.model, make_optimiser(SETTINGS.optimiser))


def _start() -> tuple[Any, Any]:
    step = OneDeviceStep()
    return step, step.init(MAKE_STATE, jax.random.key(0))


def _run(step, state, start, stop):
    losses = []
    state = run_steps(
        step,
        state,
        host_batches(PART, SETTINGS),
        SETTINGS,
        start=start,
        stop=stop,
        on_step=lambda metrics, _: losses.append(metrics.loss),
    )
    return jax.device_get(state), losses


def test_training_lowers_the_loss():
    _, losses = _run(*_start(), 0, 40)
    assert losses[-1] < 0.5 * losses[0]


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    whole, losses = _run(*_start(), 0, 12)
    half, first = _run(*_start(), 0, 6)
    alpa.save(tmp_path, half, step=6).wait()
    step, fresh = _start()
    restored = alpa.restore(tmp_path, like=jax.eval_shape(lambda: fresh))
    resumed, second = _run(step, restored, 6, 12)
    assert first + second == losses
    for expected, got in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        assert np.asarray(expected).tobytes() == np.asarray(got).tobytes()


def test_targets_are_the_inputs_one_byte_later():
    batch = jax.tree.map(np.asarray, host_batches(PART, SETTINGS)[3])
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert batch["inputs"].dtype == np.int32


def test_a_run_compared_with_itself_differs_by_nothing():
    step, state = _start()
    first = jax.device_get(state)
    final, losses = _run(step, state, 0, 3)
    found = compare_with_one_device(
        SETTINGS,
        host_batches(PART, SETTINGS),
        first,
        start=0,
        losses=losses,
        params=final.params,
    )
    assert found.num_steps == 3
    assert found.loss_difference == found.parameter_difference == found.relative_difference == 0


def test_a_difference_is_reported_with_its_place():
    params = {"a": np.array([3.0, 4.0]), "b": np.array([1.0])}
    other = {"a": np.array([3.0, 4.5]), "b": np.array([1.01])}
    found = difference([1.0, 2.0], params, [1.0, 2.25], other)
    assert found.loss_difference == 0.25
    assert found.parameter_difference == 0.5
    assert found.parameter_magnitude == 4.0
    assert found.relative_difference == 0.1  # 0.5 over the norm 5
    assert found.worst_parameter == "['a']"


def test_what_one_run_alone_lost_is_no_difference_of_nothing():
    nan, inf = float("nan"), float("inf")
    params = {"a": np.array([1.0, nan, inf]), "b": np.array([1.0])}
    assert difference([1.0], params, [1.0], params).relative_difference == 0
    found = difference([1.0, nan], params, [1.0, nan], {**params, "b": np.array([nan])})
    assert found.loss_difference == 0 and np.isnan(found.parameter_difference)
    assert np.isnan(found.relative_difference) and found.worst_parameter == "['b']"
    assert np.isnan(difference([1.0, 2.0], params, [1.0, nan], params).loss_difference)
