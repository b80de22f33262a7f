"""The table of all operators, and the questions asked of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import jax.numpy as jnp
from attrs import fields

from alpa_interchange import ShardingRule
from alpa_meta import compat
from alpa_meta.compat import JaxprEqn, dtype_of, shape_of
from alpa_meta.operators import (
    contraction,
    convolution,
    cutting,
    elementwise,
    indexing,
    layout,
    linalg,
    ordering,
    random,
    reduction,
    window,
)
from alpa_meta.operators.operator import (
    CountFunction,
    Groups,
    LocalFunction,
    Operator,
    RuleFunction,
    contracted,
    jointly,
    run_unchanged,
)
from alpa_meta.operators.regions import is_conditional
from alpa_meta.operators.work import all_bytes, copied_results, result_elements
from alpa_meta.program_caches import cached_by_program, forget_programs
from alpa_meta.types import Function

_OPERATORS: dict[str, Operator] = {
    **elementwise.OPERATORS,
    **contraction.OPERATORS,
    **convolution.OPERATORS,
    **layout.OPERATORS,
    **cutting.OPERATORS,
    **indexing.OPERATORS,
    **reduction.OPERATORS,
    **ordering.OPERATORS,
    **window.OPERATORS,
    **random.OPERATORS,
    **linalg.OPERATORS,
}
_UNKNOWN = Operator(elementwise.unknown_rule, heavy=False)
_KERNEL_CALL = "pallas_call"


def register(
    primitive_name: str,
    rule: RuleFunction,
    local: LocalFunction = run_unchanged,
    linear: bool | Callable[[JaxprEqn], bool] = False,
    *,
    linear_in: Sequence[int | Sequence[int]] = (),
    **facts: object,
) -> None:
    """Give the primitive called `primitive_name` a sharding rule, in place of any it has.

    `rule` maps an equation to its ShardingRule, with one entry per operand and result; `local` runs
    the operator on the parts of its operands (by default: the primitive itself, unchanged).

    `linear_in` says which operands it is linear in, as a gradient is in the cotangent: (0, 2) means
    in operand 0 and in operand 2, the others held; [(0, 1)] in operands 0 and 1 together, as a sum
    is. `linear=True` stands for all operands together. Sums over microbatches or devices that are
    not completed yet pass through an operator only where it is linear in them.

    The other facts of an `Operator` are derived from the rule where they are not given: `flops` and
    `bytes` (functions of the equation), `heavy`, `kernel`, `liveness`, and so on.

    Pallas kernels are told apart by their name: "pallas_call:flash_forward" is the kernel called
    with `pl.pallas_call(..., name="flash_forward")`, "pallas_call" any other.
    """
    for name, function in (("rule", rule), ("local", local)):
        if not callable(function):
            raise TypeError(
                f"the {name} of {primitive_name!r} must be a function (of the equation, such as "
                "`lambda eqn: ShardingRule.parse(...)`, or of a LocalCall), got "
                f"{function!r}"
            )
    groups = _groups(primitive_name, linear_in)
    if groups and linear:
        raise ValueError(
            f"the operator {primitive_name!r} is linear in all its operands (linear={linear!r}) "
            f"or in some (linear_in={linear_in!r}), not both; give one of them"
        )
    unknown = set(facts) - {one.name for one in fields(Operator)}
    if unknown:
        raise TypeError(
            f"an operator has no fact called {min(unknown)!r}; the facts of {primitive_name!r} may "
            f"be {', '.join(one.name for one in fields(Operator))}"
        )
    if linear:
        together = jointly if linear is True else _where(linear)
        facts["linear_in"] = together
    else:
        facts["linear_in"] = groups
    made: Function[Operator] = Operator  # the names of `facts` are its fields
    _OPERATORS[primitive_name] = made(rule, local, **facts)
    forget_programs()


def _where(linear: Callable[[JaxprEqn], bool]) -> Callable[[JaxprEqn], Groups]:
    return lambda eqn: jointly(eqn) if linear(eqn) else ()


def _groups(name: str, linear_in: Sequence[int | Sequence[int]]) -> Groups:
    """Return the groups of operands, a number alone being a group of its own."""
    groups = tuple((one,) if isinstance(one, int) else tuple(one) for one in linear_in)
    members = [operand for group in groups for operand in group]
    if any(not isinstance(k, int) or k < 0 for k in members) or len(set(members)) < len(members):
        raise ValueError(
            f"linear_in of {name!r} must name operands by position from 0, each once, got "
            f"{linear_in!r}"
        )
    return groups


def known_primitives() -> frozenset[str]:
    """Return the names of the primitives in the table."""
    return frozenset(_OPERATORS)


@cached_by_program(1 << 17)
def operator_of(eqn: JaxprEqn) -> Operator:
    """Return the table entry of an equation's primitive, or of its kernel."""
    return _OPERATORS.get(_entry_name(eqn), _UNKNOWN)


