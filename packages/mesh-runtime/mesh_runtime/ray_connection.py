"""The connection of this process to a Ray cluster, or a cluster of its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mesh_runtime.runtime import WorkerError


def connect(ray: Any, address: str | None, cpus: float) -> bool:
    """Connect to the cluster that is meant, if this process is not; return whether Ray was started
    here. Without an address it is that of RAY_ADDRESS, else a new one with `cpus`."""
    if ray.is_initialized():
        return False
    settings: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    settings["logging_level"] = logging.ERROR
    address = address or os.environ.get("RAY_ADDRESS", "local")
    if address == "local":
        # Host devices share the machine's cores however many processes hold them.
        settings["num_cpus"] = max(os.cpu_count() or 1, int(cpus + 0.999))
        # Ray runs workers at niceness 15, where another busy process leaves a step 5 % of a core.
        os.environ.setdefault("RAY_worker_niceness", "0")
    else:
        _check_reachable(address)
    with _quiet_forks(), _own_sigterm():
        try:
            ray.init(address=address, **settings)
        except Exception as error:
            raise WorkerError(f"Ray gave no cluster at {address}: {error}") from error
    return True


def _check_reachable(address: str) -> None:
    """Refuse an address "host:port" where nobody listens; Ray itself takes minutes to say so."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise WorkerError(
            f"no Ray cluster answers at {address}: {error}; start one there (ray start --head), or "
            "leave the address out for a cluster of this machine"
        ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what this process does at SIGTERM: Ray puts an exit of its own in the place, which ends
    a run in the middle of a step."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and signal.getsignal(signal.SIGTERM) is not before:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _quiet_forks() -> Iterator[None]:
    """Hide that Ray forks to start its processes: they replace themselves at once, so what JAX
    warns of cannot happen."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
        yield
