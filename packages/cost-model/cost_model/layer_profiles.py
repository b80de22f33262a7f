"""Reads measured layers of transformers from profiles.

    python -m cost_model.layer_profiles sailor_layer_seconds.csv[.gz] [--out FILE]

writes the table of `layer_table` from eth-easl/sailor's profiles (MIT): forward and backward pass
of a layer, collectives of tensor parallelism included, on GH200, A100, V100 and three consumer
GPUs. The profiles of GPT-Neo on GH200 are left out: the source repeats those of OPT-350 there.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
from pathlib import Path

from alpa_interchange.document import save
from cost_model.layer_table import LayerTable, LayerTime

_MODELS = {"OPT-350": (1024, 24), "OPT-30": (7168, 48), "GPT-Neo-2.7": (2560, 32),
           "LLAMA-3-8": (4096, 32)}  # fmt: skip
_DEVICES = {
    "GH-96": "gh200", "A100-40": "a100-40gb", "A100-80": "a100-80gb", "V100-16": "v100-16gb",
    "RTX-3090": "rtx-3090", "RTX-2080": "rtx-2080ti", "Titan-RTX": "rtx-titan",
}  # fmt: skip


def read_layers(path: Path) -> LayerTable:
    """Return the table of a CSV file with one row per layer, plain or compressed."""
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open()
    gathered: dict[tuple[str, str, int, int], list[tuple[int, float]]] = {}
    with opened as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["gpu"], int(row["micro_batch"]), int(row["tp"]))
            both = float(row["forward_seconds"]) + float(row["backward_seconds"])
            gathered.setdefault(key, []).append((int(row["layer"]), both))
    times = []
    for (model, gpu, micro_batch, tensor), rows in sorted(gathered.items()):
        if (model, gpu) == ("GPT-Neo-2.7", "GH-96"):
            continue
        hidden, layers = _MODELS[model]
        seconds = [both for _, both in sorted(rows)]
        times.append(
            LayerTime(
                device=_DEVICES[gpu],
                hidden=hidden,
                layers=layers,
                tensor=tensor,
                micro_batch=micro_batch,
                seconds=round(statistics.median(seconds[1:-1]), 7),
                first=round(seconds[0], 7),
                last=round(seconds[-1], 7),
            )
        )
    return LayerTable(source="eth-easl/sailor, MIT: layer profiles", times=tuple(times))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", type=Path, help="one row per layer, a CSV file or .gz of it")
    default = Path(__file__).parent / "data" / "layers.json"
    parser.add_argument("--out", type=Path, default=default, help="file of the table")
    options = parser.parse_args()
    save(read_layers(options.profiles), options.out)


if __name__ == "__main__":
    main()
