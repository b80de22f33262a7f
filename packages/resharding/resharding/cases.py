"""Tasks to measure planners with: the 16 of arXiv 2211.05322 and random ones.

The paper's microbenchmarks move an int32 tensor between meshes of p3.8xlarge hosts (four devices, a
card of 10 Gbit/s). S0 cuts a dim over hosts, S1 over the devices of each host, S01 over all
devices.
"""

from __future__ import annotations

import random

from alpa_interchange.reshard import PlacedTensor, ReshardingTask
from alpa_interchange.tensor import ShardingSpec, TensorType
from resharding.notation import parse_spec, place

_CUBE = (1024, 1024, 512)
_MANY = {  # name: shape, source hosts x devices and spec, target hosts x devices and spec
    "case 1": (_CUBE, (2, 4), "S0 R R", (2, 4), "S0 R R"),
    "case 2": (_CUBE, (2, 4), "R R R", (2, 4), "S0 R R"),
    "case 3": (_CUBE, (2, 4), "R S0 R", (2, 4), "S0 R R"),
    "case 4": (_CUBE, (2, 4), "R S01 R", (2, 4), "S01 R R"),
    "case 5": (_CUBE, (2, 4), "S1 R R", (2, 4), "S0 R R"),
    "case 6": ((3072, 1024, 170), (2, 4), "S0 R R", (3, 4), "S0 R R"),
    "case 7": (_CUBE, (1, 4), "S1 R R", (2, 4), "R R R"),
    "case 8": (_CUBE, (1, 4), "S1 R R", (2, 4), "R R R"),  # identical to 7 in the published suite
    "case 9": (_CUBE, (2, 4), "R S0 R", (2, 4), "R R S0"),
}
_ONE_TO_MANY = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))


def paper_cases() -> dict[str, ReshardingTask]:
    """Return the nine many-to-many and seven one-to-many cases of the paper by name."""
    cases = {}
    for name, (shape, source, source_spec, target, target_spec) in _MANY.items():
        cases[name] = ReshardingTask(
            tensor=TensorType(shape, "int32"),
            source=place(parse_spec(source_spec), *source),
            target=place(parse_spec(target_spec), *target, first_host=source[0]),
        )
    for num_hosts, devices_per_host in _ONE_TO_MANY:
        cases[f"1 to {num_hosts}x{devices_per_host}"] = ReshardingTask(
            tensor=TensorType((2**28,), "int32"),
            source=place(parse_spec("R"), 1, 1),
            target=place(parse_spec("R"), num_hosts, devices_per_host, first_host=1),
        )
    return cases


def random_task(seed: int, *, overlap: bool = False, longest: int = 64) -> ReshardingTask:
    """Return a task of rank 0 to 3 with odd extents, up to four hosts a side and mixed layouts.

    With `overlap` the two meshes may share hosts and devices.
    """
    draw = random.Random(seed)
    rank = draw.choice((0, 1, 2, 2, 3))
    shape = tuple(draw.randint(1, longest) for _ in range(rank))

    def side(first_host: int) -> PlacedTensor:
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis in draw.sample(("host", "device"), 2):
            if rank and draw.random() < 0.7:
                dims[draw.randrange(rank)].append(axis)
        spec = ShardingSpec(tuple(tuple(axes) for axes in dims))
        return place(spec, draw.randint(1, 4), draw.choice((1, 2, 4)), first_host)

    source = side(0)
    return ReshardingTask(
        tensor=TensorType(shape, draw.choice(("float32", "bfloat16", "int8"))),
        source=source,
        target=side(draw.choice((0, 1, 4)) if overlap else 4),
    )


def random_pair(seed: int) -> ReshardingTask:
    """Return a task of 1 KB to 1 GB between two meshes of up to 4 hosts x 8 devices."""
    draw = random.Random(seed)
    rank = draw.choice((1, 2, 2, 3))
    left = int(2 ** draw.uniform(10, 30)) // 4
    shape = []
    for _ in range(rank - 1):
        shape.append(max(1, int(left ** draw.uniform(0.2, 0.7))))
        left //= shape[-1]
    shape.append(max(1, left))
    draw.shuffle(shape)

    def side(first_host: int) -> PlacedTensor:
        dims: list[list[str]] = [[] for _ in range(rank)]
        for axis in draw.sample(("host", "device"), 2):
            if draw.random() < 0.7:
                dims[draw.randrange(rank)].append(axis)
        spec = ShardingSpec(tuple(tuple(axes) for axes in dims))
        return place(spec, draw.randint(1, 4), draw.choice((1, 2, 4, 8)), first_host)

    return ReshardingTask(
        tensor=TensorType(tuple(shape), "float32"), source=side(0), target=side(4)
    )
