import math

import pytest

from alpa_interchange import ReshardingTask, TensorType
from resharding import Network, plan
from resharding.notation import parse_placed


@pytest.mark.parametrize(("holders", "receivers"), [(1, 1), (1, 3), (1, 7), (2, 6), (3, 3), (4, 5)])
@pytest.mark.parametrize("issue", ["host", "device"])
def test_holders_go_on_sending_while_those_they_fed_do(issue, holders, receivers):
    task = ReshardingTask(
        tensor=TensorType((10,), "int8"),
        source=parse_placed(f"{holders}x1:R"),
        target=parse_placed(f"{receivers}x1:R", holders),
    )
    network = Network(issue=issue, latency=1.0, nic_bandwidth=1e9)
    made = plan(task, network, "slice_tree")
    # those who have it double in a latency
    rounds = math.ceil(math.log2(1 + receivers / holders))
    assert made.seconds == pytest.approx(rounds, rel=1e-6)
    assert plan(task, network).seconds == pytest.approx(rounds, rel=1e-6)
