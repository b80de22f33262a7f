import time
import tracemalloc

import pytest
from hostile_plans import outcomes, small_plan

from alpa_interchange import DocumentError, ParallelPlan, from_json


def test_ten_thousand_changed_plans_are_refused_or_are_what_they_say():
    found, slowest = outcomes(small_plan(), 10_000, runs=3)
    assert found["refused"] > 5_000 and found["restored"] > 100
    assert slowest < 30.0


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000_000,
        '{"a":' * 2_000_000,
        '"' + "x" * 20_000_000,
        "[" + "[]," * 5_000_000 + "[]]",
    ],
    ids=["deep lists", "deep objects", "an open string", "many lists"],
)
def test_large_hostile_documents_are_refused_in_bounded_time_and_memory(text):
    tracemalloc.start()
    try:
        begun = time.process_time()
        with pytest.raises(DocumentError):
            from_json(text, ParallelPlan)
        seconds = time.process_time() - begun
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 30.0 and peak < 80 * len(text)
