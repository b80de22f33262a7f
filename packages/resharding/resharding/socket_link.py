"""Messages and the memory of tiles between processes, over sockets or by reading memory.

Each process listens on a TCP port and, on Linux, on an abstract unix socket, which processes of the
same machine prefer. Both ends of a connection prove that they know the secret token (HMAC of the
other's random number, of who calls and of the address that is called) before anything else is read,
all in one time limit. A message is

    4 + 8 bytes  length of the header, length of the payload, little endian
    header       UTF-8 JSON object
    payload      raw bytes

A message that the connection does not take at once is left to a thread. A fetch is a message over a
connection of its own, answered by the bytes asked for. Where the operating system lets a process
map files of another, or read its memory (process_vm_readv), that is done instead.
"""

from __future__ import annotations

import functools
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from resharding.outbox import Outbox
from resharding.regions import Bytes, Region, Runs, read, readable
from resharding.transport import Arrived, Lost, Supply, TransportError

TOKEN_BYTES = 32
FETCHES_AT_A_TIME = 4
"""Connections that fetch from one peer of another machine: one thread copies 1.6 GB/s out of the
kernel, and four fill a card of 50 Gbit/s."""
READS_AT_A_TIME = 2
"""Threads that fetch from one peer of this machine: reading pages of another process takes a core
1.8 times as long as a copy inside one, and two cores use up the bandwidth of memory."""
_MOST_INLINE = 1 << 16  # bytes: what is smaller than a few round trips of the wire
_LENGTHS = struct.Struct("<IQ")
_MOST_HEADER_BYTES = 1 << 24
_MOST_PAYLOAD_BYTES = 1 << 20
_ANSWER = struct.Struct("<?QI")  # whether it is there, bytes, their CRC32 (0: not made)
_MOST_MAPPED = 4 << 30  # bytes of peers' memory that stay mapped, even if they have dropped it
_MOST_STRANGERS = 64
"""Connections that have not proved yet that they know the token. The oldest makes room for a new
one: who knows the token proves it in milliseconds, and is not shut out by those who only stay."""
_PATIENCE = 30.0  # seconds until a connection must be made, and have proved itself


@frozen
class Address:
    """Where a process listens. Those with equal `machine` may use the unix socket `local`.

    `process` has `probe` in its memory at `probe_at` and in its file `probe_file`, by which others
    see if they can read the one and map the other.
    """

    host: str
    port: int
    machine: str
    local: str
    process: int
    probe_at: int
    probe_file: int
    probe: bytes

    def called(self, near: bool) -> str:
        """Return what a caller proves to have meant: the unix socket, or host and port."""
        return f"unix {self.local[1:]}" if near else f"{self.host} {self.port}"


