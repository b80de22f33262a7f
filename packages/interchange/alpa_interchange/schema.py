"""JSON Schemas (draft 2020-12) of the documents, made from the classes that are read and written.

    python -m alpa_interchange.schema                 names of all documents
    python -m alpa_interchange.schema ParallelPlan    the schema of one
    python -m alpa_interchange.schema --write         write all to `alpa_interchange/schemas/`

The files are part of the package. A schema says names, types, which fields must be there, and the
limits of single fields; what several fields say together (a mesh axis used twice, a cost table of
another size) only the reader checks.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import alpa_interchange
from alpa_interchange import check
from alpa_interchange.document import SCHEMA_VERSION, has_content_hash

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = Path(__file__).with_name("schemas")

_PLAIN = {float: "number", int: "integer", str: "string", bool: "boolean", type(None): "null"}
_ARRAY = {
    "description": "Row-major numbers, here or in the .npz file beside the document.",
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "dtype": {"type": "string", "pattern": "^[<>|=][biuf][0-9]+$"},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                "data": {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {"type": ["number", "boolean"]},
                            {"enum": ["inf", "-inf", "nan"]},
                        ]
                    },
                },
            },
            "required": ["dtype", "shape", "data"],
        },
        {"type": "object", "properties": {"npz": {"type": "string"}}, "required": ["npz"]},
    ],
}


def documents() -> dict[str, type]:
    """Return the classes that documents are made of, by name: all that the package exports."""
    exported = ((name, getattr(alpa_interchange, name)) for name in alpa_interchange.__all__)
    return {name: kind for name, kind in exported if inspect.isclass(kind) and attrs.has(kind)}


def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON Schema of documents that hold a value of the class `kind`."""
    found: dict[str, Any] = {}
    _define(kind, found)
    return {
        "$schema": DIALECT,
        "title": kind.__name__,
        "type": "object",
        "properties": {
            "schema": {"const": kind.__name__},
            "version": {"type": "string", "pattern": rf"^{SCHEMA_VERSION[0]}\.[0-9]+$"},
            "value": {"$ref": f"#/$defs/{kind.__name__}"},
            **({"sha256": {"type": "string"}} if has_content_hash(kind) else {}),
        },
        "required": ["schema", "version", "value"],
        "$defs": found,
    }


def schema_text(kind: type) -> str:
    """Return the text of the schema's file."""
    return json.dumps(schema_of(kind), indent=1, sort_keys=True) + "\n"


def write_schemas(folder: Path = FOLDER) -> None:
    """Write the schema of every document to `folder`, and remove those of no document."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink()
    for name, kind in documents().items():
        (folder / f"{name}.json").write_text(schema_text(kind))


def _define(kind: type, found: dict[str, Any]) -> None:
    """Add the schema of an attrs class to `found`, and those of the classes it is made of."""
    if kind.__name__ in found:
        return
    found[kind.__name__] = {}  # a place for it: classes may hold each other
    hints = typing.get_type_hints(kind)
    members = attrs.fields(kind)
    found[kind.__name__] = {
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "type": "object",
        "properties": {
            one.name: {
                **_of_type(hints[one.name], found),
                **_limits(one.validator, hints[one.name]),
            }
            for one in members
        },
        "required": [one.name for one in members if one.default is attrs.NOTHING],
        "additionalProperties": False,
    }


def _of_type(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field of type `hint`; adds the classes it needs to `found`."""
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if hint is np.ndarray:
        found["array"] = _ARRAY
        return {"$ref": "#/$defs/array"}
    if inspect.isclass(hint) and attrs.has(hint):
        _define(hint, found)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_type(argument, found) for argument in arguments]}
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return {"type": "array", "items": _of_type(arguments[0], found)}
    if origin is tuple:
        items = [_of_type(argument, found) for argument in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin is Mapping and arguments[0] is str:
        return {"type": "object", "additionalProperties": _of_type(arguments[1], found)}
    if origin is Mapping and arguments[0] == tuple[int, int]:
        return {
            "type": "object",
            "patternProperties": {"^[0-9]+,[0-9]+$": _of_type(arguments[1], found)},
            "additionalProperties": False,
        }
    raise TypeError(f"fields of interchange classes cannot be of type {hint!r}")


def _limits(validator: Any, hint: Any) -> dict[str, Any]:
    """Return what a field's validator requires, as far as a schema can say it."""
    if isinstance(validator, check.OneOf):
        return {"enum": list(validator.options)}
    if validator is check.positive:
        return {"exclusiveMinimum": 0}
    if validator is check.non_negative:
        return {"minimum": 0}
    if validator is check.share:
        return {"exclusiveMinimum": 0, "maximum": 1}
    if validator is check.non_empty:
        return {"minLength": 1} if hint is str else {"minItems": 1}
    return {}


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    known = documents()
    if arguments == ["--write"]:
        write_schemas()
    elif not arguments:
        print("\n".join(known))
    elif len(arguments) == 1 and arguments[0] in known:
        print(schema_text(known[arguments[0]]), end="")
    else:
        print(f"give the name of one document: {', '.join(known)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
