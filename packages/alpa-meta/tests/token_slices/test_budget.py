"""More programs of slices than a host compiles are refused, with the slices that are not too
many."""

import pytest

from alpa_meta.errors import PlanError
from alpa_meta.token_slices.budget import check_budget, num_programs


def test_more_programs_than_a_host_compiles_are_refused():
    with pytest.raises(PlanError, match="are 192 programs to compile on one host, 16 for each"):
        check_budget([{0}] * 8, "1f1b", 12)
    assert num_programs(2, "zero-bubble-h1", 3) == 18


def test_each_host_compiles_the_programs_of_its_own_stages():
    check_budget([{number} for number in range(8)], "1f1b", 64)
    with pytest.raises(PlanError, match="are 130 programs to compile on one host, 2 for each"):
        check_budget([{number} for number in range(8)], "1f1b", 65)


def test_a_stage_alone_is_one_program():
    check_budget([{0}], "1f1b", 1000)
