"""Operator graphs: order, roles, refusals."""

from typing import Any

import pytest

from alpa_interchange.document import from_json, to_json
from alpa_interchange.graph import Layer, LayerGraph, Op, OpGraph, Value
from alpa_interchange.rule import ShardingRule
from alpa_interchange.tensor import TensorType

FLOAT = TensorType((8, 8), "float32")
MATMUL = ShardingRule.parse("m k, k n -> m n", {"m": 8, "k": 8, "n": 8})


def op(operands: tuple[int, ...], results: tuple[int, ...], **more: Any) -> Op:
    return Op(name="dot", operands=operands, results=results, rule=MATMUL, flops=1024.0, **more)


def graph(*ops: Op, outputs: tuple[int, ...] = (2,)) -> OpGraph:
    values = (
        Value(type=FLOAT, role="batch", name="batch['x']"),
        Value(type=FLOAT, role="state", name="state['w']"),
        Value(type=FLOAT),
        Value(type=FLOAT),
    )
    return OpGraph(values=values, ops=ops, inputs=(0, 1), outputs=outputs, aliases=((1, 2),))


def test_a_graph_survives_a_round_trip() -> None:
    value = graph(op((0, 1), (2,)), op((2, 1), (3,), phase="backward", trips=4), outputs=(3,))
    assert from_json(to_json(value), OpGraph) == value


def test_an_op_may_read_only_what_exists() -> None:
    with pytest.raises(ValueError, match="op 'dot' reads value 3 before it exists"):
        graph(op((0, 3), (2,)))


def test_outputs_must_be_produced() -> None:
    with pytest.raises(ValueError, match=r"outputs \[3\] are produced by no op"):
        graph(op((0, 1), (2,)), outputs=(2, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phase": "sideways"}, "Op.phase must be one of"),
        ({"bytes": -1.0}, "Op.bytes must be at least 0"),
    ],
)
def test_impossible_ops_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op((0, 1), (2,), **changes)


def test_a_value_has_a_known_role() -> None:
    with pytest.raises(ValueError, match="Value.role must be one of"):
        Value(type=FLOAT, role="gradient")


def test_layers_survive_a_round_trip() -> None:
    layer = Layer(
        index=0,
        equivalence_class=0,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=4e6,
        boundary_bytes=1e5,
        name="block",
    )
    value = LayerGraph(layers=(layer,), layer_of_op=(0, 0, 0))
    assert from_json(to_json(value), LayerGraph) == value
