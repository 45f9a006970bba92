"""First code of a freshly forked worker: it becomes an ordinary process, then runs the script."""

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import importlib
import importlib.machinery
import io
import os
import resource
import runpy
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from regrow.agent.workers.early_exit import hold
from regrow.agent.workers.link import WorkerLink, placed
from regrow.agent.workers.processes import call_process, die_with_parent
from regrow.agent.workers.shield import Shield
from regrow.agent.workers.standby import await_start
from regrow.agent.workers.tracebacks import report
from regrow.core.board import BoardReading
from regrow.core.config import Script, WorkerEnv
from regrow.core.errors import AgentGone, RegrowError
from regrow.core.exit_codes import LOST_AGENT
from regrow.core.ids import NO_STATE, Seconds, StepNo
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import Role, Warmth
from regrow.core.process.priority import PromptThread, give_way, offer_memory
from regrow.core.process.stage_times import CONTEXT, START, StageClock
from regrow.core.process.streams import open_standard_streams

if TYPE_CHECKING:
    from regrow.agent.workers.seed import WorkerSeed

_ADOPTION_S: Seconds = 10.0
_CONTEXT = "regrow.devices.context_times"
_RENDEZVOUS = "regrow.comm.rendezvous"
_FAR = 8192
_PRODUCING = "regrow.train.producing"
_NUMA = "regrow.comm.torch_private.numa"


def run_worker(seed: "WorkerSeed") -> None:
    """Run a worker from its fork to the end of its script. Ends by `SystemExit` or by returning, like a script."""
    _await_adoption(seed)
    env = _become_a_process(seed)
    link = WorkerLink.current()
    if link is None:
        raise RegrowError("a worker was forked without its channel", hint="this is a fault of regrow; please report it")
    link.stages = StageClock(seed.request.at)
    if env.role is Role.PROVER:
        _be_in_nobodys_way(link)
    if env.role is Role.STANDBY and env.warmth is Warmth.IMPORTS:
        await_start(link, [seed.request.script.target, *seed.request.script.args])
    if not seed.request.script.binary:
        _meet_without_a_root()
    _time_stages(link, binary=seed.request.script.binary)
    _bind(link)
    if link.env.role is not Role.RANK and env.producer is None:
        link.early.watch(rewrites=env.spec.rewrites)
    if env.producer is None:
        atexit.register(_say_that_it_ended, link)  # Registered first, so it runs last.
    if seed.request.script.binary:
        link.board.show_own_end(True)  # The executable may have its own handler, which cannot be seen from here.
    else:
        Shield(link.board).raise_()
    try:
        if env.producer is not None:
            _produce(link, seed.request.script)
        _run_script(seed.request.script)
        _say_that_it_returned(link)
    except (SystemExit, KeyboardInterrupt) as end:
        link.ended_badly = not isinstance(end, SystemExit) or end.code not in (None, 0)
        if not link.ended_badly and env.producer is None:
            _say_that_it_returned(link)
        raise  # Python itself handles these.
    except BaseException as error:  # noqa: BLE001 - any exception ends the script and is reported
        _report_failure(link, error)
        raise SystemExit(1) from None


def _time_stages(link: WorkerLink, *, binary: bool) -> None:
    """Note that the script begins; in a joining or restarted worker, also time the start of its accelerator."""
    link.stages.reached(START, time.monotonic())
    env = link.env
    if binary or env.producer is not None or not (env.role is Role.JOINER or env.restarts):
        return
    with contextlib.suppress(ImportError):  # Without torch there is nothing to measure.
        within = functools.partial(link.stages.within, CONTEXT)
        link.stages.stop = importlib.import_module(_CONTEXT).time_context(within)


def _bind(link: WorkerLink) -> None:
    """Bind this process near its accelerator if the job asks for that; write a note if it has no effect."""
    env = link.env
    if not env.spec.numa_binding or env.producer is not None:
        return
    try:
        why = importlib.import_module(_NUMA).bind(env.spec.numa_binding, env.local_rank)
    except ImportError as error:
        why = str(error)
    if why:
        link.send(facts.WorkerNoted(env.worker, f"--numa-binding {env.spec.numa_binding} changes nothing: {why}"))


def _be_in_nobodys_way(link: WorkerLink) -> None:
    """Give all other processes priority, except during work for which a rank waits."""
    link.prompt = PromptThread()
    give_way(spared=[link.prompt.thread])
    offer_memory()


def _await_adoption(seed: "WorkerSeed") -> None:
    """Wait until the agent is the parent of this process; end if the agent has gone."""
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() == seed.middle and time.monotonic() < deadline:
        os.sched_yield()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != seed.agent:
        os._exit(LOST_AGENT)


