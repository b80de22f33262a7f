import gc
import json
import time
import tracemalloc

import pytest
from changed_plans import outcomes, small_plan

from alpa_interchange import DocumentError, ParallelPlan, from_json, to_json


@pytest.fixture(scope="module")
def saved():
    return small_plan()


@pytest.mark.sample(seed=1)
@pytest.mark.parametrize("seed", range(20))
def test_five_hundred_changed_plans_are_refused_or_are_what_they_say(saved, seed):
    found, slowest = outcomes(saved, 500, seed=seed, runs=3)
    assert found["refused"] > 250 and found["restored"] > 2
    assert slowest < 10.0


def test_a_changed_plan_with_the_hash_of_what_was_saved_is_refused_unless_it_says_the_same(saved):
    found, _ = outcomes(saved, 2_000, sealed=True)
    assert set(found) == {"refused", "the same"} and found["refused"] > 1_000


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000_000,
        '{"a":' * 2_000_000,
        '"' + "x" * 20_000_000,
        "[" + "[]," * 1_500_000 + "[]]",
    ],
    ids=["deep lists", "deep objects", "an open string", "many lists"],
)
def test_large_hostile_documents_are_refused_in_bounded_time_and_memory(text):
    begun = time.process_time()
    with pytest.raises(DocumentError):
        from_json(text, ParallelPlan)
    seconds = time.process_time() - begun
    tracemalloc.start()  # apart, as it takes several times as long
    try:
        with pytest.raises(DocumentError):
            from_json(text, ParallelPlan)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 0.8 s for 15 MB at most on a core that others use too
    assert seconds < min(5.0, len(text) / 3e6) and peak < 80 * len(text)


def test_a_plan_of_twelve_megabytes_is_read_in_seconds(saved):
    document = json.loads(to_json(saved))
    del document["sha256"]
    (sharding,) = document["value"]["shardings"]
    group = sharding["operators"][0]
    sharding["operators"] = [
        {**group, "names": [f"layer{k}/jvp()/dot_general.{j}" for j in range(8)]}
        for k in range(25_000)
    ]
    text = json.dumps(document)
    assert len(text) > 11_000_000
    begun = time.process_time()
    read = from_json(text, ParallelPlan)
    seconds = time.process_time() - begun
    assert len(read.shardings[0].operators) == 25_000
    assert seconds < 5.0  # 0.7 s; 1.5 with garbage collections
    assert gc.isenabled()
