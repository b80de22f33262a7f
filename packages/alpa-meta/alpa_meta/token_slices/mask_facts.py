"""What is known of masks: what is behind the rows of a slice, and whether rows keep a key.

See `masking` for what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, dtype_of, shape_of
from alpa_meta.operators import sharding_rule
from alpa_meta.operators.elementwise import (
    extreme_taken,
    is_comparison,
    is_elementwise,
    is_masking_sum,
    is_selection,
)
from alpa_meta.token_slices.bounds import After, Diagonal, Own, Scope
from alpa_meta.token_slices.masking import is_masked, is_soft, masked, rest_of_parts
from alpa_meta.token_slices.places import BLOCK, KEY, ROW, Layout, Place, Slices, kinds
from alpa_meta.token_slices.reading import Reading
from alpa_meta.token_slices.values import BEFORE, Analysis, Value


class MaskFacts:
    """The masks of one program or body."""

    def __init__(self, found: Analysis, scope: Scope) -> None:
        self.found, self.scope = found, scope
        self._rests: dict[tuple[Scope, Var, Layout], float | None] = {}  # values have many readers
        self.within: dict[Var, frozenset[int]] = {}  # dims within a block of keys

    def operand_rest(self, atom: Atom, value: Value, layout: Layout) -> float | None:
        """Return what an operand holds behind the last row of every slice."""
        whole_keys = KEY in kinds(layout) and KEY not in kinds(value.layout)
        if value.in_parts and not whole_keys:
            return value.rest
        if value.when != BEFORE and not value.in_parts:
            return None
        return self._rest_of_known(self.scope, atom, layout)

    def _rest_of_known(self, scope: Scope, atom: Atom, layout: Layout) -> float | None:
        """Return what a value made of weights and a mask, or whose rows have all keys, holds behind
        the rows of every slice, remembered."""
        if isinstance(atom, Literal):
            return self._made_rest(scope, atom, layout)
        key = scope, atom, layout
        if key not in self._rests:
            self._rests[key] = self._made_rest(scope, atom, layout)
        return self._rests[key]

    def _made_rest(self, scope: Scope, atom: Atom, layout: Layout) -> float | None:
        found = {
            scope.bounds(atom, layout, After(number)).constant
            for number in range(self.found.slices.count - 1)
        }
        (constant,) = found if len(found) == 1 else (None,)
        if constant is not None:
            return constant
        made = scope.made_of(atom, layout)
        if made is None:
            return None
        scope, eqn, layouts = made
        pairs = list(zip(eqn.invars, layouts, strict=True))
        rests = [self._rest_of_known(scope, *pair) for pair in pairs]
        if is_comparison(eqn) and None in rests:
            return None
        rest = rest_of_parts(eqn, rests)
        if rest is not None and not is_masked(rest, dtype_of(atom)):  # exp of what was left out
            low = [p for p, one in zip(pairs, rests) if is_soft(one, dtype_of(p[0]))]
            own = diagonal([layout], self.found.slices)
            own = None if scope.in_blocks else own
            if low and (own is None or not all(self._lives(scope, *pair, own) for pair in low)):
                return None
        return rest

    def tells_apart(self, eqn: JaxprEqn, reading: Reading, rests: Sequence[float | None]) -> bool:
        """Return whether a masked score behind a slice is unequal to what it is compared with: the
        largest score of a row with a live key is finite; other unknown numbers may be masked."""
        pairs = zip(map(self.found.value, eqn.invars), reading.operands, rests, strict=True)
        return not is_comparison(eqn) or all(
            rest is not None or one.in_parts and KEY not in kinds(layout) and not one.dead
            for one, layout, rest in pairs
        )

    def is_dead(self, eqn: JaxprEqn, reading: Reading) -> bool:
        """Return whether a token's own key may be masked in a result: by a mask that is not known
        to be true there, or one that is added and not known to be moderate there. Sums over other
        dims, such as scores of queries and keys, are taken for moderate."""
        rule = sharding_rule(eqn)
        pairs = list(zip(eqn.invars, reading.operands, strict=True))
        own = diagonal((*reading.operands, *reading.results), self.found.slices)
        if self.scope.in_blocks:
            found = self._in_block(eqn, reading)
            if found is None:
                return True
            pairs, own = found, Own()
        factors = rule.factors if rule is not None and self.scope.in_blocks else ()
        reduced = {factor.reduction for factor in factors if factor.kind == "reduction"}
        if reading.reduced_keys == "max" or reduced == {"max"}:
            return self.is_low(*pairs[0], own)
        if rule is None or any(factor.kind == "reduction" for factor in rule.factors):
            return False
        if is_selection(eqn):
            which = None if own is None else self._on_diagonal(*pairs[0], own)
            pairs = pairs[1:] if which is None else [pairs[1 + int(which)]]
        elif not is_elementwise(eqn):
            pairs = [pair for pair in pairs if self.found.value(pair[0]).in_parts]
        taken = extreme_taken(eqn)
        most = math.inf if taken == "min" else None  # the scores are no larger for it
        low = (self.is_low(*pair, own, most) for pair in pairs)
        return all(low) if taken == "max" else any(low)

    def follow(self, eqn: JaxprEqn) -> None:
        """Note which dims of the results are those within a block of keys."""
        names = self._within_names(eqn)
        rule = sharding_rule(eqn) if names else None
        for var, dims in zip(eqn.outvars, rule.results if rule else (), strict=False):
            self.within[var] = frozenset(d for d, dim in enumerate(dims) if {*dim} & names)

    def within_of(self, named: Mapping[Var, Atom]) -> dict[Var, frozenset[int]]:
        """Return the dims within a block of keys of what has other names in a region."""
        pairs = ((var, atom) for var, atom in named.items() if isinstance(atom, Var))
        return {var: self.within[atom] for var, atom in pairs if atom in self.within}

    def _within_names(self, eqn: JaxprEqn) -> set[str]:
        """Return the factors of an operator that are dims within a block of keys."""
        rule, names = sharding_rule(eqn), set[str]()
        for atom, dims in zip(eqn.invars, rule.operands if rule else (), strict=False):
            held = self.within.get(atom, ()) if isinstance(atom, Var) else ()
            names |= {dims[d][0] for d in held if len(dims[d]) == 1}
        return names

    def _in_block(self, eqn: JaxprEqn, reading: Reading) -> list[tuple[Atom, Layout]] | None:
        """Return the operands of an operator in loops over blocks of tokens, whose layouts say
        which dims are those within a block; None where the rows may have changed dims."""
        pairs = list(zip(eqn.invars, reading.operands, strict=True))
        (layout, *_), shape = reading.results, shape_of(eqn.outvars[0])
        loops, names, rule = self.scope.blocks, self._within_names(eqn), sharding_rule(eqn)
        if KEY not in kinds(layout) and not names:
            return pairs
        if not is_elementwise(eqn):
            values = [self.found.value(atom) for atom, _ in pairs]
            masked_ones = [one for one in values if one.in_parts and one.rest is not None]
            sizes = [sorted(size for size in shape_of(atom) if size > 1) for atom, _ in pairs]
            laid_out = len(pairs) == 1 and sizes[0] == sorted(size for size in shape if size > 1)
            return pairs if laid_out or not masked_ones else None
        assert rule is not None
        keys = {d for d, dim in enumerate(rule.results[0]) if {*dim} & names}
        rows: list[int] = []
        queries = [place for place in loops if place.kind == ROW]
        if queries:
            block = self.scope.chunk(queries[0])
            rows = [
                d for d, s in enumerate(shape) if s == block and not layout[d] and d not in keys
            ]
            if block < 2 or len(rows) > 1 or len(queries) > 1:
                return None
        marked = []
        for atom, one in pairs:
            held = [
                Place(BLOCK, cuts=(0, size)) if size > 1 and d in (*keys, *rows) else p
                for d, (p, size) in enumerate(zip(one, shape_of(atom)))
            ]
            marked.append((atom, tuple(held)))
        return marked

    def is_low(
        self, atom: Atom, layout: Layout, own: Diagonal | None, most: float | None = None
    ) -> bool:
        """Return whether a mask may have left out a token's `own` key in a value, or made it larger
        than `most`."""
        value = self.found.value(atom)
        if value.in_parts or value.when != BEFORE:
            return value.dead
        return own is None or not self._lives(self.scope, atom, layout, own, most)

    def _lives(
        self,
        scope: Scope,
        atom: Atom,
        layout: Layout,
        own: Diagonal,
        most: float | None = None,
    ) -> bool:
        """Return whether a mask that is added leaves each row itself: on the diagonal it is made of
        moderate numbers, or up to `most`, and of weights, which are taken for such."""
        if not jnp.issubdtype(dtype_of(atom), jnp.floating):
            return True
        found, moderate = scope.bounds(atom, layout, own).flat(), masked(dtype_of(atom)) / 2
        if -moderate < found.low and found.high <= (most or moderate):
            return True
        made = scope.made_of(atom, layout)
        if made is None:
            return scope.is_weight(atom)
        scope, eqn, layouts = made
        pairs = list(zip(eqn.invars, layouts, strict=True))
        if is_selection(eqn):
            which = scope.bounds(*pairs[0], own).constant
            pairs = pairs[1:] if which is None else [pairs[1 + int(which)]]
        elif not np.isinf(found.low) and not is_masking_sum(eqn) and len(pairs) > 1:
            return False  # a product of moderate numbers
        return all(self._lives(scope, *pair, own) for pair in pairs)

    def _on_diagonal(self, atom: Atom, layout: Layout, own: Diagonal) -> float | None:
        if self.found.value(atom).in_parts:
            return None
        return self.scope.bounds(atom, layout, own).constant


def diagonal(layouts: Sequence[Layout], slices: Slices) -> Diagonal | None:
    """Return where each row's own key is: at its number, or behind keys that stand in front of the
    tokens; None where that cannot be said."""
    places = [place for layout in layouts for place in layout if place is not None]
    rows, keys = ({one.cuts for one in places if one.kind == kind} for kind in (ROW, KEY))
    if len(rows | keys) < 2 and (rows or keys <= {()}):
        return Diagonal()
    if rows != {()} or len(keys) > 1:
        return None
    (cuts,) = keys
    first = {cut - own for cut, own in zip(cuts[1:], slices.cuts[1:], strict=True)}
    return Diagonal(first.pop()) if len(first) == 1 and min(first) >= 0 else None
