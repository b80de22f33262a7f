"""The searches of Galvatron's program of 2026 as joint problems: a 7B model on 8 GPUs.

`galvatron_cases.json` has what it chose, and under `recent_model` what its costs are made of,
solved from the tables that it dumped. Milliseconds of a layer on one microbatch, with l samples
per replica and x = l / tp:

    compute f = forward_ms(x), 3 f in all, 4 f with recomputation
    tensor parallelism c = tensor_ms(l), 1.5 c with recomputation
    gathering sharded parameters, per microbatch; transfers between stages, l per layer
    state = state_mb / tp * share of what data parallelism leaves              -> _kept()
    activations = activation_mb l in flight, a buffer while tensor parallelism gathers

Gradient synchronisation hides behind compute. The program has submeshes of equal size; here they
may differ. Its transitions between tensor parallel sizes are 100 times what their bytes take in
some searches, and left out of its final figures in all; here they are what they take.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from galvatron_costs import CASES, DEVICES, MB

from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup

MODEL: dict[str, Any] = CASES["recent_model"]
TENSOR = (1, 2, 4)  # 8 is in none of the dumped tables
LAYOUTS = {tensor: number for number, tensor in enumerate(TENSOR)}
ENDS = len(TENSOR)  # the layout of embedding and head, which reach all others for nothing


def _kept(data: int, sharded: bool, single: bool) -> float:
    """Return the share of parameters, gradients and moments that a replica holds.

    Without sharded parameters the moments are sharded. `single`: one microbatch, whose gradients
    need no whole sum.
    """
    if data == 1:
        return 1.0
    each = 1 / data + 0.003
    whole = 0 if single and sharded else 2 if not single and not sharded else 1
    return (8 - whole) / 8 * each + whole / 8


def _line(figures: Sequence[float], per: float = 1.0) -> Affine:
    """Return milliseconds [fixed, per sample of a replica] as seconds of a microbatch."""
    return Affine(1e-3 * figures[0], 1e-3 * figures[1] / per)


def _sum(*parts: tuple[float, Affine]) -> Affine:
    return Affine(
        sum(times * part.fixed for times, part in parts),
        sum(times * part.each for times, part in parts),
    )


def _tensor_seconds(tensor: int, data: int) -> Affine:
    return _line(MODEL["tensor_ms"][str(tensor)], data) if tensor > 1 else Affine()


def _name(size: int, tensor: int, sharded: bool, again: bool = False) -> str:
    group = f"{tensor}{'*' * (tensor > 1)}-{size // tensor}"
    return f"{DEVICES // size}-{group}{'f' * sharded}{'-c' * again}"


def _layer(
    size: int, tensor: int, sharded: bool, again: bool, single: bool, buffer_mb: float
) -> LayerRow:
    data = size // tensor
    compute = _line(MODEL["forward_ms"], size)
    sent = _tensor_seconds(tensor, data)
    gathered = Affine(1e-3 * MODEL["gather_ms"][f"{size}x{tensor}"]) if sharded else Affine()
    crossed = Affine(0.0, 1e-3 * MODEL["transfer_ms"][str(size)] / data)
    kept = MODEL["recomputed_mb" if again else "activation_mb"][str(tensor)]
    return LayerRow(
        forward=_sum((1, compute), (1 / 3, sent), (1 / 3, gathered), (1 / 2, crossed)),
        backward_input=_sum(
            (2 + again, compute), (2 / 3 + again / 2, sent), (2 / 3, gathered), (1 / 2, crossed)
        ),
        state_bytes=MODEL["state_mb"] / tensor * _kept(data, sharded, single) * MB,
        activation_bytes=Affine(0.0, kept / data * MB),
        transient_bytes=Affine(0.0, (tensor > 1) * buffer_mb / data * MB),
        batch_split=data,
        layout_in=LAYOUTS[tensor],
        layout_out=LAYOUTS[tensor],
        recomputation="full" if again else "none",
        key=_name(size, tensor, sharded, again),
    )


def _end(
    size: int, tensor: int, last: bool, sharded: bool, sequence: bool, single: bool
) -> LayerRow | None:
    """Return embedding or head in one way; None where its figures are not known.

    `sequence`: tensor parallelism over the sequence, its parameters sharded over all devices.
    """
    parameters = 1 if sequence else tensor
    data = size // tensor
    among = size if size == DEVICES else 1  # one stage alone was measured apart
    figures = [MODEL["ends_mb"].get(f"{among}x{t}") for t in (parameters, tensor)]
    gathered = MODEL["end_gather_ms"].get(f"{size}x{parameters}") if sharded else 0.0
    if None in figures or gathered is None:
        return None
    state, kept = figures[0][last][0], figures[1][last][1]
    compute = _line(MODEL["end_ms"], size)
    sent = Affine() if sequence else _tensor_seconds(tensor, data)
    whole = _sum((1, compute), (1 / 6, sent), (1, Affine(1e-3 * gathered)))
    return LayerRow(
        forward=_sum((1 / 3, whole)),
        backward_input=_sum((2 / 3, whole)),
        state_bytes=state * _kept(size // parameters, sharded, single) * MB,
        activation_bytes=Affine(0.0, kept / data * MB),
        batch_split=data,
        layout_in=ENDS,
        layout_out=ENDS,
        key=_name(size, tensor, sharded) + "-sp" * sequence,
    )


def _mesh(size: int, buffer: bool, single: bool) -> MeshMenu:
    tensors = [tensor for tensor in TENSOR if tensor <= size]
    ways = [(t, f) for t in tensors for f in (False, True)[: 1 + (t < size)]]
    layers = tuple(
        _layer(size, tensor, sharded, again, single, buffer * MODEL["buffer_mb"])
        for tensor, sharded in ways
        for again in (False, True)
    )
    ends = [
        [
            row
            for tensor, sharded in ways
            for sequence in (False, True)[: 1 + (tensor > 1)]
            if (row := _end(size, tensor, last, sharded, sequence, single)) is not None
        ]
        for last in (False, True)
    ]
    conversion = {pair: Affine() for k in range(ENDS) for pair in ((ENDS, k), (k, ENDS))}
    for a in tensors:
        for b in tensors:
            if a != b:
                most = max(a, b)
                each = MODEL["change_ms"][str(most)] * most / size
                conversion[LAYOUTS[a], LAYOUTS[b]] = Affine(0.0, 1e-3 * each)
    return MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=size),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=size),)),
        rows=(tuple(ends[0]), layers, tuple(ends[1])),
        layouts=(*map(str, TENSOR), "ends"),
        conversion=conversion,
    )


def joint_problems(case: dict[str, Any]) -> list[JointProblem]:
    """Return a search with counts, stages and partition free: of one microbatch, and of more,
    which hold other gradients."""
    batch = case["batch"]
    counts = case["counts"] or [n for n in range(1, batch + 1) if batch % n == 0]
    memory = round(case["memory_gb"] * 1024 * MODEL["usable"]) - MODEL["context_mb"]
    found = []
    for single in (True, False):
        own = tuple(n for n in counts if (n == 1) == single)
        if not own:
            continue
        meshes = tuple(_mesh(size, case["buffer"], single) for size in (8, 4, 2, 1))
        inner = (1,) * MODEL["num_layers"]
        found.append(
            JointProblem(
                menu=LayerMenu(class_of_layer=(0, *inner, 2), meshes=meshes),
                batch_size=batch,
                counts=own,
                device_groups=(
                    DeviceGroup(num_hosts=1, devices_per_host=DEVICES, memory=memory * MB),
                ),
                schedules=("1f1b",),
            )
        )
    return found


def formula_seconds(stages: Sequence[float], num_microbatches: int) -> float:
    """Return the step of 1F1B as the program has it, from the seconds of each stage.

    Below the longest path where another stage than the last is the slowest.
    """
    num, first = len(stages), stages[0]
    last = sum(stages) + (num_microbatches - 1) * stages[-1]
    filled = max((min(num, num_microbatches) - 1) * first, sum(stages[1:]))
    return max(last, filled + first * max(0, num_microbatches + 1 - num))


def their_stages(case: dict[str, Any], *, transitions: bool = True) -> list[tuple[float, float]]:
    """Return the forward and backward seconds of each stage of the plan that the program chose.

    The program leaves `transitions` out.
    """
    best = case["best"]
    mesh = _mesh(DEVICES // best["stages"], case["buffer"], best["count"] == 1)
    named = [{row.key: row for row in rows} for rows in mesh.rows]
    layers = [named[1][name] for name, count in best["strategies"] for _ in range(count)]
    each = len(layers) // best["stages"]
    stages = [layers[n : n + each] for n in range(0, len(layers), each)]
    stages[0].insert(0, named[0][best["end"]])
    stages[-1].append(named[2][best["end"]])
    samples = case["batch"] / best["count"]
    found = []
    for rows in stages:
        between = transitions * sum(
            mesh.convert(before.layout_out, after.layout_in, samples)
            for before, after in itertools.pairwise(rows)
        )
        forward = sum(row.forward.value(samples) for row in rows)
        backward = sum(row.backward_input.value(samples) for row in rows)
        found.append((forward + between / 2, backward + between / 2))
    return found
