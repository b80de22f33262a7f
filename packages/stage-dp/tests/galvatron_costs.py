"""The searches of Galvatron's program of 2022 as joint problems, in its own costs.

`galvatron_cases.json` has its inputs and what it chose, on 8 GPUs. A layer's seconds already hold
its share of the pipeline's bubble, and a step is the sum of the stages' seconds, so that a step is
one microbatch here. In milliseconds, of one layer with b samples per replica:

    forward f = b / tp * forward_ms, backward g = 2 f
    D = gradients sent = 2 (dp - 1) / dp * parameters / tp,  X = activations sent by tensor
    parallelism; beside compute both take 1.3 x as long                     -> _overlapped()
    layer = (f + g) (P + m - 1) / (P m) + what the collectives add           -> layer_seconds()

All tables that the program dumped come out the same, bytes exactly, seconds to 3e-8.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

from attrs import frozen

from alpa_interchange.menu import Affine, JointProblem, LayerMenu, LayerRow, MeshMenu
from alpa_interchange.mesh import LogicalMesh, MeshAxis, SubmeshSpec
from alpa_interchange.stage import DeviceGroup

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("galvatron_cases.json").read_text())
DEVICES = 8
MB = 2.0**20
CONTEXT_MB = 1024  # what a process holds by itself
SLOWER = 1.3  # compute and collectives, at the same time
MEASURED = 1.1e-3  # seconds per predicted millisecond
PREFERENCE = 1e-4  # seconds from sharded to plain layers: plain ones come first
OVERHEAD_LAYERS = 24  # layers that share `overhead_ms`


@frozen
class Strategy:
    """Tensor parallelism (of neighbours or not) beside data parallelism (sharded or not)."""

    stages: int
    tensor: int
    neighbours: bool = True
    sharded: bool = False

    @property
    def data(self) -> int:
        """Replicas of the layer."""
        return DEVICES // self.stages // self.tensor

    @property
    def name(self) -> str:
        """As Galvatron writes it."""
        mixed = self.tensor > 1 and self.data > 1
        near, far = ("*", "") if self.neighbours else ("", "*")
        near, far = (near, far) if mixed else ("", "")
        return f"{self.stages}-{self.tensor}{near}-{self.data}{'f' * self.sharded}{far}"

    def coefficient(self, size: int, neighbours: bool) -> float:
        """Milliseconds per MB that a group of `size` devices takes."""
        mixed = self.tensor > 1 and self.data > 1
        table = CASES["comm_ms_per_mb"][str(self.stages)]
        return float(table[f"{size}_{int(neighbours)}" if mixed else str(size)])


def strategies(stages: int) -> list[Strategy]:
    """Return the strategies of a layer on 8 / `stages` devices."""
    found = []
    tensor = 1
    while tensor <= DEVICES // stages:
        replicas = DEVICES // stages // tensor
        for sharded in (False, True)[: 1 + (replicas > 1)]:
            for neighbours in (False, True) if tensor > 1 and replicas > 1 else (True,):
                found.append(Strategy(stages, tensor, neighbours, sharded))
        tensor *= 2
    return found


def num_microbatches(model: str, samples: float, of: Strategy) -> float:
    """Return the microbatches that the program takes for `samples` per replica."""
    if model == "bert":
        if of.stages == 1:
            return 1
        if of.tensor == 2 and (of.stages, of.data) == (4, 1):
            return samples / 4
        if (of.stages, of.tensor) == (2, 4):
            return samples / 4
        return samples / 2 if samples < 6 else samples / 8 + 2
    if model == "vit":
        return 1 if samples == 8 else 2
    if model == "t5":
        return 1 if samples == 2 else 3 if of.stages == 8 else 2
    return 1 if samples <= 8 else 2 if samples < 32 else 3 if samples <= 96 else 4


def layer_seconds(model: str, kind: dict[str, Any], of: Strategy, batch: int) -> float:
    """Return the seconds of a layer in a step of `batch` samples."""
    samples = batch / of.data
    forward = kind["forward_ms"] * samples / of.tensor
    backward = 2 * forward
    gradients = 2 * (of.data - 1) / of.data * kind["parameters_mb"] / of.tensor
    cost = of.coefficient(of.data, not of.neighbours)
    sends = 6 if kind["decoder"] else 4
    activations = samples * kind["length"] * kind["width"] * sends * 4 / MB
    sent = 2 * (of.tensor - 1) / of.tensor * activations
    tensor = sent * of.coefficient(of.tensor, of.neighbours)
    share = 1.0
    if of.tensor > 1:
        share = 2 / 3 if kind["decoder"] else 1.0 if of.tensor == 2 else 0.5
        share = share if of.stages == 1 else 0.5
    beside, rest, late = _overlapped(gradients, share * backward, cost)
    if of.data == 1:
        beside, rest = share * backward, 0.0
    elif of.stages > 1 and of.tensor == 1 and late and not of.sharded:
        rest /= of.stages
    overhead = kind["overhead_ms"] / OVERHEAD_LAYERS if of.data > 1 else 0.0
    whole = forward + (1 - share) * backward + beside + rest + tensor + overhead
    if of.stages > 1:
        compute = forward + backward + tensor
        count = num_microbatches(model, samples, of)
        whole += compute * ((of.stages + count - 1) / (of.stages * count) - 1)
    if of.sharded:
        whole += 0.5 * gradients * cost
    return float(MEASURED * whole)


def _overlapped(gradients: float, backward: float, cost: float) -> tuple[float, float, bool]:
    """Return milliseconds of both together, of what is left, and whether gradients are left."""
    sent, computed = gradients * cost * SLOWER, backward * SLOWER
    if sent > computed:
        return computed, (gradients - computed / (cost * SLOWER)) * cost, True
    return sent, backward - sent / SLOWER, False


def layer_mb(kind: dict[str, Any], of: Strategy, batch: int) -> float:
    """Return the MB of a layer on each device, rounded up as the program does."""
    state = 4 * kind["parameters_mb"] / of.tensor * (1 / of.data + 0.025 if of.sharded else 1)
    return float(math.ceil(state + kind["activation_mb"][str(of.tensor)] * batch / of.data))


def change_seconds(before: Strategy, after: Strategy, batch: int) -> float:
    """Return the seconds from a layer to the next of another strategy."""
    mixed = after.tensor > 1 and after.data > 1 and before.tensor > 1 and before.data > 1
    regrouped = mixed and before.neighbours != after.neighbours
    if after.tensor > before.tensor or regrouped:
        sent = (after.tensor - 1) / after.tensor * 2 * batch / after.data
        return 1e-3 * sent * after.coefficient(after.tensor, after.neighbours)
    same = after.tensor == before.tensor
    return PREFERENCE if same and before.sharded and not after.sharded else 0.0


def joint_problem(search: dict[str, Any], batch: int, stages: int) -> JointProblem:
    """Return a search of 2022 at one batch size and number of stages, the partition free.

    What else the program counts on a device lies on every stage of models with one kind of layer,
    and on the first stage of the others: with the first layer here.
    """
    model = CASES["models"][search["model"]]
    ways = strategies(stages)
    other = model["other_states_mb"] + CONTEXT_MB
    other += model["other_activation_mb"] * batch * stages / DEVICES
    everywhere = len(model["kinds"]) == 1
    layers = [k for k, count in enumerate(search["layers"]) for _ in range(count)]
    classes = [(k, 0.0 if everywhere or n else other) for n, k in enumerate(layers)]
    distinct = list(dict.fromkeys(classes))
    rows = tuple(
        tuple(
            _row(
                layer_seconds(search["model"], model["kinds"][k], of, batch),
                layer_mb(model["kinds"][k], of, batch) + extra,
                layout,
                of.name,
            )
            for layout, of in enumerate(ways)
        )
        for k, extra in distinct
    )
    conversion = {
        (a, b): Affine(change_seconds(x, y, batch))
        for a, x in enumerate(ways)
        for b, y in enumerate(ways)
    }
    memory = search["memory_gb"] * 1024 - (math.ceil(other) if everywhere else 0)
    return _problem(
        tuple(distinct.index(c) for c in classes), rows, conversion, stages, max(memory, 0)
    )


def _row(seconds: float, mb: float, layout: int, name: str) -> LayerRow:
    return LayerRow(
        forward=Affine(seconds / 3),
        backward_input=Affine(seconds * 2 / 3),
        state_bytes=mb * MB,
        layout_in=layout,
        layout_out=layout,
        key=name,
    )


def _problem(
    class_of_layer: tuple[int, ...],
    rows: tuple[tuple[LayerRow, ...], ...],
    conversion: dict[tuple[int, int], Affine],
    stages: int,
    memory_mb: float,
) -> JointProblem:
    size = DEVICES // stages
    mesh = MeshMenu(
        submesh=SubmeshSpec(num_hosts=1, devices_per_host=size),
        logical=LogicalMesh(axes=(MeshAxis(name="x", size=size),)),
        rows=rows,
        layouts=tuple(row.key for row in rows[0]),
        conversion=conversion,
    )
    return JointProblem(
        menu=LayerMenu(class_of_layer=class_of_layer, meshes=(mesh,)),
        batch_size=1,
        device_groups=(DeviceGroup(num_hosts=1, devices_per_host=DEVICES, memory=memory_mb * MB),),
        schedules=("1f1b",),
        num_stages=stages,
    )


def their_seconds(search: dict[str, Any]) -> float:
    """Return what the plan that the program chose takes in these costs."""
    best, kinds = search["best"], CASES["models"][search["model"]]["kinds"]
    stages = best["strategies"]
    stages = stages * (best["stages"] if len(stages) == 1 else 1)
    kind_of_layer = [k for k, count in enumerate(search["layers"]) for _ in range(count)]
    named = {of.name: of for of in strategies(best["stages"])}
    seconds, layer = 0.0, 0
    for stage in stages:
        chosen = [named[name] for name, count in stage for _ in range(count)]
        for of in chosen:
            kind = kinds[kind_of_layer[layer]]
            seconds += layer_seconds(search["model"], kind, of, best["batch"])
            layer += 1
        seconds += sum(change_seconds(a, b, best["batch"]) for a, b in itertools.pairwise(chosen))
    return seconds
