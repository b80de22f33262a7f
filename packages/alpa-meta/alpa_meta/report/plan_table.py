"""A plan as tables on the terminal: summary, stages, memory, tensors."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from alpa_interchange import LogicalMesh, ShardingSpec
from alpa_interchange.amounts import counted, format_bytes, format_seconds
from alpa_interchange.plan import ParallelPlan, StageSharding
from alpa_interchange.plan_text import mesh_text, number_text
from alpa_interchange.tensor import TensorType
from alpa_meta.report.tensor_class import classify_activations, classify_tensors

MAX_ROWS = 24  # of tensors per stage, unless all are asked for


def print_plan(plan: ParallelPlan, console: Console, *, every_parameter: bool = False) -> None:
    """Show `plan`: what was chosen, what it is predicted to cost, and how every tensor lies."""
    console.print(_stage_table(plan))
    console.print(_memory_table(plan))
    for index, sharding in enumerate(plan.shardings):
        table = _tensor_table(plan, index, sharding, every_parameter)
        if table.row_count:
            console.print(table)
        if sharding.replicated_ops:
            names = ", ".join(sorted(set(sharding.replicated_ops)))
            console.print(f"stage {index} runs replicated, for want of a sharding rule: {names}")
        if sharding.executor != "shard_map":
            console.print(executor_text(index, sharding))
    console.print(plan_summary(plan))


def executor_text(stage: int, sharding: StageSharding) -> str:
    """Return which executor runs a stage, and because of which operators."""
    text = f"stage {stage} is run by the {sharding.executor} executor"
    if sharding.executor == "shard_map":
        return f"{text}: its collectives are the planned ones"
    names = ", ".join(sharding.freed_ops)
    because = f", because of operators without a sharding rule: {names}" if names else ""
    return f"{text}: XLA chooses its collectives{because}"


def plan_summary(plan: ParallelPlan) -> str:
    """Return the plan in four lines, and one more where the batch could not be cut, or where state
    is in the memory of the hosts."""
    program = plan.program
    stages, microbatches = plan.num_stages, plan.num_microbatches
    proven = (
        f"proven: no plan of the searched space takes less than {format_seconds(plan.lower_bound)} "
        f"under the cost model (gap {100 * plan.gap:.1f} %)"
        if plan.lower_bound
        else "proven: nothing, this plan was not searched for"
    )
    batch = "" if program.batch_size is None else f", batch of {program.batch_size}"
    uncut = f"one microbatch: {program.uncut}\n" if program.uncut else ""
    hosted = [one for one in program.inputs if one.memory != "device"]
    held = sum(TensorType(one.shape, one.dtype).bytes for one in hosted)
    hosts = (
        f"in the hosts' memory between steps: {counted(len(hosted), 'array')} of the optimiser, "
        f"{format_bytes(held)}\n"
        if hosted
        else ""
    )
    return (
        f"program: {program.num_ops} operations, {counted(len(plan.layers), 'layer')}{batch}\n"
        f"plan: {counted(stages, 'stage')}, "
        f"{counted(microbatches, 'microbatch', 'microbatches')}, "
        f"schedule {plan.stage_plan.schedule}{recomputation_text(plan)}\n{uncut}{hosts}"
        f"predicted: {format_seconds(plan.step_seconds)} per step, at most "
        f"{format_bytes(max(plan.device_bytes))} per device\n{proven}"
    )


def recomputation_text(plan: ParallelPlan) -> str:
    """Return which layers are recomputed, to be appended to a sentence; empty if none is."""
    found = ""
    for kind, how in (("full", "in full"), ("selective", "selectively")):
        chosen = [layer.index for layer in plan.layers if layer.recomputation == kind]
        if len(chosen) == len(plan.layers):
            found += f", every layer recomputed {how}"
        elif chosen:
            noun = "layer" if len(chosen) == 1 else "layers"
            found += f", {noun} {number_text(chosen)} recomputed {how}"
    return found


def layer_text(plan: ParallelPlan, index: int) -> str:
    """Return the layers of stage `index` as "0-3"."""
    candidate = plan.stage_plan.stages[index].candidate
    return number_text(range(candidate.layer_start, candidate.layer_stop))


def _stage_table(plan: ParallelPlan) -> Table:
    table = _table("stages")
    for column in ("stage", "layers", "hosts x devices", "device numbers", "logical mesh"):
        table.add_column(column)
    for column in ("forward", "backward", "once per step", "memory"):
        table.add_column(column, justify="right")
    for index, (stage, sharding) in enumerate(
        zip(plan.stage_plan.stages, plan.shardings, strict=True)
    ):
        candidate, submesh = stage.candidate, stage.candidate.submesh
        table.add_row(
            str(index),
            layer_text(plan, index),
            f"{submesh.num_hosts} x {submesh.devices_per_host}",
            number_text(sharding.mesh.device_ids),
            mesh_text(sharding.mesh.logical),
            format_seconds(candidate.forward_seconds),
            format_seconds(candidate.backward_seconds),
            format_seconds(candidate.step_seconds),
            format_bytes(plan.device_bytes[index]),
        )
    table.caption = "forward and backward per microbatch; memory per device; all predicted"
    return table


def _memory_table(plan: ParallelPlan) -> Table:
    names = list(dict.fromkeys(name for sharding in plan.shardings for name in sharding.memory))
    table = _table("predicted memory per device")
    table.add_column("stage")
    shared = ["all stages"] if plan.stage_plan.device_bytes else []  # that a device runs
    for name in [*names, "sum", *shared, "device has"]:
        table.add_column(name, justify="right")
    for index, sharding in enumerate(plan.shardings):
        group = plan.cluster.host_groups[sharding.mesh.submesh.host_group]
        amounts = [sharding.memory.get(name, 0.0) for name in names]
        amounts.append(sharding.peak_bytes)
        amounts += [plan.device_bytes[index]] * len(shared)
        amounts.append(group.device.memory)
        table.add_row(str(index), *map(format_bytes, amounts))
    return table


def _tensor_table(
    plan: ParallelPlan, index: int, sharding: StageSharding, every_parameter: bool
) -> Table:
    """Return how the state and the activations of one stage lie on its mesh."""
    mesh = sharding.mesh.logical
    title = f"stage {index}: sharding over the mesh {mesh_text(mesh)}"
    table = _table(title)
    for column in ("tensor", "held as", "shape", "sharding", "per device"):
        table.add_column(column, justify="right" if column == "per device" else "left")
    state = [
        (entry.path, entry.shape, entry.dtype)
        for entry in plan.program.inputs
        if entry.path in sharding.state_specs
    ]
    rows: list[Sequence[str]] = []
    if every_parameter:
        rows = [
            (path, "", _shape(shape), _spec(sharding.state_specs[path]), _part(shape, mesh, spec))
            for path, shape, _ in state
            for spec in [sharding.state_specs[path]]
        ]
    else:
        for kind in classify_tensors(state, sharding.state_specs):
            part = _part(kind.shape, mesh, kind.spec)
            held = ", ".join(kind.members)
            rows.append((kind.name, held, _shape(kind.shape), _spec(kind.spec), part))
    left_out = 0 if every_parameter else max(0, len(rows) - MAX_ROWS)
    for row in rows[: len(rows) - left_out]:
        table.add_row(*row)
    if left_out:
        table.add_row(f"and {left_out} more (alpa show --all)", "", "", "", "")
    if rows and sharding.activation_specs:
        table.add_section()
    for name, spec, count in classify_activations(sharding.activation_specs):
        table.add_row(name, counted(count, "activation"), "", _spec(spec), "")
    return table


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _spec(spec: ShardingSpec) -> str:
    sharded = any(spec.dims) or spec.partial
    return str(spec).replace("[", "(").replace("]", ")") if sharded else "whole"


def _part(shape: Sequence[int], mesh: LogicalMesh, spec: ShardingSpec) -> str:
    """Return the shape that one device holds."""
    return _shape([size // mesh.size(axes) for size, axes in zip(shape, spec.dims, strict=True)])


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
