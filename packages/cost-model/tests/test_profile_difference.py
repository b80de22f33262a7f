from attrs import evolve

from cost_model import calibrate
from cost_model.profile_difference import profile_differences, sample_label


def test_equal_profiles_differ_nowhere(made_up_machine):
    profile = calibrate(made_up_machine())
    rows = profile_differences(profile, profile)
    assert len(rows) > len(profile.samples)
    assert {row.ratio for row in rows} == {1.0}


def test_a_faster_machine_is_seen_in_constants_and_samples(made_up_machine):
    first = calibrate(made_up_machine())
    second = evolve(
        first,
        device=evolve(first.device, memory_bandwidth=2 * first.device.memory_bandwidth),
        samples=tuple(evolve(sample, seconds=sample.seconds / 2) for sample in first.samples[:3]),
    )
    ratios = {row.name: row.ratio for row in profile_differences(first, second)}
    assert ratios["memory bandwidth"] == 2.0
    assert ratios[sample_label(first.samples[0])] == 0.5
    assert sample_label(first.samples[5]) not in ratios


def test_labels_say_what_ran(made_up_machine):
    labels = [sample_label(sample) for sample in calibrate(made_up_machine()).samples]
    assert "all-reduce float32 4096 B on 4" in labels
    assert len(set(labels)) == len(labels)
