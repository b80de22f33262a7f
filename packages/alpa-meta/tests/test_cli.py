"""Interrupts of the command line, wherever they arrive."""

import os
import signal
import subprocess
import sys

import pytest

from alpa_meta import commands
from alpa_meta.cli import run

SWALLOWED = """
import gc, os, signal, time
from alpa_meta import cli, commands

# it is ignored where the tests were started in the background of a shell
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupted(phase, info):
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGINT)

def command(*_, **__):
    gc.callbacks.append(interrupted)
    gc.collect()
    time.sleep(30)

commands.application = lambda arguments: command
cli.main()
"""


def test_an_interrupt_that_arrives_in_the_garbage_collector_ends_the_command():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


def _at_once():
    raise KeyboardInterrupt


def _in_a_compiled_module():
    inner = ImportError("numpy._core.multiarray failed to import")
    inner.__context__ = KeyboardInterrupt()
    raise ImportError("Encountered an error while initializing the extension.") from inner


@pytest.mark.parametrize("where", [_at_once, _in_a_compiled_module])
def test_an_interrupt_while_modules_are_imported_ends_without_a_traceback(
    monkeypatch, capsys, where
):
    monkeypatch.setattr(commands, "application", lambda arguments: where())
    assert run(["train"]) == 130
    assert capsys.readouterr().err == ""
