"""Tensor types and sharding specs."""

import pytest

from alpa_interchange.document import from_json, to_json
from alpa_interchange.tensor import ShardingSpec, TensorType, dtype_bytes


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("int4", 0.5),
        ("uint2", 0.25),
        ("float8_e4m3fn", 1),
        ("bool", 1),
        ("complex64", 8),
        ("key<fry>", 8),
        ("key<rbg>", 16),
        ("key<urbg>", 16),
    ],
)
def test_a_dtype_has_the_bytes_its_name_says(dtype: str, expected: float) -> None:
    assert dtype_bytes(dtype) == expected


def test_a_dtype_without_a_size_is_refused() -> None:
    for dtype in ("string", "float99", "int", "float8", "32"):
        with pytest.raises(ValueError, match=f"'{dtype}' has no known size"):
            dtype_bytes(dtype)


def test_bytes_of_a_tensor_are_elements_times_their_bytes() -> None:
    assert TensorType((3, 5), "int4").bytes == 7.5
    assert TensorType((), "float32").size == 1
    assert TensorType((0, 7), "float32").bytes == 0


def test_a_spec_is_shown_with_axes_per_dim_and_unreduced_sums() -> None:
    assert str(ShardingSpec((("x", "y"), ()), ("z",))) == "[x+y, ·] partial(z)"
    assert str(ShardingSpec.replicated(2)) == "[·, ·]"
    assert ShardingSpec.replicated(0) == ShardingSpec(())


@pytest.mark.parametrize(
    ("dims", "partial"), [((("x",), ("x",)), ()), ((("x", "x"),), ()), ((("x",),), ("x",))]
)
def test_an_axis_is_used_once(dims: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="uses a mesh axis twice"):
        ShardingSpec(dims, partial)


def test_specs_survive_a_round_trip() -> None:
    spec = ShardingSpec((("x", "y"), ()), ("z",))
    assert from_json(to_json(spec), ShardingSpec) == spec
