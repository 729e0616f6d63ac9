"""The Makefile hands its variables to the programs as they were typed."""

from __future__ import annotations

import os
import re
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
# What a shell or make could take for its own.
TRICKY = [
    "it's",
    "two words",
    'say "hi"',
    "$HOME",
    "$(BIN)",
    "$$",
    "`id`",
    "a\\b",
    "100%",
    "a;b&c|d",
    "#1",
    "é ü",
    "-n",
]


@pytest.fixture(scope="module")
def environment_folder(tmp_path_factory) -> Path:
    """A stand-in for .venv whose python writes down what it was started with; it is a shell, which starts faster."""
    folder = tmp_path_factory.mktemp("venv")
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(
        f"#!/bin/sh\n{{ printf '%s\\0' $# \"$@\"; env -0; printf '\\0'; }} >> {str(folder / 'calls')!r}\n"
    )
    python.chmod(0o755)
    (folder / ".installed").touch()
    return folder


def make(folder: Path, *arguments: str, **environment: str) -> list[tuple[list[str], dict[str, str]]]:
    """Runs make and returns (arguments, environment) of every program it started."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRIDENT_", "MAKE"))}
    subprocess.run(
        ["make", "-s", *arguments, f"VENV={folder}"], cwd=ROOT, env=clean | environment, check=True, timeout=60
    )
    words, started = iter(calls.read_bytes().decode().split("\0")[:-1]), []
    for count in words:
        arguments = [next(words) for _ in range(int(count))]
        started.append((arguments, dict(word.split("=", 1) for word in iter(words.__next__, ""))))
    return started


@pytest.mark.parametrize("text", TRICKY)
def test_a_prompt_reaches_the_client_as_it_was_typed(environment_folder, text):
    [(arguments, _)] = make(environment_folder, "chat", f"PROMPT={text}")
    assert arguments[-1] == text


@pytest.mark.parametrize("text", TRICKY)
def test_a_model_and_a_reason_reach_the_builder_as_they_were_typed(environment_folder, text):
    [(arguments, _)] = make(environment_folder, "build-engine", f"MODEL=/x/{text}", f"ACCEPT_QUALITY={text}")
    assert arguments[arguments.index("--model") + 1] == f"/x/{text}"
    assert arguments[arguments.index("--accept-quality") + 1] == text


@pytest.mark.slow
@given(st.text(string.printable.translate({ord(c): None for c in "\n\r\x0b\x0c"}) + "éß漢", min_size=1, max_size=20))
@settings(max_examples=25)
def test_any_line_of_text_is_one_argument(environment_folder, text):
    [(arguments, _)] = make(environment_folder, "chat", f"PROMPT=x{text}x")
    assert arguments[-1] == f"x{text}x"


@pytest.mark.parametrize(
    "model",
    [
        "/x/it's here/",
        "org/My Model v1.0",
        "/x/..odd--",
        "/x/ü",
        "/a/b//",
        "/x/a.Q4_1.gguf",
        "pypi:a-model==1.0/b.gguf",
    ],
)
def test_an_engine_is_named_after_its_model_as_the_builder_names_it(environment_folder, model):
    build, serve = make(environment_folder, "serve", f"MODEL={model}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name.removesuffix(".gguf")).strip(".-_")
    assert [arguments[arguments.index("--engine") + 1] for arguments, _ in (build, serve)] == [name, name]


def engines_of(calls) -> list[str]:
    return [arguments[arguments.index("--engine") + 1] for arguments, _ in calls]


@pytest.mark.parametrize("verb", ["demo", "serve", "up"])
def test_the_real_model_is_served_unless_only_the_small_one_could_be_built(environment_folder, tmp_path, verb):
    def ran(*arguments: str) -> list[tuple[list[str], dict[str, str]]]:
        return make(environment_folder, verb, *arguments, TRIDENT_ENGINES_DIR=str(tmp_path))

    built, served = ran()
    assert built[0][-4:] == ["--engine", "smollm2", "--otherwise", "demo"]
    assert engines_of([served]) == ["demo"] and served[1]["TRIDENT_GATEWAY_MODEL"] == "demo"
    (tmp_path / "smollm2").mkdir(exist_ok=True)
    (tmp_path / "smollm2" / "manifest.json").touch()
    _, served = ran()
    assert engines_of([served]) == ["smollm2"] and served[1]["TRIDENT_GATEWAY_MODEL"] == "smollm2"
    built, served = ran("ENGINE=mine")
    assert engines_of([built, served]) == ["mine", "mine"] and "--otherwise" not in built[0]


@pytest.mark.parametrize("verb", ["serve", "up"])
def test_several_engines_are_built_one_by_one_and_served_together(environment_folder, verb):
    assert engines_of(make(environment_folder, verb, "ENGINE=one,two")) == ["one", "two", "one,two"]


def test_the_demo_asks_a_model_that_can_answer(environment_folder):
    _, (small, _) = make(environment_folder, "demo", "ENGINE=demo-int8")
    assert "--ask" not in small
    _, (chatting, _) = make(environment_folder, "demo", "ENGINE=mine", "QUESTION=What's $5?")
    assert chatting[chatting.index("--ask") + 1] == "What's $5?"


def test_benchmarks_keep_the_small_model(environment_folder, tmp_path):
    calls = make(environment_folder, "bench-hops", TRIDENT_ENGINES_DIR=str(tmp_path))
    assert engines_of(calls) == ["demo", "demo"] and "--otherwise" not in calls[0][0]


def test_benchmarks_measure_the_engine_that_was_built(environment_folder):
    def asked(*arguments: str) -> list[str]:
        return make(environment_folder, *arguments)[-1][0][2:]

    assert asked("bench-efficiency") == ["efficiency"] and asked("bench-peers") == ["peers"]
    assert asked("bench-efficiency", "ENGINE=mine") == ["efficiency", "--engines", "mine"]
    assert asked("bench-peers", "MODEL=/x/it's mine", "PRECISION=int8") == [
        *("peers", "--model", "/x/it's mine"),
        *("--precision", "int8"),
    ]
    assert len(make(environment_folder, "bench-gateway")) == 1  # it measures no engine


def test_a_sweep_that_fails_fails_and_one_with_a_doubt_is_drawn(environment_folder, tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    for name in (".installed", ".bench-installed"):
        (tmp_path / name).touch()
    for code, drawn in ((0, True), (3, True), (1, False)):
        python.write_text(f'#!/bin/sh\necho "$3" >> {tmp_path}/verbs\n[ "$3" != sweep ] || exit {code}\n')
        python.chmod(0o755)
        (tmp_path / "verbs").write_text("")
        ran = subprocess.run(["make", "-s", "bench", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, timeout=60)
        assert (ran.returncode == 0) is drawn
        assert ("plot" in (tmp_path / "verbs").read_text().split()) is drawn


def test_a_dry_run_builds_nothing(environment_folder):
    (environment_folder / "calls").write_text("")
    for engine in ("one", "one,two"):
        command = ["make", "-n", "build-engine", f"ENGINE={engine}", f"VENV={environment_folder}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert not (environment_folder / "calls").read_text()


def test_chat_talks_to_the_port_that_serve_was_given(environment_folder):
    for arguments, environment in (
        (["GRPC_PORT=18401"], {}),
        ([], {"GRPC_PORT": "18401"}),
        ([], {"TRIDENT_GRPC_PORT": "18401"}),
        (["HOST=0.0.0.0", "GRPC_PORT=18401"], {}),
    ):
        _, (_, served) = make(environment_folder, "serve", *arguments, **environment)
        [(_, chatted)] = make(environment_folder, "chat", *arguments, **environment)
        assert served["TRIDENT_GRPC_PORT"] == "18401"
        assert chatted["TRIDENT_URL"] == "127.0.0.1:18401"


def test_a_server_named_by_its_variable_is_the_one_that_chat_talks_to(environment_folder):
    [(_, environment)] = make(environment_folder, "chat", TRIDENT_URL="10.0.0.7:8001")
    assert environment["TRIDENT_URL"] == "10.0.0.7:8001"


def test_the_gateway_counts_with_the_tokenizer_of_the_engine_that_is_named(environment_folder):
    [(_, environment)] = make(environment_folder, "gateway")
    assert "TRIDENT_TOKENIZER" not in environment  # what runs behind it need not be the default engine
    for engine in ("smol", "it's here"):
        [(_, environment)] = make(environment_folder, "gateway", f"ENGINE={engine}")
        assert environment["TRIDENT_TOKENIZER"] == f"engines/{engine}/tokenizer.json"


def test_clean_removes_every_environment():
    ran = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    environments = re.findall(r"^\w*VENV := (\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert len(environments) == 4 and set(environments) <= set(ran.stdout.split())


@pytest.mark.parametrize("version", ["python2.7", "python3.6", "python3.9", "python3.13"])
def test_a_python_that_cannot_serve_is_refused_with_a_sentence(version):
    found = sorted(Path.home().glob(f".pyenv/versions/{version.removeprefix('python')}*/bin/{version}"))
    if not found:
        pytest.skip(f"there is no {version} here")
    ran = subprocess.run([found[0], ROOT / "server" / "python_version.py"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "Trident needs Python 3.10, 3.11 or 3.12" in ran.stderr and "Traceback" not in ran.stderr


def test_chaos_draws_from_a_seed_unless_a_scenario_is_given(environment_folder):
    assert make(environment_folder, "chaos", "SEED=3")[-1][0] == [
        "-m",
        "chaos",
        "--seed",
        "3",
        "--count",
        "4",
        "--known",
    ]
    given_one = make(environment_folder, "chaos", "SEED=3", "COUNT=1", "SCENARIO=a b.chaos", "PLANT=lost_token")[-1][0]
    assert given_one[4:] == ["--count", "1", "--known", "--scenario", "a b.chaos", "--plant", "lost_token"]
