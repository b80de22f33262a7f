"""The GPU transport of workers in threads of this process, on a fake CUDA, with arrays of jax."""

import threading
import time
from types import SimpleNamespace

import fake_cuda
import jax
import numpy as np

from resharding.gpu_transport import GpuTransport


class Memory(fake_cuda.Memory):
    """Takes the arrays of jax on host devices for those of the fake GPUs."""

    def __init__(self, world, devices):
        super().__init__(world)
        self.number_of = {device: number for number, device in devices.items()}

    def cut(self, tile, start, boxes):
        (device,) = tile.devices()
        return super().cut(self.tile(np.asarray(tile), self.number_of[device]), start, boxes)


class Gpus:
    """Makes the ends of workers in threads of this process; one at a time is at work."""

    def __init__(self, world):
        self.world, self.lock, self.ends = world, threading.RLock(), []

    def obstacle(self):
        return ""

    def new_identity(self):
        return GpuTransport.new_identity()

    def __call__(self, name, devices, timeout):
        memory = Memory(self.world, devices)
        end = End(self, GpuTransport(name, devices, timeout, memory), name, devices)
        self.ends.append(end)
        return end


class End:
    """A `GpuTransport` whose calls come one at a time, and what receives its arrays."""

    def __init__(self, gpus, real, name, devices):
        self.gpus, self.real, self.name, self.devices = gpus, real, name, devices
        self.received = 0

    def __getattr__(self, method):
        def called(*arguments):
            with self.gpus.lock, self.gpus.world.of(self.name):
                return getattr(self.real, method)(*arguments)

        return called

    def receive(self, *arguments):
        with self.gpus.lock, self.gpus.world.of(self.name):
            real = self.real.receive(*arguments)
        return SimpleNamespace(result=lambda timeout: self.result(real), cancel=real.cancel)

    def result(self, real):
        """Return arrays of jax, once the streams have done what makes them."""
        with self.gpus.lock, self.gpus.world.of(self.name):
            made = real.result(100.0)
            tiles = {number: self.real._nccl._memory.read(tile) for number, tile in made.items()}
        deadline = time.monotonic() + 100
        while not all(tile.event.done for tile in tiles.values()):
            assert time.monotonic() < deadline
            with self.gpus.lock:
                try:
                    self.gpus.world.run()
                except fake_cuda.Hang:  # until the other worker has posted its part
                    continue
        self.received += 1
        return {
            number: jax.device_put(np.array(tile.values), self.devices[number])
            for number, tile in tiles.items()
        }
