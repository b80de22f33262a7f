import pytest

from cost_model import breakdown, in_flight, simulate


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        ("eager-1f1b", [7, 5, 3, 1]),
        ("sequential", [1, 1, 1, 1]),
    ],
)
def test_microbatches_in_flight_by_schedule_and_position(schedule, counts):
    assert [in_flight(schedule, stage, 4, 8) for stage in range(4)] == counts


def test_no_schedule_keeps_more_than_all_microbatches():
    for schedule in ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b"):
        assert in_flight(schedule, 0, 8, 2) <= 2


def test_interleaving_keeps_more_than_1f1b_by_what_its_paper_says():
    # Korthikanti et al. 2022, section 4.2.3: p (1 + (p - 1) / (p v)) microbatches on stage 0
    assert in_flight("interleaved-1f1b", 0, 8, 64, 3) == pytest.approx(8 * (1 + 7 / 24))


def test_the_simulator_agrees_with_the_counts(pipeline, stage_seconds):
    sizes = {f"a{stage}": 1.0 for stage in range(4)}
    for schedule, warm_up in (
        ("1f1b", lambda stage: 4 - stage),
        ("eager-1f1b", lambda stage: 2 * (4 - stage) - 1),
        ("gpipe", lambda stage: 8),
    ):
        peak = simulate(pipeline(4, 8, warm_up), stage_seconds(4), value_bytes=sizes).peak_bytes
        assert peak[0] == in_flight(schedule, 0, 4, 8)


def test_terms_are_named_and_add_up():
    memory = breakdown(
        parameter_bytes=10.0, gradient_bytes=20.0, optimizer_bytes=60.0, activation_bytes=5.0,
        schedule="1f1b", stage=1, num_stages=4, num_microbatches=8, temporary_bytes=2.0,
        communication_bytes=3.0, fragmentation_bytes=2.0, runtime_bytes=1.0,
    )  # fmt: skip
    assert dict(memory.terms()) == {
        "parameters": 10.0, "gradients": 20.0, "optimizer": 60.0, "activations": 15.0,
        "recomputation": 0.0, "temporaries": 2.0, "communication": 3.0,
        "fragmentation": 2.0, "runtime": 1.0,
    }  # fmt: skip
    assert memory.state == 90.0
    assert memory.total == 113.0


def test_unknown_schedules_and_stages_are_refused():
    with pytest.raises(ValueError, match="schedule must be one of"):
        in_flight("zigzag", 0, 2, 2)
    with pytest.raises(ValueError, match=r"stage must be in 0\.\.1, got 2"):
        in_flight("1f1b", 2, 2, 2)
