"""A witness says each word once: its rules, and the folder that holds its words."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.core.ids import NodeId
from regrow.core.messages.elections import VoteAsked, Voter, WitnessWord
from regrow.membership.server import witness_folder
from regrow.membership.server.witness_folder import (
    WitnessFolder,
    make_witness,
    newest_place,
    place_file,
    read_place,
    take_place,
)
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow.membership.succession.witness import Witness

FIRST = WitnessWord(1, "node0@x", (1, 5))
ASKED = VoteAsked(2, "node1@x", (1, 5))


def heard(at: float = 0.0) -> Witness:
    witness = Witness(10.0)
    witness.saw(3, FIRST, at)
    return witness


@pytest.mark.parametrize(
    ("asked", "now", "elects"),
    [
        (ASKED, 10.0, True),
        (ASKED, 9.9, False),
        (VoteAsked(1, "node1@x", (1, 5)), 10.0, False),
        (VoteAsked(2, "node1@x", (1, 4)), 10.0, False),
        (VoteAsked(2, "node1@x", (2, 1)), 10.0, True),
    ],
    ids=["in time", "it is bound", "in that term it has stood for another", "who knows less", "who knows more"],
)
def test_it_elects_who_knows_enough_when_nobody_counts_on_it(asked: VoteAsked, now: float, elects: bool) -> None:
    assert heard().elects(asked, now) is elects


def test_each_new_word_binds_it_from_when_it_was_seen_and_old_ones_are_none() -> None:
    witness = heard()
    witness.saw(4, FIRST, 8.0)
    assert not witness.elects(ASKED, 17.9)
    witness.saw(3, FIRST, 17.9)
    witness.saw(4, FIRST, 17.9)
    assert witness.elects(ASKED, 18.0)


def test_a_coordinator_counts_on_it_until_it_has_elected_another() -> None:
    assert Witness(10.0).binds(1, "node0@x")
    assert heard().binds(1, "node0@x") and not heard().binds(1, "node1@x")
    assert heard().binds(2, "node1@x"), "others have elected that one"
    later = heard()
    later.saw(4, WitnessWord(2, "node1@x", (1, 5)), 11.0)
    assert not later.binds(1, "node0@x") and later.binds(2, "node1@x")


def test_a_place_is_taken_once_whoever_tries_at_the_same_moment(tmp_path: Path) -> None:
    together, won = threading.Barrier(8), []

    def attempt(number: int) -> None:
        for place in range(1, 21):
            together.wait(20)
            if take_place(tmp_path, place, WitnessWord(place, f"node{number}", (1, 1))):
                won.append((place, f"node{number}"))

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(place for place, _ in won) == list(range(1, 21))
    assert {place: read_place(tmp_path, place).name for place, _ in won} == dict(won)
    assert newest_place(tmp_path) == 20
    assert len(os.listdir(tmp_path)) == 20, "no drafts are left"


def test_a_link_whose_answer_was_lost_has_been_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def silent(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", silent)
    assert take_place(tmp_path, 1, FIRST)


def test_a_place_that_was_cleared_away_is_not_taken_again(tmp_path: Path) -> None:
    for place in (1, 2):
        assert take_place(tmp_path, place, FIRST)
    place_file(tmp_path, 1).unlink()
    assert not take_place(tmp_path, 1, WitnessWord(9, "late", (9, 9)))


def test_a_disk_on_which_no_name_is_given_once_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="not permitted"):
        make_witness(tmp_path, "job")
    assert os.listdir(tmp_path) == []


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Voter]:
    yield make_witness(tmp_path, "job")


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


async def test_it_stands_for_the_coordinator_until_it_elects_another_which_the_first_one_learns(witness: Voter) -> None:
    clock = Clock()
    zero, one = WitnessFolder(witness, clock), WitnessFolder(witness, clock)
    first = Voters(Voter("node0@x", NodeId("node0"), "host0:1"), 1, VOTE_LEASE)
    assert await zero.bind(first)
    assert not first.free(clock.now())
    asked, trial = VoteAsked(2, "node1@x", (1, 1)), VoteAsked(2, "node1@x", (1, 1), trial=True)
    assert not await one.votes(trial)
    clock.time += VOTE_LEASE - 0.1
    assert await zero.bind(first)
    clock.time += 0.2
    assert not await one.votes(trial), "it has been bound again"
    clock.time += VOTE_LEASE
    assert await one.votes(trial) and await one.votes(trial), "a trial changes nothing"
    assert await one.votes(asked)
    assert not await zero.bind(first)
    one.close()
    zero.close(remove=True)
    assert not Path(witness.address.removeprefix("file:")).exists()


async def test_a_disk_that_does_not_answer_is_waited_for_a_moment_and_not_asked_again(
    witness: Voter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = [], threading.Event()

    def stuck(folder: Path) -> int:
        asked.append(folder)
        answers.wait(20)
        return 0

    monkeypatch.setattr(witness_folder, "newest_place", stuck)
    monkeypatch.setattr(witness_folder, "_DISK_S", 0.05)
    one = WitnessFolder(witness)
    async with asyncio.timeout(10):
        assert not await one.votes(ASKED)
        while not asked:  # its thread has begun
            await asyncio.sleep(0.01)
        assert not await one.votes(ASKED)
    assert len(asked) == 1
    answers.set()
    one.close()


async def test_a_folder_that_is_gone_gives_no_vote(witness: Voter) -> None:
    Path(witness.address.removeprefix("file:")).rmdir()
    one = WitnessFolder(witness)
    assert not await one.votes(ASKED)
    one.close()
