"""Corpus programs are their plans under random plans: collectives, bytes, numerics."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import pytest

from alpa_meta.audit.random_plans import mesh_of_shape, random_audits
from alpa_meta.corpus import build


@pytest.mark.skipif(find_spec("equinox") is None, reason="equinox is not installed")
@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 host devices")
def test_a_random_plan_of_a_perceptron_is_obeyed_and_right():
    found = random_audits(build("equinox-mlp")).audit(mesh_of_shape((2, 4)), jax.devices(), 0)
    assert found.audit.ok, found.audit.text()
    assert found.audit.collectives.ratio <= 1
    assert found.text().startswith("ok   equinox-mlp random plan 0: the program is its plan")


def test_a_mesh_with_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="needs 64 devices"):
        random_audits(build("dropout-mlp"), numerics=False).audit(
            mesh_of_shape((8, 8)), jax.devices(), 0
        )
    with pytest.raises(ValueError, match="1 to 4 axes"):
        mesh_of_shape((1, 1, 1, 1, 1))
