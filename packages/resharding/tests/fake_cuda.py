"""CuPy, CUDA and NCCL without a GPU: streams that run late, in an order chosen to do harm.

Nothing that is put on a stream happens before `World.run`; then the heads of streams are executed
in random order, as far as events and partners allow. What real hardware would answer with garbage,
a crash or a hang is an error here: memory that was freed or belongs to another device, calls with
another device current, sends that meet no receive, communicators made in different orders, ranks
of one process in separate groups.
"""

from __future__ import annotations

import itertools
import os
import random
import types
import weakref
from collections import deque
from contextlib import contextmanager
from typing import Any

import numpy as np

from resharding.nccl_transport import Exported

GARBAGE = 0xAB


class Hang(RuntimeError):
    """What would never end."""


class Allocation:
    """Device memory; it is free once nobody refers to this object."""

    def __init__(self, world, device, nbytes):
        self.device, self.bytes = device, np.full(nbytes, GARBAGE, np.uint8)
        record = types.SimpleNamespace(device=device, bytes=self.bytes, freed=False)
        world.allocations.append(record)
        weakref.finalize(self, setattr, record, "freed", True)

    @property
    def pointer(self):
        return self.bytes.ctypes.data


class Array:
    """An array of XLA: its memory, its shape, and the event after which it is computed."""

    def __init__(self, allocation, shape, dtype, event):
        self.allocation, self.shape, self.dtype, self.event = allocation, shape, dtype, event

    @property
    def values(self):
        return self.allocation.bytes.view(self.dtype).reshape(self.shape)


