"""Entries of other nodes: the door that gives and keeps them, and the producer's side that takes and sends them."""

import asyncio
import http.client
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.process.agent_harness import facts

from regrow.agent.data_door import DataDoor
from regrow.agent.data_warming import warm
from regrow.core.config import AgentConfig, Script
from regrow.core.data_messages import PEERS_FILE, PeerList
from regrow.core.ids import NodeId
from regrow.data.cache.doors import Door, NoRoom, NotThere
from regrow.data.cache.layout import Key, map_entry, name_of, sealed, write
from regrow.data.cache.peers import Peers

TOKEN, PATIENCE = "a-token", 20.0
IDENTITY, OTHER = b"\xab" * 16, b"\xcd" * 16


class Node:
    """The cache folder of one node and its door, served by a loop in a thread."""

    def __init__(
        self, folder: Path, sockets: Path, *, local: bool = True, mirror: int = 1 << 20, nodes: int = 3
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.door = DataDoor(
            AgentConfig(
                facts=facts(nodes=nodes),
                node=NodeId("node0"),
                node_rank=0,
                coordinator="",
                token=TOKEN,
                script=Script("train.py", []),
                job_dir=str(folder),
                log_dir=str(folder),
                socket_dir=str(sockets),
                local=local,
                data_dir=str(folder),
                data_mirror=mirror,
            )
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.endpoint: str = self.run(self.door.open())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def close(self) -> None:
        self.run(self.door.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)

    def make(self, step: int, *, identity: bytes = IDENTITY, size: int = 1000) -> Path:
        """An entry of this node's own."""
        key = Key(step, 0, 1)
        entry = sealed(b"tree", [secrets.token_bytes(size)], identity=identity, key=key, samples="")
        write(self.folder / identity.hex(), entry)
        return self.folder / identity.hex() / name_of(key)

    def place(self, *peers: "Node", mirror: "Node | None" = None, budget: int = 1 << 20) -> None:
        """What its agent would write when the coordinator says so."""
        listed = PeerList(mirror.endpoint if mirror else "", budget, [peer.endpoint for peer in peers])
        draft = self.folder / "draft"
        draft.write_bytes(msgspec.json.encode(listed))
        draft.replace(self.folder / PEERS_FILE)

    def mirrored(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "mirror").rglob("*.entry"))


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def node(tmp_path: Path, sockets: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(name: str = "a", **changes: Any) -> Node:
        made.append(Node(tmp_path / name, sockets, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@contextmanager
def peers_of(node: Node, name: str = "node1") -> Iterator[Peers]:
    peers = Peers(node.folder, TOKEN, name)
    try:
        yield peers
    finally:
        peers.close()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(node: Node, method: str, target: str, *, token: str = TOKEN, body: bytes | None = None, **headers: str) -> int:
    """A request as anyone could send it; its status."""
    connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
    if node.endpoint.startswith("unix:"):
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(PATIENCE)
        connection.sock.connect(node.endpoint.removeprefix("unix:"))
    else:
        connection.sock = socket.create_connection(("127.0.0.1", int(node.endpoint.rpartition(":")[2])), PATIENCE)
    try:
        connection.request(method, target, body=body, headers={"Authorization": f"Bearer {token}"} | headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


# --- the door alone -------------------------------------------------------------------------------------------------

ENTRY = f"/data/{IDENTITY.hex()}/{name_of(Key(7, 0, 1))}"
LEFT = f"/data/mirror/node1/{IDENTITY.hex()}/{name_of(Key(7, 0, 1))}?step=7&keep_from=0"


@pytest.mark.parametrize("local", [True, False])
def test_an_entry_is_listed_and_given_as_it_is(node: Callable[..., Node], local: bool) -> None:
    here = node(local=local)
    assert here.endpoint.startswith("unix:" if local else "tcp:127.0.0.1:")
    path = here.make(7, size=3_000_000)
    door = Door(here.endpoint, TOKEN)
    for _ in range(2):  # the connection is kept
        assert door.names(IDENTITY) == {path.name: path.stat().st_size}
        assert door.fetch(IDENTITY, path.name) == path.read_bytes()
    assert door.names(OTHER) == {}
    with pytest.raises(NotThere):
        door.fetch(OTHER, path.name)
    door.close()


@pytest.mark.parametrize(
    ("method", "target", "status"), [("GET", "/data", 200), ("GET", ENTRY, 200), ("PUT", LEFT, 201)]
)
@pytest.mark.parametrize("token", ["", "another", TOKEN + "x", "\xfc"])
def test_who_does_not_know_the_token_gets_nothing(
    node: Callable[..., Node], method: str, target: str, status: int, token: str
) -> None:
    here = node()
    here.make(7)
    body = b"x" if method == "PUT" else None
    assert ask(here, method, target, token=token, body=body) == 401
    assert here.mirrored() == []
    assert ask(here, method, target, body=body) == status


@pytest.mark.parametrize(
    "target",
    [
        "/data/../../etc/passwd",
        "/data/..%2f..%2fetc%2fpasswd",
        "/data/%2e%2e/%2e%2e/etc/passwd",
        f"/data/{IDENTITY.hex()}/..%2f..%2fsecret",
        f"/data/{IDENTITY.hex()}/../secret.entry",
        f"/data/{IDENTITY.hex()}/%2e%2e%2fsecret.entry",
        f"/data/{IDENTITY.hex()}/.hidden.entry",
        f"/data/{IDENTITY.hex()}/a%00.entry",
        f"/data/{IDENTITY.hex()}/a.entry.tmp",
        f"/data/{IDENTITY.hex().upper()}/{name_of(Key(7, 0, 1))}",
        "/data/mirror/..%2fsecret.entry",
        "/data/./secret.entry",
        "/data/owner",
        "/peers.json",
        f"/data/{IDENTITY.hex()}/{'a' * 200}.entry",
        f"/data/{IDENTITY.hex()}/peers.json",
        "//etc/passwd",
    ],
)
def test_nothing_but_entries_is_given(node: Callable[..., Node], tmp_path: Path, target: str) -> None:
    here = node()
    here.make(7)
    (tmp_path / "secret").write_text("secret")
    for name in ("secret.entry", ".hidden.entry", "owner"):
        (here.folder / name).write_text("secret")
        (here.folder / IDENTITY.hex() / name).write_text("secret")
    if target.endswith("/secret.entry") and "mirror" not in target:
        (here.folder / IDENTITY.hex() / "secret.entry").unlink()
    assert ask(here, "GET", target) == 404


@pytest.mark.parametrize(
    "target",
    [
        LEFT.replace("node1", ".."),
        LEFT.replace("node1", "%2e%2e%2f%2e%2e"),
        LEFT.replace(IDENTITY.hex(), "..%2f" + IDENTITY.hex()),
        LEFT.replace(IDENTITY.hex(), "0" * 31),
        LEFT.replace(name_of(Key(7, 0, 1)), "..%2f..%2fowner"),
        LEFT.replace(name_of(Key(7, 0, 1)), "owner"),
        LEFT.replace(name_of(Key(7, 0, 1)), ".entry"),
    ],
)
def test_nothing_is_kept_elsewhere(node: Callable[..., Node], tmp_path: Path, target: str) -> None:
    here = node()
    before = sorted(tmp_path.rglob("*"))
    assert ask(here, "PUT", target, body=b"x") == 404
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("step=7&keep_from=0", 201),
        ("step=7", 400),
        ("keep_from=7", 400),
        ("step=-1&keep_from=0", 400),
        ("step=7&keep_from=x", 400),
        ("step=9999999999999999999999&keep_from=0", 400),
    ],
)
def test_an_entry_is_left_with_its_step(node: Callable[..., Node], query: str, status: int) -> None:
    here = node()
    assert ask(here, "PUT", f"{LEFT.partition('?')[0]}?{query}", body=b"x") == status
    assert len(here.mirrored()) == (status == 201)


def test_what_was_left_is_listed_and_given_and_the_nodes_own_comes_first(node: Callable[..., Node]) -> None:
    here, there = node("a"), node("b")
    path, door = there.make(7), Door(here.endpoint, TOKEN)
    door.leave("node1", IDENTITY, path, step=7, keep_from=0)
    assert door.names(IDENTITY) == {path.name: path.stat().st_size}
    assert door.fetch(IDENTITY, path.name) == path.read_bytes()
    own = here.make(7)
    assert door.fetch(IDENTITY, path.name) == own.read_bytes() != path.read_bytes()
    door.close()


def test_no_more_is_kept_than_the_budget_says(node: Callable[..., Node]) -> None:
    there = node("b")
    paths = {step: there.make(step) for step in range(1, 5)}
    size = paths[1].stat().st_size
    here = node("a", mirror=2 * size)
    door = Door(here.endpoint, TOKEN)
    for step in (1, 2):
        door.leave("node1", IDENTITY, paths[step], step=step, keep_from=0)
    with pytest.raises(NoRoom):
        door.leave("node1", IDENTITY, paths[3], step=3, keep_from=0)
    assert here.mirrored() == [paths[1].name, paths[2].name]
    door.leave("node1", IDENTITY, paths[3], step=3, keep_from=2)
    assert here.mirrored() == [paths[2].name, paths[3].name]
    door.leave("node2", IDENTITY, paths[4], step=4, keep_from=4)
    assert len(here.mirrored()) == 3, "each node has a budget of its own"
    assert ask(here, "PUT", LEFT, body=b"x" * (2 * size + 1)) == 507
    door.close()


@pytest.mark.parametrize("said", [10, 1_000_000])
def test_an_upload_that_is_cut_short_leaves_nothing(node: Callable[..., Node], said: int) -> None:
    here = node(mirror=1_000_000)
    path = here.endpoint.removeprefix("unix:")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        head = f"PUT {LEFT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {said}\r\n\r\nabc"
        sock.sendall(head.encode())
        until(lambda: list(here.folder.rglob("*.tmp")))
    until(lambda: not list(here.folder.rglob("*.tmp")))
    assert here.mirrored() == []
    # What it had announced is not counted any more.
    until(lambda: ask(here, "PUT", LEFT, body=b"x" * 1_000_000) == 201)


def test_an_upload_must_say_how_long_it_is(node: Callable[..., Node]) -> None:
    here = node()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(here.endpoint.removeprefix("unix:"))
        head = f"PUT {LEFT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head.encode() + b"1\r\nx\r\n0\r\n\r\n")
        assert b" 411 " in sock.recv(1000)


def test_an_upload_that_does_not_go_on_is_ended(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.agent.data_door._UPLOAD_S", 0.2)
    here = node()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(here.endpoint.removeprefix("unix:"))
        head = f"PUT {LEFT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\nabc"
        sock.sendall(head.encode())
        assert b" 408 " in sock.recv(1000)
    assert here.mirrored() == []


# --- the producer's side --------------------------------------------------------------------------------------------


def test_an_entry_is_taken_from_whoever_has_it(node: Callable[..., Node]) -> None:
    here, one, two = node("here"), node("one"), node("two")
    path = two.make(7)
    here.place(one, two)
    with peers_of(here) as peers:
        assert peers.take(IDENTITY, Key(7, 0, 1), here.folder / IDENTITY.hex())
        assert not peers.take(IDENTITY, Key(8, 0, 1), here.folder / IDENTITY.hex())
        assert not peers.take(OTHER, Key(7, 0, 1), here.folder / OTHER.hex())
        assert peers.taken == 1
    assert map_entry(here.folder / IDENTITY.hex(), Key(7, 0, 1), IDENTITY) is not None
    assert (here.folder / IDENTITY.hex() / path.name).read_bytes() == path.read_bytes()
    assert list((here.folder / IDENTITY.hex()).iterdir()) == [here.folder / IDENTITY.hex() / path.name]


@pytest.mark.parametrize("damage", ["a bit", "the end", "another identity", "another step", "nothing at all"])
def test_a_damaged_entry_is_not_taken(node: Callable[..., Node], damage: str) -> None:
    here, one, two = node("here"), node("one"), node("two")
    good, bad = two.make(7), one.make(7)
    data = bytearray(bad.read_bytes())
    match damage:
        case "a bit":
            data[-1] ^= 1
        case "the end":
            del data[-100:]
        case "another identity":
            data = bytearray(one.make(7, identity=OTHER).read_bytes())
        case "another step":
            data = bytearray(one.make(8).read_bytes())
        case _:
            data.clear()
    bad.write_bytes(data)
    with peers_of(here) as peers:
        here.place(one)
        for _ in range(2):
            assert not peers.take(IDENTITY, Key(7, 0, 1), here.folder / IDENTITY.hex())
        assert not (here.folder / IDENTITY.hex()).exists()
        here.place(one, two)
        assert peers.take(IDENTITY, Key(7, 0, 1), here.folder / IDENTITY.hex())
    assert (here.folder / IDENTITY.hex() / good.name).read_bytes() == good.read_bytes()


@contextmanager
def deaf(sockets: Path, kind: str) -> Iterator[str]:
    """An endpoint that is of no use."""
    path = sockets / "deaf"
    if kind == "nobody":
        yield f"unix:{path}"
        return
    if kind == "nonsense":
        yield "smoke:signals"
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(8)
        hang = threading.Event()

        def serve() -> None:
            kept = []
            while not hang.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                kept.append(sock)
                if kind == "silent":
                    continue
                sock.recv(65536)
                sock.sendall(
                    b"what?\r\n\r\n" if kind == "no http" else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"
                )
                sock.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"unix:{path}"
        hang.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


@pytest.mark.parametrize("kind", ["nobody", "nonsense", "silent", "no http", "no list"])
def test_a_peer_that_fails_costs_one_try_and_the_next_one_is_asked(
    node: Callable[..., Node], sockets: Path, kind: str
) -> None:
    here, two = node("here"), node("two")
    for step in range(20):
        two.make(step)
    with deaf(sockets, kind) as endpoint, peers_of(here) as peers:
        listed = PeerList("", 0, [endpoint, two.endpoint])
        (here.folder / PEERS_FILE).write_bytes(msgspec.json.encode(listed))
        began = time.monotonic()
        assert all(peers.take(IDENTITY, Key(step, 0, 1), here.folder / IDENTITY.hex()) for step in range(20))
        assert time.monotonic() - began < 6.0


@pytest.mark.parametrize("listed", [None, b"", b"{", b"[]", b'{"peers": 7}'])
def test_without_a_list_of_peers_nobody_is_asked(node: Callable[..., Node], listed: bytes | None) -> None:
    here = node("here")
    if listed is not None:
        (here.folder / PEERS_FILE).write_bytes(listed)
    with peers_of(here) as peers:
        assert not peers.take(IDENTITY, Key(7, 0, 1), here.folder / IDENTITY.hex())


def test_what_is_offered_reaches_the_mirror_within_its_budget_the_soonest_first(node: Callable[..., Node]) -> None:
    here, mirror = node("here"), node("mirror")
    paths = [here.make(step) for step in range(10)]
    size = paths[0].stat().st_size
    with peers_of(here) as peers:
        for step in reversed(range(10)):
            peers.offer(IDENTITY, Key(step, 0, 1), paths[step], 0)
        here.place(mirror, mirror=mirror, budget=4 * size + 1)
        until(lambda: peers.sent == 4)
        assert mirror.mirrored() == [path.name for path in paths[:4]]
        peers.passed(IDENTITY, 5)
        until(lambda: peers.sent == 6)
        kept = [paths[step].name for step in (0, 3, 4, 5)]
        assert mirror.mirrored() == kept, "two steps behind the readers, and the first, which newcomers rehearse with"
    assert not list(mirror.folder.rglob("*.tmp"))


def test_a_mirror_that_keeps_less_than_was_thought_is_asked_again_later(node: Callable[..., Node]) -> None:
    here = node("here")
    paths = {step: here.make(step) for step in range(1, 4)}
    mirror = node("mirror", mirror=2 * paths[1].stat().st_size)
    here.place(mirror, mirror=mirror)
    with peers_of(here) as peers:
        for step, path in paths.items():
            peers.offer(IDENTITY, Key(step, 0, 1), path, 0)
        until(lambda: peers.sent == 2)
        peers.passed(IDENTITY, 5)
        until(lambda: peers.sent == 3)
        assert mirror.mirrored() == [paths[3].name]


def test_another_mirror_gets_all_of_it_again(node: Callable[..., Node]) -> None:
    here, first, second = node("here"), node("first"), node("second")
    paths = [here.make(step) for step in range(3)]
    here.place(first, mirror=first)
    with peers_of(here) as peers:
        for step in range(3):
            peers.offer(IDENTITY, Key(step, 0, 1), paths[step], 0)
        until(lambda: peers.sent == 3)
        paths[0].unlink()  # evicted: nobody needs it here any more
        here.place(second, mirror=second)
        until(lambda: peers.sent == 5)
        assert second.mirrored() == [paths[1].name, paths[2].name]


def test_what_workers_have_made_reaches_the_mirror_though_nobody_tells(node: Callable[..., Node]) -> None:
    here, mirror = node("here"), node("mirror")
    here.place(mirror, mirror=mirror)
    early = here.make(0)
    with peers_of(here) as peers:
        peers.passed(IDENTITY, 0)
        until(lambda: peers.sent == 1)
        late = here.make(1)
        until(lambda: peers.sent == 2)
        assert mirror.mirrored() == [early.name, late.name]


def test_a_successor_sends_only_what_the_mirror_does_not_have(node: Callable[..., Node]) -> None:
    here, mirror = node("here"), node("mirror")
    here.place(mirror, mirror=mirror)
    for step in range(3):
        here.make(step)
    with peers_of(here) as peers:
        peers.passed(IDENTITY, 0)
        until(lambda: peers.sent == 3)
    new = here.make(3)
    with peers_of(here) as peers:
        peers.passed(IDENTITY, 0)
        until(lambda: new.name in mirror.mirrored())
        assert peers.sent <= 1
    assert len(mirror.mirrored()) == 4


def test_offers_cost_nothing_where_there_is_no_mirror(node: Callable[..., Node]) -> None:
    here = node("here")
    path = here.make(0)
    with peers_of(here) as peers:
        began = time.monotonic()
        for step in range(5000):
            peers.offer(IDENTITY, Key(step, 0, 1), path, max(0, step - 10))
        assert time.monotonic() - began < 2.0
        peers.offer(IDENTITY, Key(0, 0, 1), here.folder / "gone", 0)
        assert peers.sent == 0


def warmed(here: Node, mirror: Node, **changes: Any) -> int:
    """What the agent of this node does when it hears of its mirror."""
    fields = {"node": NodeId("node1"), "data_budget": 1 << 20} | changes
    config = msgspec.structs.replace(here.door._config, **fields)
    return int(here.run(warm(config, mirror.endpoint)))


@pytest.mark.parametrize("local", [True, False])
def test_the_agent_of_a_replaced_node_fetches_all_that_was_kept_for_it(node: Callable[..., Node], local: bool) -> None:
    old, mirror, new = (node(name, local=local) for name in ("old", "mirror", "new"))
    paths = [old.make(step, identity=identity) for step in range(4) for identity in (IDENTITY, OTHER)]
    own, door = mirror.make(9), Door(mirror.endpoint, TOKEN)
    for step, path in enumerate(paths):
        door.leave("node1", bytes.fromhex(path.parent.name), path, step=step, keep_from=0)
    door.leave("node2", IDENTITY, old.make(8), step=8, keep_from=0)
    door.close()
    assert warmed(new, mirror) == 8
    for path in paths:
        assert (new.folder / path.parent.name / path.name).read_bytes() == path.read_bytes()
    assert not (new.folder / IDENTITY.hex() / own.name).exists(), "what is the mirror's own is not for this node"
    assert warmed(new, mirror) == 0, "once"
    assert list((new.folder / "taking").iterdir()) == []


def test_no_more_is_fetched_than_the_cache_may_hold_and_the_soonest_needed_first(node: Callable[..., Node]) -> None:
    old, mirror, new = node("old"), node("mirror"), node("new")
    paths = [old.make(step) for step in range(5)]
    door = Door(mirror.endpoint, TOKEN)
    for step in reversed(range(5)):
        door.leave("node1", IDENTITY, paths[step], step=step, keep_from=0)
    door.close()
    assert warmed(new, mirror, data_budget=2 * paths[0].stat().st_size + 1) == 2
    assert sorted(path.name for path in new.folder.rglob("*.entry")) == [paths[0].name, paths[1].name]


@pytest.mark.parametrize("kind", ["nobody", "no http", "no list", "nonsense"])
def test_a_mirror_that_fails_leaves_the_cache_cold_and_nothing_else(
    node: Callable[..., Node], sockets: Path, kind: str
) -> None:
    new = node("new")
    with deaf(sockets, kind) as endpoint:
        assert new.run(warm(msgspec.structs.replace(new.door._config, data_budget=1 << 20), endpoint)) == 0
    assert list(new.folder.rglob("*.entry")) == []


def test_a_lost_node_takes_back_what_it_had_left(node: Callable[..., Node]) -> None:
    old, mirror, new = node("old"), node("mirror"), node("new")
    old.place(mirror, mirror=mirror)
    paths = [old.make(step) for step in range(5)]
    with peers_of(old) as peers:
        for step in range(5):
            peers.offer(IDENTITY, Key(step, 0, 1), paths[step], 0)
        until(lambda: peers.sent == 5)
    new.place(mirror, mirror=mirror)
    with peers_of(new) as peers:
        assert all(peers.take(IDENTITY, Key(step, 0, 1), new.folder / IDENTITY.hex()) for step in range(5))
        assert peers.taken == 5
    for path in paths:
        assert (new.folder / IDENTITY.hex() / path.name).read_bytes() == path.read_bytes()
    assert os.listdir(new.folder / IDENTITY.hex()) != []
