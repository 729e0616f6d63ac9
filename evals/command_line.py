"""The command line of the evaluations."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import urlsplit

import openai

from benchmarks.peer_servers import gateway
from benchmarks.server_process import ENGINES
from contract import interpreter
from contract.errors import InvalidArgument, TridentError, Unavailable
from evals import chat_run, curate, lm_eval_run, results, task
from evals.chat_run import Endpoint
from evals.results import Results, Target, TaskResult

RESULTS = Path(__file__).resolve().parent / "results"
COMMAND = f"{interpreter.command()} -m evals"


def main(arguments: Sequence[str]) -> int:
    """Return the command's status; 2 for what cannot be run."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Evaluates models behind OpenAI endpoints (docs/evals.md)."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    one = commands.add_parser(
        "run", help="run the tasks against an endpoint, or against an engine that is started for it"
    )
    one.set_defaults(run=run)
    one.add_argument("--url", help="of any OpenAI endpoint; without it the engine is served for the run")
    one.add_argument("--model", help="by its name there; the first one unless set")
    one.add_argument(
        "--engine", help="of engines/, or the folder of what serves --url, whose manifest the results name"
    )
    one.add_argument("--tasks", default="", metavar="NAME,…", help="all of the folder unless set")
    one.add_argument("--folder", type=Path, default=task.FOLDER, help="of the tasks (default %(default)s)")
    one.add_argument("--limit", type=_count, metavar="N", help="only the first N cases of each task")
    one.add_argument("--timeout", type=float, default=60.0, metavar="S", help="of one request (default %(default)s)")
    one.add_argument("--tries", type=_count, default=3, metavar="N", help="of one request (default %(default)s)")
    one.add_argument(
        "--concurrency", type=_count, default=4, metavar="N", help="requests at once (default %(default)s)"
    )
    one.add_argument("--price", type=_price, metavar="IN,OUT", help="of 1,000 tokens, for the cost of a case")
    one.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="for the results, and the table as .md (default evals/results/NAME.json)",
    )
    two = commands.add_parser("compare", help="show two results side by side")
    two.set_defaults(run=compare)
    two.add_argument("baseline", type=Path)
    two.add_argument("candidate", type=Path)
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
    name, digest = manifest(options.engine)
    if not options.url and not name:
        raise InvalidArgument("url", "must be set, or engine, which is then served for the run")
    with contextlib.nullcontext(options.url) if options.url else gateway(options.engine) as url:
        base = url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"
        key = os.environ.get("OPENAI_API_KEY") or "none"
        limits = (options.timeout, options.tries, options.concurrency, options.price)
        endpoint = Endpoint(base, options.model or "", key, *limits)
        endpoint.model = options.model or _first_model(endpoint)
        found = _all(endpoint, tasks, options)
    target = Target(url=base if options.url else "", model=endpoint.model, engine=name, manifest_sha256=digest)
    made = Results(created=datetime.now(timezone.utc).isoformat(timespec="seconds"), target=target, tasks=found)
    table = results.table(made)
    print(table)
    out = options.out or RESULTS / f"{name or endpoint.model.replace('/', '-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    content = made.model_dump(mode="json", exclude_defaults=True) | {"format": made.format}
    out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    out.with_suffix(".md").write_text(table + "\n", "utf-8")
    print(f"evals: results in {out}", file=sys.stderr)
    return int(any(case.error for result in found.values() for case in result.cases))


def _all(endpoint: Endpoint, tasks: Sequence[task.Task], options: argparse.Namespace) -> dict[str, TaskResult]:
    """Return the results of all tasks, in their order."""
    found: dict[str, TaskResult] = {}
    for chat in (False, True):
        group = [one for one in tasks if one.runner == task.LM_EVAL and one.is_chat == chat]
        why = lm_eval_run.missing(endpoint, chat) if group else ""
        if why:
            print(f"evals: {', '.join(one.name for one in group)} skipped: {why}", file=sys.stderr)
        cases = lm_eval_run.run(endpoint, group, options.folder, options.limit) if group and not why else {}
        for one in group:
            found[one.name] = _result(one, cases.get(one.name, []), why)
    for one in tasks:
        if one.runner == task.CHAT:
            found[one.name] = _result(one, list(chat_run.run(endpoint, one, options.limit)))
    return {one.name: found[one.name] for one in tasks}


def _result(of: task.Task, cases: list[results.Case], skipped: str = "") -> TaskResult:
    return TaskResult(kind=of.kind, about=of.about, sha256=of.sha256, skipped=skipped, cases=cases)


def compare(options: argparse.Namespace) -> int:
    """Print two results side by side."""
    print(results.compared(results.read(options.baseline), results.read(options.candidate)))
    return 0


def _first_model(endpoint: Endpoint) -> str:
    try:
        return next(iter(endpoint.client.models.list())).id
    except (openai.OpenAIError, StopIteration) as exc:
        raise Unavailable(f"{endpoint.url}/models lists no model: {exc}") from exc


def manifest(engine: str | None) -> tuple[str, str]:
    """Return the name of an engine and the digest of its manifest. engine: of engines/, or a folder."""
    if not engine:
        return "", ""
    path = (Path(engine) if os.sep in engine else ENGINES / engine) / "manifest.json"
    try:
        content = path.read_bytes()
    except OSError as exc:
        raise InvalidArgument("engine", f"must be built, got {engine!r}: {path}: {exc.strerror}") from exc
    return path.parent.name, hashlib.sha256(content).hexdigest()


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return value


def _price(text: str) -> tuple[float, float]:
    one, two = map(float, text.split(","))
    return one, two
