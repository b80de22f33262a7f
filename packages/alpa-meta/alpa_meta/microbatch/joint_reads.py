"""Values of all examples that a loss takes together, as contrastive ones do: read whole.

    images, texts  ->  z_i, z_t  |  z_i z_t^T  ->  loss

No microbatch alone can make the products of all examples with all others. What they are made of is
early and small, though: a forward pass of its own puts z_i and z_t together over the microbatches,
as it adds up totals, and every microbatch then works out the whole loss and its gradient by z_i and
z_t, of which it takes its part and goes back. (GradCache: Gao et al., "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup", 2021, section 3, whose three steps these are.)

Only a loss is repeated so in every microbatch: where what is read whole meets weights again, as
after batch normalisation, each would run the rest of the model on all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from alpa_meta.compat import Atom, Jaxpr, JaxprEqn, Literal, Var, is_drop, shape_of
from alpa_meta.microbatch.cut_step import variables
from alpa_meta.microbatch.gathering import gathered
from alpa_meta.microbatch.placement import REPLICATED, SUM, Placement

MOST_ROUNDS = 4
"""Walks through a step: the first, and as many again as find more to read whole. The losses of
tests/test_joint_losses.py take three at most (a test), as that of correlations, which first mixes
predictions and then what they are multiplied by; one more is for losses that were not thought of,
and each costs about what the first does."""


def mixed_values(
    eqn: JaxprEqn,
    known: Mapping[Var, Placement],
    maker_of: Mapping[Var, JaxprEqn],
    trained: Collection[Var],
    may_be_whole: Callable[[Var], bool],
) -> frozenset[Var]:
    """Return the values of the examples that an equation mixes, and those that what it reads was
    made of once it was mixed; none if some of them cannot be put together.

    `may_be_whole` says of a value whether it is made before all that mixes examples. What no
    parameter is in is computed whole; truths that depend on parameters are made of the whole of
    what they compare.
    """
    found: set[Var] = set()
    seen: set[Var] = set()
    left: list[Atom] = list(eqn.invars)
    while left:
        atom = left.pop()
        if isinstance(atom, Literal) or atom in seen:
            continue
        seen.add(atom)
        kind = known.get(atom, REPLICATED).kind
        if kind == "replicated":
            continue
        if may_be_whole(atom) and kind != "mixed":
            if kind != "split":
                continue  # a sum that is a total
            if atom not in trained or gathered(atom) == SUM:
                found.add(atom)
                continue
        if atom not in maker_of:
            return frozenset()
        left += maker_of[atom].invars
    return frozenset(found)


def earliest(jaxpr: Jaxpr, found: Collection[Var]) -> list[Var]:
    """Return the values that are made of no other one among them, in order."""
    later: set[Var] = set()
    result = [var for var in jaxpr.invars if var in found]
    for eqn in jaxpr.eqns:
        made = [var for var in eqn.outvars if not is_drop(var)]
        if any(atom in later or atom in found for atom in variables(eqn)):
            later.update(made)
        else:
            result += [var for var in made if var in found]
    return result


def reading_whole(jaxpr: Jaxpr, whole_of: Mapping[Var, Var]) -> Jaxpr:
    """Return the step with every reader of a value reading the whole of it."""

    def read(eqn: JaxprEqn) -> JaxprEqn:
        if not any(atom in whole_of for atom in variables(eqn)):
            return eqn
        invars = [a if isinstance(a, Literal) else whole_of.get(a, a) for a in eqn.invars]
        changed: JaxprEqn = eqn.replace(invars=invars)
        return changed

    reads: Jaxpr = jaxpr.replace(eqns=[read(eqn) for eqn in jaxpr.eqns])
    return reads


def meets_weights(
    eqns: Sequence[JaxprEqn],
    phases: Sequence[str],
    whole: Collection[Var],
    weights: Collection[Var],
) -> bool:
    """Return whether values that are made of what is `whole` meet weights, or what is made of these
    alone, in the forward pass; scales and other vectors are none."""
    from_whole, from_weights = set(whole), set(weights)
    for eqn, phase in zip(eqns, phases, strict=False):
        if phase != "forward":
            continue
        read = variables(eqn)
        made = [var for var in eqn.outvars if not is_drop(var)]
        if any(atom in from_whole for atom in read):
            if any(atom in from_weights and len(shape_of(atom)) > 1 for atom in read):
                return True
            from_whole.update(made)
        elif read and all(atom in from_weights for atom in read):
            from_weights.update(made)
    return False
