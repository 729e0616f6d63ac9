"""Scenario files: what is read, and errors that name the field."""

from __future__ import annotations

import json
import random
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from cluster.plan import scenario
from cluster.plan.scenario import Lengths, of_table, read
from contract.errors import InvalidArgument
from tests.cluster.plan.scenarios import table

ESTIMATE = table()["pools"]["main"]["estimate"]


def classes(**fields):
    return table(classes=[table()["pools"]["main"]["classes"][0] | fields])


def without(name):
    found = classes()
    del found["pools"]["main"]["classes"][0][name]
    return found


def test_a_number_holds_for_every_hour_and_users_send_what_one_of_them_does():
    [one] = of_table(table()).pools["main"].classes
    assert one.rates() == (20.0,) * 24 and one.input is not None and one.input.p95 == 200
    users = classes(users=[3600] * 24, requests_per_user_hour=2.0) | {}
    del users["pools"]["main"]["classes"][0]["requests_per_s"]
    assert of_table(users).pools["main"].classes[0].rates() == (2.0,) * 24


def test_an_engine_is_a_name_or_a_folder(monkeypatch, tmp_path: Path):
    given = table()
    del given["pools"]["main"]["estimate"]
    monkeypatch.setenv("TRIDENT_ENGINES_DIR", str(tmp_path))
    monkeypatch.setattr(scenario, "kind_of", lambda pool, place: None)  # there is none
    for engine, folder in (("mine", str(tmp_path / "mine")), ("engines/mine", "engines/mine"), (str(tmp_path),) * 2):
        given["pools"]["main"]["engine"] = engine
        assert of_table(given).pools["main"].engine == folder


def test_an_engine_that_was_not_calibrated_is_named(tmp_path: Path):
    with pytest.raises(InvalidArgument, match="pools.main.engine: must be a calibrated engine: .*half-built"):
        of_table(table(estimate=None, engine=str(tmp_path)))
    for name in ("a" * 5000, "a\0b"):
        with pytest.raises(InvalidArgument, match="pools.main.engine: must be a calibrated engine"):
            of_table(table(estimate=None, engine=name))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"estimate": ESTIMATE | {"card": "h101"}}, "estimate.card: must be one of a100-80gb, "),
        ({"acceptance": 0.5}, "acceptance: must be left out: the engine does not draft"),
        ({"estimate": None, "engine": "engines/none"}, "engine: must be a calibrated engine: there is no engine at"),
    ],
)
def test_what_is_wrong_in_a_later_pool_is_told_before_any_metrics_are_read(monkeypatch, change, problem):
    monkeypatch.setattr(scenario, "_measured", None)
    given = table(classes=[{"name": "chat", "metrics": "http://127.0.0.1:1/metrics", "seconds": 3600}])
    given["pools"]["other"] = table(**change)["pools"]["main"]
    with pytest.raises(InvalidArgument, match=f"scenario: pools.other.{problem}"):
        of_table(given)


