"""``python -m gateway release``, with the file and with running gateways."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from pathlib import Path

import pytest

from contract import gate_result, toml_table
from contract.errors import InvalidArgument, NotFound, Unavailable
from gateway import command_line
from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway, until

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    monkeypatch.delenv("TRIDENT_GATEWAY_CONFIG", raising=False)
    monkeypatch.setenv("TRIDENT_GATEWAY_REPLICAS", "stable=127.0.0.1:1;next=127.0.0.1:2")
    monkeypatch.setenv("TRIDENT_GATEWAY_ADMIN_TOKEN_FILE", str(token))


def run(*arguments: object) -> None:
    parsed = command_line.parse(["release", *map(str, arguments)])
    parsed.run(parsed)


START = ("start", "r", "--stable", "stable", "--candidate", "next", "--weight", "5")


def test_the_file_is_changed_and_what_happens_is_said(tmp_path: Path, capsys):
    path = tmp_path / "gateway.toml"
    path.write_text("# mine\n")
    run(*START, "--config", path)
    run("shift", "r", "--to", "25", "--config", path)
    run("rollback", "r", "--config", path, "--reason", "odd answers")
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "release r: canary, next gets 5 % of stable",
        "release r: canary, next gets 25 % of stable",
        "release r: canary, next gets nothing",
    ]
    assert f"Gateways that read {path} follow within a second." in said.err
    assert toml_table.read(path)["releases"]["r"]["rolled_back"] == "odd answers"
    run("start", "r", "--no-rollback", "--config", path)
    assert toml_table.read(path)["releases"]["r"]["rollback"] == {"automatic": False}
    run("start", "r", "--rollback", "--config", path)
    assert toml_table.read(path)["releases"]["r"]["rollback"] == {"automatic": True}


def test_who_changed_a_release_is_in_the_audit_log(tmp_path: Path, monkeypatch, capsys):
    path, log = tmp_path / "gateway.toml", tmp_path / "audit"
    path.write_text("")
    monkeypatch.setenv("TRIDENT_GATEWAY_AUDIT_LOG", str(log))
    run(*START, "--config", path)
    run("shift", "r", "--to", "25", "--config", path)
    with pytest.raises(InvalidArgument):
        run("finish", "r", "--config", path)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["action"], line["target"], line["after"]) for line in lines] == [
        ("release.start", "r", {"stable": "stable", "candidate": "next", "weight": 5}),
        ("release.shift", "r", {"to": 25}),
    ]
    assert all(line["who"].startswith("command line of ") and line["role"] == "operator" for line in lines)
    monkeypatch.setenv("TRIDENT_GATEWAY_AUDIT_LOG", str(tmp_path))  # stands in the way of no rollback
    run("rollback", "r", "--config", path)
    assert "warning: TRIDENT_GATEWAY_AUDIT_LOG: cannot be written" in capsys.readouterr().err
    assert toml_table.read(path)["releases"]["r"]["rolled_back"] == "by an operator"


@pytest.mark.parametrize(
    "arguments", [("release", "shift", "r", "--to", "nan"), ("key", "create", "a/b/c", "--expires-in-s", "inf")]
)
def test_a_number_that_json_does_not_have_is_refused_by_its_option(arguments, capsys):
    with pytest.raises(SystemExit):
        command_line.parse(arguments)
    assert f"argument {arguments[-2]}: must be a number, got {arguments[-1]}" in capsys.readouterr().err


def test_what_the_file_may_not_hold_is_refused_before_it_is_written(tmp_path: Path, monkeypatch):
    path = tmp_path / "gateway.toml"
    path.write_text("")
    monkeypatch.setenv("TRIDENT_GATEWAY_CONFIG", str(path))
    with pytest.raises(
        InvalidArgument, match="releases.r.candidate: must be one of the pools stable, next, got 'gone'"
    ):
        run("start", "r", "--stable", "stable", "--candidate", "gone")
    with pytest.raises(InvalidArgument, match="weight must be 0 or 100 for blue_green, got 5"):
        run(*START, "--kind", "blue_green")
    with pytest.raises(NotFound, match="no release 'r'"):
        run("rollback", "r")
    assert path.read_text() == ""
    run(*START)
    monkeypatch.setenv("TRIDENT_GATEWAY_REPLICAS", "elsewhere=127.0.0.1:1")  # nothing stands in the way of a rollback
    run("rollback", "r")
    assert toml_table.read(path)["releases"]["r"]["rolled_back"] == "by an operator"


@pytest.mark.parametrize("arguments", [("shift", "r"), ("start",), ("shift", "r", "--to", "much"), (), ("stop", "r")])
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert "usage:" in capsys.readouterr().err


async def test_a_gateway_takes_commands_and_tells_its_figures(tmp_path: Path, capsys, monkeypatch):
    config = "[releases.r]\nstable = 'stable'\ncandidate = 'next'\nkind = 'shadow'\n"
    async with FakeReplica() as stable, FakeReplica() as candidate:
        where = f"stable={stable.url};next={candidate.url}"
        async with gateway(
            stable, candidate, replicas=where, config=config, admin_token_file=tmp_path / "token"
        ) as running:

            async def ran(*arguments: str) -> str:
                await asyncio.to_thread(run, *arguments, "--gateway", running.base_url)
                return capsys.readouterr().out

            assert await ran("shift", "r", "--to", "100") == f"release r: shift taken by {running.base_url}\n"
            body = {"model": "demo", "prompt": "one two", "max_tokens": 4, "temperature": 0}
            assert (await running.post("/v1/completions", body))[0] == 200
            await until(lambda: running.service.metrics.outcomes.window("next", 60).copies["agree"] == 1)
            shown = await ran("status")
            assert "r: shadow, running, weight 100 %, last 300 s" in shown and "copies: 1 agree" in shown
            [stable_row] = [line.split() for line in shown.splitlines() if line.startswith("  stable")]
            assert stable_row[:4] == ["stable", "stable", "1", "0"]
            answer = json.loads(await ran("status", "--json"))[running.base_url]
            assert answer["problem"] == "" and answer["releases"][0]["candidate"]["requests"] == 1
            await ran("rollback", "r", "--reason", "a test")
            assert "r: shadow, rolled back (a test), weight 100 %" in await ran("status")
            with pytest.raises(InvalidArgument, match=r"refused with 400: releases.r: was rolled back \(a test\)"):
                await ran("shift", "r", "--to", "5")
            (tmp_path / "other").write_text("another-token-16")
            monkeypatch.setenv("TRIDENT_GATEWAY_ADMIN_TOKEN_FILE", str(tmp_path / "other"))
            with pytest.raises(InvalidArgument, match="refused with 401"):
                await ran("status")


def test_a_gateway_that_is_not_there_is_named(capsys):
    with pytest.raises(Unavailable, match="no gateway answered"):
        run("status", "--gateway", "http://127.0.0.1:9")
    assert "warning: http://127.0.0.1:9 does not answer: [Errno 111] Connection refused" in capsys.readouterr().err
    for url in ("http://local host:9", "http://127.0.0.1:9"):
        with pytest.raises(Unavailable, match=f"{url} does not answer"):
            run("shift", "a name", "--to", "5", "--gateway", url)
    with pytest.raises(InvalidArgument, match="--gateway: must be the URL of a gateway's HTTP port, got '127.0.0.1:9'"):
        run("status", "--gateway", "127.0.0.1:9")


def test_the_token_goes_to_the_named_gateway_alone(monkeypatch):
    class Redirecting(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(302)
            self.send_header("location", "/elsewhere")
            self.end_headers()

    seen: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        try:
            with pytest.raises(InvalidArgument, match="refused with 302"):
                run("status", "--gateway", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
    assert seen == ["/admin/releases"]


@pytest.mark.slow
async def test_a_release_with_a_gate_serves_more_than_5_percent_only_after_it_passed(tmp_path: Path):
    config = "[releases.r]\nstable = 'stable'\ncandidate = 'next'\nweight = 5\ngate = 'gate.json'\n"
    async with FakeReplica() as stable, FakeReplica() as candidate:
        where = f"stable={stable.url};next={candidate.url}"
        async with gateway(
            stable, candidate, replicas=where, config=config, admin_token_file=tmp_path / "token"
        ) as running:
            shift = ("shift", "r", "--to", "25", "--gateway", running.base_url)
            with pytest.raises(
                InvalidArgument, match="refused with 400: .*releases.r.gate: must be of a gate that passed"
            ):
                await asyncio.to_thread(run, *shift)
            path = running.service.configuration.path
            path.write_text(config.replace("weight = 5", "weight = 50"))  # the loader refuses it too
            await until(
                lambda: "releases.r.gate: must be of a gate that passed" in running.service.configuration.problem
            )
            assert running.service.configuration.policy.releases["r"].weight == 5
            gate = {"verdict": "pass", "reasons": [], "candidate": {"manifest_sha256": ""}}
            (path.parent / "gate.json").write_text(gate_result.sealed(gate))
            await asyncio.to_thread(run, *shift)
            assert running.service.configuration.policy.releases["r"].weight == 25
