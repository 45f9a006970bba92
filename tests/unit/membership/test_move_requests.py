"""Moves that are asked for on a command line and over HTTP."""

from types import SimpleNamespace

import pytest
from tests.unit.membership.test_coordinator import ScriptedMachine, ask, serving

from regrow.cli import main, moving
from regrow.core.ids import NodeId, Rank
from regrow.core.messages import facts
from regrow.core.messages.unions import Fact
from regrow.membership.orders import AnswerScale, Command
from regrow.membership.server.requests import MoveRequest


async def test_a_move_is_answered_with_the_machines_own_sentence() -> None:
    def answer(fact: Fact) -> list[Command]:
        return [AnswerScale(fact.rank is None, "why")] if isinstance(fact, facts.MoveRequested) else []

    machine = ScriptedMachine(answer)
    async with serving(machine) as (coordinator, _):
        status, said = await ask(coordinator, "POST", "/move", b'{"node": "node0", "to": "node2", "reason": "dust"}')
        assert (status, said["accepted"], said["reason"]) == (200, True, "why")
        assert await machine.hears() == facts.MoveRequested(NodeId("node0"), None, NodeId("node2"), "dust")
        status, said = await ask(coordinator, "POST", "/move", b'{"rank": 1}')
        assert (status, said["accepted"]) == (200, False)
        assert await machine.hears() == facts.MoveRequested(NodeId(""), Rank(1), None, "an operator asked for it")
        for wrong in (b"{}", b'{"rank": 1, "node": "node0"}', b'{"rank": "all"}'):
            assert (await ask(coordinator, "POST", "/move", wrong))[0] == 400
        assert (await ask(coordinator, "POST", "/move", b"{}", Authorization="Bearer other"))[0] == 401


async def test_a_rank_that_the_job_does_not_have_is_a_wrong_request_as_for_a_kill() -> None:
    machine = ScriptedMachine()
    async with serving(machine) as (coordinator, _):
        for path, wrong in (("/move", b'{"rank": 7}'), ("/kill", b'{"fault": "f", "rank": 7}')):
            status, answer = await ask(coordinator, "POST", path, wrong)
            assert (status, answer["error"], answer["hint"]) == (400, "there is no rank 7", "this job has ranks 0 to 1")


def test_a_number_is_a_rank_and_anything_else_a_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[MoveRequest] = []
    asked: list[str | None] = []

    def move(scaling: MoveRequest) -> AnswerScale:
        requests.append(scaling)
        return AnswerScale(scaling.rank is None, "as you wish")

    def client_of(job: str | None) -> tuple[SimpleNamespace, SimpleNamespace]:
        asked.append(job)
        return SimpleNamespace(job="j"), SimpleNamespace(move=move)

    monkeypatch.setattr(moving, "client_of", client_of)
    assert main(["move", "node1"]) == 0
    assert main(["move", "mine", "3", "--to", "node2", "--reason", "dust"]) == 1
    assert requests == [
        MoveRequest(NodeId("node1"), None, None, "regrow move"),
        MoveRequest(NodeId(""), Rank(3), NodeId("node2"), "dust"),
    ]
    assert asked == [None, "mine"]
    assert main(["move", "a", "b", "c"]) == 2
    assert "not a b c" in capsys.readouterr().err
