"""What is known of masks: what is behind the rows of a slice, and whether rows keep a key.

See `masking` for what follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from alpa_meta.compat import Atom, JaxprEqn, dtype_of
from alpa_meta.operators.elementwise import is_masking_sum, is_selection
from alpa_meta.token_slices.bounds import After, Diagonal, Scope
from alpa_meta.token_slices.masking import MASKED, as_rest, rest_of_parts
from alpa_meta.token_slices.places import Layout
from alpa_meta.token_slices.reading import Reading
from alpa_meta.token_slices.values import BEFORE, Analysis, Value


class MaskFacts:
    """The masks of one program or body."""

    def __init__(self, found: Analysis, scope: Scope) -> None:
        self.found, self.scope = found, scope
        # By the ids of scope and value, and the layout: values are read by several.
        self._rests: dict[tuple[int, int, Layout], float | None] = {}

    def operand_rest(self, atom: Atom, value: Value, layout: Layout) -> float | None:
        """Return what an operand holds behind the last row of every slice."""
        if value.in_parts:
            return value.rest
        if value.when != BEFORE:
            return None
        return self._rest_of_known(self.scope, atom, layout)

    def _rest_of_known(self, scope: Scope, atom: Atom, layout: Layout) -> float | None:
        """Return what a value made of weights and a mask holds behind the rows of every slice,
        remembered."""
        key = (id(scope), id(atom), layout)
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
            return as_rest(constant, dtype_of(atom))
        made = scope.made_of(atom, layout)
        if made is None:
            return None
        scope, eqn, layouts = made
        pairs = zip(eqn.invars, layouts, strict=True)
        return rest_of_parts(eqn, [self._rest_of_known(scope, *pair) for pair in pairs])

    def row_lives(self, eqn: JaxprEqn, reading: Reading, rests: Sequence[float | None]) -> bool:
        """Return whether no row loses all its keys to a finite mask constant."""
        if is_selection(eqn) and rests[0] is not None:
            masked = int(rests[0])
            if self._is_infinite(eqn.invars[1 + masked], reading.operands[1 + masked]):
                return True
            own = self._on_diagonal(eqn.invars[0], reading.operands[0])
            return own is not None and own != masked
        for atom, layout, rest in zip(eqn.invars, reading.operands, rests, strict=True):
            if rest is None or not np.isinf(rest) or self.found.value(atom).in_parts:
                continue
            if not is_masking_sum(eqn) or self._is_infinite(atom, layout):
                continue
            if not self._lives(self.scope, atom, layout):
                return False
        return True

    def _lives(self, scope: Scope, atom: Atom, layout: Layout) -> bool:
        """Return whether a mask that is added leaves each row itself: on the diagonal it is made of
        moderate numbers and of weights, which are taken for such."""
        if not jnp.issubdtype(dtype_of(atom), jnp.floating):
            return True
        found = scope.bounds(atom, layout, Diagonal()).flat()
        if MASKED < found.low and found.high < -MASKED:
            return True
        made = scope.made_of(atom, layout)
        if made is None:
            return scope.is_weight(atom)
        scope, eqn, layouts = made
        pairs = list(zip(eqn.invars, layouts, strict=True))
        if is_selection(eqn):
            own = scope.bounds(*pairs[0], Diagonal()).constant
            pairs = pairs[1:] if own is None else [pairs[1 + int(own)]]
        elif not np.isinf(found.low) and not is_masking_sum(eqn) and len(pairs) > 1:
            return False  # a product of moderate numbers
        return all(self._lives(scope, *pair) for pair in pairs)

    def _on_diagonal(self, atom: Atom, layout: Layout) -> float | None:
        if self.found.value(atom).in_parts:
            return None
        return self.scope.bounds(atom, layout, Diagonal()).constant

    def _is_infinite(self, atom: Atom, layout: Layout) -> bool:
        """Return whether what masks is minus infinity, or came in masked, where it was judged."""
        if self.found.value(atom).in_parts:
            return True
        return bool(self.scope.bounds(atom, layout, After(0)).high == -np.inf)
