"""Stops real runs of `alpa train` by signals at random moments and resumes them, 50 times.

Prints for each signal what was lost, and at the end whether the run is the undisturbed one, bit for
bit. Every run is a process of its own: python benchmarks/interrupted_runs.py [SIGNALS]
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = "--layers 1 --hidden 16 --heads 2 --context 32 --batch 8 --cluster host:2".split()
OPTIONS = "--stages 1 --compare 0 --checkpoint-every 20".split()
STEPS_PER_SIGNAL = 30
MAIN = "from alpa_meta.cli import main; main()"
SAME = ("step", "loss", "gradient_norm", "learning_rate")


def rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [{name: json.loads(line)[name] for name in SAME} for line in lines]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", MAIN, "train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def main(signals: int) -> None:
    draw, stop = random.Random(0), str(STEPS_PER_SIGNAL * signals)
    lost, late = 0, 0.0
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place) / "whole", Path(place) / "run"
        sizes = [*SIZES, *OPTIONS, "--steps", stop]
        assert start(*sizes, "--out", str(whole)).wait() == 0
        expected = rows(whole)
        for k in range(signals):
            number = draw.choice([signal.SIGINT, signal.SIGTERM])
            resumed = folder.exists()
            process = start(
                *(["--resume", str(folder), *OPTIONS] if resumed else [*SIZES, *OPTIONS]),
                *([] if resumed else ["--out", str(folder), "--schedule-steps", stop]),
                *("--steps", stop, "--cluster", "host:2"),
            )
            before = len(rows(folder))
            wanted = before + draw.randrange(1, STEPS_PER_SIGNAL // 2)
            while len(rows(folder)) < wanted and process.poll() is None:
                time.sleep(0.002)
            time.sleep(draw.random() * 0.05)
            done, sent = len(rows(folder)), time.time()
            process.send_signal(number)
            status = process.wait()
            late = max(late, time.time() - sent)
            found = rows(folder)
            kept = max(
                (int(one.name[5:13]) for one in (folder / "checkpoint").glob("step-*")), default=0
            )
            lost += kept != len(found) or len(found) < done
            print(
                f"{k + 1}: {number.name} at step {done}, status {status}, steps in metrics "
                f"{len(found)}, checkpoint {kept}",
                flush=True,
            )
            assert status == 128 + number
            assert found == expected[: len(found)]
        resume = ["--resume", str(folder), *OPTIONS, "--cluster", "host:2", "--steps", stop]
        assert start(*resume).wait() == 0
        same = rows(folder) == expected
        print(
            f"{signals} signals: {lost} lost a finished step, the longest took {late:.1f} s; "
            f"all {len(expected)} steps equal those of the undisturbed run: {same}"
        )
        assert same and not lost


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
