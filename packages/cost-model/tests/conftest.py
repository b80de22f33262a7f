"""What several tests use: a private home for profiles, and pipeline schedules written by hand."""

from __future__ import annotations

import io
import tarfile

import pytest

from alpa_interchange.schedule import Instruction, PipelineSchedule


@pytest.fixture(autouse=True)
def private_profiles(tmp_path, monkeypatch):
    """Keep tests from reading or writing the profiles of whoever runs them."""
    monkeypatch.setenv("ALPA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def operator_archive(tmp_path):
    """Return a function of (folder, models, operators) -> an archive in Aceso's format: two
    microbatches and two tensor-parallel sizes of each model, every operator one microsecond."""

    def build(folder, models, operators):
        table = "op_name,forward-compute\n" + "".join(f"{name},1\n" for name in operators)
        path = tmp_path / "profiles.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for model in models:
                for batch in (1, 4):
                    for tensor in (1, 4):
                        name = f"{folder}/{model}_mbs{batch}_tp{tensor}_algo0.csv"
                        member = tarfile.TarInfo(name)
                        member.size = len(table)
                        archive.addfile(member, io.BytesIO(table.encode()))
        return path

    return build


@pytest.fixture
def pipeline():
    """Return a function of (stages, microbatches, warm-up forwards of stage i) -> schedule.

    Tasks are F0.. and B0.., values a0@m.. and g0@m..; stages free what they no longer need.
    """

    def build(num_stages, num_microbatches, warm_up, frees=True):
        programs = []
        for stage in range(num_stages):
            program: list[Instruction] = []
            first, last = stage == 0, stage == num_stages - 1

            def forward(m, stage=stage, program=program, first=first, last=last):
                given = () if first else (f"a{stage - 1}@{m}",)
                if not first:
                    program.append(Instruction(kind="receive", outputs=given, peer=stage - 1))
                made = (f"a{stage}@{m}",)
                program.append(
                    Instruction(
                        kind="run", task=f"F{stage}", phase="forward", stage=stage, microbatch=m,
                        inputs=given, outputs=made,
                    )
                )  # fmt: skip
                if not last:
                    program.append(Instruction(kind="send", inputs=made, peer=stage + 1))

            def backward(m, stage=stage, program=program, first=first, last=last):
                given = () if last else (f"g{stage + 1}@{m}",)
                if not last:
                    program.append(Instruction(kind="receive", outputs=given, peer=stage + 1))
                made = (f"g{stage}@{m}",)
                program.append(
                    Instruction(
                        kind="run", task=f"B{stage}", phase="backward", stage=stage, microbatch=m,
                        inputs=(f"a{stage}@{m}", *given), outputs=made,
                    )
                )  # fmt: skip
                if not first:
                    program.append(Instruction(kind="send", inputs=made, peer=stage - 1))
                if frees:
                    old = () if first else (f"a{stage - 1}@{m}",)
                    program.append(
                        Instruction(kind="free", inputs=(f"a{stage}@{m}", *old, *given, *made))
                    )

            early = min(num_microbatches, warm_up(stage))
            for m in range(early):
                forward(m)
            for m in range(num_microbatches):
                backward(m)
                if m + early < num_microbatches:
                    forward(m + early)
            programs.append(tuple(program))
        return PipelineSchedule(
            name="written by hand", num_stages=num_stages, num_microbatches=num_microbatches,
            programs=tuple(programs),
        )  # fmt: skip

    return build


@pytest.fixture
def stage_seconds():
    """Return a function of (stages, forward seconds, backward seconds) -> task seconds."""

    def build(num_stages, forward=1.0, backward=2.0):
        forwards = {f"F{stage}": forward for stage in range(num_stages)}
        return forwards | {f"B{stage}": backward for stage in range(num_stages)}

    return build


class MadeUpMachine:
    """A measurer of an imaginary machine whose times follow a known law."""

    def __init__(self, platform="gpu", kind="Imaginary 9000", devices=4):
        self.platform, self.kind, self.devices = platform, kind, devices
        self.peaks = {"float32": 1e13, "tensorfloat32": 4e13, "bfloat16": 8e13}
        self.peaks["float8_e4m3fn"] = 16e13
        self.calls = []

    def describe(self):
        return self.platform, self.kind, "made up 1.0", 16e9

    def num_devices(self):
        return self.devices

    def prepare(self, measurements):
        self.prepared = list(measurements)

    def matmul(self, m, n, k, dtype, num_devices):
        self.calls.append(("matmul", dtype, num_devices))
        many = num_devices if self.platform == "cpu" else 1
        return 1e-5 + many * 2.0 * m * n * k / self.peaks[dtype]

    def elementwise(self, size, dtype):
        return 1e-5 + 12.0 * size / 5e11

    def collective(self, kind, bytes, num_devices):
        factor = 2 if kind == "all-reduce" else 1
        share = 1.0 if kind == "collective-permute" else (num_devices - 1) / num_devices
        return 3e-5 + factor * share * bytes / 4e10

    def to_device(self, bytes):
        return 1e-5 + bytes / 1e10

    def layer(self, hidden, seq, batch, dtype):
        return 1e-3, 3e-3


@pytest.fixture
def made_up_machine():
    """Return the class of imaginary machines."""
    return MadeUpMachine
