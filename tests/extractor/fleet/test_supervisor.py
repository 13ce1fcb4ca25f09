"""Which workers are started, again or not at all, as nodes and workers come and go: without Ray, without a clock."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from extractor.fleet.actor import Status
from extractor.fleet.messages import (
    Committed,
    Ended,
    Erred,
    FromDriver,
    FromWorker,
    Resources,
    Said,
    Staged,
    Started,
    Strength,
)
from extractor.fleet.places import Need, Node, capacity, need_of
from extractor.fleet.supervisor import MAX_LOSSES, LostActorError, Supervisor
from hsstore.errors import UsageError

UP = Started(engine="transformers 5", seconds=3.0)


def node(name: str, gpus: float = 0, cpus: float = 4) -> Node:
    return Node(id=name, name=name, resources={"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus})


@dataclass(eq=False)
class Actor:
    node: str | None
    number: int
    said: list[Status | LostActorError] = field(default_factory=list)
    stopped: bool = False

    def tell(self, *events: FromWorker, exit_code: int | None = None, log: str = "") -> None:
        self.said.append(Status(host="h", pid=self.number, events=list(events), exit_code=exit_code, log=log))


class FakeCluster:
    def __init__(self, *nodes: Node) -> None:
        self.there = list(nodes)
        self.actors: list[Actor] = []
        self.living: list[Actor] = []
        self.now = 0.0
        self._numbers = itertools.count(1)

    def nodes(self) -> list[Node]:
        return list(self.there)

    def start(self, node: str | None, need: Need) -> object:
        actor = Actor(node, next(self._numbers))
        self.actors.append(actor)
        self.living.append(actor)
        return actor

    def poll(self, handles: list[object], seconds: float) -> list[tuple[object, Status | LostActorError]]:
        assert all(handle in self.living for handle in handles), "a dead actor was asked"
        self.now += seconds
        return [(a, a.said.pop(0)) for a in list(self.living) if a in handles and a.said]

    def stop(self, handle: object) -> None:
        assert isinstance(handle, Actor)
        handle.stopped = True
        handle.tell(Erred(kind="terminated", message="told to end"), exit_code=143)

    def kill(self, handle: object) -> None:
        if handle in self.living:
            self.living.remove(handle)


class Run:
    """A supervisor whose clock goes on while it polls: a minute a turn."""

    def __init__(self, cluster: FakeCluster, *, store_uuid: str = "", **resources: object) -> None:
        self.cluster, self.said = cluster, []
        self.supervisor = Supervisor(
            cluster,
            Resources(**resources),  # type: ignore[arg-type]
            store_uuid,
            self.said.append,
            clock=lambda: self.cluster.now,
        )
        self.said: list[FromDriver]
        self.supervisor.begin()
        self.turn()

    def turn(self) -> None:
        self.supervisor.turn(60.0)

    def end(self, turns: int = 30) -> Ended | Erred:
        left = itertools.count(turns, -1)
        result = self.supervisor.run(lambda: next(left) == 0, 60.0)
        assert not self.cluster.living, "workers were left behind"
        return result

    def text(self) -> str:
        return "\n".join(event.text for event in self.said if isinstance(event, Said))


@pytest.mark.parametrize(
    ("gpus", "cpus", "need", "expected"),
    [
        (8, 64, Need(cpus=1, gpus=8), 1),
        (8, 64, Need(cpus=1, gpus=2), 4),
        (8, 2, Need(cpus=1, gpus=2), 2),
        (8, 64, Need(cpus=0, gpus=1), 8),
        (4, 64, Need(cpus=1, gpus=8), 0),
        (0, 64, Need(cpus=1, gpus=0), 1),
        (0, 0, Need(cpus=1, gpus=0), 0),
        (1, 8, Need(cpus=1, gpus=0.25), 4),
    ],
)
def test_as_many_workers_as_a_node_takes(gpus: float, cpus: float, need: Need, expected: int) -> None:
    """A head node without processors gets none, one without GPUs a single one."""
    assert capacity(node("n", gpus, cpus), need) == expected


def test_gpus_are_needed_only_where_there_are_some() -> None:
    assert need_of(Resources(engine_gpus=8), [node("a"), node("b", 8)]).gpus == 8
    assert need_of(Resources(engine_gpus=8), [node("a")]).gpus == 0
    assert need_of(Resources(engine_gpus=8, gpus=2), [node("a")]).gpus == 2


def test_a_node_that_is_lost_is_forgotten_and_one_that_joins_gets_a_worker() -> None:
    """Nobody waits for a dead node, and nothing but the living ones' end is needed."""
    run = Run(FakeCluster(node("a"), node("b")))
    a, b = run.cluster.actors
    a.tell(UP)
    b.tell(UP)
    run.turn()
    run.cluster.there = [node("a"), node("c")]
    b.said.append(LostActorError("The actor is dead because its node has died."))
    run.turn()
    run.turn()
    assert [actor.node for actor in run.cluster.living] == ["a", "c"]
    assert "the node of worker on b is lost" in run.text()
    assert "node c has joined: 1 worker" in run.text()
    assert Strength(working=1, starting=1) in run.said
    a.tell(Ended(), exit_code=0)
    assert isinstance(run.end(), Ended)
    assert run.cluster.actors[2].stopped, "who does not end by itself is told to"


