from alpa_interchange.schedule import Instruction
from mesh_runtime.heartbeats import Doing, Heartbeats, Progress

RUN = Instruction(kind="run", task="backward.1", microbatch=2)


def test_a_worker_says_what_it_is_at_and_whom_it_waits_for():
    doing = Doing(1, 0)
    assert str(doing.progress()) == "is idle"
    doing.at(7, 4, RUN)
    said = doing.progress()
    assert (said.step, said.position, said.microbatch, said.peer) == (7, 4, 2, "")
    doing.waiting("mesh 0 host 0")
    expected = "is at mesh 1, instruction 4 (run 'backward.1' of microbatch 2) of step 7, waiting"
    assert str(doing.progress()).startswith(f"{expected} for mesh 0 host 0 for 0.")
    doing.waiting("")
    assert doing.progress().peer == ""
    doing.nothing()
    assert doing.progress() == Progress(mesh=1, host=0)


def test_a_worker_that_does_not_answer_is_late_and_those_that_wait_are_not_to_blame():
    asked = []
    heartbeats = Heartbeats(["a", "b", "c"], lambda name: asked.append(name) or name, 0.0, 0.0)
    assert heartbeats.references() == ["a", "b", "c"] == asked
    waiting = Progress(mesh=0, host=0, position=3, instruction="receive", peer="b", seconds=1.0)
    assert heartbeats.answered("a", lambda reference: waiting)
    assert not heartbeats.answered("something else", lambda reference: waiting)
    assert heartbeats.references() == ["b", "c", "a"]  # only who answered is asked again
    assert asked == ["a", "b", "c", "a"]
    assert "b" in heartbeats.late()
    assert heartbeats.culprits(["a", "b"]) == ["b"] and heartbeats.culprits(["a"]) == ["a"]
    assert "a is at receive of step 0, waiting for b for 1.0 s" in heartbeats.described(["a", "b"])


def test_an_answer_that_fails_is_none():
    heartbeats = Heartbeats(["a"], lambda name: name, 0.0, 60.0)
    (reference,) = heartbeats.references()
    assert heartbeats.answered(reference, lambda reference: 1 / 0)
    assert heartbeats.last == {} and heartbeats.late() == []
