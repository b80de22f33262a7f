"""More programs of slices than are compiled are refused, with the slices that are not too many."""

import pytest

from alpa_meta.errors import PlanError
from alpa_meta.token_slices.budget import check_budget, num_programs


def test_more_programs_than_are_compiled_are_refused():
    with pytest.raises(PlanError, match="are 192 programs to compile"):
        check_budget(8, "1f1b", 12)
    assert num_programs(2, "zero-bubble-h1", 3) == 18 and num_programs(1, "1f1b", 3) == 1
