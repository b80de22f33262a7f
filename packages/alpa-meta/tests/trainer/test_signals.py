"""Signals while a run trains."""

import os
import signal
import threading

import pytest

from alpa_meta.trainer.signals import StopSignals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_noted_and_nothing_is_interrupted(number, status):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
        assert signals.exit_status == status
    assert signal.getsignal(number) is before


def test_a_second_sigint_interrupts_at_once():
    with pytest.raises(KeyboardInterrupt), StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        signals.received = signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)


def test_another_thread_than_the_main_one_trains_without():
    entered = []

    def train():
        with StopSignals() as signals:
            entered.append(signals.received)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert entered == [None]
