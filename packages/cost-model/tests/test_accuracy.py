import pytest
from attrs import evolve

from cost_model.accuracy import memory_rows, peak_rows, predict_rows, rule_of_thumb, source_accuracy
from cost_model.measured_run import measured_run
from cost_model.prediction import FittedModel, StepModel, predict

PLAIN = StepModel(whole=FittedModel(sources=("known",)))


def row(source="known", tensor=1, micro_batch=1, seconds=1.0, batch=16, **more):
    return {
        "source": source, "id": f"{source}-{tensor}-{micro_batch}",
        "model": {"hidden": 2048, "layers": 12, "heads": 16, "seq": 1024},
        "hardware": {"gpu": "A100", "n": 8, "gpus_per_node": 8},
        "parallel": {"tp": tensor, "pp": 1, "dp": 8 // tensor, "global_batch": batch,
                     "micro_batch": micro_batch},
        "measured": {"step_time_s": seconds},
    } | more  # fmt: skip


def timed(given, factor):
    """Return the row with `factor` times its own prediction as measurement."""
    run = measured_run(given).run
    assert run is not None
    seconds = predict(run, PLAIN.whole).step_seconds * factor
    return measured_run(given | {"measured": {"step_time_s": seconds}})


def test_error_and_bias_are_those_of_predicted_over_measured():
    rows = [timed(row(tensor=1), 1.25), timed(row(tensor=2), 0.8)]
    (entry,) = source_accuracy(predict_rows(rows, PLAIN), PLAIN)
    assert entry.mape == pytest.approx((0.2 + 0.25) / 2)
    assert entry.bias == pytest.approx((-0.2 + 0.25) / 2)
    assert entry.worst == pytest.approx(0.25) and entry.worst_id == "known-2-1"
    assert entry.fitted


def test_regret_is_the_measured_time_of_the_predicted_best_over_the_best():
    # tensor parallelism is predicted slower at this size; measured, it is a fifth faster
    slow, fast = measured_run(row(tensor=1, seconds=1.0)), measured_run(row(tensor=8, seconds=0.8))
    (entry,) = source_accuracy(predict_rows([slow, fast], PLAIN), PLAIN)
    assert (entry.regret, entry.regret_groups) == pytest.approx((1.25, 1))
    other_batch = measured_run(row(tensor=8, seconds=0.8, batch=32))
    (entry,) = source_accuracy(predict_rows([slow, other_batch], PLAIN), PLAIN)
    assert (entry.regret, entry.regret_groups) == (1.0, 0)


def test_coverage_is_the_share_of_rows_in_their_interval():
    near, far = timed(row(), 1.01), timed(row(tensor=2), 3.0)
    (entry,) = source_accuracy(predict_rows([near, far], PLAIN), PLAIN)
    assert entry.coverage == 0.5


def test_sources_are_reported_apart_and_unknown_ones_are_marked():
    rows = [timed(row(), 1.0), timed(row(source="new"), 1.0)]
    known, new = source_accuracy(predict_rows(rows, PLAIN), PLAIN)
    assert (known.source, known.fitted, new.source, new.fitted) == ("known", True, "new", False)


def test_other_tools_are_compared_on_the_rows_they_predicted():
    given = row(seconds=2.0, other_predictions={"rival_s": 1.5})
    (entry,) = source_accuracy(predict_rows([measured_run(given)], PLAIN), PLAIN)
    assert entry.others["rival"][0] == pytest.approx(0.25)


def test_rows_without_configuration_or_time_are_left_out():
    rows = [measured_run(row(measured={})), timed(row(), 1.0)]
    assert len(predict_rows(rows, PLAIN)) == 1


def test_memory_is_compared_by_part():
    # arXiv 2205.05198, figure 1
    given = {
        "source": "seqsel_tab5", "id": "m",
        "measured": {"params_grads_opt_gib": 45.5625, "activations_gib": 59.25},
        "model": {"hidden": 6144, "num_blocks": 48, "attn_heads": 64, "seq_size": 2048},
        "hardware": {"gpu": "A100-80GB", "n": 8},
        "parallel": {"tp": 8, "pp": 1, "dp": 1, "micro_batch": 4, "recompute": "none"},
    }  # fmt: skip
    (entry,) = memory_rows([measured_run(given), measured_run(row())])
    assert entry.activation_error == pytest.approx(0.0, abs=1e-6)
    assert abs(entry.state_error) < 0.02 and abs(entry.total_error) < 0.01


def test_peak_memory_is_compared_and_failures_are_foreseen():
    fits = measured_run(row(tensor=8))
    assert fits.run is not None
    needed = predict(fits.run, PLAIN.whole).memory_bytes
    large = {"hidden": 12288, "layers": 96, "heads": 96, "seq": 2048}
    rows = [
        evolve(fits, peak_bytes=needed / 1.1, failed=False),
        evolve(measured_run(row(tensor=8, model=large)), failed=True, step_seconds=None),
    ]
    (entry,) = peak_rows(rows, PLAIN)
    assert entry.mape == pytest.approx(0.1) and entry.bias == pytest.approx(0.1)
    assert (entry.failed, entry.flagged, entry.false_alarms) == (1, 1.0, 0.0)


def test_the_rule_of_thumb_takes_the_least_model_parallelism_and_the_largest_microbatch():
    rows = [measured_run(row(tensor=t, micro_batch=m)) for t, m in ((1, 1), (1, 2), (4, 2))]
    assert rule_of_thumb(rows).run == rows[1].run


def test_the_regret_of_the_rule_is_reported_beside():
    slow, fast = measured_run(row(tensor=1, seconds=1.0)), measured_run(row(tensor=8, seconds=0.8))
    (entry,) = source_accuracy(predict_rows([slow, fast], PLAIN), PLAIN)
    assert entry.rule_regret == pytest.approx(1.25)
