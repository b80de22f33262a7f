"""Reading and writing the JSON of the ASPLOS/EuroSys 2025 contest (google/iopddl), plain or gzip.

    {"problem": {"name": ..., "nodes": {"intervals": [[a, b], ...], "costs": [[...], ...],
     "usages": [[...], ...]}, "edges": {"nodes": [[i, j], ...], "costs": [[...], ...]},
     "usage_limit": ...}}

The arrays of numbers make up nearly all of a file (up to 1.3 GB). They are cut out and parsed in
pieces of a few MiB, so a file needs little more memory than its text and its arrays
-> _Sections; what is left is an ordinary small document. Every fault of a file is one
`ContestFileError` that says what must hold and where it does not.
"""

from __future__ import annotations

import gzip
import os
import re
import secrets
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alpa_interchange.selection import ShardingProblem

_PIECE = 1 << 23  # bytes of array text parsed at once
_MAX_BYTES = 4 << 30  # of text; the largest contest file has 1.3 GB
_ARRAY = re.compile(rb'"(intervals|costs|usages|nodes)"\s*:\s*\[')
_END = re.compile(rb"\]\s*\]")


class ContestFileError(ValueError):
    """A file is not a valid contest problem; the message says what and where."""


def read_problem(path: str | os.PathLike[str]) -> ShardingProblem:
    """Return the problem in the contest file `path` (`.json` or `.json.gz`)."""
    path = Path(path)
    return parse_problem(_text(path), source=str(path))


