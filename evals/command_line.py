"""The command line of the evaluations."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai

from benchmarks.peer_servers import gateway
from benchmarks.server_process import ENGINES
from clients.command_line import number, seconds
from contract import gate_result, interpreter, manifest, toml_table
from contract.errors import InvalidArgument, TridentError, Unavailable
from evals import chat_run, curate, gate, judge, lm_eval_run, results, task
from evals.chat_run import Endpoint
from evals.judge import Judged
from evals.results import Results, Target, TaskResult

COMMAND = f"{interpreter.command()} -m evals"
RESULTS = Path(__file__).resolve().parent / "results"
_count = number(int, lambda value: value >= 1, "a whole number from 1")
_price = number(
    lambda text: tuple(map(float, text.split(","))),
    lambda prices: len(prices) == 2 and all(0 <= price < math.inf for price in prices),
    "two numbers from 0 with a comma between",
)
STATUS = {gate_result.PASS: 0, gate_result.FAIL: 1, gate_result.UNDECIDED: 3}


def main(arguments: Sequence[str]) -> int:
    """Return the command's status; 2 for what cannot be run."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Evaluates models behind OpenAI endpoints (docs/evals.md)."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    made = {}
    for name, does, about in (
        ("run", run, "run the tasks against an endpoint, or against an engine that is started for it"),
        ("compare", compare, "show two results side by side"),
        ("judge", ask_judge, "ask a model which answers of two results are better"),
        ("gate", decide, "say whether a candidate is as good as its baseline: status 0 pass, 1 fail, 3 undecided"),
    ):
        made[name] = command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=does)
        if name != "run":
            command.add_argument("baseline", type=Path)
            command.add_argument("candidate", type=Path)
        if name in ("run", "judge"):
            add = command.add_argument
            add("--url", help="of any OpenAI endpoint; without it the engine is served for the run")
            add("--model", help="by its name there; the first one unless set")
            add("--engine", help="of engines/, or the folder of what serves --url, whose manifest the results name")
            add("--tasks", default="", metavar="NAME,…", help="all of the folder unless set; judge: those of free text")
            add("--folder", type=Path, default=task.FOLDER, help="of the tasks (default %(default)s)")
            add("--timeout", type=seconds, default=60.0, metavar="S", help="of one request (default %(default)s)")
            add("--tries", type=_count, default=3, metavar="N", help="of one request (default %(default)s)")
            add("--concurrency", type=_count, default=4, metavar="N", help="requests at once (default %(default)s)")
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    give = made["run"].add_argument
    give("--limit", type=_count, metavar="N", help="only the first N cases of each task")
    give("--price", type=_price, metavar="IN,OUT", help="of 1,000 tokens, for the cost of a case")
    give("--out", **file, help="for the results, the table beside it as .md")
    give = made["judge"].add_argument
    give("--rubric", type=Path, default=judge.FOLDER / "rubric.md", help="what makes an answer better")
    give("--labels", type=Path, default=judge.FOLDER / "labels.jsonl", help="pairs that people judged")
    give("--kappa", type=float, default=0.6, help="least agreement to count (default %(default)s)")
    give("--out", **file, required=True, help="for `gate --judged`")
    give = made["gate"].add_argument
    give("--rules", **file, help="TOML (docs/evals.md); else the defaults")
    give("--judged", **file, help="of `judge`")
    give("--out", **file, help="for a release that asks for it (docs/releases.md)")
    curate.add(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (TridentError, OSError) as exc:
        print(f"evals: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(options: argparse.Namespace) -> int:
    """Run tasks and print the table. Return 1 where a case had no answer, else 0."""
    tasks = task.read(options.folder, list(filter(None, options.tasks.split(","))))
    if not tasks:
        raise InvalidArgument("folder", f"must have tasks, got {options.folder}")
    name, digest = _manifest(options.engine)
    with _endpoint(options) as endpoint:
        found = _all(endpoint, tasks, options)
        url = endpoint.url if options.url else ""
    target = Target(url=url, model=endpoint.model, engine=name, manifest_sha256=digest)
    made = Results(created=_now(), target=target, tasks=found)
    table = results.table(made)
    print(table)
    out = options.out or RESULTS / f"{name or endpoint.model.replace('/', '-')}.json"
    content = made.model_dump(mode="json", exclude_defaults=True) | {"format": made.format}
    _write(out, json.dumps(content, indent=1) + "\n")
    _write(out.with_name(f"{out.name.removesuffix('.json')}.md"), table + "\n")
    problems = {name: [case.error for case in result.cases if case.error] for name, result in found.items()}
    for name, failed in problems.items():
        if failed:
            print(f"evals: {name}: {len(failed)} cases without an answer, the first: {failed[0]}", file=sys.stderr)
    return int(any(problems.values()))


def _all(endpoint: Endpoint, tasks: Sequence[task.Task], options: argparse.Namespace) -> dict[str, TaskResult]:
    """Return the results of all tasks, in their order."""
    cases: dict[str, list[results.Case]] = {}
    skipped: dict[str, str] = {}
    for chat in (False, True):
        group = [one for one in tasks if one.runner == task.LM_EVAL and one.is_chat == chat]
        if group and (why := lm_eval_run.missing(endpoint, chat)):
            print(f"evals: {', '.join(one.name for one in group)} skipped: {why}", file=sys.stderr)
            skipped |= {one.name: why for one in group}
        elif group:
            cases |= lm_eval_run.run(endpoint, group, options.folder, options.limit)
    found = {}
    for one in tasks:
        if one.runner == task.CHAT:
            cases[one.name] = list(chat_run.run(endpoint, one, options.limit))
        told: dict[str, Any] = {"kind": one.kind, "about": one.about, "sha256": one.sha256}
        told |= {"skipped": skipped.get(one.name, ""), "cases": cases.get(one.name, ())}
        found[one.name] = TaskResult(**told)
    return found


def compare(options: argparse.Namespace) -> int:
    """Print two results side by side."""
    print(results.compared(results.read(options.baseline), results.read(options.candidate)))
    return 0


def ask_judge(options: argparse.Namespace) -> int:
    """Let a model judge two results, and say whether it counts."""
    sides = results.read(options.baseline), results.read(options.candidate)
    names = list(filter(None, options.tasks.split(",")))
    tasks = [one for one in task.read(options.folder, names) if names or one.kind in ("exact", "instructions")]
    rubric, labelled = task.text(options.rubric), judge.labels(options.labels)
    with _endpoint(options) as endpoint:
        found = judge.judge(endpoint, rubric, *sides, tasks, labelled, options.kappa)
    _write(options.out, found.model_dump_json(indent=1) + "\n")
    better, worse = (list(found.verdicts.values()).count(score) for score in (1, -1))
    kappa = "none" if found.kappa is None else f"{found.kappa:.2f}"
    from_on = f"from {options.kappa:g} and {judge.FEWEST_LABELS} labels on"
    counts = "counts" if found.counts else f"does not count ({from_on})"
    print(f"{found.model} agrees with {found.labels} labels at kappa {kappa}, and {counts}")
    print(f"candidate better {better}, worse {worse}, of {len(found.verdicts)} pairs; {found.failed} not answered")
    return 0


def decide(options: argparse.Namespace) -> int:
    """Print the gate's verdict, and write it."""
    baseline, candidate = results.read(options.baseline), results.read(options.candidate)
    table = toml_table.read(options.rules) if options.rules else {}
    rules = toml_table.checked(gate.Rules, table, str(options.rules))
    judged = None
    if options.judged:
        heard = results.written_by("judge", Judged, options.judged)
        if (heard.baseline_sha256, heard.candidate_sha256) != (baseline.sha256, candidate.sha256):
            raise InvalidArgument(str(options.judged), "must be of these two results, got digests of others")
        judged = list(heard.verdicts.values()) if heard.counts else None
        if judged is None:
            print(f"evals: the judge {heard.model} is left out: kappa {heard.kappa} with the labels", file=sys.stderr)
    found = gate.gate(baseline, candidate, rules, judged)
    columns = ("verdict", "cases", "mean", "low", "high", "margin", "loss_p", "needed")
    rows = [[name, *(results.shown(row[column]) for column in columns)] for name, row in found.metrics.items()]
    print("\n".join([results.markdown(rows, ("metric", *columns)), f"\n{found.verdict}", *found.reasons]))
    if options.out:
        sides = {"baseline": baseline, "candidate": candidate}
        told: dict[str, Any] = {side: {"sha256": of.sha256, **of.target.model_dump()} for side, of in sides.items()}
        told |= {"created": _now(), "rules": rules.model_dump(), **asdict(found)}
        _write(options.out, gate_result.sealed(told))
    return STATUS[found.verdict]


@contextlib.contextmanager
def _endpoint(options: argparse.Namespace) -> Iterator[Endpoint]:
    """Yield the endpoint of the options; an engine that is started for it is stopped at the end."""
    if not options.url and not options.engine:
        raise InvalidArgument("url", "must be set, or engine, which is then served for the run")
    with contextlib.nullcontext(options.url) if options.url else gateway(options.engine) as url:
        key, price = os.environ.get("OPENAI_API_KEY") or "none", getattr(options, "price", None)
        limits = (options.timeout, options.tries, options.concurrency, price)
        try:
            parts = urlsplit(url)
            base = url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
            known = parts.hostname and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise InvalidArgument("url", f"must be of the form http://HOST:PORT, got {url!r}")
        endpoint = Endpoint(base, options.model or "", key, *limits)
        with endpoint.client:
            try:
                endpoint.model = endpoint.model or next(iter(endpoint.client.models.list())).id
            except (openai.OpenAIError, StopIteration, AttributeError, TypeError, ValueError) as exc:
                raise Unavailable(f"{base}/models lists no model: {exc}") from exc
            yield endpoint


def _manifest(engine: str | None) -> tuple[str, str]:
    """Return the name of an engine and the digest of its manifest. engine: of engines/, or a folder."""
    if not engine:
        return "", ""
    path = (Path(engine) if os.sep in engine else ENGINES / engine) / manifest.FILE_NAME
    try:
        return path.parent.name, manifest.sha256_file(path)
    except OSError as exc:
        raise InvalidArgument("engine", f"must be built, got {engine!r}: {path}: {exc.strerror}") from exc


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    print(f"evals: written: {path}", file=sys.stderr)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
