"""Reading and writing interchange values as canonical JSON, with bulk arrays in an `.npz` side-car.

A *document* is `{"schema": <type name>, "version": "<major>.<minor>", "value": {...}}`. A reader
accepts every document of its own major version whose fields it knows, and refuses anything else
with a `DocumentError` that names the place. No pickle is ever read. Limits on size and nesting are
checked before parsing.

A document of a class that says `has_content_hash` also has `"sha256"`, of its value as canonical
JSON without spaces, arrays inline. A reader refuses one that does not match; without it a value is
read as it is.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import math
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import numpy as np
from attrs import fields, has
from cattrs import Converter
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn
from cattrs.v import format_exception, transform_error

SCHEMA_VERSION = (0, 3)
MAX_DOCUMENT_BYTES = 1 << 30
MAX_DEPTH = 64
_SIDE_CAR_BYTES = 1 << 20

T = TypeVar("T")

_ESCAPED = re.compile(r"\\.", re.DOTALL)  # only strings hold any; elsewhere no parser goes on


class DocumentError(ValueError):
    """A file or string is not a valid interchange document; the message says what and where."""


class _SideCar:
    """Collects the arrays of one document while it is written, or serves them while it is read."""

    def __init__(self, arrays: dict[str, np.ndarray] | None = None, collect: bool = False) -> None:
        self.arrays = {} if arrays is None else arrays
        self.collect = collect


def to_json(value: Any) -> str:
    """Return the canonical JSON document of an interchange `value`, arrays inline."""
    return _dump(value, _SideCar())


def from_json(text: str, kind: type[T], *, source: str = "document") -> T:
    """Return the interchange value of type `kind` in JSON `text`; DocumentError says what is
    wrong."""
    return _parse(text, kind, _SideCar(), source)


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write `value` to `path` at once or not at all; arrays over 1 MiB in total go to
    `<path>.npz`."""
    path = Path(path)
    side_car = _SideCar(collect=_array_bytes(value) > _SIDE_CAR_BYTES)
    text = _dump(value, side_car)
    bulk = path.with_name(path.name + ".npz")
    if side_car.arrays:
        with _replacing(bulk) as stream:
            np.savez_compressed(stream, **side_car.arrays)  # type: ignore[arg-type]
    elif bulk.exists():
        bulk.unlink()
    with _replacing(path) as stream:
        stream.write(text.encode())


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Return the interchange value of type `kind` stored at `path` by `save`."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_DOCUMENT_BYTES:
            raise DocumentError(
                f"{path}: {size} bytes; a document has at most {MAX_DOCUMENT_BYTES}"
            )
        text = path.read_bytes().decode()
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DocumentError(
            f"{path}: is not UTF-8 text, so it is no interchange document"
        ) from None
    arrays: dict[str, np.ndarray] = {}
    bulk = path.with_name(path.name + ".npz")
    if bulk.exists():
        arrays = _load_arrays(bulk)
    return _parse(text, kind, _SideCar(arrays), str(path))


def why_unwritable(path: Path, *, makes_folder: bool = True) -> str | None:
    """Return why a file cannot be written, None if it can; what writes it may make its folder.

    To be asked before time is spent on what the file is to hold.
    """
    folder = path.parent
    if makes_folder:
        folder = next(one for one in path.absolute().parents if one.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return "Is a directory" if path.is_dir() else None
    except OSError as error:
        return error.strerror


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file by name; its unpacked size is checked first."""
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(member.file_size for member in archive.infolist())
        if total <= MAX_DOCUMENT_BYTES:
            with np.load(path, allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
    except Exception as error:
        raise DocumentError(f"{path}: is not a readable array file: {error}") from None
    raise DocumentError(f"{path}: unpacks to {total} bytes, at most {MAX_DOCUMENT_BYTES} are read")


class _replacing:
    """A binary stream that replaces `path` when the block ends well and leaves it alone
    otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False)
        return self._stream

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stream.close()
        if kind is None:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(self._stream.name, 0o666 & ~mask)  # as open() would, not owner-only
            os.replace(self._stream.name, self.path)
        else:
            os.unlink(self._stream.name)