def is_known(eqn: JaxprEqn) -> bool:
    """Return whether an equation's primitive, or its kernel, has a table entry."""
    return _entry_name(eqn) in _OPERATORS


def _entry_name(eqn: JaxprEqn) -> str:
    name = str(eqn.primitive.name)
    kernel = f"{name}:{compat.kernel_name(eqn)}" if name == _KERNEL_CALL else ""
    return kernel if kernel in _OPERATORS else name


@cached_by_program(1 << 17)
def is_heavy(eqn: JaxprEqn) -> bool:
    """Return whether an equation chooses its own strategy instead of following an operand."""
    heavy = operator_of(eqn).heavy
    return _contracts(eqn) if heavy is None else heavy


def kernel_kind(eqn: JaxprEqn) -> str:
    """Return what the seconds of an equation are fitted on, one of `KERNELS`."""
    return operator_of(eqn).kernel or ("matmul" if _contracts(eqn) else "elementwise")


def flops(eqn: JaxprEqn) -> float:
    """Return the floating-point operations of `eqn`; a multiply-add is two.

    The body of a loop is counted once; of several branches the largest counts.
    """
    signature = operator_signature(eqn)
    if isinstance(signature, _Signature):
        return _flops_of(signature)
    return _of_bodies(eqn, flops, _flops)


def traffic_bytes(eqn: JaxprEqn) -> float:
    """Return the bytes that `eqn` moves through memory; bodies of loops are counted once."""
    return _of_bodies(eqn, traffic_bytes, _bytes)


def reads_windows(eqn: JaxprEqn) -> bool:
    """Return whether an operator copies parts of its first operand, and reads no more of it."""
    return operator_of(eqn).bytes is copied_results


def _of_bodies(eqn: JaxprEqn, inner: CountFunction, own: CountFunction) -> float:
    bodies = compat.subjaxprs(eqn)
    if not bodies or is_known(eqn) or compat.cost_estimate(eqn):
        return own(eqn)
    totals = [sum(map(inner, compat.open_jaxpr(body).eqns)) for _, body in bodies]
    return max(totals) if is_conditional(eqn) else sum(totals) * compat.num_programs(eqn)


def _flops(eqn: JaxprEqn) -> float:
    stated = operator_of(eqn).flops
    if stated is not None:
        return stated(eqn)
    estimate = compat.cost_estimate(eqn)
    if estimate is not None:
        return float(estimate.flops)
    rule = sharding_rule(eqn)
    if rule is not None and contracted(rule):
        return 2.0 * math.prod(factor.size for factor in rule.factors)
    return result_elements(eqn)


def _bytes(eqn: JaxprEqn) -> float:
    stated, estimate = operator_of(eqn).bytes, compat.cost_estimate(eqn)
    if stated is None and estimate is not None:
        return float(estimate.bytes_accessed)
    return (stated or all_bytes)(eqn)


