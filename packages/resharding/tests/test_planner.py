import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resharding import Network, PlanOptions, check_plan, plan
from resharding.cases import paper_cases, random_task
from resharding.strategies import STRATEGIES

CASES = paper_cases()
# time over lower bound of the published algorithm's own modes under the same referee
ALPA_BROADCAST = {"case 2": 2.0, "case 3": 1.5, "case 4": 1.88, "case 5": 2.0, "case 6": 2.0}


@pytest.mark.parametrize("issue", ["host", "device", "none"])
@pytest.mark.parametrize("name", CASES)
def test_every_paper_case_is_within_two_per_cent_of_the_bound(name, issue):
    made = plan(CASES[name], Network(issue=issue))
    assert made.seconds <= 1.02 * made.lower_bound


def test_ordering_gains_what_the_naive_order_loses():
    for name, naive in ALPA_BROADCAST.items():
        made = plan(CASES[name])
        assert made.seconds * 1.4 < naive * made.lower_bound


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([*STRATEGIES, "auto"]))
def test_every_strategy_gives_a_valid_plan_for_any_task(seed, overlap, strategy):
    task = random_task(seed, overlap=overlap, longest=10)
    made = plan(task, Network(), strategy)
    check_plan(made)
    assert made.strategy in STRATEGIES


def test_auto_is_never_slower_than_a_named_strategy_without_search():
    network = Network(nic_bandwidth=1e4, device_bandwidth=1e5)
    options = PlanOptions(num_restarts=0, node_limit=0)
    for seed in range(25):
        task = random_task(seed, overlap=True, longest=24)
        best = plan(task, network)
        for name in STRATEGIES:
            if sum(len(t.receivers) for t in best.transfers) < 100:
                assert best.seconds <= plan(task, network, name, options).seconds * 1.0011


def test_equal_tasks_give_equal_plans():
    for seed in range(10):
        assert plan(random_task(seed, overlap=True)) == plan(random_task(seed, overlap=True))


def test_equal_layouts_on_the_same_devices_take_no_time(make_task):
    made = plan(make_task((16, 8), (2, 2), "S0 S1", (2, 2), "S0 S1", first_host=0))
    assert made.seconds == 0 and {t.method for t in made.transfers} == {"local"}


def test_a_host_that_holds_a_slice_never_takes_it_in_again(make_task):
    # rows over hosts -> columns over devices: each host lacks half of each column block
    task = make_task((16, 8), (2, 2), "S0 R", (2, 2), "R S1", first_host=0)
    for transfer in plan(task, Network(nic_bandwidth=1.0)).transfers:
        crossing = [r for r in transfer.receivers if r // 100 != transfer.sender // 100]
        half = 0 if transfer.sender < 100 else 8
        assert not crossing or transfer.start[0] == half


def test_broadcast_chains_enter_each_host_once():
    (chain,) = plan(CASES["1 to 4x2"]).transfers
    hosts = [device // 100 for device in chain.receivers]
    assert hosts == sorted(hosts)


def test_latency_limits_the_number_of_chunks(make_task):
    task = make_task((1 << 20,), (1, 1), "R", (4, 1), "R", dtype="int8")
    fast, slow = (
        plan(task, Network(latency=latency), "broadcast").transfers[0].num_chunks
        for latency in (1e-7, 1e-4)
    )
    assert 1 <= slow < fast


def test_sixty_four_slices_are_sixty_four_transfers():
    assert len(plan(CASES["case 4"]).transfers) == 64


def test_unknown_strategies_and_issue_models_are_refused():
    with pytest.raises(ValueError, match="strategy must be 'auto' or one of broadcast, send_recv"):
        plan(CASES["case 1"], strategy="magic")
    with pytest.raises(ValueError, match="Network.issue must be one of"):
        Network(issue="both")


def test_long_plans_are_valid_and_estimated(make_task):
    task = make_task((64, 64), (16, 2), "S01 R", (16, 2), "R S01")
    made = plan(task, Network(), options=PlanOptions(most_simulated=100))
    check_plan(made)
    assert len(made.transfers) == 1024
    simulated = plan(task, Network())
    assert made.seconds == pytest.approx(simulated.seconds, rel=0.1)
