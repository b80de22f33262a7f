"""Interrupts of the command line, wherever they arrive."""

import os
import signal
import subprocess
import sys

import pytest

from alpa_meta import command_list
from alpa_meta.cli import run

SIGNALLED = """
import gc, os, signal, time, types
import subprocess, sys, importlib.abc, importlib.util
from alpa_meta import cli, command_list, stopping

# it is ignored where the tests were started in the background of a shell
signal.signal(signal.SIGINT, signal.default_int_handler)
NUMBER = {number}

def interrupted(phase, info):
    gc.callbacks.clear()
    os.kill(os.getpid(), NUMBER)

def swallowed():
    gc.callbacks.append(interrupted)
    gc.collect()
    time.sleep(30)

def at_once():
    os.kill(os.getpid(), NUMBER)
    time.sleep(30)

def ending():
    # slower than the second signal comes
    try:
        at_once()
    finally:
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.1)

def in_an_import():
    import signalled

def with_a_process():
    # whose parent has gone
    sleeper = "import time; time.sleep(60)"
    starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeper!r}])"
    subprocess.run([sys.executable, "-c", starter])
    deaf()

def in_ray():
    exec("import os; os.kill(os.getpid(), NUMBER)", {"__name__": "ray.worker", "NUMBER": NUMBER})
    time.sleep(30)

def turned_into_another():
    try:
        at_once()
    except KeyboardInterrupt:
        pass
    raise ValueError("XLA's words for a call back that did not return")

def deaf():
    # stands for a compiler, in which no signal is heard
    stopping._PATIENCE_SECONDS = 0.1
    try:
        at_once()
    except KeyboardInterrupt:
        time.sleep(30)

def with_garbage():
    # which is not looked for at the exit
    class Found:
        def __init__(self):
            self.itself = self

        def __del__(self):
            os.write(2, b"found")

    gc.disable()
    Found()
    at_once()

def connected_to_ray():
    stopping._PATIENCE_SECONDS = 0.1
    stopping._end = lambda stopped: os.write(2, b"not waited for")
    sys.modules["ray"] = types.SimpleNamespace(is_initialized=lambda: True)
    try:
        at_once()
    finally:
        # stands for Ray's shutdown, which is waited for
        time.sleep(0.5)

class Signalled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "signalled" else None

    def exec_module(self, module):
        try:
            at_once()
        except KeyboardInterrupt:
            print("not ended at once", file=sys.stderr)

sys.meta_path.append(Signalled())

def command(*_, **__):
    {where}()

command_list.application = lambda arguments: command
cli.main()
"""


@pytest.mark.sample("where", "number")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "where",
    [
        "swallowed",
        "at_once",
        "ending",
        "deaf",
        "in_an_import",
        "turned_into_another",
        "with_a_process",
        "in_ray",
        "connected_to_ray",
        "with_garbage",
    ],
)
def test_a_signal_ends_the_command_with_one_line_wherever_it_arrives(number, where):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    program = SIGNALLED.replace("{number}", str(int(number))).replace("{where}", where)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (128 + number, f"alpa: stopped by {number.name}\n")


def test_an_interrupt_that_python_raises_is_one_line(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_list, "application", interrupted)
    assert run(["train"]) == 130
    assert capsys.readouterr().err == "alpa: stopped by SIGINT\n"
