"""Random training steps under random options compute what the plain step does."""

import pytest
from random_steps.cases import SEEDS, random_case, require_right


@pytest.mark.sample(seed=1)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_losses(seed):
    require_right(random_case("losses", seed))


@pytest.mark.sample(seed=3)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_chains_of_operators(seed):
    require_right(random_case("chains", seed))


@pytest.mark.sample(seed=3)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_scans_over_layers(seed):
    require_right(random_case("scans", seed))


@pytest.mark.sample(seed=4)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_structures(seed):
    require_right(random_case("structures", seed))