@pytest.mark.parametrize(
    ("given", "field", "problem"),
    [
        ({}, "pools", "must be set"),
        ({"pools": {}}, "pools", "at least 1"),
        (table() | {"hours": 3}, "hours", "is not known: must be one of pools, currency, seed"),
        (table(replicas=3), "pools.main.replicas", "is not known: must be one of engine, "),
        (table(engine="engines/demo"), "pools.main.engine", "one of them"),
        (table(headroom=-1), "pools.main.headroom", "greater than or equal to 0, got -1"),
        (table(slo={"ttft_s": 0}), "pools.main.slo.ttft_s", "greater than 0, got 0"),
        (table(slo={"ttft": 1}), "pools.main.slo.ttft", "is not known: must be one of ttft_s, itl_s, e2e_s"),
        (table(price={"spot_share": 2}), "pools.main.price.spot_share", "less than or equal to 1, got 2"),
        (classes(requests_per_s=[1.0] * 23), "pools.main.classes.0.requests_per_s", "24"),
        (classes(requests_per_s=[1.0] * 23 + ["many"]), "pools.main.classes.0.requests_per_s.23", "got 'many'"),
        (classes(requests_per_user_hour=3.0), "pools.main.classes.0.requests_per_user_hour", "left out without users"),
        (classes(seconds=3.0), "pools.main.classes.0.seconds", "must be left out without metrics"),
        (
            table(price={"on_demand": 2.0, "spot": 1.0}),
            "pools.main.price.spot_share",
            "must be set with spot, got none",
        ),
        (table(price={"spot": 2.0}), "pools.main.price.spot_share", "must be set with spot, got none"),
        (table(price={"on_demand": 2.0, "spot_share": 0.5}), "pools.main.price.spot", "must be set with spot_share"),
        (
            table(classes=[{"name": "chat", "trace": "t.jsonl", "output": 9}]),
            "pools.main.classes.0.output",
            "must be left out: trace tells it",
        ),
        (classes(users=5), "pools.main.classes.0.requests_per_s", "one of them; got ['requests_per_s', 'users']"),
        (classes(input={"p50": 9, "p95": 3}), "pools.main.classes.0.input.p95", "must be at least p50, got 3"),
        (classes(output=0), "pools.main.classes.0.output.p50", "greater than or equal to 1, got 0"),
        (classes(input=1.5), "pools.main.classes.0.input", "must be a whole number or {p50, p95, most}, got 1.5"),
        (classes(input={"p50": 100, "p95": 200, "most": 5}), "pools.main.classes.0.input.most", "must be at least p50"),
        (classes(input={"p50": 1e-9, "p95": 1e9}), "pools.main.classes.0.input.p50", "greater than or equal to 1, got"),
        (classes(input={"p50": 1, "p95": 1e8}), "pools.main.classes.0.input.p95", "less than or equal to 1000000, got"),
        (classes(input={"p50": "10", "p95": 20}), "pools.main.classes.0.input.p50", "number, got '10'"),
        (
            classes(requests_per_s="x"),
            "pools.main.classes.0.requests_per_s",
            "must be a number, or 24 of them, got 'x'",
        ),
        (classes(requests_per_s=[True] * 24), "pools.main.classes.0.requests_per_s.0", "number, got True"),
        (table(estimate=ESTIMATE | {"max_batch_size": 100_000}), "pools.main.estimate.max_batch_size", "to 2048, got"),
        (table(min_replicas=True), "pools.main.min_replicas", "integer, got True"),
        (table(classes={"name": "chat"}), "pools.main.classes", "must be a list, got {"),
        (
            table(price={"spot": 1.0, "spot_share": 0.5}),
            "pools.main.price.on_demand",
            "must be set, or reserved, where",
        ),
        (table(acceptance=[[0.5] * 6]), "pools.main.acceptance.0", "must have at most 5 items"),
        (table(acceptance=[[]]), "pools.main.acceptance.0", "must have at least 1 item"),
        (without("requests_per_s"), "pools.main.classes.0.requests_per_s", "one of them; got none"),
        (without("output"), "pools.main.classes.0.output", "must be a number of tokens or a table"),
        (classes(name=""), "pools.main.classes.0.name", "must have at least 1 character without metrics"),
        (without("name"), "pools.main.classes.0.name", "must be set"),
    ],
)
def test_what_is_wrong_is_named(given, field, problem):
    with pytest.raises(InvalidArgument) as caught:
        of_table(given)
    assert caught.value.field == f"scenario: {field}" and problem in caught.value.problem


