"""Runs a command so that nothing of it outlives its supervisor. Run by path, alone: ``python -I -S keeper.py``.

    keeper.py SHM_PREFIX COMMAND ARG...

The keeper stands between supervisor and tritonserver. Its standard input is a pipe the supervisor holds open;
when that closes, on purpose or because the supervisor was killed, or when the command ends by itself, it kills
every process that descends from the command, removes their files in /dev/shm and the folders that tritonserver leaves
in /tmp, and exits the way the command did.
First line of standard output: the command's pid.

A parent-death signal alone would not do: it reaches tritonserver, not its stubs, nor what they started.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHM = "/dev/shm"
# Where tritonserver's Python backend makes an empty folder at every start, for packed environments of models, which
# we have none of. It stays when the server ends, however it ends.
ENVIRONMENTS, ENVIRONMENT = "/tmp", "python_env_"


def main(shm_prefix: str, command: list[str]) -> int:
    # Orphans of the command become our children, so "no children left" means "nothing left".
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)  # the supervisor decides
    pid = _spawn(command)
    print(pid, flush=True)
    _wait_for_either(pid)
    status = kill_all(pid)
    _remove_files(shm_prefix)
    remove_environments(ENVIRONMENTS, oldest_server_s())
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill_all(pid: int) -> int:
    """Kills ``pid`` and all other children, and theirs as they become ours; returns the wait status of ``pid``."""
    status = 0
    while True:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            ended, its_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended == pid:
            status = its_status
        elif ended == 0:
            time.sleep(0.002)


def _run_in_batches() -> None:
    """The command's threads, a dozen of which pass every response on, do not push each other off the core.

    A thread that is woken then waits for the one that woke it to go on with the next response first: a tenth to a
    quarter less CPU per response (benchmarks/LOG.md). Inherited by the stubs.
    """
    with contextlib.suppress(OSError):  # a sandbox that does not allow it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def children() -> list[int]:
    """Our children that have not been waited for. Only we wait, so none of these pids can be somebody else's."""
    me = os.getpid()
    return [pid for pid, _, fields in _processes() if int(fields[1]) == me]


def _processes() -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Every process of this machine: its pid, its command's name, and what /proc/<pid>/stat says behind that."""
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as stat:
                # The name may hold blanks and parentheses; what follows the last one does not.
                command, _, fields = stat.read().rpartition(b")")
                yield int(pid), command.partition(b"(")[2], fields.split()


def _spawn(command: list[str]) -> int:
    keeper = os.getpid()
    pid = os.fork()  # no threads here, so nothing is torn
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _run_in_batches()
        if os.getppid() != keeper:
            os._exit(1)
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a descriptor per connection
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)  # both into the log; standard output is ours
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _wait_for_either(pid: int) -> None:
    """Returns when ``pid`` ended or our standard input closed."""
    command_ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(command_ended, select.POLLIN)
    poller.poll()
    os.close(command_ended)


def _remove_files(shm_prefix: str) -> None:
    for name in os.listdir(SHM):
        if name.startswith(shm_prefix):
            try:
                os.unlink(f"{SHM}/{name}")
            except FileNotFoundError:
                pass


def remove_environments(folder: str, oldest_s: float) -> None:
    """Removes the empty environment folders of ``oldest_s``, the age in seconds of the oldest living server, or more:
    whoever made them is gone."""
    for name in os.listdir(folder):
        if name.startswith(ENVIRONMENT):
            with contextlib.suppress(OSError):  # somebody else's, in use, or gone
                if time.time() - os.stat(f"{folder}/{name}").st_ctime >= oldest_s:
                    os.rmdir(f"{folder}/{name}")


def oldest_server_s() -> float:
    """Seconds since the start of the oldest tritonserver on this machine; 0 if there is none."""
    now_s, ticks_per_s = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    starts_s = [int(fields[19]) / ticks_per_s for _, command, fields in _processes() if command == b"tritonserver"]
    return now_s - min(starts_s, default=now_s)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