def _become_a_process(seed: "WorkerSeed") -> WorkerEnv:
    """Replace everything that comes from the zygote: name, signals, standard streams, environment, random state."""
    call_process("regrow-worker")
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # Some real-time signals belong to the C library.
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Moved above the standard streams, which a module imported by the zygote may have closed.
    channel, board, output, errors = (_above(each) for each in seed.descriptors)
    open_standard_streams()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    hold(board)
    channel, board = _out_of_reach(channel), _out_of_reach(board)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    env = placed(seed.request.env, channel=channel, board=board)
    os.set_inheritable(channel, True)
    os.set_inheritable(board, True)
    os.environ.clear()
    os.environ.update(seed.inherited | seed.request.variables | env.variables())
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Otherwise all workers share the zygote's state; Python reseeds its own generator itself.
    return env


def _above(descriptor: int) -> int:
    if descriptor > 2:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def _out_of_reach(descriptor: int) -> int:
    """Move a descriptor, if possible, beyond the numbers that scripts close when they close all, as daemons do."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _FAR + 2), hard))
    except (OSError, ValueError):  # The limit is lower or fixed. `WorkerLink` reports it if the script closes this.
        return descriptor
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FAR)
    except OSError:
        return descriptor
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.close(descriptor)
    return moved


def _meet_without_a_root() -> None:
    # Imported by name, because this package is free of torch, which the zygote has imported.
    try:
        rendezvous = importlib.import_module(_RENDEZVOUS)
    except ImportError as error:
        sys.stderr.write(f"regrow: env:// is torch's own, since the job's store cannot be used: {error}\n")
        return
    rendezvous.install(_environment)


def _produce(link: WorkerLink, script: Script) -> NoReturn:
    """Run the script up to the loader of this producer, and serve that loader. Ends by `SystemExit`.

    Raises the script's exceptions, and `ImportError` if there is no torch.
    """
    producing = importlib.import_module(_PRODUCING)
    if script.binary:
        producing.leave("the job runs an executable")
    call_process("regrow-data")
    producing.await_loader(link)
    try:
        _run_script(script)
    except SystemExit as end:
        producing.leave(f"the script ended itself ({end.code})")
    producing.leave("the script ended")
    raise SystemExit(0)


def _environment() -> WorkerEnv | None:
    link = WorkerLink.current()
    return None if link is None else link.env


def _run_script(script: Script) -> None:
    sys.argv = [script.target, *script.args]
    if script.binary:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        try:
            os.execvp(script.target, sys.argv)
        except OSError as error:
            raise OSError(error.errno, error.strerror, script.target) from None
    elif script.module:
        sys.path.insert(0, os.getcwd())
        sys.modules["__main__"] = types.ModuleType("__main__")
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    elif Path(script.target).is_dir() or script.target.endswith((".zip", ".pyz")):
        runpy.run_path(script.target, run_name="__main__")
    else:
        _run_file(script.target)


def _run_file(target: str) -> None:
    # Not `runpy.run_path`, which removes the module `__main__` when the script ends, although threads, exit handlers
    # and spawned loaders may still need it.
    path = os.path.abspath(target)
    with io.open_code(path) as file:
        source = file.read()
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __cached__=None,
        __builtins__=sys.modules["builtins"],
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __annotations__={},
    )
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _report_failure(link: WorkerLink, error: BaseException) -> None:
    link.failed = True
    with contextlib.suppress(OSError, ValueError):  # The script may have closed its standard output.
        sys.stdout.flush()
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, error.__traceback__)
    link.failing(error)
    try:
        environment, excused = report(error), link.excused()
        if excused and (advice := link.advice()):
            environment = msgspec.structs.replace(
                environment,
                message=f"{environment.message} ({advice})",
                traceback=f"{environment.traceback.rstrip()}\n({advice})\n",
            )
        link.send(facts.WorkerFailed(link.env.worker, environment, _step(link.board.read()), own=not excused))
    except AgentGone as gone:
        sys.stderr.write(f"{gone}\n{report(error).traceback}")


def _say_that_it_returned(link: WorkerLink) -> None:
    if os.getpid() != link.pid:
        return
    threads = [each.name for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    with contextlib.suppress(AgentGone):
        link.send(facts.ScriptReturned(link.env.worker, threads))


def _say_that_it_ended(link: WorkerLink) -> None:
    if link.failed or link.ended_badly or os.getpid() != link.pid:
        return
    with contextlib.suppress(AgentGone):
        link.send(facts.ScriptEnded(link.env.worker))


def _step(reading: BoardReading) -> StepNo:
    return StepNo(reading.step) if reading.beats else NO_STATE