class World:
    def __init__(self, seed=0, version="14.2.0"):
        self.random = random.Random(seed)
        self.version = version
        self.allocations, self.streams, self.communicators = [], {}, {}
        self.made, self.connected, self.wires = {}, set(), {}
        self.process, self.device, self.group = "", 0, None
        self.status, self.ids, self.kernels, self.fail_at = 0, 0, 0, None
        self.xla = {}
        self.numbers = itertools.count(1000)
        self.met = False  # whether operations became active or met since

    @contextmanager
    def of(self, process):
        self.process = process
        yield
        self.process = ""

    def stream(self, device):
        made = types.SimpleNamespace(ptr=next(self.numbers), device=device, queue=deque())
        made.wait_event = lambda event: made.queue.append(("wait", event))

        def synchronize():
            raise AssertionError("nothing may wait for a device")

        made.synchronize = synchronize
        self.streams[made.ptr] = made
        return made

    def xla_stream(self, device):
        if device not in self.xla:
            self.xla[device] = self.stream(device)
        return self.xla[device]

    def memory_at(self, pointer, nbytes, device):
        for one in self.allocations:
            first = one.bytes.ctypes.data
            if first <= pointer and pointer + nbytes <= first + one.bytes.nbytes:
                assert one.device == device, f"memory of device {one.device} used on {device}"
                assert not one.freed, "memory that was freed is used"
                return one.bytes[pointer - first : pointer - first + nbytes]
        raise AssertionError(f"no memory of {nbytes} bytes at {pointer:#x}")

    def run(self):
        """Do all that is on streams; Hang if something is left that cannot go on."""
        while busy := [stream for stream in self.streams.values() if stream.queue]:
            self.random.shuffle(busy)
            self.met = False
            if not any(self._advance(stream) for stream in busy) and not self.met:
                heads = [stream.queue[0][0] for stream in busy]
                raise Hang(f"streams wait for ever at {heads}")

    def _advance(self, stream):
        """Do the head of a stream, if that can be."""
        kind, what = stream.queue[0]
        if kind == "wait" and not what.done:
            return False
        if kind == "do":
            what()
        elif kind == "record":
            what.happened = True
        elif kind == "nccl" and not self._exchange(what, stream.device):
            return False
        stream.queue.popleft()
        return True

    def _exchange(self, kernel, device):
        """Let the operations of a kernel meet their partners; return whether all have."""
        communicator, operations, active = kernel
        if communicator.aborted:
            return True
        if not active:
            active.append(True)
            self.met = True
            for each in operations:
                sends, rank, peer = each["sends"], communicator.rank, each["peer"]
                ends = (communicator.key, rank, peer) if sends else (communicator.key, peer, rank)
                wire = self.wires.setdefault(ends, (deque(), deque()))
                each["device"] = device
                wire[0 if sends else 1].append(each)
        for sends, receives in self.wires.values():
            while sends and receives:
                source, target = sends.popleft(), receives.popleft()
                assert source["nbytes"] == target["nbytes"], "sizes differ"
                memory = self.memory_at(target["pointer"], target["nbytes"], target["device"])
                memory[:] = self.memory_at(source["pointer"], source["nbytes"], source["device"])
                source["done"] = target["done"] = self.met = True
        return all(each["done"] for each in operations)

    def check_orders(self):
        """Refuse communicators that two processes made in different orders."""
        for first, second in itertools.combinations(self.made.values(), 2):
            common = [key for key in first if key in second]
            assert common == [key for key in second if key in first], "communicators out of order"

    # ------------------------------------------------------------------ CuPy

    def cupy(self):
        """Return the modules of CuPy by name."""
        world = self

        class Device:
            def __init__(self, index):
                self.index = index

            def __enter__(self):
                self.before, world.device = world.device, self.index

            def __exit__(self, *_):
                world.device = self.before

        class Event:
            def __init__(self, disable_timing=False):
                self.device, self.happened = world.device, False

            @property
            def done(self):
                return self.happened

            def record(self, stream):
                assert stream.device == self.device == world.device, "an event of another device"
                stream.queue.append(("record", self))

        class NcclError(RuntimeError):
            def __init__(self, status):
                names = {1: "UNHANDLED_CUDA_ERROR", 2: "SYSTEM_ERROR", 5: "INVALID_USAGE"}
                super().__init__(f"NCCL_ERROR_{names[status]}")  # KeyError for 6 and 7, as CuPy's

        def check(status):
            if status:
                raise NcclError(status)

        class NcclCommunicator:
            def __init__(self, size, key, rank):
                assert world.group is not None, "it waits for the others with Python's lock held"
                if int(world.version.split(".")[0]) >= 14:
                    assert isinstance(key, bytes), "an id must be bytes"
                elif not isinstance(key, tuple):
                    raise TypeError("an id must be a tuple")
                elif any(not -128 <= value < 128 for value in key):
                    raise OverflowError("value too large to convert to char")
                self.key, self.rank, self.size, self.device = key, rank, size, world.device
                self.aborted = False
                self.in_issue_order = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
                made = world.made.setdefault(world.process, [])
                if key not in made:
                    made.append(key)
                world.communicators[key, rank] = self
                self.process = world.process

            def send(self, pointer, count, kind, peer, stream):
                self._issue(True, pointer, count, kind, peer, stream)

            def recv(self, pointer, count, kind, peer, stream):
                self._issue(False, pointer, count, kind, peer, stream)

            def _issue(self, sends, pointer, nbytes, kind, peer, stream):
                assert world.group is not None and not self.aborted
                assert kind == "uint8" and 0 <= peer < self.size and peer != self.rank
                assert world.device == self.device, "another device is current"
                assert world.streams[stream].device == self.device, "a stream of another device"
                world.memory_at(pointer, nbytes, self.device)
                if world.fail_at is not None:
                    world.fail_at -= 1
                    if world.fail_at < 0:
                        check(2)
                operation = {
                    "sends": sends,
                    "pointer": pointer,
                    "nbytes": nbytes,
                    "peer": peer,
                    "done": False,
                }
                world.group.append((self, stream, operation))

            def check_async_error(self):
                check(world.status)

            def abort(self):
                self.aborted = True

        def group_start():
            assert world.group is None, "groups may not be nested"
            world.group = []

        def group_end():
            issued, world.group = world.group, None
            assert issued is not None, "a group must be begun before it ends"
            kernels: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
            for communicator, stream, operation in issued:
                edge = (communicator.key, frozenset((communicator.rank, operation["peer"])))
                other = world.communicators.get((communicator.key, operation["peer"]))
                if edge not in world.connected and other and other.process == world.process:
                    there = any(one is other for one, _, _ in issued)
                    if not there:
                        raise Hang("ranks of one process connect in separate groups")
                world.connected.add(edge)
                kernels.setdefault((communicator, stream), []).append(operation)
            for (communicator, stream), operations in kernels.items():
                world.kernels += 1
                world.streams[stream].queue.append(("nccl", (communicator, operations, [])))

        def get_unique_id():
            world.ids += 1
            made = bytes((world.ids * 37 + k * 29) % 256 for k in range(128))
            if int(world.version.split(".")[0]) >= 14:
                return made
            return tuple(value - 256 if value > 127 else value for value in made)

        def new_stream(non_blocking=False):
            assert non_blocking, "a blocking stream waits for the default stream"
            return world.stream(world.device)

        nccl = module(
            "cupy.cuda.nccl",
            NcclCommunicator=NcclCommunicator,
            NcclError=NcclError,
            NCCL_UINT8="uint8",
            groupStart=group_start,
            groupEnd=group_end,
            get_unique_id=get_unique_id,
        )
        cuda = module("cupy.cuda", nccl=nccl, Stream=new_stream, Device=Device, Event=Event)
        cupy = module("cupy", cuda=cuda, __version__=self.version)
        return {one.__name__: one for one in (cupy, cuda, nccl)}