def test_a_lost_worker_is_started_again_but_not_for_ever() -> None:
    """A node on which every worker dies costs a few starts, not the run; a commit shows that it can work."""
    run = Run(FakeCluster(node("bad"), node("good")))
    good = run.cluster.actors[1]
    good.tell(UP)
    commits = 2
    for _ in range(5 * MAX_LOSSES):
        for actor in [actor for actor in run.cluster.living if actor.node == "bad"]:
            events = (UP, Committed(shard=commits)) if commits else (UP,)
            actor.tell(*events, exit_code=-9, log="Traceback …\nMemoryError: no\n")
            commits = max(0, commits - 1)
        run.turn()
    assert len([a for a in run.cluster.actors if a.node == "bad"]) == 1 + MAX_LOSSES
    assert (
        "giving up worker on bad: its process ended with exit code -9: MemoryError: no; the others go on" in run.text()
    )
    good.tell(Ended(), exit_code=0)
    assert isinstance(run.end(), Ended)


def test_when_every_worker_is_given_up_the_last_error_ends_the_run() -> None:
    run = Run(FakeCluster(node("a")))
    for _ in range(MAX_LOSSES):
        run.cluster.living[0].tell(Erred(kind="incomplete", message="8 errors in a row", hint="mend"), exit_code=4)
        for _ in range(3):
            run.turn()
    assert run.end(1) == Erred(kind="incomplete", message="worker on a: 8 errors in a row", hint="mend")


def test_a_wrong_call_ends_the_run_at_once() -> None:
    """It would be as wrong on every node: no second try, and the others are told to end."""
    run = Run(FakeCluster(node("a"), node("b")))
    a, b = run.cluster.actors
    b.tell(UP)
    a.tell(Erred(kind="not_found", message="/models/x does not exist", hint="check"), exit_code=10)
    assert run.end() == Erred(kind="not_found", message="worker on a: /models/x does not exist", hint="check")
    assert b.stopped
    assert len(run.cluster.actors) == 2


def test_a_wrong_node_that_joins_later_ends_nothing() -> None:
    """The run goes well without it; it is named and left out."""
    run = Run(FakeCluster(node("a")))
    run.cluster.there.append(node("late"))
    run.turn()
    run.cluster.actors[1].tell(Erred(kind="usage", message="this node does not see /data"), exit_code=2)
    run.turn()
    run.turn()
    assert [actor.node for actor in run.cluster.living] == ["a"]
    assert "giving up worker on late: this node does not see /data" in run.text()
    run.cluster.actors[0].tell(Ended(), exit_code=0)
    assert isinstance(run.end(), Ended)


def test_a_full_disk_ends_the_run_whoever_meets_it() -> None:
    run = Run(FakeCluster(node("a"), node("b")))
    for actor in run.cluster.actors:
        actor.tell(UP)
    run.turn()
    run.cluster.actors[1].tell(Erred(kind="no_space", message="the disk is full"), exit_code=4)
    assert run.end() == Erred(kind="no_space", message="worker on b: the disk is full")


def test_two_stores_under_one_path_end_the_run() -> None:
    """Two file systems that have the same path: half of the states would be in neither store."""
    run = Run(FakeCluster(node("a"), node("b")))
    run.cluster.actors[0].tell(UP, Staged(store_uuid="one"))
    run.cluster.actors[1].tell(UP, Staged(store_uuid="two"))
    result = run.end()
    assert isinstance(result, Erred)
    assert result.kind == "usage"
    assert "worker on b writes to store two, others to one" in result.message


def test_without_any_node_the_run_waits_and_then_ends() -> None:
    run = Run(FakeCluster(node("a")), patience_seconds=300.0)
    run.cluster.there = []
    for _ in range(4):
        run.turn()
    run.cluster.there = [node("b")]
    run.turn()
    assert [actor.node for actor in run.cluster.living] == ["b"]
    run.cluster.there = []
    for _ in range(8):
        run.turn()
    result = run.end()
    assert isinstance(result, Erred)
    assert result.kind == "incomplete"
    assert "every node of the Ray cluster is lost" in result.message


def test_no_node_with_enough_is_a_wrong_call_unless_a_number_was_asked_for() -> None:
    """With a number Ray is asked for room, and an autoscaler may make it."""
    with pytest.raises(UsageError, match=r"needs 8 GPUs and 1 CPU, and no node .*a: 4 GPUs"):
        Run(FakeCluster(node("a", 4)), engine_gpus=8)
    run = Run(FakeCluster(node("a", 4)), engine_gpus=8, actors=2)
    assert [actor.node for actor in run.cluster.living] == [None, None]
    run.turn()
    run.turn()
    assert "worker on worker 0 still waits" not in run.text()
    assert "worker 0 still waits for Ray to give it 8 GPUs and 1 CPU" in run.text()


def test_told_to_stop_every_worker_ends_in_good_order() -> None:
    run = Run(FakeCluster(node("a", 8), node("b", 8)), engine_gpus=4)
    assert len(run.cluster.actors) == 4
    assert run.end(2) == Erred(kind="terminated", message="told to end")
    assert all(actor.stopped for actor in run.cluster.actors)
