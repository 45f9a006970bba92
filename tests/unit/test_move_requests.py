"""Moves that are asked for over HTTP, and while the coordinator is being restarted."""

from tests.unit.test_coordinator import ScriptedMachine, ask, serving

from regrow.core.ids import NodeId, Rank
from regrow.core.messages import facts
from regrow.core.messages.unions import Fact
from regrow.membership.orders import AnswerScale, Command


async def test_a_move_is_answered_with_the_machines_own_sentence() -> None:
    def answer(fact: Fact) -> list[Command]:
        return [AnswerScale(fact.rank is None, "why")] if isinstance(fact, facts.MoveRequested) else []

    machine = ScriptedMachine(answer)
    async with serving(machine) as (coordinator, _):
        status, said = await ask(coordinator, "POST", "/move", b'{"node": "node0", "to": "node2", "reason": "dust"}')
        assert (status, said["accepted"], said["reason"]) == (200, True, "why")
        assert await machine.hears() == facts.MoveRequested(NodeId("node0"), None, NodeId("node2"), "dust")
        status, said = await ask(coordinator, "POST", "/move", b'{"rank": 3}')
        assert (status, said["accepted"]) == (200, False)
        assert await machine.hears() == facts.MoveRequested(NodeId(""), Rank(3), None, "an operator asked for it")
        for wrong in (b"{}", b'{"rank": 1, "node": "node0"}', b'{"rank": "all"}'):
            assert (await ask(coordinator, "POST", "/move", wrong))[0] == 400
        assert (await ask(coordinator, "POST", "/move", b"{}", Authorization="Bearer other"))[0] == 401