def module(name, **members):
    """Return a module of that name that has these members."""
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


class Memory:
    """Arrays of XLA in a `World`; follows `DeviceMemory`. CUDA's numbers are those of plans."""

    def __init__(self, world):
        self.world = world

    def cuda_index(self, device):
        return device

    def tile(self, values, device):
        """Return an array whose values XLA computes later."""
        return self._computed(values.shape, values.dtype, self.cuda_index(device), lambda: values)

    def cut(self, tile, start, boxes):
        made = []
        for box in boxes:
            if box.start == start and box.shape == tile.shape:
                made.append(tile)
                continue
            where = box.within(start)
            made.append(
                self._computed(
                    box.shape, tile.dtype, tile.allocation.device, lambda w=where: tile.values[w]
                )
            )
        return made

    def empty(self, shape, dtype, device):
        dtype = np.dtype(dtype)
        zeros = np.zeros(shape, dtype)
        return self._computed(shape, dtype, self.cuda_index(device), lambda: zeros)

    def export(self, array, stream):
        self.world.streams[stream].wait_event(array.event)
        return Exported(array.allocation.pointer, array.allocation.bytes.nbytes, array.allocation)

    def read(self, array):
        """Return what a program on the array's device makes of it."""
        device = array.allocation.device
        self.world.xla_stream(device).wait_event(array.event)
        return self._computed(array.shape, array.dtype, device, lambda: array.values)

    def adopt(self, array, event):
        return Array(array.allocation, array.shape, array.dtype, event)

    def join(self, pieces, order, dtype):
        if isinstance(order, int):
            return pieces[order]

        def joined(part):
            if isinstance(part, int):
                return pieces[part].values
            dim, parts = part
            return np.concatenate([joined(one) for one in parts], dim)

        device = pieces[0].allocation.device
        for piece in pieces:
            self.world.xla_stream(device).wait_event(piece.event)
        shape = self._shape(pieces, order)
        return self._computed(shape, pieces[0].dtype, device, lambda: joined(order))

    def _shape(self, pieces, order):
        if isinstance(order, int):
            return pieces[order].shape
        dim, parts = order
        shapes = [self._shape(pieces, part) for part in parts]
        whole = list(shapes[0])
        whole[dim] = sum(shape[dim] for shape in shapes)
        return tuple(whole)

    def _computed(self, shape, dtype, device, compute):
        """Return an array that a program on the device's XLA stream fills."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        event = types.SimpleNamespace(done=False, happened=False)
        array = Array(Allocation(self.world, device, size), shape, dtype, event)

        def program(array=array):
            array.values[...] = compute()
            event.done = True

        self.world.xla_stream(device).queue.append(("do", program))
        return array
