"""Clusters described in TOML."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import NOTHING, evolve, fields

from alpa_interchange.cluster import ClusterSpec, DeviceSpec, GroupLink, HostGroup, LinkSpec
from cost_model.catalogue import DEVICES, HOSTS, LINKS


def read_cluster(path: str | os.PathLike[str]) -> ClusterSpec:
    """Return the cluster described by the TOML file at `path`.

    One `[[host_groups]]` table per kind of host. `preset` starts from a host of the catalogue,
    other keys are fields of `HostGroup` and override it; `device`, `intra_host`, `inter_host` and
    `host_link` are a catalogue name or a table of their fields (`preset` allowed there too).
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not valid TOML: it is no UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not valid TOML: {error}") from None
    return parse_cluster(data, source=str(path), name=path.stem)


def parse_cluster(
    data: Mapping[str, Any], *, source: str = "cluster", name: str = "cluster"
) -> ClusterSpec:
    """Return the cluster in the parsed TOML `data`; messages name `source` and the key."""
    known = {"name", "host_groups", "inter_group", "group_links"}
    _refuse_unknown(data, known, source)
    groups = data.get("host_groups")
    if not isinstance(groups, list) or not groups:
        raise ValueError(f"{source}: needs at least one [[host_groups]] table")
    inter_group = data.get("inter_group")
    links = data.get("group_links", [])
    return ClusterSpec(
        name=str(data.get("name", name)),
        host_groups=tuple(
            _host_group(table, f"{source}: host_groups[{index}]")
            for index, table in enumerate(groups)
        ),
        inter_group=None
        if inter_group is None
        else _part(inter_group, LinkSpec, LINKS, f"{source}: inter_group"),
        group_links=tuple(
            GroupLink(
                first=int(table["first"]),
                second=int(table["second"]),
                link=_part(table["link"], LinkSpec, LINKS, f"{source}: group_links[{index}].link"),
            )
            for index, table in enumerate(links)
        ),
    )


def _host_group(table: Any, place: str) -> HostGroup:
    if not isinstance(table, Mapping):
        raise ValueError(f"{place}: must be a table, got {table!r}")
    names = {attribute.name for attribute in fields(HostGroup)}
    _refuse_unknown(table, names | {"preset"}, place)
    values = {key: value for key, value in table.items() if key != "preset"}
    if "device" in values:
        values["device"] = _part(values["device"], DeviceSpec, DEVICES, f"{place}.device")
    for key in ("intra_host", "inter_host", "host_link"):
        if key in values:
            values[key] = _part(values[key], LinkSpec, LINKS, f"{place}.{key}")
    built: HostGroup = _build(HostGroup, values, table.get("preset"), HOSTS, place)
    return built


def _part(value: Any, kind: Any, catalogue: Mapping[str, Any], place: str) -> Any:
    if isinstance(value, str):
        return _preset(value, catalogue, place)
    if not isinstance(value, Mapping):
        raise ValueError(f"{place}: must be a catalogue name or a table, got {value!r}")
    _refuse_unknown(value, {attribute.name for attribute in fields(kind)} | {"preset"}, place)
    values = {key: entry for key, entry in value.items() if key != "preset"}
    return _build(kind, values, value.get("preset"), catalogue, place)


def _build(
    kind: Any, values: dict[str, Any], preset: Any, catalogue: Mapping[str, Any], place: str
) -> Any:
    try:
        if preset is not None:
            return evolve(_preset(str(preset), catalogue, f"{place}.preset"), **values)
        needed = [
            attribute.name
            for attribute in fields(kind)
            if attribute.default is NOTHING and attribute.name not in values
        ]
        if needed:
            raise ValueError(f"needs {', '.join(needed)} (or a preset that has them)")
        return kind(**values)
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ValueError(text if text.startswith(place) else f"{place}: {text}") from None


def _preset(name: str, catalogue: Mapping[str, Any], place: str) -> Any:
    if name not in catalogue:
        raise ValueError(f"{place}: {name!r} is not in the catalogue: {', '.join(catalogue)}")
    return catalogue[name]


def _refuse_unknown(table: Mapping[str, Any], known: set[str], place: str) -> None:
    extra = sorted(set(table) - known)
    if extra:
        raise ValueError(
            f"{place}: unknown key {', '.join(map(repr, extra))}; known are {sorted(known)}"
        )
