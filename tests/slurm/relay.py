"""`regrow words…` on a node, forked from the node's warm process: same streams, signals and exit code.

Run as `python -S relay.py SPOOL words…`; that process listens at `door` in the node's folder there. Where it does not,
and for the node's task itself, which Slurm is to have as its own child, `regrow` is started as ever.

The command is a child of the warm process, in a session of its own. It is killed when this process has ended.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

DOOR = "door"
_START_S = 180.0
_FORKED = ("run", "agent")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(spool: str, words: list[str]) -> int:
    """The command's exit code; a signal's number below zero."""
    control = _connected(f"{spool}/{socket.gethostname()}/{DOOR}") if words[0] in _FORKED else None
    if control is None:
        os.execv(sys.executable, [sys.executable, "-m", "regrow", *words])
    report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = {"module": "regrow", "words": words, "cwd": os.getcwd(), "env": dict(os.environ), "tied": True}
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    socket.send_fds(control, [json.dumps(request).encode()], [theirs.fileno(), 0, 1, 2])
    theirs.close()
    report.settimeout(_START_S)
    pid = int(report.recv(64))
    report.settimeout(None)  # it lasts as long as the job

    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    return int(report.recv(64))


def _connected(door: str) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.connect(door)
    except OSError:
        made.close()
        return None
    return made


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
