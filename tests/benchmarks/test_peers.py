"""Fake peers: two small OpenAI-compatible servers, one that ends and one that never answers."""

import contextlib
import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import peer_servers, peers
from benchmarks.environments import Environment
from benchmarks.lengths import Fixed, LogNormal
from benchmarks.openai_target import OpenAITarget
from benchmarks.peer_servers import Peer, Subject
from benchmarks.peers import Plan
from benchmarks.record import Record
from contract.errors import EngineFailed, InvalidArgument
from server import ports

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200); self.end_headers()
        for n in range(request["max_tokens"]):
            time.sleep(0.002)
            reason = "length" if n + 1 == request["max_tokens"] else None
            chunk = {"choices": [{"text": sys.argv[2], "finish_reason": reason}]}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
        usage = {"prompt_tokens": len(request["prompt"].split()), "completion_tokens": request["max_tokens"]}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def fake_peer(name, script=SERVER, says="a", **more):
    command = lambda of, at: [sys.executable, "-c", script, str(at[0]), says]  # noqa: E731
    return Peer(name, command, lambda of, at: OpenAITarget(f"http://127.0.0.1:{at[0]}", "m"), f"{name}'s way", **more)


@pytest.fixture
def subject(tmp_path):
    return Subject("small", tmp_path, "demo", "f32", 64)


def plan(subject, **changes):
    return Plan(subject, **{"levels": (1, 2), "rounds": 1, "duration_s": 1.0, "input": "8", "output": "4"} | changes)


def wait_for(port):
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


def install(monkeypatch, *fake_peers):
    monkeypatch.setattr(peers, "PEERS", {peer.name: peer for peer in fake_peers} | {"transformers": fake_peers[0]})
    monkeypatch.setattr(peers, "IDLE_SAMPLE_S", 0.1)
    monkeypatch.setattr(peers, "TRIES", 1)
    monkeypatch.setattr(peers, "COMPARED_TOKENS", 4)


