"""The supervisor with a real tritonserver: starts, faults, stops. The models are the fixture's."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract.errors import EngineFailed, Unavailable
from server import installation, ports, server_metrics, shared_memory, status, stubs
from server.admin import fetch
from server.settings import ROOT
from server.triton_command import ADMIN_HEADER

REPOSITORY = Path(__file__).parent / "fixtures" / "model_repository"
pytestmark = pytest.mark.end_to_end


def admin_headers(replica):
    """HTTP headers that unlock Triton's management APIs."""
    return {ADMIN_HEADER: replica.settings.admin_key}


def descendants(pid):
    """Pids of all descendants of ``pid``, zombies included."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, queue = set(), [pid]
    while queue:
        above = queue.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found.update(below)
        queue += below
    return found


def wait_until(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def gone(pids):
    return wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def files_of(replica):
    return list(Path("/dev/shm").glob(f"{shared_memory.port_prefix(replica.settings.grpc_port)}*"))


def is_ready(replica):
    try:
        fetch(f"{replica.http_url}/v2/health/ready")
    except (EngineFailed, Unavailable):
        return False
    return True


@pytest.fixture
def replica(serve):
    with serve() as replica:
        yield replica


@pytest.fixture(scope="module")
def untouched(serve):
    """A replica for tests that do not change it."""
    with serve() as replica:
        yield replica


def test_a_server_starts_answers_reports_itself_ready_and_leaves_nothing_behind(serve, open_stream):
    with serve() as replica:
        assert is_ready(replica)
        stream = open_stream(replica, max_tokens=8)
        assert stream.ended.wait(60) and "".join(stream.texts) == "pingping" and stream.finish_reason == "length"
        assert replica.status.state == "ready" and replica.status.reloads == 0
        assert {stub.model for stub in replica.stubs()} == {"tokenizer", "engine", "detokenizer"}
        assert files_of(replica)
        everything = descendants(replica.pid)
        assert replica.server_pid in everything
        message = replica.output.read_text()
        assert f"python -m clients --url {replica.grpc_url}" in message and f"{replica.http_url}/v2/models" in message
    assert replica.process.returncode == 0
    assert gone(everything) and files_of(replica) == []
    assert not status.path(replica.settings.state_dir, replica.settings.grpc_port).exists()


def test_clients_without_the_key_may_read_and_infer_but_not_unload_or_map_memory(untouched):
    for path in ("/v2", "/v2/models/ensemble/config", "/v2/models/ensemble/stats"):
        assert fetch(untouched.http_url + path)
    for path in ("/v2/repository/models/ensemble/unload", "/v2/repository/index", "/v2/systemsharedmemory/status"):
        method = "GET" if path.endswith("status") else "POST"
        with pytest.raises(EngineFailed, match="403"):
            fetch(untouched.http_url + path, method)
        assert fetch(untouched.http_url + path, method, admin_headers(untouched)) or path.endswith("unload")


def test_a_killed_streaming_stub_ends_every_stream_at_once_and_the_server_is_ready_again(replica, open_stream):
    for restarts, model in ((1, "engine"), (2, "detokenizer")):
        streams = [open_stream(replica, max_tokens=100_000) for _ in range(4)]
        assert all(stream.started.wait(60) for stream in streams)
        before = replica.server_pid
        os.kill(replica.stubs(model)[0].pid, signal.SIGKILL)
        assert all(stream.ended.wait(60) for stream in streams)
        assert {stream.failure for stream in streams} == {"UNAVAILABLE"}
        replica.wait_until_ready(restarts=restarts)
        again = open_stream(replica, max_tokens=4)
        assert again.ended.wait(60) and "".join(again.texts) == "ping"
        assert f"{model} process exited with signal 9; " in replica.output.read_text()
        assert replica.server_pid != before and len(files_of(replica)) == 4


def test_a_killed_tokenizer_stub_is_reloaded_while_streams_continue_and_readiness_fails(serve, open_stream, tmp_path):
    hold = tmp_path / "hold"
    with serve(env={"TRIDENT_FIXTURE_HOLD": str(hold)}) as replica:
        stream = open_stream(replica, max_tokens=100_000)
        assert stream.started.wait(60)
        before = replica.server_pid
        hold.touch()
        os.kill(replica.stubs("tokenizer")[0].pid, signal.SIGKILL)
        assert wait_until(lambda: not is_ready(replica))
        assert continues(stream) and not is_ready(replica)
        hold.unlink()
        found = replica.wait_until_ready(reloads=1)
        assert (found.restarts, found.reloads) == (0, 1) and replica.server_pid == before
        assert is_ready(replica)
        assert {stub.instance for stub in replica.stubs("tokenizer")} == {"tokenizer_0_0", "tokenizer_0_1"}
        again = open_stream(replica, max_tokens=4)
        assert again.ended.wait(60) and "".join(again.texts) == "ping"
        assert continues(stream) and not stream.ended.is_set()
        assert set(stream.texts[0::4]) == {"p"} and set(stream.texts[3::4]) == {"g"}  # nothing was lost


def continues(stream):
    """Return whether more text arrives from now on."""
    seen = len(stream.texts)
    return wait_until(lambda: len(stream.texts) > seen)


def test_all_stubs_and_then_tritonserver_itself_may_be_killed_again_and_again(replica, open_stream):
    for restarts in (1, 2):
        for stub in replica.stubs():
            with contextlib.suppress(ProcessLookupError):  # the first exit ends the others
                os.kill(stub.pid, signal.SIGKILL)
        replica.wait_until_ready(restarts=restarts)
    os.kill(replica.server_pid, signal.SIGKILL)
    found = replica.wait_until_ready(restarts=3)
    assert found.restarts >= 3 and "tritonserver exited with signal 9" in replica.output.read_text()
    again = open_stream(replica, max_tokens=4)
    assert again.ended.wait(60) and again.finish_reason == "length"


def test_a_model_reloaded_by_an_operator_is_no_failure(serve, open_stream, tmp_path):
    repository = tmp_path / "model_repository"
    shutil.copytree(REPOSITORY, repository)
    with serve(model_repository=repository, canary_interval_s=0.2) as replica:
        old = replica.stubs("detokenizer")[0]
        (repository / "detokenizer" / "1" / "model.py").touch()
        load = f"{replica.http_url}/v2/repository/models/detokenizer/load"
        fetch(load, "POST", admin_headers(replica), timeout_s=60)
        assert gone([old.pid])
        assert wait_until(lambda: len(replica.stubs("detokenizer")) == 1)
        before = responses(replica)
        assert wait_until(lambda: responses(replica) >= before + 2)  # to liveness probes: there are no other requests
        assert replica.status.restarts == 0 and is_ready(replica)
        # Its new process is watched as the old one was.
        os.kill(replica.stubs("detokenizer")[0].pid, signal.SIGKILL)
        replica.wait_until_ready(restarts=1)


def responses(replica):
    """Responses of the ensemble so far."""
    metrics = fetch(replica.metrics_url, timeout_s=60).decode()
    return server_metrics.parse(metrics, "detokenizer").responses


def test_a_hung_engine_is_restarted_and_a_full_one_is_not(serve, open_stream):
    with serve(canary_interval_s=0.3, canary_timeout_s=2.0, env={"TRIDENT_FIXTURE_SLOTS": "4"}) as replica:
        busy = [open_stream(replica, max_tokens=20, step_ms=100) for _ in range(4)]
        assert all(stream.ended.wait(60) for stream in busy) and replica.status.restarts == 0
        os.kill(replica.stubs("engine")[0].pid, signal.SIGSTOP)
        replica.wait_until_ready(restarts=1)
        assert "liveness probes in a row failed" in replica.output.read_text()


def test_a_stop_lets_short_streams_end_and_ends_long_ones_with_an_error(serve, open_stream):
    with serve(drain_s=6.0) as replica:
        short = [open_stream(replica, max_tokens=4, step_ms=250) for _ in range(20)]
        # A token a second: with more, a busy machine has too many under way to end them in time.
        long = [open_stream(replica, max_tokens=100_000, step_ms=1000) for _ in range(80)]
        assert all(stream.started.wait(60) for stream in short + long)
        everything = descendants(replica.pid)
        replica.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: not is_ready(replica))
        late = open_stream(replica, max_tokens=4)
        assert replica.process.wait(60) == 0
    assert all(stream.ended.wait(60) for stream in short + long + [late])
    assert {(len(stream.texts), stream.finish_reason, stream.failure) for stream in short} == {(4, "length", "")}
    assert {(stream.finish_reason, stream.error_message) for stream in long} == {
        ("error", "Unavailable: the server is shutting down")
    }
    assert "Unavailable: the fixture drains" in late.failure
    assert gone(everything) and files_of(replica) == []


def test_a_stop_waits_for_streams_that_are_still_in_the_detokenizer(serve, open_stream):
    with serve(drain_s=30.0, env={"TRIDENT_FIXTURE_DETOKENIZE_S": "0.4"}) as replica:
        # Detokenizing one response takes longer than an empty engine must stay without responses to count as idle.
        stream = open_stream(replica, max_tokens=8, step_ms=1)
        assert stream.started.wait(60)
        assert replica.stop() == 0
    assert stream.ended.wait(60) and (stream.finish_reason, stream.failure) == ("length", "")
    assert "".join(stream.texts) == "pingping"


def test_the_drain_file_of_a_killed_supervisor_does_not_stop_the_next_one_from_serving(serve, open_stream):
    with serve(drain_s=600) as replica:
        stream = open_stream(replica, max_tokens=100_000)
        assert stream.started.wait(60)
        replica.process.send_signal(signal.SIGTERM)
        assert wait_until(replica.settings.drain_file.exists)
        replica.process.kill()
    settings = replica.settings
    listen = (settings.grpc_port, settings.http_port, settings.metrics_port)
    with serve(listen=listen, state_dir=settings.state_dir) as again:
        assert not settings.drain_file.exists()
        stream = open_stream(again, max_tokens=4)
        assert stream.ended.wait(60) and "".join(stream.texts) == "ping"
    assert not settings.drain_file.exists()


def test_a_server_without_streams_is_not_said_to_have_ended_some_also_where_they_get_no_time(serve):
    with serve(drain_s=0) as replica:
        assert replica.stop() == 0
    assert "all streams completed" in replica.output.read_text()


def test_a_stop_cuts_off_streams_of_an_engine_that_does_not_respond(serve, open_stream):
    with serve(drain_s=0.2) as replica:
        stream = open_stream(replica, max_tokens=100_000)
        assert stream.started.wait(60)
        os.kill(replica.stubs("engine")[0].pid, signal.SIGSTOP)
        everything = descendants(replica.pid)
        assert replica.stop() == 0
    assert stream.ended.wait(60) and stream.failure == "UNAVAILABLE"
    assert gone(everything) and "some streams did not end" in replica.output.read_text()


def test_a_second_signal_stops_at_once(serve, open_stream):
    with serve(drain_s=600) as replica:
        stream = open_stream(replica, max_tokens=100_000)
        assert stream.started.wait(60)
        everything = descendants(replica.pid)
        replica.process.send_signal(signal.SIGINT)
        assert wait_until(lambda: replica.status.state == "draining")
        assert not stream.ended.wait(0.3)
        replica.process.send_signal(signal.SIGINT)
        assert replica.process.wait(60) == 130
    assert stream.ended.wait(60) and stream.failure == "UNAVAILABLE"
    assert gone(everything) and files_of(replica) == []


IGNORES_SIGNALS = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.environ["TRIDENT_GATEWAY_REPLICAS"], flush=True)
time.sleep(600)
"""


