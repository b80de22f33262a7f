"""Sweeps give the least sums and the least missing bytes, and plans that attain them."""

import numpy as np
import pytest

from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup, StageCandidate, StageProblem
from stage_dp.device_pool import DevicePool
from stage_dp.stage_table import StageTable, Sweep

ONE = SubmeshSpec(num_hosts=1, devices_per_host=1)


def table_of(seconds, schedule="1f1b", memory=100.0, **changes):
    """Return a table of candidates {(start, stop): seconds} on single devices, 4 microbatches."""
    candidates = [
        StageCandidate(
            layer_start=start,
            layer_stop=stop,
            submesh=ONE,
            logical=LogicalMesh(axes=(MeshAxis(name="data", size=1),)),
            num_microbatches=4,
            forward_seconds=t / 2,
            backward_seconds=t / 2,
            state_bytes=10.0 * (stop - start),
            activation_bytes=1.0 * (stop - start),
            boundary_seconds=0.25,
        )
        for (start, stop), t in seconds.items()
    ]
    groups = (DeviceGroup(num_hosts=1, devices_per_host=3, memory=memory),)
    layers = max(stop for _, stop in seconds)
    problem = StageProblem(
        num_layers=layers, device_groups=groups, candidates=tuple(candidates), **changes
    )
    return StageTable(problem, candidates, schedule, DevicePool(groups, [ONE]))


THREE = {(0, 1): 1.0, (1, 2): 2.0, (2, 3): 1.0, (0, 2): 2.5, (0, 3): 9.0}


def sweep(table, **changes):
    everything = np.ones(len(table.candidates), dtype=bool)
    return Sweep(table, **{"allowed": everything, "weight": table.cost, **changes})


def test_the_least_sum_counts_crossings_both_ways_and_none_after_the_last_layer():
    # (0, 2) then (2, 3): 2.5 + 0.5 + 1; one by one: 1 + 0.5 + 2 + 0.5 + 1.
    table = table_of(THREE)
    found = sweep(table)
    assert found.best() == pytest.approx(4.0)
    spans = [
        (table.candidates[c].layer_start, table.candidates[c].layer_stop) for c in found.plan()
    ]
    assert spans == [(0, 2), (2, 3)]


def test_disallowed_candidates_are_not_used():
    table = table_of(THREE)
    below = table.cost < 2.9
    assert sweep(table, allowed=below).best() == pytest.approx(5.0)


def test_a_fixed_number_of_stages_is_kept():
    assert sweep(table_of(THREE, num_stages=3)).best() == pytest.approx(5.0)
    assert sweep(table_of(THREE, num_stages=1)).best() == pytest.approx(9.0)


def test_memory_leaves_out_what_does_not_fit_at_its_place():
    # With 23 bytes (0, 2) holds 20 + 2 k: one microbatch fits, but the first of two stages has two.
    assert sweep(table_of(THREE, memory=23.0)).best() == pytest.approx(5.0)
    assert sweep(table_of(THREE, memory=23.0), use_memory=False).best() == pytest.approx(4.0)


def test_the_least_missing_bytes():
    # One by one the first stage needs 10 + 3; with 11 bytes 2 are missing.
    table = table_of(THREE, memory=11.0)
    missing = sweep(table, combine="missing", use_memory=False, per_level=True)
    assert missing.best() == pytest.approx(2.0)


def test_levels_count_microbatches_in_flight_from_the_last_stage():
    assert [level.in_flight for level in table_of(THREE).levels] == [0, 1, 2, 3]
    assert [level.in_flight for level in table_of(THREE, "eager-1f1b").levels] == [0, 1, 3, 4]
    assert [level.in_flight for level in table_of(THREE, "gpipe").levels] == [4]
