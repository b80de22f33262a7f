"""Raw numpy buffers between worker processes, over sockets: no pickle, no broker.

Each worker listens on a TCP port and, on Linux, on an abstract unix socket, which workers of the
same machine prefer. A connection carries messages one way. It opens with a secret token, the
sender's name and nothing else is read before they match. A message is

    8 bytes   length of the header, length of the payload, little endian (4 + 8 bytes)
    header    UTF-8 JSON object; "key" says which instruction of which step the payload belongs to
    payload   raw bytes, received straight into memory that jax can use without copying

Every peer has its own sending thread, so that computing never waits for the wire; arrived messages
wait in the inbox until they are taken. A peer that goes away fails everyone who waits for it.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from mesh_runtime.receive_memory import ReceiveMemory

Bytes = NDArray[np.uint8]
Content = tuple[dict[str, Any], Sequence[Bytes]]

TOKEN_BYTES = 32
_LENGTHS = struct.Struct("<IQ")
_MOST_HEADER_BYTES = 1 << 24
_MOST_PAYLOAD_BYTES = 1 << 42


class DataPlaneError(RuntimeError):
    """A message did not arrive or could not be sent; the message names the peer and the key."""


@frozen
class Address:
    """Where a worker listens. Workers with equal `machine` may use the unix socket `local`."""

    host: str
    port: int
    machine: str
    local: str


class Plane(Protocol):
    """What a worker needs to exchange messages with the others, whatever carries them."""

    def send(self, peer: str, make: Callable[[], Content]) -> Future[None]:
        """Send the message `make()` returns to `peer`; it is called in the thread that sends."""
        ...

    def take(self, key: str, sender: str, timeout: float) -> Content:
        """Return the message of `sender` under `key`, waiting for it for at most `timeout` s."""
        ...

    def close(self) -> None:
        """Stop sending; whoever waits fails."""
        ...


class Inbox:
    """Arrived messages of the worker called `name`, by key and sender, until they are taken."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._messages: dict[tuple[str, str], Content] = {}
        self._gone: dict[str, str] = {}  # sender -> reason
        self._arrived = threading.Condition()
        self._closed = False

    def deliver(self, sender: str, header: dict[str, Any], payload: Bytes) -> None:
        """Put a message in, under the key its header names."""
        with self._arrived:
            self._messages[header["key"], sender] = (header, [payload])
            self._arrived.notify_all()

    def lose(self, sender: str, reason: str) -> None:
        """Note that nothing more will come from `sender`."""
        with self._arrived:
            self._gone[sender] = reason
            self._arrived.notify_all()

    def close(self) -> None:
        """Fail everyone who waits."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    def take(self, key: str, sender: str, timeout: float) -> Content:
        """Return the message of `sender` under `key`, waiting for it for at most `timeout` s."""
        with self._arrived:
            found = self._arrived.wait_for(
                lambda: (key, sender) in self._messages or sender in self._gone or self._closed,
                timeout,
            )
            if (key, sender) in self._messages:
                return self._messages.pop((key, sender))
            if self._closed:
                raise DataPlaneError(f"{self.name} was closed while waiting for {sender} ({key})")
            if found:
                raise DataPlaneError(
                    f"{self.name} waits for {key} from {sender}, but {self._gone[sender]}"
                )
            raise DataPlaneError(
                f"{self.name} waited {timeout:g} s for {key} from {sender} and nothing came"
            )


class DataPlane:
    """The endpoint of one worker, called `name`; all workers of a runtime share `token`."""

    def __init__(self, name: str, token: bytes, host: str = "127.0.0.1") -> None:
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"token must have {TOKEN_BYTES} bytes, got {len(token)}")
        self.name, self._token = name, token
        self._inbox = Inbox(name)
        self._memory = ReceiveMemory()
        self._peers: dict[str, Address] = {}
        self._senders: dict[str, _Sender] = {}
        self._connections: list[socket.socket] = []
        tcp = socket.create_server((host, 0))
        self._listeners = [tcp]
        local = ""
        if sys.platform == "linux":
            local = f"\0mesh-runtime-{secrets.token_hex(16)}"
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind(local)
            unix.listen()
            self._listeners.append(unix)
        self.address = Address(host, tcp.getsockname()[1], _machine(), local)
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def connect(self, peers: Mapping[str, Address]) -> None:
        """Learn where the other workers listen; connections are made when first used."""
        self._peers = dict(peers)

    def send(self, peer: str, make: Callable[[], Content]) -> Future[None]:
        """Send the message `make()` returns to `peer`; it is called in the thread that sends."""
        if peer not in self._senders:
            if peer not in self._peers:
                raise DataPlaneError(f"{self.name} knows no peer {peer!r}")
            self._senders[peer] = _Sender(self, peer)
        return self._senders[peer].submit(make)

    def take(self, key: str, sender: str, timeout: float) -> Content:
        """Return the message of `sender` under `key`, waiting for it for at most `timeout` s."""
        return self._inbox.take(key, sender, timeout)

    def close(self) -> None:
        """Stop listening and sending; whoever waits fails."""
        self._inbox.close()
        for sender in self._senders.values():
            sender.stop()
        for opened in (*self._listeners, *self._connections):
            _shut(opened)

    def open_connection(self, peer: str) -> socket.socket:
        """Return a connection to `peer`, by the unix socket where it is on this machine."""
        address = self._peers[peer]
        if address.local and address.machine == self.address.machine:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            opened.settimeout(30.0)
            opened.connect(address.local)
        else:
            opened = socket.create_connection((address.host, address.port), timeout=30.0)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.settimeout(None)
        name = self.name.encode()
        opened.sendall(self._token + struct.pack("<I", len(name)) + name)
        return opened

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                opened, _ = listener.accept()
            except OSError:
                return
            self._connections.append(opened)
            threading.Thread(target=self._read, args=(opened,), daemon=True).start()

    def _read(self, opened: socket.socket) -> None:
        """Receive messages until the connection ends; strangers are cut off unheard."""
        sender = ""
        try:
            if not hmac.compare_digest(bytes(_exactly(opened, TOKEN_BYTES)), self._token):
                return
            (length,) = struct.unpack("<I", bytes(_exactly(opened, 4)))
            if length > 4096:
                return
            sender = bytes(_exactly(opened, length)).decode()
            while True:
                header_size, payload_size = _LENGTHS.unpack(bytes(_exactly(opened, _LENGTHS.size)))
                if header_size > _MOST_HEADER_BYTES or payload_size > _MOST_PAYLOAD_BYTES:
                    raise ValueError(f"a message announces {header_size} + {payload_size} bytes")
                header = json.loads(bytes(_exactly(opened, header_size)))
                payload = _exactly(opened, payload_size, self._memory)
                self._inbox.deliver(sender, header, payload)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            if sender:
                reason = str(error) or type(error).__name__
                self._inbox.lose(sender, f"its connection ended ({reason})")
        finally:
            _shut(opened)


class _Sender:
    """The thread that sends to one peer, in the order of submission."""

    def __init__(self, plane: DataPlane, peer: str) -> None:
        self._plane, self._peer = plane, peer
        self._work: queue.SimpleQueue[tuple[Callable[[], Content], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._connection: socket.socket | None = None
        self._failure: DataPlaneError | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, make: Callable[[], Content]) -> Future[None]:
        future: Future[None] = Future()
        self._work.put((make, future))
        return future

    def stop(self) -> None:
        self._work.put(None)
        if self._connection is not None:
            _shut(self._connection)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            make, future = item
            try:
                if self._failure is not None:
                    raise self._failure
                self._transmit(*make())
                future.set_result(None)
            except OSError as error:
                self._failure = DataPlaneError(
                    f"{self._plane.name} cannot send to {self._peer}: {error}"
                )
                future.set_exception(self._failure)
            except Exception as error:
                future.set_exception(error)

    def _transmit(self, header: dict[str, Any], payload: Sequence[Bytes]) -> None:
        if self._connection is None:
            self._connection = self._plane.open_connection(self._peer)
        text = json.dumps(header).encode()
        size = sum(part.nbytes for part in payload)
        self._connection.sendall(_LENGTHS.pack(len(text), size) + text)
        for part in payload:
            self._connection.sendall(part.data)


def new_token() -> bytes:
    """Return a fresh secret for the workers of one runtime."""
    return secrets.token_bytes(TOKEN_BYTES)


def _exactly(opened: socket.socket, size: int, memory: ReceiveMemory | None = None) -> Bytes:
    """Return the next `size` bytes; EOFError when the connection ends before."""
    buffer = np.empty(size, np.uint8) if memory is None else memory.lend(size)
    view, filled = memoryview(buffer.data), 0
    while filled < size:
        count = opened.recv_into(view[filled:])
        if not count:
            raise EOFError("closed by the peer")
        filled += count
    return buffer


def _machine() -> str:
    """Return what two processes share exactly when they can meet at an abstract unix socket."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return secrets.token_hex(16)


def _shut(opened: socket.socket) -> None:
    try:
        opened.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    opened.close()
