"""Programs in slices are compared with whole ones in double precision."""

import jax
import pytest


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield
