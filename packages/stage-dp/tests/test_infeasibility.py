"""The error carries what a caller needs to act on it."""

from stage_dp import InfeasibleError


def test_the_error_is_a_value_error_with_bytes_and_remedy():
    error = InfeasibleError("does not fit", missing_bytes=5.0, remedy="use twice the hosts")
    assert isinstance(error, ValueError)
    assert (str(error), error.missing_bytes, error.remedy) == (
        "does not fit",
        5.0,
        "use twice the hosts",
    )
