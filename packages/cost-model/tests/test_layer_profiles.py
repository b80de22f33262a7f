import gzip

import pytest

from alpa_interchange.document import load
from cost_model import layer_profiles
from cost_model.layer_table import LayerTable

# eth-easl/sailor (MIT), OPT-350 on GH200, tensor parallelism 4
ROWS = """\
model,gpu,micro_batch,tp,layer,forward_seconds,backward_seconds,update_seconds
OPT-350,GH-96,8,4,0,0.00092,0.0,0.0
OPT-350,GH-96,8,4,1,0.00268,0.00647,0.00048
OPT-350,GH-96,8,4,2,0.00269,0.00647,0.00048
OPT-350,GH-96,8,4,3,0.00401,0.00594,0.0
GPT-Neo-2.7,GH-96,8,4,0,0.00092,0.0,0.0
"""


def test_tables_give_the_median_layer_and_both_ends(tmp_path, monkeypatch):
    path = tmp_path / "layers.csv.gz"
    path.write_bytes(gzip.compress(ROWS.encode()))
    out = tmp_path / "layers.json"
    monkeypatch.setattr("sys.argv", ["layer_profiles", str(path), "--out", str(out)])
    layer_profiles.main()
    (time,) = load(out, LayerTable).times  # the source repeats OPT-350 as GPT-Neo there: left out
    assert (time.device, time.hidden, time.tensor, time.micro_batch) == ("gh200", 1024, 4, 8)
    assert time.seconds == pytest.approx(9.155e-3, abs=1e-6)
    assert (time.first, time.last) == pytest.approx((0.92e-3, 9.95e-3), abs=1e-6)
