"""Fits link bandwidths and latencies to measured collectives.

    python -m cost_model.link_fit TABLES_DIRECTORY [--out FILE]

reads `allreduce/*.txt` (nccl-tests columns: size, count, type, nanoseconds) and
`aceso_v100/prim_*_<collective>_<n>gpus.csv` (MB, milliseconds) and writes the fitted table. Each
entry is the relative least-squares line  seconds = latency + factor * bytes / bandwidth  with the
bus factor of the collective, 2 (n - 1) / n for an all-reduce and (n - 1) / n for the others.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from alpa_interchange.document import save
from cost_model.link_table import LinkFit, LinkTable, bus_factor, fit_line

_MIB = float(1 << 20)
_SOURCES = {
    "vtrain_a100": ("nvlink3", "VIA-Research/vTrain, NCCL tests on A100"),
    "vtrain_v100": ("nvlink2", "VIA-Research/vTrain, NCCL tests on V100"),
    "aceso": ("nvlink2-32gb", "microsoft/SuperScaler (Aceso), PyTorch collectives on V100-32GB"),
}


def fit_tables(directory: Path) -> LinkTable:
    """Return the lines of every table in `directory`."""
    fits = []
    for link, source, collective, devices, data in sorted(
        _tables(directory), key=lambda table: table[:4]
    ):
        latency, slope, error = fit_line(data[:, 0], data[:, 1])
        fits.append(
            LinkFit(
                link=link,
                collective=collective,
                devices=devices,
                latency=latency,
                bandwidth=bus_factor(collective, devices) / slope,
                num_rows=len(data),
                mape=error,
                source=source,
            )
        )
    return LinkTable(fits=tuple(fits))


def _tables(directory: Path) -> Iterator[tuple[str, str, str, int, np.ndarray]]:
    for path in sorted((directory / "allreduce").glob("*.txt")):
        name = re.fullmatch(r"(\w+)_(\d+)gpu", path.stem)
        if name and name[1] in _SOURCES:
            rows = list(csv.reader(path.open(encoding="utf-8")))[1:]
            data = np.array([(float(row[0]), float(row[3]) * 1e-9) for row in rows])
            yield (*_SOURCES[name[1]], "all-reduce", int(name[2]), data)
    gathered: dict[tuple[str, int], set[tuple[float, float]]] = {}
    for path in sorted((directory / "aceso_v100").glob("prim_*.csv")):
        name = re.search(r"_(all_reduce|all_gather|reduce_scatter|all_to_all)_(\d)gpus", path.stem)
        if not name:
            continue
        for size, milliseconds in list(csv.reader(path.open(encoding="utf-8")))[1:]:
            if float(milliseconds) > 0.02:  # the profiler writes 0 where it did not measure
                entry = (float(size) * _MIB, float(milliseconds) * 1e-3)
                gathered.setdefault((name[1].replace("_", "-"), int(name[2])), set()).add(entry)
    for (collective, devices), entries in gathered.items():
        yield (*_SOURCES["aceso"], collective, devices, np.array(sorted(entries)))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, help="folder with allreduce/ and aceso_v100/")
    default = Path(__file__).parent / "data" / "links.json"
    parser.add_argument("--out", type=Path, default=default, help="file of the fits")
    options = parser.parse_args()
    table = fit_tables(options.tables)
    if not table.fits:
        parser.error(
            f"{options.tables} must have tables of collectives, allreduce/*_<n>gpu.txt or "
            f"aceso_v100/prim_*_<n>gpus.csv, and has none; nothing was written"
        )
    save(table, options.out)
    for fit in table.fits:
        print(
            f"{fit.link:14} {fit.collective:15} {fit.devices:2} devices  "
            f"{fit.bandwidth / 1e9:7.1f} GB/s  {fit.latency * 1e6:6.1f} us  "
            f"MAPE {fit.mape:6.1%} of {fit.num_rows} rows"
        )


if __name__ == "__main__":
    main()
