import jax

from mesh_runtime.handshake import disagreement, identity


def test_equal_versions_agree():
    assert identity()["jax"] == jax.__version__
    assert disagreement({"mesh 0 host 0": identity(), "mesh 1 host 0": identity()}) is None


def test_every_difference_names_both_sides():
    other = {**identity(), "jax": "0.9.0", "schema": "7.1"}
    del other["mesh-runtime"]
    found = disagreement({"mesh 0 host 0": identity(), "mesh 1 host 0": other})
    assert found is not None
    assert f"mesh 1 host 0 has jax 0.9.0, this process {jax.__version__};" in found
    assert "mesh 1 host 0 has schema 7.1, this process" in found
    assert "mesh 1 host 0 has mesh-runtime of no known version" in found
    assert "mesh 0" not in found
