"""Launchers that elect coordinators, on a virtual clock and a network that delays, loses, doubles and cuts."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec

from regrow.core.ids import NodeId
from regrow.core.messages.elections import (
    CoordinatorPresent,
    LauncherPresent,
    Office,
    VoteAnswered,
    VoteAsked,
    Voter,
    WitnessWord,
)
from regrow.membership.succession.election import Election
from regrow.membership.succession.voters import Voters
from regrow.membership.succession.witness import Witness, is_witness

LEASE = 10.0
WITNESS = Voter("witness", NodeId(""), "file:/shared")
_POLL_S, _DECIDE_S = 0.5, 0.3


@dataclass
class Event:
    """Something goes wrong. `how`: `dies`, `pauses`, `cut`, or `off`, from the disk; `of`: whom; `last`: seconds."""

    at: float
    how: str
    of: frozenset[int]
    last: float = 0.0


@dataclass
class Decision:
    """A coordinator has decided something."""

    at: float
    term: int
    by: int


@dataclass
class _Launcher:
    """One process, which may be paused: then what it would do waits. `office`: whom it follows, by number."""

    number: int
    skew: float
    election: Election
    voters: Voters | None = None
    follows: tuple[int, int] | None = None
    beat: float | None = None
    dead: bool = False
    paused_until: float = 0.0
    votes: dict[tuple[int, bool], set[str]] = field(default_factory=dict)
    witness: Witness = field(default_factory=lambda: Witness(LEASE))


class ElectionWorld:
    """Runs them.

    Args:
        launchers: how many; the first is coordinator.
        seed: of delays and losses.
        events: what goes wrong.
        loss: part of the messages that are lost.
        slow: part of the messages that take seconds.
        witness: whether there is one.
    """

    def __init__(
        self,
        launchers: int,
        seed: int,
        events: list[Event],
        *,
        loss: float = 0.0,
        slow: float = 0.0,
        witness: bool = False,
    ) -> None:
        self.now = 0.0
        self._words = f"ElectionWorld({launchers}, {seed}, {events}, loss={loss}, slow={slow}, witness={witness})"
        self._witness = witness
        self._off: dict[int, float] = {}
        self.places: dict[int, WitnessWord] = {}
        self.decisions: list[Decision] = []
        self._random, self._loss, self._slow = Random(seed), loss, slow
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._cuts: list[tuple[float, float, frozenset[int]]] = []
        self.launchers = [self._make(number) for number in range(launchers)]
        first = self.launchers[0]
        first.voters = Voters(first.election.me, 1, LEASE)
        for each in self.launchers:
            each.follows = (1, 0)
            self._after(self._random.random() * _POLL_S, lambda each=each: self._poll(each))  # type: ignore[misc]
        self._after(_DECIDE_S, lambda: self._decide(first, 1))
        for event in events:
            self._after(event.at, lambda event=event: self._happens(event))  # type: ignore[misc]

    def __repr__(self) -> str:
        return self._words

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = until

    def _make(self, number: int) -> _Launcher:
        node = NodeId(f"node{number}")
        return _Launcher(number, self._random.uniform(-1e4, 1e4), Election(Voter(f"{node}@x", node, str(number))))

    def _after(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), act))

    def _happens(self, event: Event) -> None:
        if event.how == "cut":
            self._cuts.append((self.now, self.now + event.last, event.of))
        for number in event.of:
            launcher = self.launchers[number]
            if event.how == "off":
                self._off[number] = max(self._off.get(number, 0.0), self.now + event.last)
            elif event.how == "dies":
                launcher.dead = True
            elif event.how == "pauses":
                launcher.paused_until = max(launcher.paused_until, self.now + event.last)

    def _clock(self, launcher: _Launcher) -> float:
        return self.now + launcher.skew

    def _apart(self, a: int, b: int) -> float | None:
        """Until when nothing passes between two; None: it does."""
        ends = [end for _, end, side in self._cuts if end > self.now and (a in side) != (b in side)]
        return max(ends, default=None)

    def _at(self, launcher: _Launcher, act: Callable[[], None]) -> None:
        """Act now, or when it is no longer paused."""
        if launcher.dead:
            return
        if launcher.paused_until > self.now:
            self._after(launcher.paused_until - self.now, lambda: self._at(launcher, act))
        else:
            act()

    def _send(self, sender: _Launcher, to: int, deliver: Callable[[_Launcher], None]) -> None:
        """As TCP would: late, after a cut, or not at all; a request that is repeated may come twice."""
        receiver = self.launchers[to]

        def arrive() -> None:
            self._at(receiver, lambda: deliver(receiver))

        for _ in range(1 + (self._random.random() < 0.05)):
            if self._random.random() < self._loss:
                continue
            delay = self._random.uniform(0.001, 0.05)
            if self._random.random() < self._slow:
                delay = self._random.uniform(0.5, 2 * LEASE)
            healed = self._apart(sender.number, to)
            if healed is not None:
                if self._random.random() < 0.5:
                    continue
                delay += healed - self.now
            self._after(delay, arrive)

    # --- following, as a deputy does ----------------------------------------------------------------------------

    def _poll(self, me: _Launcher) -> None:
        def act() -> None:
            free = self._clock(me) >= me.election.bound_until
            self._after(_POLL_S / 5 if free else _POLL_S, lambda: self._poll(me))
            if me.voters is not None or me.follows is None:
                return
            term, coordinator = me.follows
            if self.launchers[coordinator].dead and self._apart(me.number, coordinator) is None:
                me.election.released(self._clock(me))
            else:
                self._beat(me, term, coordinator)
            if self._clock(me) >= me.election.bound_until:
                self._look_for_another(me, term)

        self._at(me, act)

    def _beat(self, me: _Launcher, term: int, coordinator: int) -> None:
        held = me.election.handover
        version = (0, 0) if held is None else held.version
        present = LauncherPresent(me.election.me, *version, me.beat)
        self._send(me, coordinator, lambda to: self._present(to, me, term, present))

    def _present(self, host: _Launcher, sender: _Launcher, term: int, present: LauncherPresent) -> None:
        voters = host.voters
        if voters is None or voters.term != term:
            return
        now = self._clock(host)
        voters.heard(present, now)
        voters.change(now)
        held = present.number if present.term == voters.term else 0
        handover = voters.handover(present.voter.name) if held < voters.number else None
        answer = CoordinatorPresent(voters.term, now, LEASE, handover)
        self._send(host, sender.number, lambda me: self._answered(me, host.number, answer))

    def _answered(self, me: _Launcher, host: int, answer: CoordinatorPresent) -> None:
        if me.voters is not None or me.follows != (answer.term, host):
            return
        if me.election.heard(answer.term, answer.handover, answer.lease, self._clock(me)):
            me.beat = answer.beat

    def _look_for_another(self, me: _Launcher, term: int) -> None:
        election = me.election
        others = (
            [voter for voter in election.handover.voters if voter.name != election.me.name] if election.handover else []
        )
        for voter in (each for each in others if not is_witness(each)):
            self._send(me, int(voter.address), lambda to: self._tell_leader(to, me.number))
        asked = election.stand(self._clock(me))
        if asked is not None:
            self._ask_all(me, asked)

    def _ask_all(self, me: _Launcher, asked: VoteAsked) -> None:
        me.votes[asked.term, asked.trial] = {me.election.me.name}
        for voter in me.election.handover.voters if me.election.handover else []:
            if is_witness(voter):
                self._look(me, lambda: self._elected_by_witness(me, asked))
            elif voter.name != me.election.me.name:
                self._send(me, int(voter.address), lambda to: self._vote(to, me.number, asked))

    def _tell_leader(self, to: _Launcher, asker: int) -> None:
        if to.follows is None:
            return
        term, host = to.follows
        office = Office(term, str(host))
        self._send(to, asker, lambda me: self._follow(me, office))

    def _follow(self, me: _Launcher, office: Office) -> None:
        if me.follows is not None and office.term > me.follows[0] and me.voters is None:
            me.follows, me.beat = (office.term, int(office.address)), None
            me.election.follow(LEASE, self._clock(me))
            self._beat(me, *me.follows)

    # --- electing ------------------------------------------------------------------------------------------------

    def _vote(self, to: _Launcher, asker: int, asked: VoteAsked) -> None:
        granted = to.voters is None and to.election.vote(asked, self._clock(to))
        answer = VoteAnswered(granted, to.election.term)
        name = to.election.me.name
        self._send(to, asker, lambda me: self._counted(me, name, asked, answer))

    def _counted(self, me: _Launcher, voter: str, asked: VoteAsked, answer: VoteAnswered) -> None:
        election = me.election
        if not election.answered(answer) or me.voters is not None or election.handover is None:
            return
        votes = me.votes[asked.term, asked.trial]
        votes.add(voter)
        if asked.trial:
            if election.wins(len(votes)) and (asked.term, False) not in me.votes:
                real = election.campaign(asked, self._clock(me))
                if real is not None:
                    self._ask_all(me, real)
            return
        newer = me.follows is not None and me.follows[0] < asked.term
        if newer and election.term == asked.term and election.wins(len(votes)):
            me.voters = Voters.of_successor(election.me, asked.term, LEASE, election.handover, self._clock(me))
            me.follows = (asked.term, me.number)
            self._decide(me, asked.term)

    # --- the witness ---------------------------------------------------------------------------------------------

    def _at_disk(self, me: _Launcher, act: Callable[[], Callable[[], None]]) -> None:
        """As a shared file system would, with which this launcher has or has no connection: late, or not at all."""
        if self._random.random() < self._loss:
            return
        delay = self._random.uniform(0.5, 2 * LEASE) if self._random.random() < self._slow else 0.01
        delay += max(0.0, self._off.get(me.number, 0.0) - self.now)

        def arrive() -> None:
            answer = act()
            self._after(self._random.uniform(0.001, 0.05), lambda: self._at(me, answer))

        self._after(delay, arrive)

    def _look(self, me: _Launcher, then: Callable[[], None]) -> None:
        def act() -> Callable[[], None]:
            newest = max(self.places, default=0) - (self._random.random() < 0.1)  # a list of names may be an older one

            def seen() -> None:
                if newest > 0:
                    me.witness.saw(newest, self.places[newest], self._clock(me))
                then()

            return seen

        self._at_disk(me, act)

    def _take(self, me: _Launcher, word: WitnessWord, taken: Callable[[], None]) -> None:
        place = me.witness.place + 1

        def act() -> Callable[[], None]:
            mine = self.places.setdefault(place, word) is word

            def told() -> None:
                me.witness.saw(place, self.places[place], self._clock(me))
                if mine:
                    taken()

            return told

        self._at_disk(me, act)

    def _bind_witness(self, host: _Launcher, voters: Voters) -> None:
        me, began = voters.me, self._clock(host)
        if host.voters is voters and host.witness.binds(voters.term, me.name):
            number = voters.for_witness(WITNESS.name, began)
            word = WitnessWord(voters.term, me.name, (voters.term, number))
            present = LauncherPresent(WITNESS, *word.version, began)
            self._take(host, word, lambda: voters.heard(present, self._clock(host)))

    def _elected_by_witness(self, me: _Launcher, asked: VoteAsked) -> None:
        if not me.witness.elects(asked, self._clock(me)):
            return
        granted = VoteAnswered(True, asked.term)
        if asked.trial:
            self._counted(me, WITNESS.name, asked, granted)
        else:
            word = WitnessWord(asked.term, asked.name, asked.version)
            self._take(me, word, lambda: self._counted(me, WITNESS.name, asked, granted))

    # --- deciding ------------------------------------------------------------------------------------------------

    def _decide(self, host: _Launcher, term: int) -> None:
        def act() -> None:
            voters = host.voters
            if voters is None:
                return
            self._after(_DECIDE_S, lambda: self._decide(host, term))
            now = self._clock(host)
            voters.write(msgspec.msgpack.encode(len(self.decisions)))
            voters.change(now)
            if self._witness and self._random.random() < 0.2:
                self._look(host, lambda: self._bind_witness(host, voters))
            for voter in (each for each in voters.quiet(now) if not is_witness(each)):
                number = int(voter.address)
                if self.launchers[number].dead and self._apart(host.number, number) is None:
                    voters.ended(voter.name, now)
            if voters.may_decide(now):
                self.decisions.append(Decision(self.now, term, host.number))

        self._at(host, act)