def test_a_trace_gives_rate_and_lengths(tmp_path: Path):
    rows = [{"at_s": n, "input_tokens": 10 + n, "output_tokens": 5} for n in range(101)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = table(classes=[{"name": "chat", "trace": "trace.jsonl"}])
    [one] = of_table(given, tmp_path / "a.toml").pools["main"].classes
    assert one.rates() == (1.0,) * 24
    assert {one.draw(random.Random(seed)) for seed in range(2000)} == {(10 + n, 5) for n in range(101)}
    row = '{"at_s": 1, "input_tokens": %s, "output_tokens": 5}'
    wrong = [row % tokens for tokens in ("0", "1.5", "1e400", "2000000", "true", '"10"')]
    later = '\n{"at_s": %s, "input_tokens": 1, "output_tokens": 5}'
    wrong += [row % 1 + later % at_s for at_s in ("-1", "1e400", "NaN", "true")]
    for text in ("", '{"at_s": 1}', "many", "[" * 100_000, (later % 0).strip(), row % 1, *wrong):
        (tmp_path / "trace.jsonl").write_text(text)
        with pytest.raises(InvalidArgument, match="classes.0.trace: must have JSON lines of at_s"):
            of_table(given, tmp_path / "a.toml")
    (tmp_path / "trace.jsonl").write_text((row % 1) + "\n\n" + row % 1.5)
    with pytest.raises(InvalidArgument, match=r"trace.jsonl: request 2: input_tokens: "):
        of_table(given, tmp_path / "a.toml")
    (tmp_path / "trace.jsonl").write_text((later % 0) + later % 1e-12)
    with pytest.raises(InvalidArgument, match=r"classes.0.trace: must have .* at most 1e\+09 requests/s, got 1e\+12"):
        of_table(given, tmp_path / "a.toml")
    with pytest.raises(InvalidArgument, match="classes.0.trace: must be a file that can be read"):
        of_table(given, tmp_path / "elsewhere" / "a.toml")


def recorded(tmp_path: Path, rows):
    """Return a class of a trace of these instants and lengths."""
    names = "at_s", "input_tokens", "output_tokens"
    lines = (json.dumps(dict(zip(names, row, strict=True))) for row in rows)
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    given = table(classes=[{"name": "chat", "trace": "trace.jsonl"}])
    return of_table(given, tmp_path / "a.toml").pools["main"].classes[0]


def test_the_requests_of_a_trace_are_drawn_as_they_were_recorded(tmp_path: Path):
    """Four per cent are long, and their answers are, too; the trace was cut out of the middle of another."""
    one = recorded(tmp_path, [(1000 + n / 2, *((50_000, 900) if n % 25 == 0 else (100, 9))) for n in range(100)])
    rng = random.Random(1)
    assert one.rates() == (2.0,) * 24 and one.scaled("input", 2) != one
    for found, kinds in (
        (one, {(50_000, 900), (100, 9)}),
        (one.scaled("input", 1.2), {(60_000, 900), (120, 9)}),
        (one.scaled("output", 0.8), {(50_000, 720), (100, 7)}),
    ):
        drawn = [found.draw(rng) for _ in range(2000)]
        assert set(drawn) == kinds and 40 < drawn.count(max(kinds)) < 120


def test_a_trace_of_a_day_gives_each_hours_rate_and_a_shorter_one_its_mean(tmp_path: Path):
    day = [(3600 * (hour + part / (1 + hour)), 1, 1) for hour in range(48) for part in range(1 + hour)]
    rates = recorded(tmp_path, day).rates()
    assert [3600 * rate for rate in rates[:-1]] == pytest.approx([13 + hour for hour in range(23)])
    assert 3600 * rates[-1] == pytest.approx(36, rel=0.02)
    first, last = day[0][0], day[200][0]  # nearly 20 hours
    assert recorded(tmp_path, day[:201]).rates() == pytest.approx([200 / (last - first)] * 24)


@pytest.mark.parametrize("pool", ["chat", ""])
def test_a_gateways_metrics_give_rate_and_mean_lengths(monkeypatch, pool):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    pages = [(100, 1000, 500), (120, 5000, 1500)]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            requests, told, made = pages.pop(0)
            text = (
                f'gen_ai_server_request_duration_seconds_count{{pool="{pool}",error_type=""}} {requests}\n'
                f'gen_ai_server_request_duration_seconds_count{{pool="{pool}",error_type="Cancelled"}} {requests}\n'
                f'trident_gateway_pool_tokens_total{{pool="{pool}",direction="input"}} {told}\n'
                f'trident_gateway_pool_tokens_total{{pool="{pool}",direction="output"}} {made}\n'
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=lambda: [server.handle_request() for _ in range(4)])
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        given = table(classes=[{"name": pool, "metrics": url, "seconds": 1}])
        [one] = of_table(given).pools["main"].classes
        pages += [(120, 5000, 1500)] * 2
        other = table(classes=[{"name": "others", "metrics": url, "seconds": 1}])
        with pytest.raises(InvalidArgument, match=f"requests of a pool 'others' .*, which tells of '{pool}'$"):
            of_table(other)
        thread.join()
    assert one.rates()[0] == 20 and one.input is not None
    assert one.input.p50 < 200 < one.input.p95
    with pytest.raises(InvalidArgument, match="classes.0.metrics: must be a gateway's metrics page"):
        of_table(given)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(InvalidArgument, match="none.toml: must be a file"):
        read(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_text("pools = [")
    with pytest.raises(InvalidArgument, match="a.toml: must be TOML"):
        read(tmp_path / "a.toml")


@drawn(st.floats(1, 1e6), st.floats(1, 1e6), st.integers(1, 1_000_000), st.sampled_from([0.8, 1.2]))
def test_scaled_lengths_are_allowed_and_their_longest_is_scaled_too(p50, p95, most, factor):
    lengths = Lengths(p50=min(p50, p95), p95=max(p50, p95), most=most)
    scaled = lengths.scaled(factor)
    assert scaled.most == min(max(1, round(most * factor)), 1_000_000) and scaled.p50 <= scaled.p95
    assert lengths.sigma <= 10  # the most that the bench takes


def test_an_address_that_is_none_is_named(tmp_path: Path):
    urls = ["http://127.0.0.1:abc/metrics", "http://127.0.0.1:1/a b", "http://127.0.0.1:99999/", "http://[::1/"]
    for url in urls:
        with pytest.raises(InvalidArgument, match="classes.0.metrics: must be a gateway's metrics page, got http"):
            of_table(table(classes=[{"name": "chat", "metrics": url}]))


def test_a_server_that_does_not_speak_http_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        with pytest.raises(InvalidArgument, match="classes.0.metrics: must be a gateway's metrics page, got http"):
            of_table(table(classes=[{"name": "chat", "metrics": url}]))
        thread.join()