def test_ctrl_c_drains_every_server_of_a_chain_although_what_runs_beside_them_does_not_end(
    engines, open_stream, tmp_path
):
    for name in ("first", "second"):
        shutil.copytree(engines / "demo", tmp_path / name)
    settings = {"MODEL_REPOSITORY": REPOSITORY, "ENGINES_DIR": tmp_path, "STATE_DIR": tmp_path / "state", "DRAIN_S": 1}
    chain = [sys.executable, "-m", "server", "--engine", "first,second", "--free-ports"]
    process = subprocess.Popen(
        [*chain, "--", sys.executable, "-c", IGNORES_SIGNALS],
        cwd=ROOT,
        env=os.environ | {f"TRIDENT_{name}": str(value) for name, value in settings.items()},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        urls = [one.partition("=")[2] for one in process.stdout.readline().split(";")]
        streams = [open_stream(SimpleNamespace(grpc_url=url), max_tokens=100_000) for url in urls]
        assert len(streams) == 2 and all(stream.started.wait(60) for stream in streams)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert all(stream.ended.wait(60) for stream in streams)
    assert {(stream.finish_reason, stream.error_message) for stream in streams} == {
        ("error", "Unavailable: the server is shutting down")
    }


def test_a_killed_reaper_is_a_restart_and_no_process_survives_a_killed_supervisor(replica, open_stream):
    stream = open_stream(replica, max_tokens=100_000)
    assert stream.started.wait(60)
    everything = descendants(replica.pid)
    reaper = int(Path(f"/proc/{replica.server_pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    os.kill(reaper, signal.SIGKILL)
    replica.wait_until_ready(restarts=1)
    assert stream.ended.wait(60) and stream.failure == "UNAVAILABLE"
    assert gone(everything)

    stream = open_stream(replica, max_tokens=100_000)
    assert stream.started.wait(60)
    everything = descendants(replica.pid)
    replica.process.kill()
    replica.process.wait()
    assert stream.ended.wait(60) and stream.failure == "UNAVAILABLE"
    assert gone(everything) and files_of(replica) == []
    assert replica.status.state == "dead"


def run(*arguments, env=None, cwd=ROOT, **settings):
    """``python -m server`` with ``arguments`` in the folder ``cwd``, to its end."""
    variables = {f"TRIDENT_{name.upper()}": str(value) for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def fixture_settings(engines, tmp_path):
    """Settings of a server of the fixture ensemble on free ports."""
    grpc_port, http_port, metrics_port = ports.free(3)
    return {
        "model_repository": REPOSITORY,
        "engines_dir": engines,
        "state_dir": tmp_path,
        "grpc_port": grpc_port,
        "http_port": http_port,
        "metrics_port": metrics_port,
    }


def test_a_command_runs_once_the_server_is_ready_from_any_folder_and_its_exit_code_is_returned(
    fixture_settings, tmp_path
):
    ended = run("--", sys.executable, "-c", CHECK_READINESS, cwd=tmp_path, **fixture_settings)
    assert ended.returncode == 7 and ended.stdout == f"127.0.0.1:{fixture_settings['grpc_port']} 200\n"
    assert "ready in" in ended.stderr and "stopped" in ended.stderr
    ended = run("--", "no-such-command", **fixture_settings)
    assert ended.returncode == 1 and "no-such-command" in ended.stderr


CHECK_READINESS = """
import os, sys, urllib.request
print(os.environ["TRIDENT_URL"], urllib.request.urlopen(os.environ["TRIDENT_HTTP_URL"] + "/v2/health/ready").status)
sys.exit(7)
"""


def test_over_tls_the_liveness_probe_trusts_the_given_authority_and_plain_text_clients_fail(serve, open_stream):
    certificates = ROOT / "tests" / "clients" / "certificates"
    tls = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
    with serve(**tls, tls_ca=certificates / "ca.pem", tls_name="server.test") as replica:
        deadline_s = time.monotonic() + 60
        while "ModelStreamInfer over TLS" not in replica.output.read_text():  # said once it is ready
            assert time.monotonic() < deadline_s, replica.output.read_text()
            time.sleep(0.02)
        stream = open_stream(replica, max_tokens=4)
        assert stream.ended.wait(60) and stream.failure == "UNAVAILABLE" and not stream.texts


def test_a_wrong_setting_of_a_model_is_one_line_of_error_before_anything_starts(fixture_settings, tmp_path):
    ended = run(env={"TRIDENT_MAX_WAITING": "-1"}, **fixture_settings)
    assert ended.stderr == "error: TRIDENT_MAX_WAITING: must be a whole number from 1, got '-1'\n"
    assert ended.returncode == 1 and not (tmp_path / "logs").exists()


def test_a_busy_port_and_a_damaged_engine_are_one_line_of_error_before_anything_starts(fixture_settings, tmp_path):
    with socket.create_server(("127.0.0.1", fixture_settings["http_port"])):
        ended = run(**fixture_settings)
    assert ended.returncode == 1 and f"by process {os.getpid()}" in ended.stderr and "TRIDENT_HTTP_PORT" in ended.stderr
    shutil.copytree(fixture_settings["engines_dir"], tmp_path / "engines")
    (tmp_path / "engines" / "demo" / "weights.bin").write_bytes(b"other weights")
    ended = run(**fixture_settings | {"engines_dir": tmp_path / "engines"})
    assert ended.returncode == 1 and "weights.bin is not the file that was built" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and not (tmp_path / "logs").exists()


def test_a_stop_request_during_a_restart_ends_the_supervisor(serve, tmp_path):
    hold = tmp_path / "hold"
    with serve(env={"TRIDENT_FIXTURE_HOLD": str(hold)}) as replica:
        hold.touch()
        everything = descendants(replica.pid)
        os.kill(replica.server_pid, signal.SIGKILL)
        assert wait_until(lambda: replica.status.state == "restarting")
        assert replica.stop() == 0
        assert gone(everything) and files_of(replica) == []


def test_a_model_that_does_not_load_is_one_error_with_the_message_of_the_log(fixture_settings):
    ended = run(env={"TRIDENT_FIXTURE_FAULT": "engine-load"}, **fixture_settings)
    assert ended.returncode == 1
    assert "the fixture's weights are missing" in ended.stderr and "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) < 20
    (found,) = status.read_all(fixture_settings["state_dir"])
    assert found.state == "failed" and "weights are missing" in found.reason
    assert not list(Path("/dev/shm").glob(f"{shared_memory.port_prefix(fixture_settings['grpc_port'])}*"))


def test_a_stub_that_cannot_start_fails_the_start_with_its_own_message(fixture_settings, tmp_path):
    """As with a missing library: the stub exits before its first message, and Triton waits for it."""
    wheel = installation.find()
    image = tmp_path / "image"
    (image / "bin").mkdir(parents=True)
    (image / "bin" / "tritonserver").symlink_to(wheel.tritonserver)
    (image / "caches").symlink_to(wheel.caches)
    python = image / "backends" / "python"
    python.mkdir(parents=True)
    for file in wheel.backend_files.iterdir():
        (python / file.name).symlink_to(file)
    stub = python / installation.STUB
    stub.write_text("#!/bin/sh\nexec /no/such/program\n")
    stub.chmod(0o755)
    ended = run(tritonserver=image, start_timeout_s=3600, **fixture_settings)
    assert ended.returncode == 1 and "exited before it could load the model" in ended.stderr
    assert "/no/such/program: not found" in ended.stderr and "Traceback" not in ended.stderr


def test_paths_with_shell_metacharacters_are_served(fixture_settings, tmp_path):
    awkward = tmp_path / "a b's $HOME & (c); *"
    shutil.copytree(REPOSITORY, awkward / "model_repository")
    (awkward / "state").mkdir()
    ended = run(
        "--",
        sys.executable,
        "-c",
        CHECK_READINESS,
        **fixture_settings | {"model_repository": awkward / "model_repository", "state_dir": awkward / "state"},
    )
    assert ended.returncode == 7, ended.stderr
    assert not list(Path("/dev/shm").glob(f"{shared_memory.port_prefix(fixture_settings['grpc_port'])}*"))


def test_a_full_disk_does_not_end_a_supervisor_that_restarts_its_server(serve, tmp_path):
    full = tmp_path / "full"
    with serve(env={"TRIDENT_FAILPOINTS": f"disk.full@{full}"}) as replica:
        full.touch()
        old = replica.server_pid
        os.kill(old, signal.SIGKILL)
        assert gone([old]) and wait_until(lambda: is_ready(replica) or replica.process.poll() is not None)
        assert replica.process.poll() is None and "No space left" in replica.output.read_text()


def test_crashes_leave_no_files_in_shared_memory_while_the_supervisor_runs(serve):
    with serve() as replica:
        names = {file.name for file in files_of(replica)}
        for restarts, of_reaper in ((1, False), (2, True), (3, True)):
            server = replica.server_pid
            reaper = int(Path(f"/proc/{server}/stat").read_bytes().rpartition(b")")[2].split()[1])
            os.kill(reaper if of_reaper else server, signal.SIGKILL)
            replica.wait_until_ready(restarts=restarts)
            found = {file.name for file in files_of(replica)}
            assert len(found) == 4 and not found & names
            names |= found


def test_a_server_filled_by_reconnecting_clients_is_ready_although_the_probe_gets_no_slot(serve, open_stream, tmp_path):
    crowded = tmp_path / "crowded"
    with serve(start_timeout_s=30, env={"TRIDENT_FIXTURE_CROWDED": str(crowded)}) as replica:
        crowded.touch()
        stop = threading.Event()

        def reconnect():
            while not stop.is_set():
                stream = open_stream(replica, max_tokens=20)
                stream.ended.wait(60)
                stream.close()

        client = threading.Thread(target=reconnect)
        client.start()
        try:
            os.kill(replica.server_pid, signal.SIGKILL)
            found = replica.wait_until_ready(restarts=1)
            assert found.restarts == 1
        finally:
            stop.set()
            client.join(60)


def test_a_server_that_keeps_failing_to_start_ends_the_supervisor(serve, tmp_path):
    repository = tmp_path / "model_repository"
    shutil.copytree(REPOSITORY, repository)
    with serve(model_repository=repository) as replica:
        repository.rename(tmp_path / "lost")
        os.kill(replica.server_pid, signal.SIGKILL)
        assert replica.process.wait(120) == 1
        output = replica.output.read_text()
        assert "did not start 3 times in a row" in output and str(repository) in output
        assert replica.status.state == "failed" and replica.status.restarts == 3


def test_status_lists_a_running_server(untouched):
    listed = run("status", "--json", state_dir=untouched.settings.state_dir)
    assert [each["server_pid"] for each in json.loads(listed.stdout)] == [untouched.server_pid]
    listed = run("status", state_dir=untouched.settings.state_dir)
    assert listed.returncode == 0
    assert untouched.grpc_url in listed.stdout and "ready since" in listed.stdout


def test_generate_stream_over_http_reaches_the_ensemble(untouched):
    body = json.dumps({"text_input": "abc", "max_tokens": 3}).encode()
    with urllib.request.urlopen(f"{untouched.http_url}/v2/models/ensemble/generate_stream", body, timeout=60) as answer:
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]
    assert "".join(event["text_output"] for event in events) == "abc"


def test_stubs_are_found_by_model_and_instance(untouched):
    found = stubs.find(untouched.server_pid)
    assert [stub.instance for stub in found] == ["detokenizer_0_0", "engine_0_0", "tokenizer_0_0", "tokenizer_0_1"]
    assert [stub.model for stub in found] == ["detokenizer", "engine", "tokenizer", "tokenizer"]
    assert stubs.find(os.getpid()) == []