def _dump(value: Any, side_car: _SideCar) -> str:
    document = {
        "schema": type(value).__name__,
        "version": f"{SCHEMA_VERSION[0]}.{SCHEMA_VERSION[1]}",
        "value": _unstructured(value, side_car),
    }
    try:
        if has_content_hash(type(value)):
            document["sha256"] = _content_hash(value)
        return json.dumps(document, sort_keys=True, allow_nan=False, indent=1) + "\n"
    except ValueError as error:
        raise DocumentError(
            f"{type(value).__name__}: numbers must be finite, write None: {error}"
        ) from None


def has_content_hash(kind: type) -> bool:
    """Return whether documents of a class have a hash of their content."""
    return bool(getattr(kind, "has_content_hash", False))


def _content_hash(value: Any) -> str:
    """Return the hash of what a value says, however its document is formatted."""
    data = _unstructured(value, _SideCar())
    text = json.dumps(data, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _parse(text: str, kind: type[T], side_car: _SideCar, source: str) -> T:
    if len(text) > MAX_DOCUMENT_BYTES:
        raise DocumentError(
            f"{source}: {len(text)} characters; at most {MAX_DOCUMENT_BYTES} are read"
        )
    _check_depth(text, source)
    with _no_collections():
        return _read(text, kind, side_car, source)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage inside: a document has no cycles, and visiting what was read so far again
    and again takes half of the time (0.7 of 1.5 CPU seconds for a plan of 12 MB, 0.9 of 1.2 for
    15 MB of empty lists)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(text: str, kind: type[T], side_car: _SideCar, source: str) -> T:
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise DocumentError(f"{source}: is not valid JSON: {error}") from None
    if not isinstance(document, dict) or not {"schema", "version", "value"} <= set(document):
        raise DocumentError(f"{source}: must be an object with 'schema', 'version' and 'value'")
    if document["schema"] != kind.__name__:
        raise DocumentError(
            f"{source}: holds a {document['schema']!r}, but a {kind.__name__!r} is needed here"
        )
    try:
        major, minor = (int(part) for part in str(document["version"]).split("."))
    except ValueError:
        raise DocumentError(
            f"{source}: version {document['version']!r} is not MAJOR.MINOR"
        ) from None
    if major != SCHEMA_VERSION[0]:
        ours = ".".join(map(str, SCHEMA_VERSION))
        raise DocumentError(
            f"{source}: written in schema version {major}.{minor}, but this reader knows {ours}; "
            "install the alpa-interchange that wrote it"
        )
    try:
        value = _structured(document["value"], kind, side_car)
    except Exception as error:
        reasons = "; ".join(transform_error(error, "value", _reason)[:3])
        raise DocumentError(f"{source}: is not a valid {kind.__name__}: {reasons}") from None
    hashed = has_content_hash(kind) and "sha256" in document
    if hashed and document["sha256"] != _content_hash(value):
        raise DocumentError(
            f"{source}: was edited or damaged after it was written: 'sha256' is not that of its "
            "value; take the document as it was saved, or delete 'sha256' to have it read as it is"
        )
    return value


def _reason(error: BaseException, kind: type | None) -> str:
    """Return why one part of a document is not valid: our own words where there are any."""
    return str(error) if type(error) is ValueError else format_exception(error, kind)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(text: str, source: str) -> None:
    """Raise DocumentError where brackets outside of strings nest deeper than `MAX_DEPTH`.

    On whole arrays: a loop over the characters in Python takes longer than parsing them.
    """
    characters = np.frombuffer(_ESCAPED.sub("", text).encode(errors="replace"), dtype=np.uint8)
    in_string = np.logical_xor.accumulate(characters == ord('"'))
    opens = (characters == ord("[")) | (characters == ord("{"))
    closes = (characters == ord("]")) | (characters == ord("}"))
    steps = np.subtract(opens, closes, dtype=np.int8)[(opens | closes) & ~in_string]
    if np.cumsum(steps, dtype=np.int64).max(initial=0) > MAX_DEPTH:
        raise DocumentError(f"{source}: nested deeper than {MAX_DEPTH} levels")


def _array_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if has(type(value)):
        return sum(_array_bytes(getattr(value, field.name)) for field in fields(type(value)))
    if isinstance(value, (list, tuple)):
        return sum(_array_bytes(item) for item in value)
    if isinstance(value, dict):
        return sum(_array_bytes(item) for item in value.values())
    return 0


_SIDE_CAR: ContextVar[_SideCar] = ContextVar("side_car")
"""Of the document that is being read or written: the converter is made once, which takes as long as
reading a hundred small documents."""


def _unstructured(value: Any, side_car: _SideCar) -> Any:
    token = _SIDE_CAR.set(side_car)
    try:
        return _converter().unstructure(value)
    finally:
        _SIDE_CAR.reset(token)


def _structured(data: Any, kind: type[T], side_car: _SideCar) -> T:
    token = _SIDE_CAR.set(side_car)
    try:
        return _converter().structure(data, kind)
    finally:
        _SIDE_CAR.reset(token)


@functools.cache
def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, omit_if_default=True)

    def write_array(array: np.ndarray) -> Any:
        side_car = _SIDE_CAR.get()
        if side_car.collect:
            key = f"a{len(side_car.arrays)}"
            side_car.arrays[key] = array
            return {"npz": key}
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            data = [_float_text(number) for number in array.ravel().tolist()]
        else:
            data = array.ravel().tolist()
        return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}

    def read_array(data: Any, _: Any) -> np.ndarray:
        if not isinstance(data, dict):
            raise ValueError("an array must be an object")
        if "npz" in data:
            side_car = _SIDE_CAR.get()
            if data["npz"] not in side_car.arrays:
                raise ValueError(
                    f"array {data['npz']!r} is missing from the .npz beside the document"
                )
            return side_car.arrays[data["npz"]]
        dtype = np.dtype(str(data["dtype"]))
        if dtype.kind not in "biuf":
            raise ValueError(f"array dtype {dtype} is not a number")
        array = np.array(data["data"], dtype=dtype)
        if any(size < 0 for size in data["shape"]):
            raise ValueError(f"array shape {data['shape']} must not be negative")
        return array.reshape(data["shape"])

    def read_float(data: Any, _: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            raise ValueError(f"must be a number, got {data!r}")
        if not math.isfinite(data):
            raise ValueError(f"must be finite, got {data!r}")
        return float(data)

    def read_int(data: Any, _: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            raise ValueError(f"must be an integer, got {data!r}")
        return data

    def read_str(data: Any, _: Any) -> str:
        if not isinstance(data, str):
            raise ValueError(f"must be a string, got {data!r}")
        return data

    def read_bool(data: Any, _: Any) -> bool:
        if not isinstance(data, bool):
            raise ValueError(f"must be true or false, got {data!r}")
        return data

    for kind, reader in ((float, read_float), (int, read_int), (str, read_str), (bool, read_bool)):
        converter.register_structure_hook(kind, reader)
    converter.register_unstructure_hook(np.ndarray, write_array)
    converter.register_structure_hook(np.ndarray, read_array)
    converter.register_structure_hook_factory(
        has, lambda kind: make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True)
    )
    converter.register_structure_hook_factory(
        _is_by_pair, lambda kind: lambda data, _: _read_by_pair(converter, data, kind)
    )
    converter.register_unstructure_hook_factory(
        _is_by_pair,
        lambda kind: (
            lambda pairs: {
                f"{a},{b}": converter.unstructure(value) for (a, b), value in pairs.items()
            }
        ),
    )
    converter.register_unstructure_hook_factory(
        has, lambda kind: make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=True)
    )
    return converter


def _is_by_pair(kind: Any) -> bool:
    """Return whether a type is a mapping from pairs of integers, which JSON keys name "a,b"."""
    arguments = get_args(kind)
    return get_origin(kind) is Mapping and arguments[0] == tuple[int, int]


def _read_by_pair(converter: Converter, data: Any, kind: Any) -> dict[tuple[int, int], Any]:
    if not isinstance(data, dict):
        raise ValueError(f"must be an object, got {data!r}")
    found = {}
    for name, value in data.items():
        first, comma, second = str(name).partition(",")
        if not (comma and first.isdecimal() and second.isdecimal()):
            raise ValueError(f"a key must be two numbers such as '0,1', got {name!r}")
        found[int(first), int(second)] = converter.structure(value, get_args(kind)[1])
    return found


def _float_text(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
