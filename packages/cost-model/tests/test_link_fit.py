import pytest

from cost_model import link_fit
from cost_model.link_fit import fit_tables


def test_tables_of_both_formats_are_fitted(tmp_path):
    (tmp_path / "allreduce").mkdir()
    (tmp_path / "aceso_v100").mkdir()
    sizes = [1 << power for power in range(20, 30)]
    # columns as nccl-tests prints them, in nanoseconds: 40 us and 200 GB/s on 4 devices
    rows = [f"{s},{s // 4},float,{4e4 + 1.5 * s / 200:.1f},0,0,0" for s in sizes]
    (tmp_path / "allreduce" / "vtrain_a100_4gpu.txt").write_text("size\n" + "\n".join(rows))
    # MB and milliseconds: 0.1 ms and 25 GB/s on 2 devices; a zero means not measured
    lines = [f"{m},{0.1 + m * 2**20 / 2 / 25e9 * 1e3:.6f}" for m in (1, 16, 256)] + ["3,0.0"]
    name = "prim_gpt_1_3B_reduce_scatter_2gpus.csv"
    (tmp_path / "aceso_v100" / name).write_text("size,time\n" + "\n".join(lines))
    fits = {fit.collective: fit for fit in fit_tables(tmp_path).fits}
    ring = fits["all-reduce"]
    assert (ring.link, ring.devices, ring.num_rows) == ("nvlink3", 4, 10)
    assert ring.bandwidth == pytest.approx(200e9, rel=1e-3)
    assert ring.latency == pytest.approx(4e-5, rel=1e-2)
    assert fits["reduce-scatter"].bandwidth == pytest.approx(25e9, rel=1e-2)
    assert fits["reduce-scatter"].num_rows == 3


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_a_folder_without_tables_leaves_the_fits_as_they_are(arguments, tmp_path, monkeypatch):
    out = tmp_path / "links.json"
    out.write_text("as it was")
    given = arguments or [str(tmp_path), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["link_fit", *given])
    with pytest.raises(SystemExit) as stopped:
        link_fit.main()
    assert stopped.value.code == (0 if arguments else 2)
    assert out.read_text() == "as it was"
