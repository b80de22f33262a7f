"""The collectives of a compiled program, read from its HLO text.

Shapes in partitioned HLO are those of one device, so the bytes of a collective's result are bytes
per device. Loops multiply: a collective inside a while loop of known trip count n runs n times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import MappingProxyType

from attrs import frozen

from alpa_meta.audit.planned import KINDS, link_bytes
from alpa_meta.audit.replica_groups import Groups, read_groups

DTYPES = MappingProxyType(
    {
        "pred": ("bool", 1),
        "s4": ("int4", 0.5),
        "u4": ("uint4", 0.5),
        "s8": ("int8", 1),
        "u8": ("uint8", 1),
        "s16": ("int16", 2),
        "u16": ("uint16", 2),
        "s32": ("int32", 4),
        "u32": ("uint32", 4),
        "s64": ("int64", 8),
        "u64": ("uint64", 8),
        "f8e4m3fn": ("float8_e4m3fn", 1),
        "f8e5m2": ("float8_e5m2", 1),
        "bf16": ("bfloat16", 2),
        "f16": ("float16", 2),
        "f32": ("float32", 4),
        "f64": ("float64", 8),
        "c64": ("complex64", 8),
        "c128": ("complex128", 16),
    }
)
"""HLO's name of a dtype: numpy's name and bytes per element."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"(?:to_apply|calls|true_computation|false_computation|called_computations?)=\{?%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FILE_AND_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")


@frozen(kw_only=True)
class CompiledCollective:
    """One collective of the compiled program.

    `parts` are the result bytes of each tensor that XLA's combiner put into it (as a tuple, or
    concatenated), `dtypes` their dtypes; `trips` is how often it runs in a step, None if XLA does
    not know. `promoted` marks a reduction of 16-bit floats that the CPU backend does in float32.
    """

    name: str
    kind: str
    parts: tuple[int, ...]
    dtypes: tuple[str, ...]
    groups: Groups
    channel: int | None
    op_name: str
    source: str
    trips: int | None
    promoted: bool

    @property
    def bytes(self) -> int:
        """Result bytes per device of one execution."""
        return sum(self.parts)

    @property
    def group_size(self) -> int:
        """Devices in one group; for a permutation, 2 if anything moves."""
        if self.kind == "collective-permute":
            return 2 if any(source != target for source, target in self.groups) else 1
        return max(len(group) for group in self.groups)

    @property
    def link_bytes(self) -> float:
        """Bytes one device sends for all executions; a loop of unknown length counts once."""
        return link_bytes(self.kind, self.bytes, self.group_size) * (self.trips or 1)


@frozen
class _Instruction:
    name: str
    result: str
    opcode: str
    line: str


@frozen
class _Call:
    computation: str
    trips: int | None


@frozen
class _Frames:
    """The tables of source locations at the head of HLO text."""

    files: dict[int, str]
    functions: dict[int, str]
    locations: dict[int, str]
    frames: dict[int, str]

    def describe(self, frame: int) -> str:
        """Return "file.py:line (function)" of an innermost frame, "" if it is not in the tables."""
        location = self.locations.get(_number(self.frames.get(frame, ""), "file_location_id"), "")
        file = self.files.get(_number(location, "file_name_id"), "")
        if not file:
            return ""
        function = self.functions.get(_number(location, "function_name_id"), "")
        base = file.strip('"').rsplit("/", 1)[-1]
        return f"{base}:{_number(location, 'line')} ({function.strip(chr(34))})"


def compiled_collectives(text: str) -> tuple[CompiledCollective, ...]:
    """Return every collective that the entry computation of HLO `text` reaches, in program order.

    A computation called twice is listed twice. Asynchronous pairs count once, at the start.
    """
    computations, entry = _split(text)
    if entry is None:
        raise ValueError(
            "HLO text must have an ENTRY computation, got "
            f"{text[:80]!r}; pass compiled.as_text() of an executable"
        )
    frames = _read_frames(text)
    header = text[: text.index("\n")]
    num_devices = _attribute(header, "num_partitions") * _attribute(header, "replica_count")

    def reached(computation: str, trips: int | None) -> Iterator[CompiledCollective]:
        for instruction in computations.get(computation, ()):
            kind = _kind(instruction)
            if kind is not None:
                joined = _concatenated(instruction, computation, computations)
                yield _collective(instruction, kind, trips, frames, num_devices, joined)
            for call in _calls(instruction):
                inner = None if trips is None or call.trips is None else trips * call.trips
                yield from reached(call.computation, inner)

    return tuple(reached(entry, 1))


def parse_result(result: str) -> tuple[tuple[str, int], ...]:
    """Return (numpy dtype, bytes) of each array in an HLO result type, tuples flattened."""
    arrays = []
    for name, dims in _ARRAY.findall(result):
        if name not in DTYPES:
            continue
        dtype, width = DTYPES[name]
        count = math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        arrays.append((dtype, math.ceil(count * width)))
    return tuple(arrays)


def _split(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    """Return the instructions of each computation and the entry's name."""
    computations: dict[str, list[_Instruction]] = {}
    entry = None
    current: list[_Instruction] | None = None
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _COMPUTATION.match(line)
            if head:
                current = computations.setdefault(head.group(2), [])
                entry = head.group(2) if head.group(1) else entry
            elif line.startswith("}"):
                current = None
            continue
        if current is None:
            continue
        found = _INSTRUCTION.match(_without_comments(line.strip()))
        if found:
            name, result, opcode = found.groups()
            current.append(_Instruction(name, result, opcode, line.strip()))
    return computations, entry


def _without_comments(line: str) -> str:
    """Return the instruction without the `/*index=5*/` marks of long tuples."""
    return re.sub(r"/\*[^*]*\*/", "", line)


def _kind(instruction: _Instruction) -> str | None:
    """Return the collective an instruction starts, None for any other instruction."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "send":
        return None if "is_host_transfer=true" in instruction.line else "send"
    return opcode if opcode in KINDS else None


def _calls(instruction: _Instruction) -> Iterator[_Call]:
    """Yield the computations an instruction runs, reducers (which have no collectives) included."""
    line = instruction.line
    if instruction.opcode == "while":
        trips = _TRIPS.search(line)
        body = re.search(r"body=%?([\w.\-]+)", line)
        condition = re.search(r"condition=%?([\w.\-]+)", line)
        count = int(trips.group(1)) if trips else None
        if condition:
            yield _Call(condition.group(1), None if count is None else count + 1)
        if body:
            yield _Call(body.group(1), count)
        return
    for name in _CALLED.findall(line):
        yield _Call(name, 1)
    branches = _BRANCHES.search(line)
    if branches:
        for name in branches.group(1).split(","):
            yield _Call(name.strip().lstrip("%"), 1)


def _collective(
    instruction: _Instruction,
    kind: str,
    trips: int | None,
    frames: _Frames,
    num_devices: int,
    joined: tuple[int, ...],
) -> CompiledCollective:
    line = instruction.line
    result = instruction.result
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        result = _async_result(result)
    arrays = parse_result(result)
    if kind in ("send", "collective-permute"):
        arrays = arrays[:1]
    sizes = tuple(size for _, size in arrays)
    if kind == "all-to-all" and len(sizes) > 1 and "dimensions=" not in line:
        sizes = (sum(sizes),)
    dtypes = tuple(dtype for dtype, _ in arrays)[: len(sizes)]
    if kind == "all-reduce" and len(sizes) == 1 and sum(joined) == sizes[0]:
        sizes, dtypes = joined, dtypes * len(joined)
    channel = re.search(r"channel_id=(\d+)", line)
    op_name = _OP_NAME.search(line)
    reducer = re.search(r"to_apply=%?([\w.\-]+)", line)
    return CompiledCollective(
        name=instruction.name,
        kind=kind,
        parts=sizes,
        dtypes=dtypes,
        groups=() if kind == "send" else read_groups(line, num_devices),
        channel=int(channel.group(1)) if channel else None,
        op_name=op_name.group(1) if op_name else "",
        source=_source(line, frames),
        trips=trips,
        promoted=reducer is not None and "promoted" in reducer.group(1),
    )


def _concatenated(
    instruction: _Instruction, computation: str, computations: dict[str, list[_Instruction]]
) -> tuple[int, ...]:
    """Return the bytes of the tensors a combiner concatenated into the operand, or ()."""
    operand = _operands(instruction)[:1]
    within = {one.name: one for one in computations[computation]}
    source = within.get(operand[0]) if operand else None
    if source is not None and source.opcode == "fusion":
        called = _CALLED.search(source.line)
        body = computations.get(called.group(1), []) if called else []
        within = {one.name: one for one in body}
        source = body[-1] if body else None
    if source is None or source.opcode != "concatenate":
        return ()
    parts = [parse_result(within[name].result) for name in _operands(source) if name in within]
    return tuple(size for part in parts for _, size in part)


def _operands(instruction: _Instruction) -> tuple[str, ...]:
    """Return the names of an instruction's operands."""
    start = instruction.line.index(f" {instruction.opcode}(") + len(instruction.opcode) + 2
    return tuple(
        re.findall(r"%([\w.\-]+)", instruction.line[start : _closing(instruction.line, start)])
    )


def _closing(line: str, start: int) -> int:
    """Return the index of the bracket that closes the one before `start`."""
    depth = 1
    for index in range(start, len(line)):
        depth += (line[index] == "(") - (line[index] == ")")
        if depth == 0:
            return index
    return len(line)


def _async_result(result: str) -> str:
    """Return the result inside the type of an asynchronous start: (operands, results, contexts)."""
    if not result.startswith("("):
        return result
    parts, depth, start = [], 0, 1
    for index, character in enumerate(result):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(result[start:index].strip())
            start = index + 1
            if depth == 0:
                break
    return parts[1] if len(parts) > 1 else parts[0]


def _source(line: str, frames: _Frames) -> str:
    direct = _FILE_AND_LINE.search(line)
    if direct:
        return f"{direct.group(1).rsplit('/', 1)[-1]}:{direct.group(2)}"
    frame = _FRAME.search(line)
    return frames.describe(int(frame.group(1))) if frame else ""


def _read_frames(text: str) -> _Frames:
    tables: dict[str, dict[int, str]] = {
        name: {} for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    }
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if line.startswith(("ENTRY ", "%")):
            break
        if line in tables:
            table = tables[line]
            continue
        row = _TABLE_ROW.match(line)
        if row and table is not None:
            table[int(row.group(1))] = row.group(2)
    return _Frames(*tables.values())


def _number(text: str, field: str) -> int:
    found = re.search(rf"\b{field}=(\d+)", text)
    return int(found.group(1)) if found else 0


def _attribute(header: str, name: str) -> int:
    return _number(header, name) or 1
