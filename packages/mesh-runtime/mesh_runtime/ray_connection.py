"""The connection of this process to a Ray cluster, or a cluster of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mesh_runtime.runtime import WorkerError

_LOG = logging.getLogger("mesh_runtime")
_LONG_SECONDS = 30.0
"""After which a start that goes on is warned of: on two idle cores it takes 4 to 8 s."""
_REMEDY = (
    "start one there (ray start --head), or leave the address out for a cluster of this machine"
)
_SLOW_SECONDS = 20.0
"""What a start takes at least that failed because the machine is busy: Ray 2.60 waits for its own
node for 30 s, which no setting changes. What fails earlier fails again."""


def connect(ray: Any, address: str | None, cpus: float, seconds: float) -> bool:
    """Connect to the cluster that is meant, if this process is not; return whether Ray was started
    here. Without an address it is that of RAY_ADDRESS, else a new one with `cpus`, which may take
    `seconds` to start."""
    if ray.is_initialized():
        _check_connected(ray.get_runtime_context().gcs_address, address)
        return False
    settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    settings["logging_level"] = logging.ERROR
    if address is None:
        address = os.environ.get("RAY_ADDRESS") or "local"
        check_address(address, "RAY_ADDRESS")
    what = f"connecting to the Ray cluster at {address}"
    if address == "local":
        what = f"starting a Ray cluster on this machine (RayOptions.start_timeout: {seconds:.0f} s)"
        # Host devices share the machine's cores however many processes hold them.
        settings["num_cpus"] = max(os.cpu_count() or 1, int(cpus + 0.999))
        # Ray runs workers at niceness 15, where another busy process leaves a step 5 % of a core.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", f"{seconds:.0f}")
        # Else Ray starts an idle worker for each core, of 0.36 CPU s each, none of which can be
        # ours: those have an environment of their own.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    elif address != "auto":
        check_reachable(address)
    with _quiet_forks(), _own_sigterm(), _said(what):
        if address == "local":
            _start(ray, settings, time.monotonic() + seconds)
        else:
            _init(ray, address, settings)
    return True


def _check_connected(to: str, address: str | None) -> None:
    """Refuse an address "host:port" that is not of the cluster this process is connected `to`."""
    if address in (None, "auto", "local") or "://" in address:
        return
    (own, _, own_port), (host, _, port) = to.rpartition(":"), address.rpartition(":")
    with contextlib.suppress(OSError, UnicodeError):  # a name that means nothing is no cluster
        named = {found[4][0] for found in socket.getaddrinfo(host.strip("[]"), int(port))}
        own_names = {found[4][0] for found in socket.getaddrinfo(own.strip("[]"), int(own_port))}
        here = named <= {"127.0.0.1", "::1"}
        if own_port == port and (here or named & own_names):
            return
    raise WorkerError(
        f"this process is connected to the Ray cluster at {to}, not to {address}; call "
        "ray.shutdown() first, or leave the address out"
    )


def _init(ray: Any, address: str, settings: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **settings)
    except Exception as error:
        raise WorkerError(f"Ray gave no cluster at {address}: {error}") from error


def _start(ray: Any, settings: dict[str, Any], deadline: float) -> None:
    """Start a cluster here, again where the machine was too busy for Ray's patience."""
    while True:
        began, before = time.monotonic(), _processes()
        try:
            return _init(ray, "local", settings)
        except WorkerError as error:
            for process in _processes() - before:  # Ray leaves them
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            ended = time.monotonic()
            if ended - began < _SLOW_SECONDS:
                raise
            if ended > deadline:
                raise WorkerError(
                    f"{error} (a machine as busy as this one may need a longer "
                    "RayOptions.start_timeout)"
                ) from error
            _LOG.warning("the machine is busy: %s; trying again", error)


def _processes() -> set[int]:
    """Return the processes of Ray that this one has started, where the system lists them."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and b"/ray/" in (place / "cmdline").read_bytes():
                found.add(int(place.name))
    return found


def check_address(address: str | None, name: str = "RayOptions.address") -> None:
    """Refuse what cannot be the address of a cluster."""
    if address in (None, "auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"{name} must be host:port, 'auto' (the cluster that runs on this machine) or 'local' "
            f"(a new one), got {address!r}"
        )


def check_reachable(address: str | None) -> None:
    """Refuse an address "host:port" where nobody listens, which takes Ray minutes, and "auto" where
    no cluster runs on this machine; where one does, this process is then connected to it. A process
    that is connected already is refused another address."""
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        _check_connected(ray.get_runtime_context().gcs_address, address)
    elif address == "auto":
        import ray

        try:
            connect(ray, address, cpus=0.0, seconds=0.0)
        except WorkerError as error:
            raise WorkerError(f"{str(error).rstrip('.')}; {_REMEDY}") from error
    elif not (address in (None, "local") or "://" in address):
        _check_listens(address)


def _check_listens(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, UnicodeError) as error:
        raise WorkerError(f"no Ray cluster answers at {address}: {error}; {_REMEDY}") from error


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Say what begins, and warn where it takes long."""
    _LOG.info("%s", what)
    still = f"still {what} after {_LONG_SECONDS:.0f} s"
    timer = threading.Timer(_LONG_SECONDS, _LOG.warning, ["%s", still])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what this process does at SIGTERM: Ray puts an exit of its own in the place, which ends
    a run in the middle of a step."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # Ray's, at a SIGTERM
        if callable(before):
            before(signal.SIGTERM, None)
        raise
    finally:
        if callable(before) and signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _quiet_forks() -> Iterator[None]:
    """Hide that Ray forks to start its processes: they replace themselves at once, so what JAX
    warns of cannot happen."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        yield
