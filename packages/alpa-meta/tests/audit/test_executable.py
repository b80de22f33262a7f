"""An executable's audit is the audit of all its tasks."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from alpa_interchange import LogicalMesh, MeshAxis
from alpa_meta.audit.executable import audit_executable
from alpa_meta.audit.planned import PlannedCollective

TEXT = """HloModule m, num_partitions=4

ENTRY %main (p: f32[250]) -> f32[250] {
  %p = f32[250]{0} parameter(0)
  ROOT %r = f32[250]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""
PLANNED = PlannedCollective(kind="all-reduce", axes=("model",), bytes=1000, dtype="float32")


class TwoTasks:
    def __init__(self, backward=(PLANNED,)):
        self.backward = tuple(backward)

    def compiled_texts(self):
        return {"forward": TEXT, "backward": TEXT}

    def planned_collectives(self):
        return {"forward": (PLANNED,), "backward": self.backward}

    def logical_mesh(self, task):
        return LogicalMesh(axes=(MeshAxis(name="data", size=2), MeshAxis(name="model", size=2)))


def test_all_tasks_as_planned_are_the_plan():
    found = audit_executable(TwoTasks())
    assert found.ok and found.equal and found.exit_status == 0
    assert found.summary() == (
        "the program is its plan: 2 tasks, 2 compiled collectives for 2 planned, 2.0 kB sent per "
        "device, 1.000 of the plan's"
    )


def test_one_task_with_an_unplanned_collective_fails_the_executable():
    found = audit_executable(TwoTasks(backward=()))
    assert not found.ok and found.exit_status == 1
    assert "1 UNPLANNED: 2 tasks" in found.summary()
    assert "backward\n" in found.text() and "UNPLANNED" in found.text()
    assert str(found) == found.text()
    shown = StringIO()
    found.print(Console(file=shown, width=140))
    assert "UNPLANNED" in shown.getvalue()


def test_tasks_without_a_plan_are_refused():
    class Forgetful(TwoTasks):
        def planned_collectives(self):
            return {"forward": (PLANNED,)}

    with pytest.raises(ValueError, match=r"got \['backward'\] in one of the two only"):
        audit_executable(Forgetful())
