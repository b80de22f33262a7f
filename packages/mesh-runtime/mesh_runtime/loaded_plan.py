"""A schedule and its programs as the driver of other processes knows them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, frozen

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime.carry import parts_of
from mesh_runtime.exported import ExportedProgram
from mesh_runtime.layout import Layout
from mesh_runtime.order import ScheduleOrder, value_name
from mesh_runtime.worker_types import ArrayType, TaskTypes

SMALL = 1 << 16
"""Bytes up to which an output that is no state comes back with the step: a loss is asked for every
step, and asking costs a millisecond, as much as these bytes cost to send."""


@frozen(kw_only=True)
class LoadedPlan:
    """A checked schedule as the driver knows it; `types` are of values, by mesh."""

    plan: str
    schedule: PipelineSchedule
    order: ScheduleOrder
    layouts: tuple[Mapping[str, Layout], ...]
    types: tuple[Mapping[str, ArrayType], ...]
    outputs: tuple[str, ...]
    carry: Mapping[str, str]
    joined: Mapping[str, int]
    overwritten: frozenset[str]  # inputs that a program donates
    written: frozenset[str]  # buffers that a run or a receive writes

    def type_of(self, mesh: int, name: str) -> ArrayType:
        """Return the shape and dtype of a buffer, and its layout on a mesh."""
        value = value_name(name)
        if value in self.types[mesh]:
            return self.types[mesh][value]
        known = next(types[value] for types in self.types if value in types)
        return ArrayType(known.shape, known.dtype, self.layouts[mesh].get(value, known.layout))

    def readers(self, name: str) -> tuple[int, ...]:
        """Return the meshes that a buffer is an input of, also a value that is given whole."""
        return self.order.reading(name)

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the meshes that hold a buffer after the step where it is needed next: those that
        read what it replaces, else the first that has it."""
        if name in self.carry:
            return self.readers(self.carry[name])
        return self.order.holders[name][:1]

    @functools.cached_property
    def joined_on(self) -> Mapping[str, int]:
        """The mesh that holds what every microbatch made of each joined output."""
        count, kept = self.schedule.num_microbatches, self.order.remaining
        wanted = {name: set(parts_of(name, count)) for name in self.joined}
        return {
            name: next(mesh for mesh, names in enumerate(kept) if parts <= set(names))
            for name, parts in wanted.items()
        }

    def type_of_joined(self, name: str) -> ArrayType:
        """Return the type of a joined output, laid out as its parts are."""
        part, dim = self.type_of(self.joined_on[name], name), self.joined[name]
        size = part.shape[dim] * self.schedule.num_microbatches
        return evolve(part, shape=(*part.shape[:dim], size, *part.shape[dim + 1 :]))

    def remains(self, name: str) -> bool:
        """Return whether an input is still on all its meshes after the step."""
        return set(self.readers(name)) <= set(self.order.holders.get(name, ()))

    @functools.cached_property
    def staying(self) -> tuple[str, ...]:
        """The outputs that stay on the workers, and what replaces inputs: state and what is
        large."""
        sizes = {name: self.type_of(self.holders(name)[0], name) for name in self.outputs}
        large = [name for name, found in sizes.items() if found.nbytes > SMALL]
        return tuple(dict.fromkeys((*self.carry, *large)))


def plan_hash(
    schedule: str, programs: Mapping[str, ExportedProgram], layouts: Sequence[Mapping[str, Layout]]
) -> str:
    """Return a hash of all that workers are loaded with."""
    found = hashlib.sha256(schedule.encode())
    for name, program in sorted(programs.items()):
        found.update(f"{name} {program.donated} {sorted(program.options.items())}".encode())
        found.update(program.program)
    for mapping in layouts:
        found.update(repr(sorted(mapping.items(), key=lambda item: item[0])).encode())
    return found.hexdigest()[:16]


def value_types(program: Iterable[Instruction], tasks: TaskTypes) -> dict[str, ArrayType]:
    """Return the types of the values that the runs of one mesh read and write."""
    found: dict[str, ArrayType] = {}
    for each in program:
        if each.kind == "run":
            given, made = tasks[each.task]
            for names, types in ((each.outputs, made), (each.inputs, given)):
                found.update(zip(map(value_name, names), types, strict=True))
    return found
