from io import StringIO

import pytest
from rich.console import Console

from alpa_meta.report.cluster import cluster_table
from cost_model import cluster


def _shown(table):
    output = StringIO()
    console = Console(file=output, width=160)
    console.print(table)
    return output.getvalue()


@pytest.mark.parametrize("name", ["h100:16", "host:8"])
def test_a_cluster_shows_its_devices(name):
    text = _shown(cluster_table(cluster(name, measure=False)))
    assert name in text
    assert "8" in text
