from typing import Any

import pytest

from cost_model.measured_run import measured_run
from cost_model.prediction import DEFAULT_EXECUTOR, predict, step_model
from cost_model.step_fit import FOLDS, fit_all, fold_of_groups
from cost_model.step_terms import predict_terms


def made_up_rows():
    """Return runs of 8 groups whose times are 1.3 times those of the shipped constants."""
    rows = []
    for hidden in (1024, 2048, 3072, 4096):
        for batch in (16, 32):
            for tensor, micro_batch in ((1, 1), (2, 2), (8, 2)):
                given: dict[str, Any] = {
                    "source": "vtrain_single", "id": f"{hidden}-{batch}-{tensor}",
                    "model": {"hidden": hidden, "layers": 12, "heads": 16, "seq": 1024},
                    "hardware": {"gpu": "A100", "n": 8, "gpus_per_node": 8},
                    "parallel": {"tp": tensor, "pp": 1, "dp": 8 // tensor, "global_batch": batch,
                                 "micro_batch": micro_batch},
                    "measured": {"step_time_s": 1.0},
                }  # fmt: skip
                run = measured_run(given).run
                assert run is not None
                seconds = 1.3 * sum(predict_terms(run, step_model().whole.constants).values())
                rows.append(measured_run(given | {"measured": {"step_time_s": seconds}}))
    return rows


@pytest.fixture(scope="module")
def fitted():
    return fit_all(made_up_rows())[DEFAULT_EXECUTOR]


def test_folds_hold_whole_groups_of_about_equal_number():
    rows = made_up_rows()
    folds = fold_of_groups(rows)
    assert len(folds) == 8
    assert sorted(folds.values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert folds == fold_of_groups(reversed(rows))
    assert folds != fold_of_groups(rows, seed=7)


def test_times_that_follow_the_model_are_learned(fitted):
    for row in made_up_rows():
        unseen = fitted.unseen(row.source, row.group)
        assert unseen is not fitted.whole
        assert predict(row.run, unseen).step_seconds == pytest.approx(row.step_seconds, rel=0.15)
        assert predict(row.run, fitted.whole).step_seconds == pytest.approx(
            row.step_seconds, rel=0.05
        )


def test_no_fold_has_seen_the_groups_it_judges(fitted):
    assert len(fitted.folds) == FOLDS
    for model in fitted.folds:
        assert model.num_rows == 18 < fitted.whole.num_rows == 24


def test_the_fit_is_reproducible(fitted):
    assert fit_all(made_up_rows())[DEFAULT_EXECUTOR] == fitted


def test_sources_that_are_never_fitted_are_left_out():
    rows = made_up_rows()
    other = measured_run(
        {
            "source": "elsewhere", "id": "x", "measured": {"step_time_s": 1.0},
            "model": {"hidden": 512, "layers": 2, "heads": 8, "seq": 512},
            "hardware": {"gpu": "A100", "n": 8, "gpus_per_node": 8},
            "parallel": {"tp": 8, "pp": 1, "dp": 1, "global_batch": 8, "micro_batch": 8},
        }
    )  # fmt: skip
    assert fit_all([*rows, other])[DEFAULT_EXECUTOR].whole.num_rows == len(rows)
