"""Signals while a run trains."""

import os
import signal
import threading

import pytest

from alpa_meta.trainer.signals import StopSignals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_noted_and_nothing_is_interrupted(number, status):
    before = signal.getsignal(number)
    heard, told = os.pipe()  # as what ends the command at a signal hears of it
    os.set_blocking(heard, False)
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    with StopSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
        assert signals.exit_status == status
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == told
    with pytest.raises(BlockingIOError):
        os.read(heard, 1)
    os.close(heard)
    os.close(told)


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
