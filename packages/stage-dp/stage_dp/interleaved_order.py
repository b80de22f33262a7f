"""Megatron's interleaved order as arrays: groups of p microbatches through all chunks of p meshes.

Mesh j runs stages j, j + p, j + 2p, ... (chunks). Its n = chunks * microbatches forwards run in one
order, its backwards in another, and w of the forwards before the first backward:

    forward k is its run k where k < w, else run 2 k - w + 1
    backward k is its run w + 2 k where k < n - w, else run n + k

Where the last group is not full the usual w can wait for itself; all are then raised by the
smallest number of runs that does not. -> interleaved_order()

The chunks of a mesh do not hold most at one time: of p = 8 meshes with two chunks the fifth holds
up to 15 microbatches of the first and 7 of the second, but 15 of both together.
-> InterleavedOrder.alive, holding_order()
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

FULL = 3  # groups of p microbatches after which what chunks hold does not change

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

    def runs(self, mesh: int) -> Index:
        """Return the mesh's runs in order: (1 if backward, stage, microbatch), [runs, 3]."""
        found = np.empty((2 * len(self.chunk), 3), dtype=np.int64)
        chunks = self.chunk, self.back
        for backward, (chunk, at) in enumerate(zip(chunks, self.places(mesh), strict=True)):
            found[at, 0], found[at, 1] = backward, chunk * self.num_meshes + mesh
            found[at, 2] = self.microbatch
        return found

    @cached_property
    def alive(self) -> tuple[Index, ...]:
        """Return the microbatches of each chunk that are alive together, by mesh: [moments, chunks]
        of the moments at which no other has as many of every chunk."""
        result = []
        for mesh in range(self.num_meshes):
            there, back = self.places(mesh)
            begun = np.zeros((self.chunks, 2 * len(there)), dtype=np.int64)
            ended = np.zeros_like(begun)
            begun[self.chunk, there] = 1
            ended[self.back, back] = 1  # a backward frees them when it ends
            some = np.unique((begun.cumsum(axis=1) - ended.cumsum(axis=1) + ended).T, axis=0)
            if some[-1].tolist() != some.max(axis=0).tolist():  # not all of them at once
                more = (some[:, None] <= some).all(axis=2).sum(axis=1)  # as many of every chunk
                result.append(some[more == 1])
            else:
                result.append(some[-1:])
        return tuple(result)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Return the microbatches of each stage that are alive when its mesh holds most of all its
        chunks; of several such moments, when those of the fullest chunk are fewest."""
        held = np.zeros((self.chunks, self.num_meshes), dtype=np.int64)
        for mesh, alive in enumerate(self.alive):
            total = alive.sum(axis=1)
            most = alive[total == total.max()]
            held[:, mesh] = most[most.max(axis=1).argmin()]
        return tuple(held.ravel().tolist())

    @property
    def holds_all(self) -> bool:
        """Return whether all forwards of a mesh run before its first backward."""
        return max(self.warmups) == len(self.chunk)

    def waits_for_itself(self) -> bool:
        """Return whether every mesh gets stuck."""
        num, last = self.num_meshes, self.num_meshes * self.chunks - 1
        runs = []
        for mesh in range(num):
            back, stage, _ = self.runs(mesh).T
            runs.append(np.where(back == 1, -1 - stage, stage).tolist())
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


def shorter(count: int, num_meshes: int) -> int:
    """Return a number of microbatches, `count` or fewer, whose order differs in the groups of the
    middle only: the last group is as full."""
    return FULL * num_meshes + count % num_meshes if count > (FULL + 1) * num_meshes else count


def holding_order(num_meshes: int, chunks: int, num_microbatches: int) -> InterleavedOrder:
    """Return an order of so many microbatches or fewer, whose chunks hold as many at every
    moment."""
    found = interleaved_order(num_meshes, chunks, shorter(num_microbatches, num_meshes))
    return interleaved_order(num_meshes, chunks, num_microbatches) if found.holds_all else found


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
    least = 0
    if num_microbatches % p and shorter(num_microbatches, p) < num_microbatches:
        short = interleaved_order(p, chunks, shorter(num_microbatches, p))
        least = short.warmups[-1] - usual[-1] + (total - len(short.chunk)) * short.holds_all
    for raised in range(least, total + 1):
        warmups = tuple(min(total, k + raised) for k in usual)
        found = InterleavedOrder(
            p, chunks, num_microbatches, warmups, chunk, chunks - 1 - chunk, microbatch
        )
        if raised == total or num_microbatches % p == 0 or not found.waits_for_itself():
            break
    return found
