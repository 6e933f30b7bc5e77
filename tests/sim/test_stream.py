"""KV events that are lost and asked for again, against the real router."""

from sumibi.core.kvevents import EventBatch
from sumibi.routing.events import EndpointUp, EngineBatch, Grade, KeysAdded, KeysRemoved
from sumibi.routing.router import Router
from sumibi.sim.stream import Stream


class Shell:
    """A router with one endpoint whose events can be asked for again."""

    def __init__(self) -> None:
        self.router = Router()
        self.asks: list[int] = []
        self.stream = Stream("e", True, self.tell, self.last_taken)
        self.tell(
            EndpointUp(
                t=0.0, endpoint="e", models=["m"], engine_block_tokens=64, has_events=True, has_replay=True
            )
        )
        self.answer(0.0)

    def tell(self, event) -> None:
        for instruction in self.router.handle(event):
            if type(instruction).__name__ == "AskReplay":
                self.stream.asked()
                self.asks.append(instruction.from_seq)

    def last_taken(self, endpoint: str) -> int | None:
        return self.view.last_sequence

    @property
    def view(self):
        return self.router.fleet_view()[0]

    def answer(self, t: float, *, alive: bool = True) -> None:
        self.stream.replay(self.asks.pop(), t, alive=alive)


def added(*keys: int, parent: int | None = None):
    return [KeysAdded("gpu", parent, list(keys))]


def test_batches_that_were_lost_are_asked_for_and_then_known():
    shell = Shell()
    stream = shell.stream
    for t, changes in ((1.0, added(1, 2)), (2.0, added(3, parent=2))):
        stream.deliver(stream.publish(changes, t), t)
    stream.lost_until_s = 10.0
    assert stream.publish(added(4, parent=3), 3.0) is None
    assert stream.publish([KeysRemoved("gpu", [2, 3, 4])], 4.0) is None
    assert (shell.view.blocks, shell.view.grade) == (3, Grade.EXACT)
    late, later = stream.publish(added(10), 11.0), stream.publish(added(11, parent=10), 11.5)
    stream.deliver(late, 11.0)
    assert shell.asks == [1], "from the last one taken, whose digest tells who answers"
    assert shell.view.grade is not Grade.EXACT
    stream.deliver(later, 11.5)
    assert shell.view.blocks == 3, "nothing is taken while the replay is under way"
    shell.answer(12.0)
    assert (shell.view.blocks, shell.view.grade) == (3, Grade.EXACT)
    assert shell.view.last_sequence == 5
    shell.router.check_integrity()


def test_an_unanswered_replay_leaves_nothing_that_is_false():
    shell = Shell()
    stream = shell.stream
    stream.deliver(stream.publish(added(1, 2), 1.0), 1.0)
    stream.lost_until_s = 3.0
    stream.publish(added(3, parent=2), 2.0)
    stream.deliver(stream.publish(added(9), 4.0), 4.0)
    shell.answer(5.0, alive=False)
    assert shell.view.grade is not Grade.EXACT
    shell.router.check_integrity()


def test_a_new_process_is_not_taken_for_the_old_one():
    shell = Shell()
    stream = shell.stream
    for i in range(5):
        stream.deliver(stream.publish(added(100 + i), 1.0 + i), 1.0 + i)
    assert shell.view.blocks == 5
    stream.restart()
    stream.deliver(stream.publish(added(7), 10.0), 10.0)
    shell.answer(10.5)
    assert shell.view.blocks == 1
    assert shell.view.epoch == 2


def test_what_is_given_holds_no_events():
    given = []
    stream = Stream("e", False, given.append, lambda _: None)
    stream.deliver(stream.publish(added(1), 1.0), 1.5)
    assert isinstance(given[0], EngineBatch)
    assert given[0].batch == EventBatch(seq=0, ts=1.0, events=[])
    assert given[1].changes == added(1)
