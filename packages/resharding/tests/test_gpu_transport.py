import sys
from types import SimpleNamespace

import pytest
from fake_cuda import Memory, World

from resharding.gpu_transport import AHEAD, GpuTransport

PLAN = SimpleNamespace(
    task=SimpleNamespace(
        source=SimpleNamespace(devices=(0, 1)), target=SimpleNamespace(devices=(4, 5))
    )
)


@pytest.fixture
def end(monkeypatch):
    """Return an end, and which receives NCCL is given, and which are given up."""
    made = GpuTransport("a", {4: None}, 1.0, memory=Memory(World()))
    begun: list[str] = []
    cancelled: list[str] = []

    def receive(key, *_):
        begun.append(key)
        return SimpleNamespace(
            result=lambda _: key,
            cancel=lambda: cancelled.append(key),
            awaited=lambda: (("b",), 3.0),
        )

    monkeypatch.setattr(made._nccl, "receive", receive)
    return SimpleNamespace(receive=made.receive, begun=begun, cancelled=cancelled)


def test_few_receives_of_a_step_take_memory_at_a_time(end):
    posted = [end.receive(f"{k}", PLAN) for k in range(5)]
    assert AHEAD == 2 and end.begun == ["0", "1"]
    assert posted[0].result(1.0) == posted[0].result(1.0) == "0"
    assert end.begun == ["0", "1", "2"]
    assert posted[3].result(1.0) == "3"  # behind others that nobody has asked for
    assert end.begun == ["0", "1", "2", "3"]


def test_a_receive_waits_for_nobody_before_nccl_has_been_given_it(end):
    posted = [end.receive(f"{k}", PLAN) for k in range(3)]
    assert [one.awaited() for one in posted] == [(("b",), 3.0), (("b",), 3.0), ((), 0.0)]


def test_what_a_step_has_used_is_not_given_up_at_its_end(end):
    posted = [end.receive(f"{k}", PLAN) for k in range(4)]
    posted[0].result(1.0)
    for one in posted:
        one.cancel()
    assert end.begun == ["0", "1", "2"] and end.cancelled == ["1", "2"]


def test_a_process_without_cupy_or_with_one_without_nccl_says_so(monkeypatch):
    monkeypatch.setattr("resharding.gpu_transport.find_spec", lambda name: None)
    assert "pip install 'resharding[nccl]'" in GpuTransport.obstacle()
    monkeypatch.undo()
    for name, module in World().cupy().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("resharding.gpu_transport.find_spec", lambda name: name)
    assert GpuTransport.obstacle() == ""
    monkeypatch.setattr("cupy.cuda.nccl.available", False, raising=False)
    assert GpuTransport.obstacle() == "CuPy was made without NCCL"
