"""Clusters that are started, reached, or not, on a Ray that is not there."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mesh_runtime import RayOptions, WorkerError, check_reachable, ray_connection


class Clock:
    """Passes only where it is told to."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds


class BusyRay:
    """Fails to start `failures` times after `seconds` each, and leaves a process behind."""

    def __init__(self, clock, failures, seconds):
        self.clock, self.failures, self.seconds = clock, failures, seconds
        self.left, self.calls = [], 0

    def is_initialized(self):
        return False

    def init(self, **settings):
        self.calls += 1
        self.clock.seconds += self.seconds
        if self.calls <= self.failures:
            program = [sys.executable, "-c", "import time; time.sleep(100)", "/ray/raylet"]
            self.left.append(subprocess.Popen(program))
            while "/ray/raylet" not in _command(self.left[-1].pid):
                time.sleep(0.01)
            raise Exception("The current node timed out during startup.")


def _command(pid):
    with open(f"/proc/{pid}/cmdline") as stream:
        return stream.read()


@pytest.fixture
def busy(monkeypatch):
    """Return a function that makes a Ray which fails, whose processes are ended in the end."""
    made, clock = [], Clock()
    monkeypatch.setattr(ray_connection, "time", clock)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "30")
    monkeypatch.delenv("RAY_prestart_worker_first_driver")  # conftest.py sets it

    def make(failures, seconds=31.0):
        made.append(BusyRay(clock, failures, seconds))
        return made[-1]

    yield make
    for ray in made:
        for process in ray.left:
            process.kill()
            process.wait()


def test_a_busy_machine_is_given_the_time_of_start_timeout_and_nothing_is_left(busy, caplog):
    ray = busy(failures=2)
    assert ray_connection.connect(ray, None, 1.0, seconds=300.0)
    assert ray.calls == 3
    assert [process.wait(10) for process in ray.left] == [-signal.SIGKILL] * 2
    assert caplog.text.count("the machine is busy: ") == 2


def test_no_workers_are_started_before_they_are_asked_for(busy):
    assert ray_connection.connect(busy(failures=0, seconds=1.0), None, 1.0, seconds=300.0)
    assert os.environ["RAY_prestart_worker_first_driver"] == "0"


def test_a_machine_that_stays_busy_is_refused_with_what_to_do(busy):
    ray = busy(failures=9)
    with pytest.raises(WorkerError, match=r"timed out during startup.*start_timeout"):
        ray_connection.connect(ray, None, 1.0, seconds=70.0)
    assert ray.calls == 3


def test_what_fails_at_once_is_not_tried_again(busy, monkeypatch):
    ray = busy(failures=9, seconds=1.0)
    monkeypatch.setenv("RAY_ADDRESS", "foo")
    with pytest.raises(ValueError, match="RAY_ADDRESS must be host:port"):
        ray_connection.connect(ray, None, 1.0, seconds=300.0)
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(WorkerError, match="Ray gave no cluster at local"):
        ray_connection.connect(ray, None, 1.0, seconds=300.0)
    assert ray.calls == 1


@pytest.fixture
def started(monkeypatch, caplog):
    """Return a function that starts a Ray which waits for a warning, and returns what was said."""

    def start(wait):
        def init(**_):
            deadline = time.monotonic() + 10
            while wait and "WARNING" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)

        ray = SimpleNamespace(is_initialized=lambda: False, init=init)
        ray_connection.connect(ray, "local", 1.0, seconds=300.0)
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    monkeypatch.setattr(os, "environ", dict(os.environ))
    caplog.set_level("INFO", "mesh_runtime")
    return start


START = "starting a Ray cluster on this machine (RayOptions.start_timeout: 300 s)"


def test_a_start_is_told_once_and_no_warning(started):
    assert started(wait=False) == [("INFO", START)]


def test_a_start_that_takes_long_is_warned_of(started, monkeypatch):
    monkeypatch.setattr(ray_connection, "_LONG_SECONDS", 0.01)
    assert started(wait=True) == [("INFO", START), ("WARNING", f"still {START} after 0 s")]


@pytest.mark.parametrize("address", ["", "foo", ":1", "host:x", "host:99999", "host:0"])
def test_what_cannot_be_an_address_is_refused(address):
    with pytest.raises(ValueError, match="RayOptions.address must be host:port"):
        RayOptions(address=address)


@pytest.mark.parametrize("address", [None, "auto", "local", "ray://head:10001", "[::1]:6379"])
def test_what_can_be_an_address_is_taken(address):
    assert RayOptions(address=address).address == address


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "a" * 70])
def test_an_address_where_nobody_listens_is_one_line(host):
    with pytest.raises(WorkerError, match="no Ray cluster answers at .*ray start --head"):
        check_reachable(f"{host}:1")


def test_a_process_that_is_connected_is_refused_another_address(monkeypatch):
    context = SimpleNamespace(gcs_address="192.0.2.7:6379")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for address in (None, "auto", "192.0.2.7:6379"):
        check_reachable(address)
    with pytest.raises(WorkerError, match="at 192.0.2.7:6379, not to 127.0.0.1:1"):
        check_reachable("127.0.0.1:1")


def test_a_machine_without_a_cluster_is_one_line(monkeypatch):
    def init(**settings):
        raise ConnectionError("Could not find any running Ray instance.")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(WorkerError, match="no cluster at auto: Could not .*ray start --head"):
        check_reachable("auto")


def test_a_sigterm_while_ray_starts_goes_to_the_handler_of_the_process(monkeypatch):
    class OwnEnd(BaseException):
        pass

    def own(number, frame):
        raise OwnEnd

    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = signal.signal(signal.SIGTERM, own)
    try:
        with pytest.raises(OwnEnd):
            ray = SimpleNamespace(is_initialized=lambda: False, init=init)
            ray_connection.connect(ray, "local", 1.0, seconds=300.0)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
