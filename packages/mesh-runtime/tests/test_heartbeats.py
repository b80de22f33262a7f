from types import SimpleNamespace

from alpa_interchange.schedule import Instruction
from mesh_runtime.heartbeats import Doing, Heartbeats, Progress

RUN = Instruction(kind="run", task="backward.1", microbatch=2)
MESSAGE = "step 7: h@2 from mesh 0 to mesh 1, message 2"
RECEIVE = Instruction(kind="receive", outputs=("h@2",), peer=0, microbatch=2)


def transfer(peers, quiet):
    return SimpleNamespace(awaited=lambda: (peers, quiet))


def test_a_worker_says_what_it_is_at_and_whom_it_waits_for():
    doing = Doing(1, 0)
    assert str(doing.progress()) == "is idle"
    doing.at(7, 4, RUN)
    said = doing.progress()
    assert (said.step, said.position, said.microbatch, said.peers) == (7, 4, 2, ())
    expected = "is at mesh 1, instruction 3 (receive of microbatch 2 of h@2 from mesh 0) of step 7"
    for peers, named in ((("mesh 0 host 0",), "mesh 0 host 0"), ((), "mesh 0")):
        with doing.waiting(3, RECEIVE, transfer(peers, 0.0)):
            assert str(doing.progress()).startswith(f"{expected}, waiting for {named} for 0.")
    assert doing.progress() == said
    doing.nothing()
    assert doing.progress() == Progress(mesh=1, host=0)


def test_a_worker_that_does_not_answer_is_late_and_those_that_wait_are_not_to_blame():
    asked = []

    def ask(name):
        asked.append(name)
        return name

    heartbeats = Heartbeats(["a", "b", "c"], ask, 0.0, 0.0)
    assert heartbeats.references() == ["a", "b", "c"] == asked
    waiting = Progress(mesh=0, host=0, position=3, instruction="receive", peers=("b",), seconds=1.0)
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
    assert heartbeats.answered(reference, {}.__getitem__)
    assert heartbeats.last == {} and heartbeats.late() == []


def between(quiet, ready, others=()):
    """Return what is said of two workers, of which one waits for a message of the other."""
    receiver, sender = Doing(1, 0), Doing(0, 0)
    receiver.at(7, 4, RUN)
    sender.at(7, 9, RUN)
    sender.sent(MESSAGE, transfer(("mesh 1 host 0",) if ready else (), ready))
    heartbeats = Heartbeats(["mesh 1 host 0", "mesh 0 host 0"], lambda name: name, 0.0, 8.0)
    owed = transfer(("mesh 0 host 0",), quiet)
    receiver.receives(MESSAGE, owed)
    with receiver.waiting(3, RECEIVE, owed):
        said = {"mesh 1 host 0": receiver.progress(), "mesh 0 host 0": sender.progress()}
    for reference in heartbeats.references():
        heartbeats.answered(reference, {**said, **dict(others)}.__getitem__)
    return heartbeats


def test_a_transfer_that_one_end_has_ready_and_the_other_waits_for_is_stalled():
    assert between(9.1, 9.3).stalled() == (
        f"the transfer of {MESSAGE} is stalled: mesh 1 host 0 is at mesh 1, instruction 3 (receive "
        "of microbatch 2 of h@2 from mesh 0), and nothing has come for 9.1 s from mesh 0 host 0, "
        "which has it ready"
    )


def test_a_transfer_is_not_stalled_while_bytes_come_or_the_sender_computes():
    assert not between(1.0, 9.3).stalled()
    assert not between(9.1, 0.0).stalled()
    assert not between(9.1, 3.0).stalled()


def test_a_message_that_is_passed_on_is_stalled_where_both_ends_wait_for_each_other():
    passing_on = Doing(0, 0)
    passing_on.at(7, 9, RUN)
    passing_on.receives(MESSAGE, transfer(("mesh 1 host 0",), 8.5))
    said = {"mesh 0 host 0": passing_on.progress()}
    assert between(9.1, 0.0, said).stalled()