def parse_problem(text: bytes, *, source: str = "contest document") -> ShardingProblem:
    """Return the problem in the JSON `text` of a contest file; `source` names it in errors."""
    small, arrays = _cut_arrays(text, source)
    document = _load(small, source, "the document")
    problem = _member(document, "problem", dict, source)
    nodes = _member(problem, "nodes", dict, source)
    edges = _member(problem, "edges", dict, source) if "edges" in problem else {}
    intervals = _table(arrays, nodes, "intervals", "nodes.intervals", source, width=2)
    node_cost, num_strategies = _ragged(arrays, nodes, "costs", "nodes.costs", source)
    usages, num_usages = _ragged(arrays, nodes, "usages", "nodes.usages", source)
    if edges:
        pairs = _table(arrays, edges, "nodes", "edges.nodes", source, width=2)
        edge_cost, num_entries = _ragged(arrays, edges, "costs", "edges.costs", source)
    else:
        pairs = np.zeros((0, 2), dtype=np.int64)
        edge_cost, num_entries = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    _check_shapes(source, intervals, num_strategies, num_usages, usages, pairs, num_entries)
    limit = problem.get("usage_limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ContestFileError(f"{source}: usage_limit must be a whole number >= 0, got {limit!r}")
    name = problem.get("name", "")
    if not isinstance(name, str):
        raise ContestFileError(f"{source}: name must be a string, got {name!r}")
    return ShardingProblem(
        name=name,
        num_strategies=num_strategies,
        node_cost=node_cost,
        node_memory=usages,
        live=intervals,
        edges=pairs,
        edge_cost=edge_cost,
        memory_limit=limit,
    )


def write_problem(problem: ShardingProblem, path: str | os.PathLike[str]) -> None:
    """Write `problem` as a contest file, gzip if `path` ends in `.gz`; the file is replaced at
    once.

    The contest knows integers only: infinite costs are written as 10^18 (its forbidden mark), other
    numbers must be whole.
    """
    import orjson

    def rows(values: np.ndarray, counts: np.ndarray, name: str) -> list[list[int]]:
        whole = _whole(values, name)
        bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
        flat = whole.tolist()
        return [flat[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]

    count = problem.num_strategies
    pairs = problem.edges.reshape(-1, 2)
    value: dict[str, Any] = {
        "name": problem.name,
        "nodes": {
            "intervals": problem.live.reshape(-1, 2).tolist(),
            "costs": rows(problem.node_cost, count, "node_cost"),
            "usages": rows(problem.node_memory, count, "node_memory"),
        },
        "edges": {
            "nodes": pairs.tolist(),
            "costs": rows(problem.edge_cost, count[pairs[:, 0]] * count[pairs[:, 1]], "edge_cost"),
        },
    }
    if problem.memory_limit is not None:
        value["usage_limit"] = int(np.floor(problem.memory_limit))
    data = orjson.dumps({"problem": value})
    target = Path(path)
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def parse_choice(text: str, *, source: str = "solution") -> tuple[int, ...]:
    """Return the choice in `text`: its last line that starts with `[`, a list of whole numbers."""
    import orjson

    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("[")]
    if not lines:
        raise ContestFileError(f"{source}: must have a line like [0, 2, 1], found none")
    try:
        value = orjson.loads(lines[-1])
    except orjson.JSONDecodeError as error:
        raise ContestFileError(f"{source}: the last bracketed line is no list: {error}") from None
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise ContestFileError(f"{source}: a solution must hold whole numbers only")
    return tuple(value)


def _text(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as stream:
                text = stream.read(_MAX_BYTES + 1)
        else:
            with path.open("rb") as stream:
                text = stream.read(_MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ContestFileError(f"{path}: is not a complete gzip file: {error}") from None
    except OSError as error:
        raise ContestFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(text) > _MAX_BYTES:
        raise ContestFileError(f"{path}: has more than {_MAX_BYTES} bytes of text")
    return text


def _cut_arrays(text: bytes, source: str) -> tuple[bytes, dict[str, memoryview]]:
    """Return (text with every array of arrays replaced by a name no file can know, their texts).

    Arrays are cut only where no string can hold them: the first one-level-nested array after its
    key.
    """
    pieces: list[bytes] = []
    arrays: dict[str, memoryview] = {}
    token = secrets.token_hex(16)
    view = memoryview(text)
    place = 0
    while True:
        found = _ARRAY.search(text, place)
        if found is None:
            break
        first = found.end() - 1
        head = text[first + 1 : first + 4096].lstrip()
        if not head.startswith(b"["):  # empty, or not an array of arrays: left to the document
            pieces.append(bytes(view[place : found.end()]))
            place = found.end()
            continue
        last = _END.search(text, first)
        if last is None:
            raise ContestFileError(
                f"{source}: the array {found.group(1).decode()!r} at byte {first} is never closed"
            )
        name = f"{token}.{len(arrays)}"
        pieces += [bytes(view[place:first]), f'"{name}"'.encode()]
        arrays[name] = view[first : last.end()]
        place = last.end()
    pieces.append(bytes(view[place:]))
    small = b"".join(pieces)
    if len(small) > 1 << 26:
        raise ContestFileError(f"{source}: is not a contest document (no arrays of arrays found)")
    return small, arrays


def _load(text: bytes | memoryview, source: str, what: str) -> Any:
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ContestFileError(f"{source}: {what} is not valid JSON: {error}") from None


def _member(owner: Any, name: str, kind: type, source: str) -> Any:
    if not isinstance(owner, dict) or name not in owner:
        raise ContestFileError(f"{source}: must be a contest document; {name!r} is missing")
    if not isinstance(owner[name], kind):
        raise ContestFileError(f"{source}: {name!r} must be a JSON object")
    return owner[name]


def _rows(
    arrays: dict[str, memoryview], owner: dict[str, Any], name: str, where: str, source: str
) -> Iterator[list[list[int]]]:
    """Yield the rows of the array `owner[name]` in pieces."""
    if name not in owner:
        raise ContestFileError(f"{source}: {where} is missing")
    value = owner[name]
    if isinstance(value, list) and not value:
        return
    if not isinstance(value, str) or value not in arrays:
        raise ContestFileError(f"{source}: {where} must be a list of lists of whole numbers")
    view = arrays[value]
    inner_start, inner_stop = 1, len(view) - 1
    while inner_start < inner_stop:
        stop, size = inner_stop, _PIECE
        while inner_stop - inner_start > size:
            cut = bytes(view[inner_start : inner_start + size]).rfind(b"]")
            if cut >= 0:
                stop = inner_start + cut + 1
                break
            size *= 2  # a row longer than a piece is parsed at once
        piece = bytes(view[inner_start:stop])
        if b"true" in piece or b"false" in piece:
            raise ContestFileError(
                f"{source}: {where} must hold whole numbers, found true or false"
            )
        rows = _load(b"[" + piece.lstrip(b" \t\r\n,") + b"]", source, where)
        for row in rows:
            if not isinstance(row, list):
                raise ContestFileError(f"{source}: {where} must hold lists, found {row!r:.60}")
        yield rows
        inner_start = stop


def _ragged(
    arrays: dict[str, memoryview], owner: dict[str, Any], name: str, where: str, source: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (all numbers, length of each row) of an array of rows of whole numbers."""
    values: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for rows in _rows(arrays, owner, name, where, source):
        lengths.append(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
        flat = [item for row in rows for item in row]
        values.append(_integers(flat, where, source))
    if not values:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.concatenate(values), np.concatenate(lengths)


def _integers(flat: list[Any], where: str, source: str) -> np.ndarray:
    try:
        array = np.array(flat) if flat else np.zeros(0, dtype=np.int64)
    except (ValueError, OverflowError):
        array = np.zeros(0, dtype=object)
    if array.dtype != np.int64 or array.shape != (len(flat),):
        bad = next(
            (x for x in flat if isinstance(x, bool) or not isinstance(x, int) or abs(x) >= 2**63),
            None,
        )
        raise ContestFileError(
            f"{source}: {where} must hold whole numbers of at most 63 bits, found {bad!r:.60}"
        )
    return array


def _table(
    arrays: dict[str, memoryview],
    owner: dict[str, Any],
    name: str,
    where: str,
    source: str,
    *,
    width: int,
) -> np.ndarray:
    values, lengths = _ragged(arrays, owner, name, where, source)
    if len(lengths) and not (lengths == width).all():
        row = int(np.flatnonzero(lengths != width)[0])
        raise ContestFileError(
            f"{source}: {where}[{row}] must have {width} numbers, has {lengths[row]}"
        )
    return values.reshape(-1, width)


def _check_shapes(
    source: str,
    intervals: np.ndarray,
    num_strategies: np.ndarray,
    num_usages: np.ndarray,
    usages: np.ndarray,
    pairs: np.ndarray,
    num_entries: np.ndarray,
) -> None:
    num_nodes = len(num_strategies)
    if len(intervals) != num_nodes or len(num_usages) != num_nodes:
        raise ContestFileError(
            f"{source}: nodes.costs has {num_nodes} rows, nodes.usages {len(num_usages)} and "
            f"nodes.intervals {len(intervals)}; they must agree"
        )
    if len(num_strategies) and num_strategies.min() < 1:
        node = int(np.argmin(num_strategies))
        raise ContestFileError(f"{source}: nodes.costs[{node}] is empty; a node needs a strategy")
    if (num_strategies != num_usages).any():
        node = int(np.flatnonzero(num_strategies != num_usages)[0])
        raise ContestFileError(
            f"{source}: nodes.usages[{node}] has {num_usages[node]} numbers, nodes.costs[{node}] "
            f"has {num_strategies[node]}; they must agree"
        )
    if len(usages) and usages.min() < 0:
        raise ContestFileError(f"{source}: nodes.usages must not be negative, got {usages.min()}")
    if len(intervals) and intervals.min() < 0:
        raise ContestFileError(
            f"{source}: nodes.intervals must not be negative, got {intervals.min()}"
        )
    if len(pairs) != len(num_entries):
        raise ContestFileError(
            f"{source}: edges.nodes has {len(pairs)} rows, edges.costs "
            f"{len(num_entries)}; they must agree"
        )
    if len(pairs) and (pairs.min() < 0 or pairs.max() >= num_nodes):
        edge = int(np.flatnonzero((pairs < 0).any(1) | (pairs >= num_nodes).any(1))[0])
        raise ContestFileError(
            f"{source}: edges.nodes[{edge}] is {pairs[edge].tolist()}; nodes are 0..{num_nodes - 1}"
        )
    wanted = num_strategies[pairs[:, 0]] * num_strategies[pairs[:, 1]]
    if (wanted != num_entries).any():
        edge = int(np.flatnonzero(wanted != num_entries)[0])
        raise ContestFileError(
            f"{source}: edges.costs[{edge}] has {num_entries[edge]} numbers, its nodes need "
            f"{wanted[edge]}"
        )


def _whole(values: np.ndarray, name: str) -> np.ndarray:
    if values.dtype.kind == "i":
        return values
    forbidden = np.isposinf(values)
    finite = np.where(forbidden, 0.0, values)
    if (finite != np.rint(finite)).any() or (np.abs(finite) >= 2.0**63).any():
        raise ValueError(
            f"the contest format holds whole numbers; ShardingProblem.{name} has "
            "fractions: scale it"
        )
    whole = finite.astype(np.int64)
    whole[forbidden] = 10**18
    return whole
