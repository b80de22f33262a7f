"""Megatron's interleaved order as arrays: groups of p microbatches through all chunks of p meshes.

Mesh j runs stages j, j + p, j + 2p, ... (chunks). Its n = chunks * microbatches forwards run in one
order, its backwards in another, and w of the forwards before the first backward:

    forward k is its run k where k < w, else run 2 k - w + 1
    backward k is its run w + 2 k where k < n - w, else run n + k

Where the last group is not full the usual w can wait for itself; all are then raised by the
smallest number of runs that does not. -> interleaved_order()
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Index = NDArray[np.int64]


@frozen(eq=False, slots=False)
class InterleavedOrder:
    """The order of `num_microbatches` on `num_meshes` with `chunks` stages each.

    `warmups` [meshes]: forwards before the first backward. `chunk` and `microbatch` [runs] are
    those of the forwards in order, `back` [runs] the chunks of the backwards, whose microbatches
    are the forwards'.
    """

    num_meshes: int
    chunks: int
    num_microbatches: int
    warmups: tuple[int, ...]
    chunk: Index
    back: Index
    microbatch: Index

    @property
    def num_stages(self) -> int:
        return self.num_meshes * self.chunks

    def places(self, mesh: int) -> tuple[Index, Index]:
        """Return which of the mesh's runs the forwards and the backwards are: [runs] each."""
        w, k = self.warmups[mesh], np.arange(len(self.chunk))
        return (
            np.where(k < w, k, 2 * k - w + 1),
            np.where(k < len(k) - w, w + 2 * k, len(k) + k),
        )

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Return the most microbatches of each stage that are alive at one time."""
        held = np.zeros((self.chunks, self.num_meshes), dtype=np.int64)
        for mesh in range(self.num_meshes):
            there, back = self.places(mesh)
            for chunk in range(self.chunks):
                before = np.searchsorted(back[self.back == chunk], there[self.chunk == chunk])
                held[chunk, mesh] = (np.arange(1, len(before) + 1) - before).max()
        return tuple(held.ravel().tolist())

    def waits_for_itself(self) -> bool:
        """Return whether every mesh gets stuck."""
        num, last = self.num_meshes, self.num_meshes * self.chunks - 1
        runs = []
        for mesh in range(num):
            there, back = self.places(mesh)
            order = np.empty(2 * len(there), dtype=np.int64)
            order[there] = self.chunk * num + mesh
            order[back] = -1 - (self.back * num + mesh)
            runs.append(order.tolist())
        # Microbatches of a stage run in their order, so that counts say which are done.
        forwards, backwards = [0] * (last + 1), [0] * (last + 1)
        at, moved = [0] * num, True
        while moved:
            moved = False
            for mesh, order_of_mesh in enumerate(runs):
                for place in range(at[mesh], len(order_of_mesh)):
                    stage = order_of_mesh[place]
                    if stage >= 0:
                        done = forwards[stage]
                        if stage and forwards[stage - 1] <= done:
                            break
                        forwards[stage] = done + 1
                    else:
                        stage = -1 - stage
                        done = backwards[stage]
                        if forwards[stage] <= done:
                            break
                        if stage < last and backwards[stage + 1] <= done:
                            break
                        backwards[stage] = done + 1
                    at[mesh], moved = place + 1, True
        return any(place < 2 * len(self.chunk) for place in at)


# A search asks for the same few dozen orders again and again: each took a fiftieth of a second.
@lru_cache(maxsize=128)
def interleaved_order(num_meshes: int, chunks: int, num_microbatches: int) -> InterleavedOrder:
    """Return the order of so many microbatches, which does not wait for itself."""
    p, total = num_meshes, chunks * num_microbatches
    groups = [(first, min(p, num_microbatches - first)) for first in range(0, num_microbatches, p)]
    chunk = np.concatenate([np.repeat(np.arange(chunks), size) for _, size in groups])
    microbatch = np.concatenate(
        [np.tile(np.arange(first, first + size), chunks) for first, size in groups]
    )
    usual = [
        p - mesh if chunks == 1 else 2 * (p - mesh - 1) + (chunks - 1) * p + 1 for mesh in range(p)
    ]
    for raised in range(total + 1):
        warmups = tuple(min(total, k + raised) for k in usual)
        found = InterleavedOrder(
            p, chunks, num_microbatches, warmups, chunk, chunks - 1 - chunk, microbatch
        )
        if raised == total or num_microbatches % p == 0 or not found.waits_for_itself():
            break
    return found
