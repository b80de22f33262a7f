import numpy as np
import pytest

from alpa_interchange.cluster import LinkSpec
from alpa_interchange.mesh import SubmeshSpec
from cost_model import cluster, logical_mesh
from cost_model.catalogue import LINKS
from cost_model.collective import collective_seconds
from cost_model.link_table import LinkFit, bus_factor, fit_line, link_rate, link_table

# seconds of all-reduces on A100, from VIA-Research/vTrain (MIT): 64 MiB and 1 GiB
MEASURED = {(2, 1 << 30): 5.4428e-3, (4, 1 << 30): 7.2594e-3, (8, 1 << 30): 8.193e-3}


def test_links_without_a_table_give_what_is_stated():
    link = LinkSpec(name="own", bandwidth=1e10, latency=3e-6, efficiency=0.5)
    assert link_rate(link, 8) == (5e9, 3e-6)


def test_more_devices_reach_more_of_a_switched_link():
    rates = [link_rate(LINKS["nvlink3"], count)[0] for count in (2, 4, 8)]
    assert rates == sorted(rates) and 150e9 < rates[0] < rates[2] < 300e9


def test_numbers_between_tables_take_the_smaller_one():
    assert link_rate(LINKS["nvlink3"], 6)[0] == link_rate(LINKS["nvlink3"], 4)[0]
    assert link_rate(LINKS["nvlink3"], 16)[0] == link_rate(LINKS["nvlink3"], 8)[0]


@pytest.mark.parametrize(("fitted", "reached"), [(0.5e10, 0.5e10), (2e10, 1e10)])
def test_no_fit_gives_a_link_more_than_its_stated_bandwidth(monkeypatch, fitted, reached):
    fit = LinkFit(
        link="own",
        collective="all-reduce",
        devices=2,
        latency=2e-5,
        bandwidth=fitted,
        num_rows=1,
        mape=0.0,
        source="",
    )
    monkeypatch.setattr("cost_model.link_table._all_reduces", lambda: {"own": {2: fit}})
    link = LinkSpec(name="own", bandwidth=1e10, latency=3e-6, efficiency=0.5)
    assert link_rate(link, 2) == (reached, 1e-5)


@pytest.mark.parametrize(("devices", "size"), MEASURED)
def test_measured_all_reduces_are_reproduced(devices, size):
    submesh = SubmeshSpec(num_hosts=1, devices_per_host=devices)
    mesh = logical_mesh(cluster("a100-80gb:8"), submesh, (devices,))
    seconds = collective_seconds("all-reduce", float(size), mesh.axes)
    assert seconds == pytest.approx(MEASURED[devices, size], rel=0.05)


def test_the_shipped_table_says_how_well_it_fits():
    fits = link_table().fits
    assert len(fits) == 18
    assert max(fit.mape for fit in fits if fit.collective == "all-reduce") < 0.04


def test_a_line_gives_its_latency_and_slope():
    sizes = np.geomspace(1e3, 1e9, 20)
    latency, slope, error = fit_line(sizes, 2e-5 + sizes / 1e11)
    assert (latency, slope, error) == pytest.approx((2e-5, 1e-11, 0.0), abs=1e-9)


def test_an_all_reduce_crosses_the_link_twice():
    assert bus_factor("all-reduce", 8) == 2 * bus_factor("all-gather", 8) == 2 * 7 / 8
