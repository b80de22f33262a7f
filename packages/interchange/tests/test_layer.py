"""Layers as documents."""

from alpa_interchange.document import from_json, to_json
from alpa_interchange.layer import Layer


def test_layers_survive_a_round_trip() -> None:
    layer = Layer(
        index=0,
        equivalence_class=0,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=4e6,
        boundary_bytes=1e5,
        name="block",
        recomputation="full",
    )
    assert from_json(to_json(layer), Layer) == layer
