"""What the axes of a mesh divide, whatever their sizes.

How operators and tensors can be sharded goes by which axes divide which dims, so that most meshes
with as many axes offer the same: 16 heads are split alike on 2 x 8 and on 4 x 16 devices. Such
meshes share one small mesh, and sizes one small size that its axes divide as theirs do:

    mesh      4 x 16   size 3   48   16   64     axes that divide it
    stand-in  2 x 4         1    4    4    8     none, both, both, both together
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from attrs import frozen

from alpa_interchange import LogicalMesh, MeshAxis

_SIZES = (2, 3, 4, 8, 16)
"""Of stand-ins' axes: four that divide one another, as powers of two do, and one that divides none
of them, as three does on 3 hosts of 8. What needs others stands for itself."""


@frozen(eq=False)
class Divisibility:
    """A mesh that stands for another one with the same axes, on which other sizes stand for those
    of dims. `sizes`: what stands for a common divisor with the number of devices."""

    mesh: LogicalMesh
    num_devices: int  # of the other one
    sizes: Mapping[int, int]

    def size(self, given: int) -> int:
        """Return the size that stands for one, 1 where no axis divides it."""
        return self.sizes[math.gcd(given, self.num_devices)]

    def shape(self, given: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes that stand for those of a shape."""
        return tuple([self.size(one) for one in given])


def divisibility_of(mesh: LogicalMesh) -> Divisibility:
    """Return the small mesh that stands for all whose axes divide alike."""
    return _of(tuple((axis.name, axis.size) for axis in mesh.axes))


@functools.lru_cache(maxsize=256)
def _of(axes: tuple[tuple[str, int], ...]) -> Divisibility:
    own = tuple(size for _, size in axes)
    divided = _divided(own)
    ranges = [(1,) if size == 1 else [few for few in _SIZES if few <= size] for size in own]
    candidates = sorted(itertools.product(*ranges), key=math.prod)
    small = next((few for few in candidates if _divided(few).keys() == divided.keys()), own)
    stands = _divided(small)
    return Divisibility(
        LogicalMesh(
            axes=tuple(
                MeshAxis(name=name, size=few) for (name, _), few in zip(axes, small, strict=True)
            )
        ),
        math.prod(own),
        {size: stands[by][0] for by, sizes in divided.items() for size in sizes},
    )


def _divided(axes: tuple[int, ...]) -> dict[tuple[bool, ...], list[int]]:
    """Return the divisors of the number of devices by which axes, or several together, divide
    them."""
    together = [
        math.prod(some)
        for count in range(1, len(axes) + 1)
        for some in itertools.combinations(axes, count)
    ]
    total = math.prod(axes)
    found: dict[tuple[bool, ...], list[int]] = {}
    for size in _divisors(total):
        found.setdefault(tuple(size % one == 0 for one in together), []).append(size)
    return found


def _divisors(total: int) -> list[int]:
    """Return the divisors, the least first."""
    low = [k for k in range(1, math.isqrt(total) + 1) if total % k == 0]
    return sorted({*low, *(total // k for k in low)})