def _contracts(eqn: JaxprEqn) -> bool:
    signature = operator_signature(eqn)
    if isinstance(signature, _Signature):
        return _contracts_of(signature)
    rule = sharding_rule(eqn)
    return rule is not None and bool(contracted(rule))


@cached_by_program(1 << 17)
def sharding_rule(eqn: JaxprEqn) -> ShardingRule | None:
    """Return the sharding rule of `eqn`, or None if it can only run replicated.

    The rule has an entry for every operand, literals included.
    """
    signature = operator_signature(eqn)
    return _rule_of(signature) if isinstance(signature, _Signature) else _computed(eqn)


@cached_by_program(1 << 17)
def rule_number(eqn: JaxprEqn) -> int:
    """Return a number that is equal for equations of one primitive, types, rule and work."""
    return _number_of(operator_signature(eqn))


@cached_by_program(1 << 17)
def operator_signature(eqn: JaxprEqn) -> JaxprEqn | _Signature:
    """Return what is equal for equations of one primitive, types and parameters.

    The equation itself where its parameters cannot be compared.
    """
    params = tuple([(name, eqn.params[name]) for name in sorted(eqn.params)])
    key = (
        eqn.primitive.name,
        tuple((shape_of(a), getattr(a.aval, "dtype", None)) for a in eqn.invars),
        tuple((shape_of(v), getattr(v.aval, "dtype", None)) for v in eqn.outvars),
        params,
    )
    try:
        return _same(_Signature(eqn, key))
    except TypeError:
        return eqn


@cached_by_program(1 << 17)
def linear_operands(eqn: JaxprEqn) -> bool:
    """Return whether `eqn` is linear in its tensor operands together.

    If so, and if all of them are unreduced sums over the same axes, so is its result.
    """
    summed = [atom for atom in eqn.invars if not isinstance(atom, compat.Literal)]
    if not summed or not all(jnp.issubdtype(dtype_of(atom), jnp.number) for atom in summed):
        return False
    return operator_of(eqn).passes_sums(eqn)


def _computed(eqn: JaxprEqn) -> ShardingRule | None:
    rule = operator_of(eqn).rule(eqn)
    if rule is None:
        return None
    ranks = [len(shape_of(atom)) for atom in (*eqn.invars, *eqn.outvars)]
    stated = [len(dims) for dims in (*rule.operands, *rule.results)]
    if ranks != stated:
        raise ValueError(
            f"the sharding rule of {eqn.primitive.name!r} must have one entry per dim of every "
            f"operand and result: ranks are {ranks}, the rule {rule} has {stated}"
        )
    return rule


class _Signature:
    """An equation compared by primitive, types and parameters, so that each rule is made once."""

    def __init__(self, eqn: JaxprEqn, key: tuple[Hashable, ...]) -> None:
        self.eqn, self.key, self._hash = eqn, key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Signature) and self.key == other.key


@cached_by_program(1 << 14)
def _same(signature: _Signature) -> _Signature:
    """Return one object for all equal ones: it is compared with itself in no time."""
    return signature


@cached_by_program(1 << 14)
def _number_of(signature: JaxprEqn | _Signature) -> int:
    eqn = signature.eqn if isinstance(signature, _Signature) else signature
    types = [tuple(str(atom.aval) for atom in atoms) for atoms in (eqn.invars, eqn.outvars)]
    key = (_entry_name(eqn), *types, sharding_rule(eqn), flops(eqn), traffic_bytes(eqn))
    return _NUMBERS.setdefault(key, len(_NUMBERS))


_NUMBERS: dict[Hashable, int] = {}


@cached_by_program(4096)
def _rule_of(signature: _Signature) -> ShardingRule | None:
    return _computed(signature.eqn)


@cached_by_program(4096)
def _contracts_of(signature: _Signature) -> bool:
    rule = _rule_of(signature)
    return rule is not None and bool(contracted(rule))


@cached_by_program(4096)
def _flops_of(signature: _Signature) -> float:
    return _of_bodies(signature.eqn, flops, _flops)
