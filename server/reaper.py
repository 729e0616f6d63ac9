"""Runs a command as a child subreaper, so that no descendant outlives the supervisor.

    python -I -S reaper.py SHM_PREFIX COMMAND ARG...

Runs by path and uses only the standard library, to start fast. The reaper stands between supervisor and tritonserver.
Its standard input is a pipe that the supervisor holds open. When the pipe closes (the supervisor closed it or was
killed), or when the command exits, the reaper kills every descendant of the command, removes their files in /dev/shm
and the folders that tritonserver leaves in /tmp, and exits with the command's exit code.
It writes the command's pid to standard output.

A parent-death signal alone is not enough: it reaches tritonserver, but neither its stubs nor their children.
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
# tritonserver's Python backend makes an empty folder here at every start, for packed environments of models, and never
# removes it. No model of ours has one.
ENVIRONMENTS, ENVIRONMENT = "/tmp", "python_env_"


def main(shm_prefix: str, command: list[str]) -> int:
    # Orphans of the command become children of this process, so no children left means no descendants left.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)  # the supervisor handles them
    pid = _spawn(command)
    print(pid, flush=True)
    _wait_for_exit_or_closed_stdin(pid)
    status = kill_all(pid)
    _remove_files(shm_prefix)
    remove_environments(ENVIRONMENTS, oldest_server_s())
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def kill_all(pid: int) -> int:
    """Kill ``pid`` and all other descendants; return the wait status of ``pid``."""
    status = 0
    while True:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            exited, its_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if exited == pid:
            status = its_status
        elif exited == 0:
            time.sleep(0.002)


def children() -> list[int]:
    """Return the pids of this process's children, zombies included. Only we wait for them, so no pid is reused."""
    this = os.getpid()
    return [pid for pid, _, fields in _processes() if int(fields[1]) == this]


def remove_environments(folder: str, min_age_s: float) -> None:
    """Remove empty environment folders as old as the oldest running server, ``min_age_s``: they belong to none."""
    for name in os.listdir(folder):
        if name.startswith(ENVIRONMENT):
            with contextlib.suppress(OSError):  # another user's, in use, or gone
                if time.time() - os.stat(f"{folder}/{name}").st_ctime >= min_age_s:
                    os.rmdir(f"{folder}/{name}")


def oldest_server_s() -> float:
    """Return the age in seconds of the oldest tritonserver on this machine; 0 if none runs."""
    now_s, ticks_per_s = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    starts_s = [int(fields[19]) / ticks_per_s for _, command, fields in _processes() if command == b"tritonserver"]
    return now_s - min(starts_s, default=now_s)


def _set_batch_policy() -> None:
    """Set SCHED_BATCH: no wake-up preemption among the command's threads; stubs inherit it.

    A dozen threads pass on every response. Without preemption the waking thread handles its next response first: 10
    to 25 % less CPU per response (benchmarks/LOG.md).
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _processes() -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Yield pid, command name and the fields behind the name in /proc/<pid>/stat of every process."""
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as stat:
                # The name may contain blanks and parentheses; the fields behind the last one do not.
                command, _, fields = stat.read().rpartition(b")")
                yield int(pid), command.partition(b"(")[2], fields.split()


def _spawn(command: list[str]) -> int:
    reaper = os.getpid()
    pid = os.fork()  # safe: this process has one thread
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _set_batch_policy()
        if os.getppid() != reaper:
            os._exit(1)
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one descriptor per connection
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)  # both into the log; standard output is the reaper's
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _wait_for_exit_or_closed_stdin(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os.close(pidfd)


def _remove_files(shm_prefix: str) -> None:
    for name in os.listdir(SHM):
        if name.startswith(shm_prefix):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{SHM}/{name}")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
