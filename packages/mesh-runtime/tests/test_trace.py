import threading
from typing import cast

import jax
import jax.numpy as jnp
import pytest

from mesh_runtime.trace import Recorder


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="trace must be one of"):
        Recorder("loud", 1)


def test_blocking_waits_for_results_and_ready_does_not():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y), x))
    x = jnp.ones((400, 400))
    slow(x).block_until_ready()
    for mode in ("blocking", "ready"):
        recorder = Recorder(mode, 1)
        start = recorder.now()
        result = slow(x)
        recorder.record(0, 0, "run", start, [], [result])
        issued = recorder.now()
        (event,) = recorder.finish()
        assert result.is_ready()
        assert (event.stop <= issued) == (mode == "blocking")
        assert event.start == start and event.stop > start


def test_results_donated_before_they_were_seen_are_passed_over():
    recorder = Recorder("ready", 1)
    x = jnp.ones(8)
    jax.jit(lambda v: v + 1, donate_argnums=0)(x)
    recorder.record(0, 0, "run", recorder.now(), [], [x])
    assert len(recorder.finish()) == 1


def test_events_are_sorted_by_start():
    recorder = Recorder("dispatch", 2)
    for position, start in enumerate((0.3, 0.1, 0.2)):
        recorder.record(1, position, "run", start, [], [])
    found = [(event.position, event.start) for event in recorder.finish()]
    assert found == [(1, 0.1), (2, 0.2), (0, 0.3)]


def test_a_run_starts_once_what_it_received_is_there():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: jnp.sin(y @ y), x))
    x = jnp.ones((400, 400))
    slow(x).block_until_ready()
    recorder = Recorder("ready", 1)
    arriving = slow(x)
    recorder.record(0, 0, "receive", 0.0, [x], [arriving])
    recorder.record(0, 1, "run", 0.0, [], [arriving + 1], received=[0])
    receive, run = recorder.finish()
    assert run.start >= receive.stop > receive.start


class Watched:
    """A result whose watcher wakes when `wakes` is set, and sets `seen` then."""

    def __init__(self, wakes: threading.Event) -> None:
        self.wakes, self.seen = wakes, threading.Event()

    def block_until_ready(self) -> None:
        assert self.wakes.wait(60)
        self.seen.set()


def arrays(*watched: Watched) -> list[jax.Array]:
    return [cast(jax.Array, one) for one in watched]


def test_a_receive_whose_watcher_wakes_after_the_run_was_there_when_the_run_was():
    recorder = Recorder("ready", 1)
    now = threading.Event()
    now.set()
    made = Watched(now)
    recorder.record(0, 0, "receive", 0.0, [], arrays(Watched(made.seen)))
    recorder.record(0, 1, "run", 0.0, [], arrays(made), received=[0])
    one, other = recorder.finish()
    receive, run = sorted((one, other), key=lambda event: event.position)
    assert 0 <= receive.start <= receive.stop <= run.start <= run.stop


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_timings_before_a_failed_result_are_kept():
    class Failed(Watched):
        def block_until_ready(self) -> None:
            raise RuntimeError("boom")

    recorder = Recorder("ready", 1)
    now = threading.Event()
    now.set()
    recorder.record(0, 0, "receive", 0.0, [], arrays(Watched(now)))
    recorder.record(0, 1, "run", 0.0, [], arrays(Failed(now)), received=[0])
    assert [event.position for event in recorder.finish()] == [0]
