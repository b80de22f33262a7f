"""Joint problems that tests of the joint search are tried on."""

import itertools

import numpy as np
from attrs import evolve

from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "adaptive", "zero-bubble-h1")


def logical(size):
    return LogicalMesh(axes=(MeshAxis(name="data", size=size),))


def random_row(rng, scale, tight, layouts):
    def affine(low, high):
        return Affine(scale * rng.uniform(low, high), scale * rng.uniform(low, high))

    return LayerRow(
        forward=affine(0.2, 1.0),
        backward_input=affine(0.2, 1.0),
        backward_weight=affine(0.0, 1.0),
        split_seconds=affine(0.0, 0.2),
        step_seconds=float(rng.choice([0.0, rng.uniform(0, 4.0)])),
        state_bytes=rng.uniform(0, 4) * tight,
        activation_bytes=Affine(0.0, rng.uniform(0, 1) * tight),
        delayed_bytes=Affine(0.0, rng.uniform(0, 1) * tight),
        waiting_bytes=Affine(0.0, rng.uniform(0, 1) * tight) if rng.random() < 0.5 else None,
        transient_bytes=Affine(float(rng.choice([0.0, 1.0])) * tight),
        batch_split=int(rng.choice([1, 1, 1, 2])),
        layout_in=int(rng.integers(layouts)),
        layout_out=int(rng.integers(layouts)),
    )


def random_problem(seed, **changes):
    rng = np.random.default_rng(seed)
    tight = 0.0 if seed % 4 == 0 else 1.0
    groups = tuple(
        DeviceGroup(num_hosts=h, devices_per_host=d, memory=9.0)
        for h, d in [[(1, 2)], [(2, 2)], [(1, 4)], [(3, 1)], [(1, 3)], [(1, 2), (2, 1)]][
            rng.integers(6)
        ]
    )
    layers = int(rng.integers(2, 5))
    classes = int(rng.integers(1, 3))
    layouts = int(rng.integers(1, 3))
    meshes = []
    for g, group in enumerate(groups):
        for hosts in range(1, group.num_hosts + 1):
            for devices in range(1, group.devices_per_host + 1):
                if rng.random() < 0.35 and (hosts, devices) != (1, 1):
                    continue
                scale = 1 / (hosts * devices) ** 0.8
                rows = tuple(
                    tuple(
                        random_row(rng, scale, tight, layouts)
                        for _ in range(rng.integers(1, 4 if layers < 4 else 3))
                    )
                    for _ in range(classes)
                )
                meshes.append(
                    MeshMenu(
                        submesh=SubmeshSpec(
                            num_hosts=hosts, devices_per_host=devices, host_group=g
                        ),
                        logical=logical(hosts * devices),
                        rows=rows,
                        layouts=("a", "b")[:layouts],
                        conversion={
                            pair: Affine(rng.uniform(0, 0.3))
                            for pair in itertools.permutations(range(layouts), 2)
                        },
                    )
                )
    scale = {"host": 0.05, "hosts": 0.3, "groups": 0.8}
    arguments = {
        "menu": LayerMenu(
            class_of_layer=tuple(int(c) for c in rng.integers(classes, size=layers)),
            meshes=tuple(meshes),
        ),
        "batch_size": int(rng.choice([4, 6, 8])),
        "device_groups": groups,
        "schedules": tuple(rng.permutation(SCHEDULES)[: rng.integers(1, 3)].tolist()),
        "boundary": lambda a, y, b, x, link: Affine(scale[link] * (1 + (y != x)), 0.02 * (a == b)),
        "num_stages": int(rng.integers(1, layers)) if seed % 5 == 3 else None,
        "use_all_devices": seed % 7 == 2,
    }
    problem = JointProblem(**{**arguments, **changes})
    divisors = [n for n in range(1, 9) if problem.batch_size % n == 0]
    counts = tuple(int(n) for n in sorted(rng.choice(divisors, size=2, replace=False)))
    return evolve(problem, counts=changes.get("counts", counts))


def equal_layers(count, costs, num_hosts):
    """A chain of equal layers on hosts of one device; `costs` {hosts of a mesh: (seconds of a layer
    for a sample, seconds of its update)}."""

    def row(seconds, update):
        third = Affine(0.0, seconds / 3)
        return LayerRow(
            forward=third,
            backward_input=third,
            backward_weight=third,
            step_seconds=update,
            state_bytes=0.0,
            activation_bytes=Affine(),
            delayed_bytes=Affine(),
            transient_bytes=Affine(),
            batch_split=1,
            layout_in=0,
            layout_out=0,
        )

    meshes = tuple(
        MeshMenu(
            submesh=SubmeshSpec(num_hosts=hosts, devices_per_host=1, host_group=0),
            logical=logical(hosts),
            rows=((row(*seconds),),),
            layouts=("a",),
            conversion={},
        )
        for hosts, seconds in costs.items()
    )
    return JointProblem(
        menu=LayerMenu(class_of_layer=(0,) * count, meshes=meshes),
        batch_size=64,
        counts=(64,),
        device_groups=(DeviceGroup(num_hosts=num_hosts, devices_per_host=1, memory=1.0),),
        schedules=("1f1b",),
        boundary=lambda *_: Affine(),
    )
