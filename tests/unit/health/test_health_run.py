"""Probes in child processes: one that hangs, dies, raises or prints garbage costs the others nothing."""

import contextlib
import os
import select
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from regrow.health.probes import PROBES, QUICK, known_answer
from regrow.health.readings import (
    BandwidthReading,
    FailedHow,
    NetworkReading,
    NotApplicable,
    ProbeFailed,
    ProbeResult,
    ProbeSettings,
    ProductReading,
)
from regrow.health.run import ProbeRunner

STAND_IN = """
import json, os, signal, sys, time
order = json.load(sys.stdin)
def say(**words): os.write(1, json.dumps(words).encode() + b"\\n")
def at(device=""): say(type="ProbeAt", probe=probe, device=device)
def gave(device): say(type="Gave", probe=probe, reading=dict(type="BandwidthReading", device=device, bytes_per_s=1e12))
def through(): say(type="Through", probe=probe)
for probe in order["probes"]:
    at()
    {body}
    through()
"""


def runner(tmp_path: Path, body: str, **deadlines: float) -> ProbeRunner:
    """Its child does this for each probe."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip()))
    settings = ProbeSettings(str(tmp_path))
    others = dict.fromkeys(PROBES, 60.0)
    return ProbeRunner(settings, os.environ, command=[sys.executable, str(script)], deadlines=others | deadlines)


def told(results: list[ProbeResult]) -> list[tuple[str, str]]:
    """Of each result the probe, and the device or what went wrong there."""
    found = []
    for result in results:
        match result.reading:
            case ProbeFailed(how=how, device=device):
                found.append((result.probe, f"{device} {how}".strip()))
            case BandwidthReading(device=device):
                found.append((result.probe, device))
    return found


def detail(results: list[ProbeResult]) -> str:
    (failed,) = [result.reading for result in results if isinstance(result.reading, ProbeFailed)]
    return failed.detail


def test_what_probes_read_comes_in_their_order(tmp_path: Path) -> None:
    results = runner(tmp_path, "gave(probe)").run(["disk", "nvml", "clock"])
    assert told(results) == [("disk", "disk"), ("nvml", "nvml"), ("clock", "clock")]


def test_one_that_hangs_is_ended_at_its_deadline_and_the_others_go_on(tmp_path: Path) -> None:
    start = time.monotonic()
    hangs = "time.sleep(3600) if probe == 'nvml' else gave(probe)"
    results = runner(tmp_path, hangs, nvml=1.0).run(["disk", "nvml", "clock"])
    assert told(results) == [("disk", "disk"), ("nvml", "hung"), ("clock", "clock")]
    assert "no answer within 1 s" in detail(results)
    assert time.monotonic() - start < 300


def test_one_that_dies_by_a_signal_is_told_with_its_last_words(tmp_path: Path) -> None:
    body = """
    if probe == 'nvml':
        print('driver: cannot go on', file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    gave(probe)
    """
    results = runner(tmp_path, body).run(["nvml", "disk"])
    assert told(results) == [("nvml", "died"), ("disk", "disk")]
    assert detail(results) == "its process was ended by SIGSEGV; its last words: driver: cannot go on"


def test_one_that_prints_garbage_is_told_what_it_printed(tmp_path: Path) -> None:
    results = runner(tmp_path, "os.write(1, b'hello\\n'); gave(probe)").run(["nvml"])
    assert told(results) == [("nvml", "garbled")]
    assert "'hello'" in detail(results)


@pytest.mark.parametrize(
    "body",
    [
        "os.write(1, b'x' * (5 << 20))",
        "say(type='Gave', probe=probe, reading=dict(type='BandwidthReading', device=7))",
        "say(type='ProbeAt', probe='another', device='')",
    ],
    ids=["a flood", "a wrong type", "another probe's words"],
)
def test_what_is_no_reading_is_garbage(body: str, tmp_path: Path) -> None:
    assert told(runner(tmp_path, body).run(["nvml"])) == [("nvml", "garbled")]


def test_a_device_that_kills_its_probe_does_not_hide_the_other_devices(tmp_path: Path) -> None:
    body = """
    for device in ('cuda0', 'cuda1', 'cuda2', 'cuda3'):
        if probe == order['probes'][0] and device in order['settings']['skip']: continue
        at(device)
        if device == 'cuda1': os.abort()
        if device == 'cuda2': say(type='Raised', probe=probe, device=device, error='CUDA error'); sys.exit(1)
        gave(device)
    """
    results = runner(tmp_path, body).run(["accelerator", "disk"])
    assert told(results) == [
        ("accelerator", "cuda0"),
        ("accelerator", "cuda1 died"),
        ("accelerator", "cuda2 raised"),
        ("accelerator", "cuda3"),
        ("disk", "cuda0"),
        ("disk", "cuda1 died"),
        ("disk", "cuda2 raised"),
        ("disk", "cuda3"),
    ]


def test_one_that_cannot_start_is_told_for_each_probe(tmp_path: Path) -> None:
    settings = ProbeSettings(str(tmp_path))
    command = [sys.executable, str(tmp_path / "nothing.py")]
    results = ProbeRunner(settings, os.environ, command=command).run(["disk", "clock"])
    assert told(results) == [("disk", "died"), ("clock", "died")]


def test_what_a_child_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    body = f"""
    child = os.fork()
    if child == 0: time.sleep(3600)
    open({str(note)!r}, 'w').write(str(child))
    os.abort()
    """
    results = runner(tmp_path, body, disk=5.0).run(["disk"])
    assert told(results) == [("disk", "hung")], "its output is open as long as somebody has it"
    with contextlib.suppress(ProcessLookupError):  # killed, perhaps not reaped yet
        left = os.pidfd_open(int(note.read_text()))
        assert select.select([left], [], [], 60.0)[0], "what the probe has started is alive"
        os.close(left)


# --- the probes themselves -----------------------------------------------------------------------------------------


def test_the_quick_probes_run_here_and_find_nothing_wrong(tmp_path: Path) -> None:
    results = ProbeRunner(ProbeSettings(str(tmp_path / "not" / "yet")), os.environ).run(QUICK)
    assert {result.probe for result in results} == set(QUICK)
    assert [result for result in results if isinstance(result.reading, ProbeFailed)] == []
    cores = [result.reading for result in results if isinstance(result.reading, ProductReading)]
    assert [(core.wrong, core.products > 0) for core in cores] == [(0, True)]
    loopback = [result.reading for result in results if isinstance(result.reading, NetworkReading)]
    assert [(each.peer, each.error, each.wrong) for each in loopback] == [("loopback", "", False)]
    assert list(tmp_path.iterdir()) == []


def test_a_peer_that_nobody_answers_at_is_told(tmp_path: Path) -> None:
    settings = ProbeSettings(str(tmp_path), peers=["127.0.0.1:1", "host without a port"])
    results = ProbeRunner(settings, os.environ).run(["network"])
    peers = {each.reading.peer: each.reading.error for each in results if isinstance(each.reading, NetworkReading)}
    assert peers.pop("loopback") == ""
    assert set(peers) == {"127.0.0.1:1", "host without a port"}
    assert all(peers.values())


def test_a_driver_that_crashes_or_prints_costs_only_its_own_reading(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("import os; print('a banner'); os.abort()\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    results = ProbeRunner(ProbeSettings(str(tmp_path)), environ).run(["nvml", "clock"])
    failed, clock = (result.reading for result in results)
    assert isinstance(failed, ProbeFailed)
    assert (failed.how, "SIGABRT" in failed.detail) == (FailedHow.DIED, True)
    assert isinstance(clock, NotApplicable)


def test_what_a_library_prints_garbles_nothing(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("print('a banner', flush=True)\nraise ImportError('an odd one')\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    (result,) = ProbeRunner(ProbeSettings(str(tmp_path)), environ).run(["nvml"])
    assert isinstance(result.reading, NotApplicable)


# --- products with a known answer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(known_answer.BOUNDS))
def test_every_partial_sum_is_exact_in_its_type(dtype: str) -> None:
    largest = known_answer.SIZE * known_answer.BOUNDS[dtype] ** 2
    assert largest <= {"float32": 1 << 24, "bfloat16": 1 << 8}[dtype]
    left, right = known_answer.factors(known_answer.BOUNDS[dtype], seed=3)
    assert max(abs(left).max(), abs(right).max()) == known_answer.BOUNDS[dtype]
    assert len(np.unique(known_answer.product(left, right))) > 20


def test_a_single_wrong_element_is_found_and_named() -> None:
    left, right = known_answer.factors(15, seed=0)
    want = known_answer.product(left, right)
    got = (left.astype(np.float32) @ right.astype(np.float32)).astype(np.float32)
    assert known_answer.differences(got, want) == (0, "")
    got[3, 5] += 1
    assert known_answer.differences(got, want) == (
        1,
        f"element (3, 5) is {float(want[3, 5]) + 1:g} instead of {want[3, 5]}",
    )
    got[3, 5] = np.nan
    assert known_answer.differences(got, want)[0] == 1
