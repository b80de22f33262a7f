"""Random bits. They depend on the whole shape, so each device draws them all and keeps its part.

The compiler fuses the cut into the counter-based generator, so that only the part is computed.
Keys of the default (counter-based) generator are drawn from one by one, so batches of keys may be
sharded; other generators are treated as a whole.
"""

from __future__ import annotations

from typing import Any

from alpa_interchange import ShardingRule
from alpa_meta.rules.operator import (
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    result_shapes,
    run_whole,
)


def _draw_rule(eqn: Any) -> ShardingRule:
    """Return the rule of drawing from keys [keys]: the result is [keys, drawn]."""
    (keys, *others), (shape,) = operand_shapes(eqn), result_shapes(eqn)
    factors = Factors()
    dims = factors.each(shape)
    independent = str(eqn.invars[0].aval.dtype) == "key<fry>" and not others
    held: list[Dim] = dims[: len(keys)] if independent else [()] * len(keys)
    rest: list[list[Dim]] = [[()] * len(other) for other in others]
    return factors.rule([held, *rest], [dims])


def _run_draw(call: LocalCall) -> list[Any]:
    (whole,) = call.bind()
    held = [dim for dim in call.rule.operands[0] if dim]
    dims = [d for d, dim in enumerate(call.rule.results[0]) if dim and dim not in held]
    return [call.own_part(whole, 0, dims)]


def _wrap_rule(eqn: Any) -> ShardingRule:
    """Return the rule of turning words into keys or back: only the dim of words stays whole."""
    before, after = operand_shapes(eqn)[0], result_shapes(eqn)[0]
    factors = Factors()
    shared = factors.each(before if len(before) < len(after) else after)
    words: Dim = ()
    return factors.rule(
        [shared + [words] * (len(before) - len(shared))],
        [shared + [words] * (len(after) - len(shared))],
    )


def _generator_rule(eqn: Any) -> ShardingRule:
    """Return the rule of a generator with a state: (state) -> (state, bits)."""
    factors = Factors()
    state, bits = result_shapes(eqn)
    operands: list[list[Dim]] = [[()] * len(shape) for shape in operand_shapes(eqn)]
    return factors.rule(operands, [[()] * len(state), factors.each(bits)])


def _uniform_rule(eqn: Any) -> ShardingRule:
    operands: list[list[Dim]] = [[()] * len(shape) for shape in operand_shapes(eqn)]
    return Factors().rule(operands, [[()] * len(shape) for shape in result_shapes(eqn)])


OPERATORS = {
    "random_bits": Operator(_draw_rule, _run_draw),
    "random_split": Operator(_draw_rule, _run_draw),
    "random_gamma": Operator(_draw_rule, _run_draw),
    "random_wrap": Operator(_wrap_rule),
    "random_unwrap": Operator(_wrap_rule),
    "rng_bit_generator": Operator(_generator_rule, run_whole),
    "rng_uniform": Operator(_uniform_rule),
}
