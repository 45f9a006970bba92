"""`python -m tests.surroundings.refusing ERRNO CALL[,CALL…] COMMAND…`: the command under a filter of system calls.

As a container's seccomp profile has it: these calls, of it and of all that it starts, are answered with this error.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

# Numbers by the kernel's tables: x86_64, aarch64.
CALLS = {
    "clone3": (435, 435),
    "close_range": (436, 436),
    "copy_file_range": (326, 285),
    "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fallocate": (285, 47),
    "flock": (73, 32),
    "get_mempolicy": (239, 236),
    "getpriority": (140, 141),
    "getrandom": (318, 278),
    "inotify_init1": (294, 26),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "madvise": (28, 233),
    "mbind": (237, 235),
    "membarrier": (324, 283),
    "memfd_create": (319, 279),
    "mincore": (27, 232),
    "mlock": (149, 228),
    "mlock2": (325, 284),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prctl": (157, 167),
    "preadv2": (327, 286),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "recvmmsg": (299, 243),
    "rseq": (334, 293),
    "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sendfile": (40, 71),
    "sendmmsg": (307, 269),
    "set_mempolicy": (238, 237),
    "set_robust_list": (273, 99),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "signalfd4": (289, 74),
    "splice": (275, 76),
    "statx": (332, 291),
    "sync_file_range": (277, 84),
    "sysinfo": (99, 179),
    "tee": (276, 77),
    "timerfd_create": (283, 85),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "waitid": (247, 95),
}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_FILTER = struct.Struct("=HBBI")
_LOAD_NUMBER, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def can_refuse() -> bool:
    """True if this machine's system call numbers are known here."""
    return platform.machine() in _COLUMN


def refuse(number: int, calls: Sequence[str]) -> None:
    """From now on, for this process and what it starts, for good."""
    column = _COLUMN[platform.machine()]
    program = [_FILTER.pack(_LOAD_NUMBER, 0, 0, 0)]
    for call in calls:
        program += [_FILTER.pack(_IF_EQUAL, 0, 1, CALLS[call][column]), _FILTER.pack(_RETURN, 0, 0, _ERRNO | number)]
    program.append(_FILTER.pack(_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((_NO_NEW_PRIVILEGES, 1, 0), (_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(head))):
        if libc.prctl(words[0], words[1], ctypes.c_ulong(words[2]), 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    name, calls, *command = sys.argv[1:]
    refuse(getattr(errno, name), calls.split(","))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
