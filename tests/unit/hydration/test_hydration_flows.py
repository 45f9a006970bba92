"""Flows of a newcomer: how bytes are dealt to them, which addresses they take, and what is told of them."""

import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.core.errors import UsageError
from regrow.core.hosts import own_addresses
from regrow.core.ids import StepNo
from regrow.core.messages.state_ways import StateWay, merged
from regrow.hydration import flows
from regrow.hydration.flows import FLOW_WORTH, FLOWS, further
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.messages import StateOffered
from regrow.hydration.plan import LEAST_PART, ByteSpan, FlowDealer
from regrow.launch.addresses import hydration_of

GB = 1_000_000_000


def spans_of(lengths: Any) -> list[ByteSpan]:
    return [ByteSpan(f"t{at}", 0, length) for at, length in enumerate(lengths) if length]


@given(
    st.lists(st.integers(0, 100 << 20), max_size=6),
    st.lists(st.floats(0.0, 1e10), min_size=1, max_size=5),
)
def test_every_byte_is_dealt_once_as_long_as_the_fastest_asks(lengths: Any, rates: Any) -> None:
    dealer, taken, total = FlowDealer(spans_of(lengths)), 0, sum(lengths)
    fastest, others = max(rates), sorted(rates)[:-1]
    while part := dealer.take(fastest, others):
        taken += sum(span.length for span in part)
    assert taken == total
    assert dealer.rest() == []


def seconds_with(rates: list[float], nbytes: int) -> tuple[float, list[int]]:
    """Time until all is there in a world where each flow has that rate, and the bytes of each."""
    dealer, got, done = FlowDealer([ByteSpan("w", 0, nbytes)]), [0] * len(rates), 0.0
    known = [0.0] * len(rates)
    asking = [(0.0, at) for at in range(len(rates))]
    while asking:
        now, at = heapq.heappop(asking)
        part = dealer.take(known[at], [each for other, each in enumerate(known) if other != at])
        if not part:
            continue
        size = sum(span.length for span in part)
        got[at], known[at] = got[at] + size, rates[at]
        done = max(done, now + size / rates[at])
        heapq.heappush(asking, (now + size / rates[at], at))
    assert sum(got) == nbytes
    return done, got


@pytest.mark.parametrize("rates", [[3 * GB, 1 * GB], [2.5 * GB] * 4, [12 * GB, 12 * GB, 3 * GB, 0.5 * GB]])
def test_addresses_get_bytes_after_their_rates(rates: list[float]) -> None:
    seconds, got = seconds_with(rates, 20 * GB)
    assert seconds < 1.05 * 20 * GB / sum(rates)
    for rate, size in zip(rates, got, strict=True):
        assert size / sum(got) == pytest.approx(rate / sum(rates), rel=0.2)


def test_an_address_that_is_much_slower_does_not_hold_up_the_others() -> None:
    seconds, got = seconds_with([3 * GB, 0.012 * GB], 4 * GB)
    assert got[1] >= LEAST_PART
    assert seconds < 1.05 * 4 / 3


def offer(nbytes: int, ways: Any = (), ticket: str = "t") -> StateOffered:
    entries = [TensorEntry("w", "uint8", (nbytes,), nbytes, "cpu")]
    return StateOffered(Inventory(StepNo(1), entries, b""), ticket, list(ways))


def test_further_flows_take_the_holders_addresses_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "cores", lambda: 2 * FLOWS)
    large = FLOW_WORTH * 100
    assert further(["a"], [offer(large)]) == [("a", "t")] * (FLOWS - 1)
    assert further(["a"], [offer(large, ["b"])]) == [("b", "t"), ("a", "t"), ("b", "t")]
    assert [to for to, _ in further(["a"], [offer(large, "bcdefgh")])] == list("bcdefgh")
    assert [to for to, _ in further(["a", "x"], [offer(large, "bc"), offer(large, "yz")])] == ["b", "c", "z", "y"]


def test_on_few_cores_there_are_as_many_flows_as_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "cores", lambda: 2)
    large = FLOW_WORTH * 100
    assert further(["a"], [offer(large)]) == []
    assert further(["a"], [offer(large, "bc")]) == [("b", "t"), ("c", "t")]


def test_a_small_state_many_holders_and_a_proof_need_no_further_flow() -> None:
    assert further(["a"], [offer(FLOW_WORTH * 2 - 1)]) == []
    assert further([*"abcd"], [offer(FLOW_WORTH * 100)] * 4) == []
    assert further(["a"], [offer(FLOW_WORTH * 100, ["b"], ticket="")]) == []


def test_ways_of_several_newcomers_are_told_by_address() -> None:
    ways = [StateWay("a", 1, 5, 0.5), StateWay("b", failure="gone"), StateWay("a", 2, 6, 1.0, "late")]
    assert merged(ways) == [StateWay("a", 3, 11, 1.5, "late"), StateWay("b", failure="gone")]


def test_further_addresses_are_addresses() -> None:
    assert own_addresses("--state-addr", "") == []
    assert own_addresses("--state-addr", "10.0.0.5, [fe80::1],10.0.0.5") == ["10.0.0.5", "fe80::1"]
    for wrong in ("0.0.0.0", "::", "host", "10.0.0.5:80"):
        with pytest.raises(UsageError, match="--state-addr"):
            own_addresses("--state-addr", wrong)


def test_reads_past_tls_and_unknown_ways_are_refused() -> None:
    assert [hydration_of(word, encrypted=False) for word in ("sockets", "memory", "nixl")] == [
        "sockets",
        "memory",
        "nixl",
    ]
    assert hydration_of("memory", encrypted=True) == "memory"
    with pytest.raises(UsageError, match="past TLS"):
        hydration_of("nixl", encrypted=True)
    with pytest.raises(UsageError, match="--hydration"):
        hydration_of("rdma", encrypted=False)