@pytest.mark.slow
def test_servers_that_start_are_measured_and_the_others_are_skipped_with_a_reason(
    monkeypatch, tmp_path, subject, capsys
):
    dying = fake_peer("dying", "import sys; sys.exit('fatal error: no such weights')")
    missing = fake_peer("missing", environment=Environment("nothing", (), (("no-such-program",),)))
    reads = 'request = json.loads(self.rfile.read(int(self.headers["content-length"])))'
    short = fake_peer("short", SERVER.replace(reads, f"{reads}; assert request['max_tokens'] == 1"))
    install(monkeypatch, fake_peer("one"), fake_peer("two", says="b"), dying, missing, short)
    monkeypatch.setattr("benchmarks.environments.FOLDER", tmp_path)
    assert peers.run(["one", "two", "short", "dying", "missing"], plan(subject), tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert {(one["peer"], one["concurrency"]) for one in found["rounds"]} == {
        (name, level) for name in ("one", "two") for level in (1, 2)
    }
    for one in found["rounds"]:
        assert one["tokens"] > 0 and one["failed"] == 0 and one["input_tokens"] == [8] and one["steady"]
        assert all(ttft_s >= 0.002 for ttft_s in one["ttfts_s"]) and one["tokens_per_s"] < one["concurrency"] / 0.002
    assert found["results"]["one"]["alone"] == ["a" * 4] * 8 and found["results"]["two"]["load_s"] > 0
    assert len(found["compared"]["tokens/s: one, 2"]["values"]) == 1
    assert "code 1: fatal error: no such weights" in found["skipped"]["dying"]
    assert "short" in found["skipped"] and "short" not in found["results"]  # of what it was to answer, only one token
    assert "no-such-program" in found["skipped"]["missing"]
    shown = capsys.readouterr().out
    assert "8 of 8" in shown and "0 of 8" in shown  # the texts of "two" differ from the reference
    assert "skipped, dying: it ended with code 1" in shown and "one: f32 weights; one's way" in shown


@pytest.mark.slow
def test_a_server_that_was_started_by_hand_is_measured_and_left_running(monkeypatch, tmp_path, subject):
    install(monkeypatch, fake_peer("one"))
    [port] = ports.free(1)
    models = SERVER.replace(
        "def log_message",
        """def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"data": [{"id": "theirs"}]}')
    def log_message""",
    )
    with subprocess.Popen([sys.executable, "-c", models, str(port), "b"]) as theirs:
        try:
            urls = [f"http://127.0.0.1:{port}", "http://127.0.0.1:9"]
            wait_for(port)
            assert peers.run(["one"], plan(subject, levels=(2,)), tmp_path, [*map(peer_servers.by_hand, urls)]) == 0
            assert theirs.poll() is None
        finally:
            theirs.terminate()
    found = json.loads((tmp_path / "peers.json").read_text())
    assert {one["peer"] for one in found["rounds"]} == {"one", urls[0]} and "names no model" in found["skipped"][
        urls[1]
    ]
    assert found["compared"][f"tokens/s: {urls[0]}, 2"]["values"][0] > 0


def test_answers_that_end_before_the_length_asked_for_are_wrong():
    whole = Record(0, 0.0, messages=[(1.0, 8)], usage_tokens=8, finish_reason="length")
    assert not peers._wrong(whole, Fixed(8)) and not peers._wrong(whole, LogNormal(9, 0.5))
    assert peers._wrong(whole, Fixed(9))  # a server started by hand that knows no ignore_eos
    assert peers._wrong(dataclasses.replace(whole, usage_tokens=7), LogNormal(9, 0.5))


def test_ratios_are_to_the_best_peer_of_the_same_round(subject):
    comparison = peers.Comparison(plan(subject, levels=(8,)), conditions={})
    for name, speeds in (("Trident, gRPC", (110.0, 90.0)), ("a", (100.0, 30.0)), ("b", (50.0, 60.0))):
        for n, speed in enumerate(speeds):
            load = peers.HostLoad(0.9, 0.0, 0.0)
            one = peers.Round(name, "words", 8, n, speed, 64, [0.1], 0, [8], n == 0, 1.0, 0.1, load)
            comparison.rounds.append(one)
        comparison.settings[name] = f"{'int8' if name < 'a' else 'bf16'} weights; its defaults"
        comparison.results[name] = peers.Result(1.0)
    found = peers.compared(comparison)
    assert found["tokens/s of the best peer's: Trident, gRPC, 8"]["values"] == [1.1, 1.5]
    speed, first = peers.goals(comparison)
    assert speed[1:] == (1.3, 1.1, True) and first[1] == pytest.approx(1.0)
    # A peer that died answers nothing: it has no first token, and what failed is told.
    dead = peers.Round("dead", "words", 8, 0, 0.0, 0, [], 7, [], True, 1.0, 0.1, load)
    comparison.rounds = [dead, dataclasses.replace(dead, number=1), *comparison.rounds]
    comparison.results["dead"], comparison.settings["dead"] = peers.Result(1.0), "bf16 weights"
    assert peers.goals(comparison) == [speed, first]
    shown = "\n".join(peers._doubts(comparison))
    assert "answers failed, or were not as long as requested or told: 7 of dead at 8, 7 of dead at 8" in shown
    assert "no steady state" in shown and "weights of different precision (bf16, int8)" in shown


@pytest.mark.slow
def test_a_server_that_is_stopped_leaves_no_children(tmp_path, subject):
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    server = peer_servers.start(fake_peer("parent", script), subject, tmp_path)
    while server.use().processes < 2:
        assert server.process.poll() is None
    server.stop()
    assert server.process.returncode is not None and server.use().cpu_s == 0


def test_a_program_that_is_not_there_is_named(tmp_path, subject):
    ghost = Peer("ghost", lambda of, at: ["/no/such/server"], lambda of, at: None, "")
    with pytest.raises(EngineFailed, match="ghost cannot be started: .*No such file.*/no/such/server"):
        peer_servers.start(ghost, subject, tmp_path)


def test_prompts_depend_on_the_round_and_the_level_alone(subject):
    one = plan(subject)
    assert one.workload(8, 1) == one.workload(8, 1)
    assert len({one.workload(level, turn).seed for level in (1, 8, 32) for turn in (0, 1, 100, 101)}) == 12


def test_what_is_unknown_is_named(subject, tmp_path):
    with pytest.raises(InvalidArgument, match="also: must be of http://HOST:PORT"):
        peer_servers.by_hand("http://h:80/v1")
    with pytest.raises(InvalidArgument, match="input: must be N, lognormal"):
        peers.run(["trident"], dataclasses.replace(plan(subject), input="x"), tmp_path)
    with pytest.raises(InvalidArgument, match="model: must be demo, bench-160m, a folder .*, got 'huge'"):
        peer_servers.subject("huge")


def test_what_no_server_can_take_is_refused_before_servers_are_installed(monkeypatch, subject, tmp_path, capsys):
    install(monkeypatch, fake_peer("missing", environment=Environment("nothing", (), (("no-such-program",),))))
    monkeypatch.setattr("benchmarks.environments.FOLDER", tmp_path)
    for lengths, match in (
        ("62", "input: must be, with the output, at most the 64 tokens that small takes; got up to 66"),
        ("lognormal:8,1", "input: must be, .* got up to 1000004"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            peers.run(["missing"], plan(subject, input=lengths), tmp_path)
    assert not capsys.readouterr().err


def test_servers_get_the_context_that_the_lengths_take(subject):
    large = dataclasses.replace(subject, max_len=8192)
    for lengths, max_len in (("8", 1024), ("2000", 2040), ("8160", 8192)):
        assert peers._fitted(plan(large, input=lengths)).subject.max_len == max_len


def test_an_endless_checkpoint_has_everything_but_its_end_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_servers, "FOLDER", tmp_path / "peers")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "generation_config.json"):
        (source / name).write_text('{"eos_token_id": [0, 5], "bos_token_id": 0}')
    for name in ("model.safetensors", "tokenizer.json", "README.md"):
        (source / name).write_text(name)
    for _ in range(2):
        folder = peer_servers.endless(Subject("s", source, "s", "f32", 1))
    assert {file.name for file in folder.iterdir()} == {file.name for file in source.iterdir()} - {"README.md"}
    assert json.loads((folder / "config.json").read_text()) == {"bos_token_id": 0}
    assert (folder / "model.safetensors").read_text() == "model.safetensors"


@pytest.mark.parametrize("name", ["vllm", "llama.cpp", "transformers"])
def test_every_peers_command_names_the_weights_the_precision_and_the_port(name, tmp_path, monkeypatch):
    of = Subject("demo", tmp_path, "demo", "f32", 1024)
    monkeypatch.setattr(peer_servers, "endless", lambda of: of.checkpoint)
    monkeypatch.setattr(peer_servers, "gguf", lambda of: of.checkpoint / "demo-f32.gguf")
    argv = " ".join(peer_servers.PEERS[name].command(of, [4711]))
    assert str(tmp_path) in argv and "--port 4711" in argv and ("float32" in argv or "f32" in argv)


@pytest.mark.slow
def test_sigterm_stops_what_was_started(tmp_path):
    """The servers that run by then are stopped too."""
    connected = tmp_path / "connected"  # by the client that waits for its first answer
    mute = (
        "import socket, sys, time; server = socket.create_server(('127.0.0.1', int(sys.argv[1])));"
        "call = server.accept(); open(sys.argv[2], 'w').close(); time.sleep(99)"
    )
    code = (
        "import sys; from benchmarks import command_line, peers; import tests.benchmarks.test_peers as here;"
        f"slow = here.fake_peer('slow', {mute!r}, {str(connected)!r});"
        "peers.PEERS.clear(); peers.PEERS.update(one=here.fake_peer('one'), slow=slow);"
        f"sys.exit(command_line.main(['peers', '--only', 'one,slow', '--out', {str(tmp_path)!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not connected.exists():
        assert process.poll() is None
        time.sleep(0.01)
    started = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(started) == 2
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    process.stderr.close()
    assert not [pid for pid in started if psutil.pid_exists(pid)]
