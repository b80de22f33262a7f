import math

import pytest

from cost_model import TrainingRun, TransformerSpec, cluster
from cost_model.correction import FEATURES, Cell, Correction, features

HERE = (12.0, 1.0, 2.0, 11.0, 0.0, 0.0)


def cell(point=HERE, residual=0.2, count=20, **more):
    return Cell(device="d", features=point, residual=residual, count=count, **more)


def test_without_cells_nothing_is_corrected_and_little_is_known():
    assert Correction().at_point("d", HERE) == (0.0, Correction().unseen)


def test_one_cell_pulls_by_the_share_its_noise_allows():
    process = Correction(cells=(cell(),), scale=0.1, noise=0.05, floor=0.0)
    variance, noise = 0.1**2, 0.05**2 / 20
    mean, deviation = process.at_point("d", HERE)
    assert mean == pytest.approx(0.2 * variance / (variance + noise))
    assert deviation == pytest.approx(math.sqrt(variance - variance**2 / (variance + noise)))


def test_the_correction_fades_with_distance():
    process = Correction(cells=(cell(),))
    means, deviations = zip(
        *(process.at_point("d", (12.0 + step, *HERE[1:])) for step in range(5)), strict=True
    )
    assert list(means) == sorted(means, reverse=True) and means[-1] < 1e-4
    assert list(deviations) == sorted(deviations)
    assert deviations[-1] == pytest.approx(process.scale)


def test_other_devices_and_software_stacks_are_not_corrected():
    process = Correction(cells=(cell(),))
    assert process.at_point("other", HERE)[0] == 0.0
    assert abs(process.at_point("d", (*HERE[:5], 8.0))[0]) < 1e-6


def test_runs_over_several_hosts_are_trusted_less():
    one = Correction(cells=(cell(count=1),)).at_point("d", HERE)[0]
    many = Correction(cells=(cell(count=1, many_hosts=True),)).at_point("d", HERE)[0]
    assert 0 < many < one


def test_features_say_what_runs():
    run = TrainingRun(
        model=TransformerSpec(hidden=1024, layers=4, heads=8, seq=512),
        cluster=cluster("a100-80gb:8"), global_batch=8, micro_batch=4, tensor=4, pipeline=2,
        recompute="full",
    )  # fmt: skip
    assert features(run) == (10.0, 2.0, 2.0, 9.0, 1.0, 4.0)
    assert len(FEATURES) == len(features(run)) == len(Correction().lengths)
