"""Which equations of a program are the same operator of equal layers, so that one choice serves
all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_name, open_jaxpr, shape_of
from alpa_meta.operators import rule_number
from alpa_meta.operators.regions import bodies, is_region
from alpa_meta.passes.shared_reads import is_shared_read
from alpa_meta.pinning import is_pin, pinned_spec
from alpa_meta.program_caches import cached_by_program


def fold_keys(
    eqns: Sequence[JaxprEqn],
    phases: Sequence[str],
    layers: Sequence[int | None],
    marks: Mapping[Var, Hashable] | None = None,
) -> list[Hashable | None]:
    """Return a key per equation, equal for equations at the same place of equal layers.

    Layers are equal when their equations agree one by one in primitive, phase, sharding rule, types
    and in which equation of the layer each operand comes from. The update is compared whatever its
    order, which follows the names of parameters ("block_10" comes before "block_2"). Equations
    without a layer get None. With `marks`, equal layers also read operands of equal marks.
    """
    members: dict[int, list[int]] = {}
    for k, layer in enumerate(layers):
        if layer is not None:
            members.setdefault(layer, []).append(k)
    classes: dict[Hashable, int] = {}
    keys: list[Hashable | None] = [None] * len(eqns)
    for layer in sorted(members):
        ordered = _ordered(eqns, phases, members[layer])
        own = [eqns[k] for k in ordered]
        signature = _signature(own, [phases[k] for k in ordered], marks or {})
        number = classes.setdefault(signature, len(classes))
        for place, k in enumerate(ordered):
            keys[k] = (number, place)
    return keys


def layer_classes(
    keys: Sequence[Hashable | None], layers: Sequence[int | None], num_layers: int
) -> list[int]:
    """Return the class number of each layer, the last of those without equations."""
    known = [key[0] for key in keys if isinstance(key, tuple)]
    found = [max(known, default=-1) + 1] * num_layers
    for key, layer in zip(keys, layers, strict=True):
        if layer is not None and isinstance(key, tuple):
            found[layer] = key[0]
    return found


@cached_by_program(1 << 17)
def eqn_signature(eqn: JaxprEqn) -> Hashable:
    """Return what an equation does, up to the values it works on: primitive, rule, types, work."""
    if is_region(eqn):
        inner = tuple(eqn_signature(sub) for body in bodies(eqn) for sub in open_jaxpr(body).eqns)
        return eqn.primitive.name, _types(eqn), eqn.params.get("length"), inner
    if is_pin(eqn):
        return eqn.primitive.name, _types(eqn), str(pinned_spec(eqn))
    return rule_number(eqn)


def _ordered(eqns: Sequence[JaxprEqn], phases: Sequence[str], members: Sequence[int]) -> list[int]:
    """Return the equations of a layer, those of the update last and in an order by what they do.

    An equation of the update ranks by itself, by where what it reads comes from, and by what reads
    it: moments of equal shape differ only in the gradient that is added to them later.
    """
    before = _with_reads_in_place(eqns, [k for k in members if phases[k] != "update"])
    update = [k for k in members if phases[k] == "update"]
    origin: dict[Var, Hashable] = {}
    for place, k in enumerate(before):
        origin.update(((var, (place, number)) for number, var in enumerate(eqns[k].outvars)))
    ranks: dict[int, int] = {}
    for k in update:
        read = tuple(
            [
                None if isinstance(atom, Literal) else origin.get(atom) or shape_of(atom)
                for atom in eqns[k].invars
            ]
        )
        ranks[k] = hash((eqn_signature(eqns[k]), read))
        origin.update(((var, (ranks[k], n)) for n, var in enumerate(eqns[k].outvars)))
    readers: dict[Atom, list[int]] = {}
    for k in reversed(update):
        read_by = tuple([tuple(sorted(readers.get(var, ()))) for var in eqns[k].outvars])
        ranks[k] = hash((ranks[k], read_by))
        for atom in eqns[k].invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(ranks[k])
    return before + sorted(update, key=ranks.__getitem__)


def _with_reads_in_place(eqns: Sequence[JaxprEqn], members: Sequence[int]) -> list[int]:
    """Return the equations of a layer in an order in which what is read once for other layers is
    behind the equation that makes it, or behind all.

    It stands in front of its first reader, between equations of the layer or not: where layers in
    between are left out (`short_step`), copies of one layer differed in that.
    """
    read = {atom for k in members for atom in eqns[k].invars if not isinstance(atom, Literal)}
    moved = [k for k in members if is_shared_read(eqns[k]) and eqns[k].outvars[0] not in read]
    if not moved:
        return list(members)
    kept = [k for k in members if k not in moved]
    maker = {var: k for k in kept for var in eqns[k].outvars}
    behind: dict[int | None, list[int]] = {}
    for k in moved:
        atom = eqns[k].invars[0]
        after = None if isinstance(atom, Literal) else maker.get(atom)
        behind.setdefault(after, []).append(k)
    found = [one for k in kept for one in (k, *behind.get(k, ()))]
    return found + behind.get(None, [])


def _signature(
    eqns: Sequence[JaxprEqn], phases: Sequence[str], marks: Mapping[Var, Hashable]
) -> Hashable:
    place: dict[Var, tuple[Hashable, ...]] = {}
    outside: dict[Var, int] = {}
    parts = []
    for k, (eqn, phase) in enumerate(zip(eqns, phases, strict=True)):
        origins: list[Hashable] = []
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                origins.append("literal")
                continue
            inside = place.get(atom)
            if inside is None:
                number = outside.setdefault(atom, len(outside))
                inside = ("outside", number, marks.get(atom, 0))
            origins.append(inside)
        parts.append((phase, eqn_signature(eqn), tuple(origins)))
        for number, var in enumerate(eqn.outvars):
            place[var] = (k, number)
    return tuple(parts)


def _types(eqn: JaxprEqn) -> Hashable:
    return tuple(_type(atom) for atom in eqn.invars), tuple(_type(var) for var in eqn.outvars)


def _type(atom: Atom) -> tuple[tuple[int, ...], str]:
    return tuple(shape_of(atom)), dtype_name(getattr(atom.aval, "dtype", ""))
