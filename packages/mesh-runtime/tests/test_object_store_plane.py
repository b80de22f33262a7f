import types

import numpy as np
import pytest

from mesh_runtime.data_plane import DataPlaneError
from mesh_runtime.object_store_plane import ObjectStorePlane


@pytest.fixture
def pair():
    """Return two endpoints whose "actors" deliver when called, as Ray's do."""
    ends = {name: ObjectStorePlane(name, lambda call: call()) for name in ("a", "b")}

    def actor(end):
        def remote(sender, header, payload):
            return lambda: end.deliver(sender, header, payload)

        def options(concurrency_group):
            assert concurrency_group == "data"  # beside the group in which steps run
            return types.SimpleNamespace(remote=remote)

        return types.SimpleNamespace(deliver=types.SimpleNamespace(options=options))

    for end in ends.values():
        end.connect({name: actor(other) for name, other in ends.items()})
    yield ends["a"], ends["b"]
    for end in ends.values():
        end.close()


def test_parts_of_a_message_arrive_as_one_buffer(pair):
    a, b = pair
    parts = [np.arange(3, dtype=np.uint8), np.arange(5, dtype=np.uint8)]
    a.send("b", lambda: ({"key": "k"}, parts)).result(10)
    header, (payload,) = b.take("k", "a", 10)
    assert header == {"key": "k"}
    np.testing.assert_array_equal(payload, np.concatenate(parts))


def test_failures_name_both_ends(pair):
    a, b = pair
    with pytest.raises(DataPlaneError, match="a knows no peer 'c'"):
        a.send("c", lambda: ({"key": "k"}, []))
    a.connect({"b": None})
    with pytest.raises(DataPlaneError, match="a cannot send to b"):
        a.send("b", lambda: ({"key": "k"}, [])).result(10)
    b.close()
    with pytest.raises(DataPlaneError, match="b was closed while waiting for a"):
        b.take("k", "a", 10)
