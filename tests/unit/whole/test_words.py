"""Words that have given way to the field's: no name of the code brings one of them back."""

import io
import tokenize
from pathlib import Path

import pytest
from tests.sources import ROOT

GONE = {
    "an attribute bears its class's name": "_vault _hearing _mender _switch household _household _speaker speaker",
    "worker": "_member",
    "restartable": "enter_region leave_region begin_region first_inside",
    "leader": "Office Offices office _office _offices enter_office take_office",
    "follower, backup": "Deputy _deputy SimDeputies heirs",
    "network": "Carriers _carriers carriers",
    "request": "wish wishes _wish _wishes Wish JobWishes ScaleWish DrainWish MoveWish WorkerWish",
    "endpoint": "door _door Door door_path",
    "slot, placed": "Seat NodeSeat CacheSeat ProducerSeat seat _seat seats _seats seated _seated",
    "api, notes": "Desk desk _desk LauncherDesk FiguresDesk DataDesk AgentDesk ProofDesk",
    "options": "BatchWords WorkerWords PackWords TableWords",
    "arguments": "gang_words placed_words replica_words node_words",
    "apply, send, report, describe": "told _told Told _Told told_state _tell tell_place",
    "receive, received": "hear _hear hears heard _heard Heard _Heard Hearing",
    "entry store, versions": "Shelf shelf _shelf",
    "observation": "WorkerSight NodeSight sight sights _sight _sights",
    "fault": "strike strikes _strike _strikes",
    "share group": "Portion portion portions",
    "late facts": "belated",
    "set-up calls": "SetUpHearing",
    "changed by updates": "lasting",
    "active rules": "RuleBook",
    "avoided node": "BadNode KeptNode BadMark",
    "copies": "VaultReply VaultRequest VaultHost SimVaults vaults",
    "pending, unreported": "_untold _Untold unheard",
    "survivors": "standings",
    "unseen": "lose_sight regain_sight",
    "callback": "mourner",
    "open steps": "heritage _heritage _Heritage",
    "output": "_Voice _voices",
    "close unidentified connections": "_send_away",
    "always reached": "come_to is_come_to",
    "loop iterations": "goes_through",
    "substitute, set": "stands_for _stands_for_latest",
    "undelivered, incomplete": "unsaid",
    "stop the schedule": "not_due",
    "nodes of ranks": "standing_at not_standing",
}
"""By what stands in their place."""

SOURCES = sorted((ROOT / "packages").glob("*/src"))


def names(folder: Path) -> set[tuple[str, str]]:
    """Each name of a package, with the file that it stands in."""
    found = set()
    for path in folder.rglob("*.py"):
        with io.StringIO(path.read_text(encoding="utf-8")) as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type == tokenize.NAME:
                    found.add((token.string, str(path.relative_to(folder))))
    return found


@pytest.mark.parametrize("folder", SOURCES, ids=lambda folder: folder.parent.name)
def test_no_name_is_one_of_the_words_that_have_given_way(folder: Path) -> None:
    gone = {word: instead for instead, words in GONE.items() for word in words.split()}
    back = sorted(f"{file}: {name} (instead: {gone[name]})" for name, file in names(folder) if name in gone)
    assert back == []
