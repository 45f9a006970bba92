"""The bell that aborts groups on devices while a thread keeps Python's lock."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from regrow.agent.workers.processes import ring
from regrow.comm.on_device.bell import Bells
from regrow.comm.torch_private.internals import HashStore
from regrow.comm.torch_private.nccl_group import method_of
from regrow.core.board import Board

C = ctypes.CDLL(None)
PATIENCE_S = 60
_RINGER = (
    "import sys; from regrow.agent.workers.processes import ring; sys.stdout.write(str(ring(*map(int, sys.argv[1:]))))"
)


class Moment(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A semaphore of the C library, whose `sem_post` stands for an abort."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(64)
        self.address = ctypes.addressof(self._memory)
        self.post = ctypes.cast(C.sem_post, ctypes.c_void_p).value or 0
        C.sem_init(self._memory, 0, 0)

    @property
    def count(self) -> int:
        value = ctypes.c_int()
        C.sem_getvalue(self._memory, ctypes.byref(value))
        return value.value

    def await_posted(self) -> bool:
        """Wait for it and keep Python's lock; False if it did not come."""
        until = Moment()
        C.clock_gettime(0, ctypes.byref(until))
        until.seconds += PATIENCE_S
        return int(ctypes.PyDLL(None).sem_timedwait(self._memory, ctypes.byref(until))) == 0


@pytest.fixture
def board() -> Iterator[Board]:
    made, descriptor = Board.create()
    os.close(descriptor)
    yield made
    made.close()


@pytest.fixture
def bells(board: Board) -> Iterator[Bells]:
    made = Bells()
    made.show = board.show_bell
    yield made
    made.close()


def test_another_process_has_functions_called_while_a_thread_keeps_pythons_lock(bells: Bells, board: Board) -> None:
    first, second = Semaphore(), Semaphore()
    prevent = [bells.add((each.post, each.address)) for each in (first, second)]
    bell = board.read_bell()
    words = [sys.executable, "-c", _RINGER, str(os.getpid()), *map(str, bell)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as ringer:
        assert first.await_posted()
        assert second.await_posted()
        assert ringer.communicate(timeout=PATIENCE_S)[0] == b"True"
    prevent[0]()
    assert board.read_bell() == bell
    prevent[1]()
    assert board.read_bell() == (0, 0)


def test_one_that_python_aborts_itself_is_left_alone_and_the_pipe_goes(bells: Bells, board: Board) -> None:
    semaphore = Semaphore()
    prevent = bells.add((semaphore.post, semaphore.address))
    bell = board.read_bell()
    prevent()
    prevent()
    assert board.read_bell() == (0, 0)
    bells.close()
    assert semaphore.count == 0
    assert not ring(os.getpid(), *bell)
    again = bells.add((semaphore.post, semaphore.address))
    assert board.read_bell()[1] not in (0, bell[1])
    again()


def test_another_file_by_that_number_is_not_written_to() -> None:
    read, write = os.pipe2(os.O_NONBLOCK)
    assert not ring(os.getpid(), write, os.fstat(write).st_ino + 1)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    assert ring(os.getpid(), write, os.fstat(write).st_ino)
    assert os.read(read, 1)
    for descriptor in (read, write):
        os.close(descriptor)


def test_nothing_is_prepared_where_no_agent_can_ring_and_where_no_function_is_known(bells: Bells, board: Board) -> None:
    Bells().add((1, 1))()
    bells.add(None)()
    assert board.read_bell() == (0, 0)


def test_a_method_and_an_object_of_torch_are_found_by_the_objects_class() -> None:
    store = HashStore()
    group: Any = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=PATIENCE_S))
    gloo = ("libtorch_cpu.so", "16ProcessGroupGloo", "25getSequenceNumberForGroupEv")
    found = method_of(group, *gloo)
    assert found is not None
    function, this = found
    count = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(function)
    before = count(this)
    group.barrier().wait()
    assert count(this) == group._get_sequence_number_for_group() == before + 1
    assert method_of(store, *gloo) is None
    assert method_of(1 << 40, *gloo) is None  # no object of C++ is behind it
    assert method_of(group, "libtorch_cpu.so", "16ProcessGroupGloo", "7nothingEv") is None
    assert method_of(group, "libtorch_cuda_of_none.so", "16ProcessGroupNCCL", "5abortEv") is None
