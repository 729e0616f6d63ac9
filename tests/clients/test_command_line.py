"""The command as a person types it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clients import TLS, command_line, terminal
from clients.wire.failures import RetryHint
from contract import errors
from contract.errors import BY_NAME, TridentError
from contract.generation import FinishReason
from tests.fakes.replica import FakeReplica, Script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ABC = ("a", "b", "c")
CERTIFICATES = Path(__file__).with_name("certificates")


def run(
    replica: FakeReplica | None, *arguments: str, stdin: str | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """``python -m clients ARGUMENTS`` against the replica."""
    found = {"TRIDENT_URL": replica.url, "TRIDENT_METRICS_URL": replica.metrics_url} if replica else {}
    ours = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}  # the gateway sets it
    return subprocess.run(
        [sys.executable, "-m", "clients", *arguments],
        cwd=ROOT,
        env=ours | found | environment,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_prompt_streams_its_completion_to_standard_output(threaded_replica) -> None:
    done = run(
        threaded_replica,
        "one two",
        "--max-tokens",
        "3",
        "--temperature",
        "0",
        "--seed",
        "7",
        "--stop",
        "x",
        "--stop",
        "y",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, " one two one\n", "")
    seen = threaded_replica.seen[0]
    assert (seen.value("temperature"), seen.value("seed"), seen.inputs["stop_words"]) == (0.0, 7, ["x", "y"])
    assert seen.value("stream") is True and "top_k" not in seen.inputs


def test_the_prompt_may_come_from_a_pipe(threaded_replica) -> None:
    assert run(threaded_replica, "--max-tokens", "2", stdin="from a pipe").stdout == " from a\n"
    assert run(threaded_replica, "-", "--max-tokens", "2", stdin="and again").stdout == " and again\n"


def test_a_pipe_that_is_not_text_is_refused(threaded_replica) -> None:
    command = [sys.executable, "-m", "clients", "--url", threaded_replica.url]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=ROOT, env=strict, input=b"\xff\xfe", capture_output=True, timeout=60)
    assert done.returncode == 2 and b"prompt: standard input is not UTF-8 text" in done.stderr


@pytest.mark.parametrize(
    ("redirected", "arguments", "code", "said"),
    [
        (">&-", "x", 0, ""),
        (">/dev/full", "x", 9, "error: standard input or output: No space left on device"),
        (">/dev/full", "health", 9, "error: standard input or output: No space left on device"),
        ("<&-", "", 2, "prompt: must have at least one character"),
        ("<&-", "chat", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full_are_no_traceback(
    threaded_replica, redirected: str, arguments: str, code: int, said: str
) -> None:
    shell = f"{sys.executable} -m clients {arguments} --url {threaded_replica.url} {redirected}"
    done = subprocess.run(shell, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code and said in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_nothing_but_the_error_is_said_of_a_connection_that_fails(threaded_replica) -> None:
    ours = ("--tls-root", f"{CERTIFICATES}/ca.pem")  # the replica does not speak TLS
    done = run(threaded_replica, "x", *ours, "--retries", "0")
    assert done.returncode == 6
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["error:", ""]


def test_a_chat_line_that_is_not_text_is_refused(threaded_replica) -> None:
    command = [sys.executable, "-m", "clients", "chat", "--url", threaded_replica.url]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=ROOT, env=strict, input=b"a\n\xff\n", capture_output=True, timeout=60)
    assert done.returncode == 2 and b"messages: standard input is not UTF-8 text" in done.stderr


def test_a_terminal_without_the_characters_shows_substitutes(threaded_replica, playlist) -> None:
    playlist.set(Script(("h\u00e4",)))
    done = run(threaded_replica, "x", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "h?\n")


def test_stats_go_to_standard_error(threaded_replica) -> None:
    done = run(threaded_replica, "one two", "--max-tokens", "3", "--stats")
    assert done.stdout == " one two one\n"
    for part in (
        "first token",
        "between tokens p50",
        "tokens/s",
        "2 prompt tokens",
        "3 new tokens",
        "ended by: length",
    ):
        assert part in done.stderr


def test_json_gives_one_object_per_response_and_all_on_the_last(threaded_replica) -> None:
    done = run(threaded_replica, "one two", "--max-tokens", "3", "--json", "--request-id", "mine")
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["text"] for one in objects] == [" one", " two", " one"]
    assert objects[-1]["finish_reason"] == "length" and objects[-1]["request_id"] == "mine"
    assert objects[-1]["usage"] == {"input_tokens": 2, "output_tokens": 3, "cached_tokens": 0, "reasoning_tokens": 0}
    assert objects[-1]["timings"]["first_token_ns"] == 3_000
    whole = run(threaded_replica, "one two", "--max-tokens", "3", "--json", "--no-stream")
    assert [json.loads(line)["text"] for line in whole.stdout.splitlines()] == [" one two one"]


def test_an_answer_that_comes_whole_has_no_time_to_its_first_token(threaded_replica) -> None:
    done = run(threaded_replica, "one two", "--max-tokens", "3", "--json", "--stats", "--no-stream")
    last = json.loads(done.stdout)
    assert last["ttft_s"] is None and last["total_s"] > 0
    assert "first token" not in done.stderr and "3 new tokens" in done.stderr


def one_is_cancelled(replica: FakeReplica) -> bool:
    """Whether the one request that the replica has seen is cancelled, which it hears after its caller has left."""
    deadline_s = time.monotonic() + 60
    while replica.counts.running and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return (replica.counts.started, replica.counts.cancelled) == (1, 1)


def test_cancel_after_ends_early_and_well(threaded_replica, playlist) -> None:
    playlist.set(Script(tuple("abc" * 1000), gap_s=0.005))
    done = run(threaded_replica, "x", "--cancel-after", "4", "--stats")
    assert (done.returncode, done.stdout) == (0, "abca\n")
    assert "cancelled by us" in done.stderr
    assert one_is_cancelled(threaded_replica)


@pytest.mark.parametrize(
    ("script", "arguments", "code", "message"),
    [
        (
            Script(refuse=errors.InvalidArgument("stop_words", "too long")),
            [],
            2,
            "InvalidArgument: stop_words: too long",
        ),
        (Script(refuse=errors.Unauthenticated("no key")), [], 3, "Unauthenticated: no key"),
        (Script(), ["--model", "nosuch"], 4, "NotFound: Request for unknown model"),
        (Script(refuse=errors.Overloaded("full")), ["--retries", "0"], 5, "Overloaded: full"),
        (Script(refuse=errors.Unavailable("draining")), ["--retries", "0"], 6, "Unavailable: draining"),
        (Script(ABC, stall_after=0), ["--timeout", "0.3"], 7, "the deadline of 0.3 s passed before the first token"),
        (Script(refuse=errors.EngineFailed("boom")), [], 1, "EngineFailed: boom"),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_one_line(
    threaded_replica, playlist, script, arguments, code, message
) -> None:
    playlist.set(script)
    done = run(threaded_replica, "x", *arguments)
    assert done.returncode == code
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert "Traceback" not in done.stderr


def test_every_error_has_a_code_and_help_shows_it() -> None:
    for kind in BY_NAME.values():
        if kind is not TridentError:
            code = terminal.exit_code(errors.make(kind, "f: x"))
            assert f"\n  {code:>3}  " in "\n" + terminal.exit_codes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--top-p", "2"], "top_p: must be a finite number"),
        (["x", "--header", "novalue"], "--header: must be NAME=VALUE, got 'novalue'"),
        (["x", "--url", "http://a:1"], "url: must be HOST:PORT"),
        (["x", "--url", ""], "url: must be HOST:PORT"),
        (["x", "--header", "x-bin=1"], "metadata: got the key 'x-bin'"),
        (["x", "--tls-root", __file__], "tls.root: must be a certificate in PEM, got"),
        (["stop", "\u00fc"], "request_id: must be at most 256 printable ASCII characters, got '\u00fc'"),
    ],
)
def test_bad_options_are_named(arguments: list[str], message: str, capsys) -> None:
    assert command_line.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("option", "allowed", "given"), [("--cancel-after", 1, 0), ("--retries", 0, -1)])
def test_a_count_below_the_least_is_refused(option: str, allowed: int, given: int, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["x", option, str(given)])
    assert ended.value.code == 2
    assert f"argument {option}: must be {allowed} or more, got {given}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["generate", "chat", "health", "models", "stop", "demo"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused_by_every_verb(verb: str, seconds: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main([verb, f"--timeout={seconds}", "x"])
    assert ended.value.code == 2
    assert f"argument --timeout: must be more than 0, at most 86400, got {seconds}" in capsys.readouterr().err


def test_a_name_of_a_certificate_alone_does_not_mean_plain_text() -> None:
    args = command_line.parser().parse_args(["health", "--tls-name", "server.test"])
    assert command_line.client_for(args).connection.tls == TLS(server_name="server.test")


def test_an_unknown_option_is_named(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["x", "--nonsense"])
    assert ended.value.code == 2 and "unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_said_with_a_way_out(unused_tcp_port) -> None:
    done = run(None, "x", "--url", f"127.0.0.1:{unused_tcp_port}", "--retries", "0")
    assert done.returncode == 6
    assert f"cannot reach 127.0.0.1:{unused_tcp_port}" in done.stderr and "make serve" in done.stderr


def test_help_is_whole_and_needs_no_server(capsys) -> None:
    overview = run(None, "--help")
    assert overview.returncode == 0
    for word in (*command_line.VERBS, "exit codes:", "TRIDENT_URL", "127.0.0.1:8001"):
        assert word in overview.stdout
    for verb in command_line.VERBS:
        with pytest.raises(SystemExit) as ended:
            command_line.main([verb, "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0 and "--url" in shown and "exit codes:" in shown


def test_health_models_and_stop(threaded_replica) -> None:
    assert run(threaded_replica, "health").stdout.endswith("live: yes  ready: yes  ensemble: ready\n")
    assert run(threaded_replica, "models").stdout.splitlines()[0].split() == ["ensemble", "1", "READY"]
    assert run(threaded_replica, "stop", "some-id").returncode == 0
    assert threaded_replica.counts.stopped_ids == ["some-id"]
    threaded_replica.ready = False
    done = run(threaded_replica, "health")
    assert done.returncode == 6 and "ready: no  ensemble: not ready" in done.stdout


def test_the_known_models_are_checked_where_the_index_is_restricted(monkeypatch, capsys) -> None:
    timeouts_s = set()

    async def models(client, timeout_s):
        raise errors.PermissionDenied("restricted")

    async def model_ready(client, model, timeout_s):
        timeouts_s.add(timeout_s)
        return model in ("ensemble", "tokenizer", "engine")

    monkeypatch.setattr(command_line.AsyncClient, "models", models)
    monkeypatch.setattr(command_line.AsyncClient, "model_ready", model_ready)
    assert command_line.main(["models", "--timeout", "7"]) == 0
    assert [line.split()[::2] for line in capsys.readouterr().out.splitlines()] == [
        ["ensemble", "READY"],
        ["tokenizer", "READY"],
        ["engine", "READY"],
        ["detokenizer", "UNAVAILABLE"],
    ]
    assert timeouts_s == {7.0}


def test_an_answer_that_was_stopped_is_told_from_a_whole_one(threaded_replica, playlist) -> None:
    playlist.set(Script(("a", "b"), FinishReason.CANCELLED))
    done = run(threaded_replica, "x")
    assert (done.returncode, done.stdout) == (terminal.CUT_SHORT, "ab\n")


def test_credentials_and_headers_travel(threaded_replica) -> None:
    run(threaded_replica, "x", "--max-tokens", "1", "--header", "X-Tenant=acme", TRIDENT_API_KEY="k1")
    assert threaded_replica.seen[0].metadata["authorization"] == "Bearer k1"
    assert threaded_replica.seen[0].metadata["x-tenant"] == "acme"


@pytest.mark.parametrize(
    ("typed", "understood"),
    [
        (["hello"], ["generate", "hello"]),
        (["generate", "chat"], ["generate", "chat"]),
        (["--url", "a:1", "health"], ["health", "--url", "a:1"]),
        (["--url=a:1", "--tls", "chat"], ["chat", "--url=a:1", "--tls"]),
        (["--max-tokens", "3", "x"], ["generate", "--max-tokens", "3", "x"]),
        (["--url", "chat"], ["generate", "--url", "chat"]),
        (["--help"], ["--help"]),
        ([], []),
    ],
)
def test_a_verb_is_found_behind_connection_options_and_none_means_generate(typed, understood) -> None:
    assert command_line.with_verb(typed) == understood


def test_a_reader_that_goes_away_ends_it_quietly(threaded_replica, playlist) -> None:
    playlist.set(Script(tuple("abc" * 100_000), gap_s=0.0005))
    command = [sys.executable, "-m", "clients", "x", "--url", threaded_replica.url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(5)
        process.stdout.close()
        assert process.wait(60) == terminal.PIPE_CLOSED
        assert process.stderr.read() == b""


def test_ctrl_c_cancels_and_ends_with_130(threaded_replica, playlist) -> None:
    playlist.set(Script(tuple("abc" * 10_000), gap_s=0.005))
    command = [sys.executable, "-m", "clients", "x", "--url", threaded_replica.url, "--stats"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(3) == "abc"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == terminal.INTERRUPTED
        errors_shown = process.stderr.read()
    assert "Traceback" not in errors_shown and "ended by: unfinished" in errors_shown
    assert one_is_cancelled(threaded_replica)


def test_a_chat_keeps_its_history_and_obeys_its_commands(threaded_replica, playlist) -> None:
    playlist.set(Script(("yes",)))
    turns = [
        "hello",
        "and?",
        "/system be brief",
        "hi",
        "/reset",
        "again",
        "/system",
        "/help",
        "/what",
        "/quit",
        "never",
    ]
    done = run(threaded_replica, "chat", "--max-tokens", "5", "--system", "be kind", stdin="\n".join(turns) + "\n")
    assert (done.returncode, done.stdout) == (0, "yes\n" * 4)
    sent = [json.loads(seen.value("messages")) for seen in threaded_replica.seen]
    kind, brief = {"role": "system", "content": "be kind"}, {"role": "system", "content": "be brief"}
    assert sent[0] == [kind, {"role": "user", "content": "hello"}]
    assert sent[1][2:] == [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    assert sent[2] == [brief, {"role": "user", "content": "hi"}]
    assert sent[3] == [brief, {"role": "user", "content": "again"}]
    assert "no such command: /what" in done.stderr and "be brief" in done.stderr


def test_ctrl_c_in_a_chat_stops_the_answer_alone(threaded_replica, playlist) -> None:
    playlist.set(Script(tuple("abc" * 10_000), gap_s=0.005), Script(("fine",)))
    command = [sys.executable, "-m", "clients", "chat", "--url", threaded_replica.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.read(3) == "abc"
        process.send_signal(signal.SIGINT)
        process.stdin.write("next\n")
        process.stdin.close()
        assert process.stdout.read().endswith("fine\n")
        assert process.wait(60) == 0
        assert "(stopped)" in process.stderr.read()
    second = json.loads(threaded_replica.seen[1].value("messages"))
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"].startswith("abc")


def test_a_chat_that_fails_says_so_and_ends_with_its_code(threaded_replica, playlist) -> None:
    playlist.set(Script(refuse=errors.PromptTooLong("messages", "9000 tokens, 4096 are allowed")))
    done = run(threaded_replica, "chat", stdin="hello\n")
    assert done.returncode == 2 and "PromptTooLong: messages: 9000 tokens" in done.stderr


def test_as_many_retries_are_made_as_were_asked_for():
    client = command_line.client_for(command_line.parser().parse_args(["health", "--retries", "30"]))
    schedule = client._schedule()
    waits = [schedule.wait_s(errors.Unavailable("draining"), RetryHint(), 600.0) for _ in range(31)]
    assert None not in waits[:30] and waits[30] is None