class SocketLink:
    """The end of one process, called `name`; see `resharding.transport.Link`."""

    most_inline: int | None = _MOST_INLINE

    def __init__(
        self, name: str, token: bytes, host: str = "127.0.0.1", checksum: bool = False
    ) -> None:
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"token must have {TOKEN_BYTES} bytes, got {len(token)}")
        self.name, self._token, self._checksum = name, token, checksum
        self._peers: dict[str, Address] = {}
        self._reads: dict[str, bool] = {}
        self._shares: dict[str, bool] = {}
        self._mapped: OrderedDict[tuple[str, int], Bytes] = OrderedDict()
        self._posts: dict[str, Outbox] = {}
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._fetching = threading.local()
        self._closed = False
        tcp = socket.create_server((host, 0))
        self._listeners = [tcp]
        local = ""
        if sys.platform == "linux":
            local = f"\0resharding-{secrets.token_hex(16)}"
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind(local)
            unix.listen()
            self._listeners.append(unix)
        self._probe = np.frombuffer(secrets.token_bytes(32), np.uint8).copy()
        self._probe_file = -1
        if sys.platform == "linux":
            self._probe_file = os.memfd_create("resharding")
            os.write(self._probe_file, self._probe.tobytes())
        self._address = Address(
            host,
            tcp.getsockname()[1],
            _machine(),
            local,
            os.getpid(),
            self._probe.ctypes.data,
            self._probe_file,
            self._probe.tobytes(),
        )

    @property
    def address(self) -> Address:
        """Where the others find it."""
        return self._address

    def open(self, arrived: Arrived, lost: Lost, supply: Supply) -> None:
        """Begin to listen."""
        self._arrived, self._lost, self._supply = arrived, lost, supply
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def connect(self, peers: Mapping[str, Address]) -> None:
        """Learn where the others listen; connections are made when first used."""
        self._peers = dict(peers)
        self._reads.clear()
        self._shares.clear()

    def post(
        self,
        peer: str,
        header: dict[str, Any],
        payload: Bytes | None = None,
        later: bool = False,
    ) -> None:
        """Send a message behind the earlier ones; one that may go `later` goes with the next."""
        if peer not in self._peers:
            raise TransportError(f"{self.name} knows no peer {peer!r}")
        with self._lock:
            if peer not in self._posts:
                self._posts[peer] = Outbox(
                    functools.partial(self._connect_messages, peer),
                    functools.partial(self._lose, peer),
                )
        self._posts[peer].post(_head(header, payload), payload, later)

    def flush(self) -> None:
        """Send what may go later."""
        for outbox in list(self._posts.values()):
            outbox.flush()

    def lanes(self, peer: str) -> int:
        """Return how many fetches from a peer pay off at a time."""
        return READS_AT_A_TIME if self._near(peer) else FETCHES_AT_A_TIME

    def reads(self, peer: str) -> bool:
        """Return whether this process can read the memory of a peer; tried once."""
        if peer not in self._reads:
            address = self._peers[peer]
            self._reads[peer] = self._near(peer) and readable(
                address.process, address.probe_at, address.probe
            )
        return self._reads[peer]

    def shares(self, peer: str) -> bool:
        """Return whether this process can map the files of a peer; tried once."""
        if peer not in self._shares:
            address = self._peers[peer]
            found = b""
            if self._near(peer):
                try:
                    with open(f"/proc/{address.process}/fd/{address.probe_file}", "rb") as file:
                        found = file.read(len(address.probe))
                except OSError:
                    found = b""
            self._shares[peer] = hmac.compare_digest(found, address.probe)
        return self._shares[peer]

    def mapped(self, peer: str, number: int, file: int, size: int) -> Bytes:
        """Return the memory of a peer's file, which stays mapped for later."""
        key = (peer, number)
        with self._lock:
            found = self._mapped.get(key)
            if found is not None:
                self._mapped.move_to_end(key)
                return found
        path = f"/proc/{self._peers[peer].process}/fd/{file}"
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = np.frombuffer(mmap.mmap(opened, size), np.uint8)
        finally:
            os.close(opened)
        with self._lock:
            self._mapped[key] = memory
            while sum(one.nbytes for one in self._mapped.values()) > _MOST_MAPPED:
                self._mapped.popitem(last=False)
        return memory

    def read(
        self, peer: str, address: int, runs: Runs, region: Region, begin: int, end: int
    ) -> None:
        """Fill bytes `begin` to `end` of `region` from the memory of a peer."""
        read(self._peers[peer].process, address, runs, region, begin, end)

    def fetch(
        self, peer: str, key: str, number: int, begin: int, views: Sequence[memoryview]
    ) -> None:
        """Fill `views` with what a peer has of a box, from byte `begin`."""
        size = sum(view.nbytes for view in views)
        header = {"key": key, "number": number, "begin": begin, "end": begin + size}
        kept = self._fetching.__dict__.setdefault("connections", {})
        if peer not in kept:
            kept[peer] = self._connect(peer, "fetch")
        opened = kept[peer]
        try:
            opened.sendall(_head(header))
            there, length, total = _ANSWER.unpack(_exactly(opened, _ANSWER.size))
            if not there:
                raise TransportError(bytes(_exactly(opened, min(length, 1 << 16))).decode())
            if length != size:
                raise TransportError(f"{peer} answers {length} bytes instead of {size}")
            found = 0
            for view in views:
                _fill(opened, view)
                found = zlib.crc32(view, found) if total else found
            if found != total:
                raise TransportError(f"the checksum of a chunk from {peer} is wrong")
        except BaseException:
            del kept[peer]
            self._drop(opened)
            raise

    def close(self) -> None:
        """Stop; the others learn of it."""
        self._closed = True
        for outbox in self._posts.values():
            outbox.close()
        with self._lock:  # closed twice at a time, the file might be another one by then
            opened, self._open = list(self._open), set()
            probe, self._probe_file = self._probe_file, -1
        for one in (*self._listeners, *opened):
            _shut(one)
        self._mapped.clear()
        if probe >= 0:
            os.close(probe)

    # ------------------------------------------------------------------ connections

    def _near(self, peer: str) -> bool:
        address = self._peers[peer]
        return bool(address.local) and address.machine == self._address.machine

    def _connect(self, peer: str, purpose: str) -> socket.socket:
        """Return a connection to `peer` after both have proved to know the token."""
        address, near = self._peers[peer], self._near(peer)
        deadline = time.monotonic() + _PATIENCE
        if near:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            opened.settimeout(_PATIENCE)
            opened.connect(address.local)
        else:
            opened = socket.create_connection((address.host, address.port), timeout=_PATIENCE)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            theirs = _exactly(opened, TOKEN_BYTES, deadline)
            ours = secrets.token_bytes(TOKEN_BYTES)
            text = json.dumps([self.name, purpose, address.called(near)]).encode()
            proof = self._proof(b"connect", theirs, ours, text)
            opened.sendall(ours + proof + struct.pack("<I", len(text)) + text)
            answer = bytes(_exactly(opened, TOKEN_BYTES, deadline))
            if not hmac.compare_digest(answer, self._proof(b"accept", ours, theirs)):
                raise ConnectionError("it does not know the token")
        except EOFError:
            _shut(opened)
            raise ConnectionError("it refused the connection") from None
        except BaseException:
            _shut(opened)
            raise
        opened.settimeout(None)
        with self._lock:
            self._open.add(opened)
        return opened

    def _proof(self, *parts: bytes | bytearray) -> bytes:
        return hmac.digest(self._token, b"|".join(map(bytes, parts)), "sha256")

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                opened, _ = listener.accept()
            except OSError:
                return
            with self._lock:  # none of them can have proved itself meanwhile
                strangers = list(self._strangers)
                for oldest in strangers[: 1 - _MOST_STRANGERS]:
                    with suppress(OSError):  # told before, or gone: its thread closes it
                        oldest.shutdown(socket.SHUT_RDWR)
            if len(strangers) >= 2 * _MOST_STRANGERS:  # threads that have not ended yet
                _shut(opened)
                continue
            if opened.family != socket.AF_UNIX:
                # the bytes behind an answer's head would wait 40 ms for it to be acknowledged
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(opened)
                self._strangers[opened] = None
            threading.Thread(target=self._meet, args=(opened,), daemon=True).start()

    def _meet(self, opened: socket.socket) -> None:
        """Let a stranger prove itself, then serve it until the connection ends."""
        try:
            try:
                peer, purpose = self._introduced(opened)
            finally:
                with self._lock:
                    self._strangers.pop(opened, None)
            if purpose == "fetch":
                self._serve(peer, opened)
            else:
                self._read_messages(peer, opened)
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):
            pass
        finally:
            self._drop(opened)

    def _introduced(self, opened: socket.socket) -> tuple[str, str]:
        deadline = time.monotonic() + _PATIENCE
        opened.settimeout(_PATIENCE)
        ours = secrets.token_bytes(TOKEN_BYTES)
        opened.sendall(ours)
        theirs, proof = (_exactly(opened, TOKEN_BYTES, deadline) for _ in range(2))
        (length,) = struct.unpack("<I", _exactly(opened, 4, deadline))
        if length > 4096:
            raise ValueError("a name of that length")
        text = bytes(_exactly(opened, length, deadline))
        if not hmac.compare_digest(bytes(proof), self._proof(b"connect", ours, theirs, text)):
            raise ValueError("a stranger")
        peer, purpose, called = json.loads(text)
        if called != self._address.called(opened.family == socket.AF_UNIX):
            raise ValueError("a call of another, passed on by a stranger")
        opened.sendall(self._proof(b"accept", theirs, ours))
        opened.settimeout(None)
        return str(peer), str(purpose)

    def _read_messages(self, peer: str, opened: socket.socket) -> None:
        try:
            while True:
                header_size, payload_size = _LENGTHS.unpack(_exactly(opened, _LENGTHS.size))
                if header_size > _MOST_HEADER_BYTES or payload_size > _MOST_PAYLOAD_BYTES:
                    raise ValueError(f"a message announces {header_size} + {payload_size} bytes")
                header = json.loads(bytes(_exactly(opened, header_size)))
                payload = np.frombuffer(_exactly(opened, payload_size), np.uint8)
                self._arrived(peer, header, payload)
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._lose(peer, error)

    def _serve(self, peer: str, opened: socket.socket) -> None:
        """Answer fetches of a peer."""
        while True:
            header_size, _ = _LENGTHS.unpack(_exactly(opened, _LENGTHS.size))
            if header_size > 1 << 16:
                raise ValueError(f"a request of {header_size} bytes")
            asked = json.loads(bytes(_exactly(opened, header_size)))
            begin, end = int(asked["begin"]), int(asked["end"])
            try:
                views: Iterable[memoryview]
                views = self._supply(peer, asked["key"], int(asked["number"]), begin, end)
            except TransportError as error:
                reason = str(error).encode()[: 1 << 16]
                opened.sendall(_ANSWER.pack(False, len(reason), 0) + reason)
                continue
            total = 0
            if self._checksum:
                views = list(views)
                for view in views:
                    total = zlib.crc32(view, total)
            opened.sendall(_ANSWER.pack(True, end - begin, total))
            for view in views:
                opened.sendall(view)

    def _connect_messages(self, peer: str) -> socket.socket:
        """Return a connection for messages to a peer, whose end is noticed."""
        opened = self._connect(peer, "messages")
        threading.Thread(target=self._watch, args=(peer, opened), daemon=True).start()
        return opened

    def _watch(self, peer: str, opened: socket.socket) -> None:
        """Notice that a peer, which never writes here, has gone."""
        try:
            opened.recv(1)
            self._lose(peer, EOFError("closed by the peer"))
        except OSError as error:
            self._lose(peer, error)

    def _lose(self, peer: str, error: Exception) -> None:
        if not self._closed:
            self._lost(peer, f"its connection ended ({str(error) or type(error).__name__})")

    def _drop(self, opened: socket.socket) -> None:
        with self._lock:
            self._open.discard(opened)
        _shut(opened)


def new_token() -> bytes:
    """Return a fresh secret for processes that are to meet."""
    return secrets.token_bytes(TOKEN_BYTES)


def _head(header: dict[str, Any], payload: Bytes | None = None) -> bytes:
    """Return a message up to its payload."""
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), 0 if payload is None else payload.nbytes) + text


def _exactly(opened: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Return the next `size` bytes; EOFError when the connection ends before, TimeoutError where
    they have not all come by `deadline` (of `time.monotonic`), however many come at a time."""
    made = bytearray(size)
    _fill(opened, memoryview(made), deadline)
    return made


def _fill(opened: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    filled = 0
    while filled < view.nbytes:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it did not prove in time that it knows the token")
            opened.settimeout(left)
        count = opened.recv_into(view[filled:])
        if not count:
            raise EOFError("closed by the peer")
        filled += count


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
