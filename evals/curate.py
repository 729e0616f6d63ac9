"""Make dated tasks of samples that a gateway exported, and results of its shadow pairs (docs/samples.md)."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from contract import redaction
from contract.errors import InvalidArgument
from evals import chat_run, checks, task
from evals.results import Case, Results, Target, TaskResult

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
_ANSWERED = [{"rule": "words_at_least", "value": 1}]  # of free text; whether it is good, a judge says
_FILTERS = {"reason": "reasons", "model": "model", "tenant": "tenant", "language": "language"}
_PROVENANCE = ("tenant", "operation", "model", "pool", "time", "reasons", "finding", "language", "output", "feedback")


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    about = "make a dated set of exported samples, for `run --folder`; of shadow pairs also for `judge` and `gate`"
    command = commands.add_parser("curate", help=about, description=about)
    command.set_defaults(run=curate)
    argument = command.add_argument
    argument("samples", type=Path, nargs="+", help="files of `python -m gateway samples export`")
    argument("--name", required=True, help="of the set; the date follows it")
    argument("--out", type=Path, required=True, metavar="FOLDER", help="for the set's files")
    argument("--size", type=int, default=200, metavar="N", help="cases at most, in turn of each reason (default 200)")
    argument("--seed", type=int, default=0, help="another one draws other cases (default %(default)s)")
    for name, about in (("date", "of the set; today unless set"), ("since", "of samples"), ("until", "before it")):
        argument(f"--{name}", type=day, metavar="YYYY-MM-DD", help=about)
    for name in _FILTERS:
        argument(f"--{name}", action="append", default=[], help="only these; may be repeated")
    argument("--pairs", action="store_true", help="only shadow pairs, with both sides as results beside the set")


def curate(options: argparse.Namespace) -> int:
    """Write the set, its manifest and, of pairs, the results of both sides. Raises: InvalidArgument."""
    if not _NAME.fullmatch(options.name):
        raise InvalidArgument("name", f"must be lower-case letters, digits and hyphens, got {options.name!r}")
    date = options.date or datetime.now(timezone.utc)
    samples = {sample["id"]: sample for path in options.samples for sample in _read(path)}
    left_out, cases = Counter[str](), dict[str, dict[str, Any]]()
    for sample in sorted(samples.values(), key=lambda sample: _sha256(f"{options.seed} {sample['id']}")):
        case = _case(sample)
        asked = _texts([case.get("messages"), case["prompt"], json.dumps(case.get("schema"))])
        words = "\n".join(" ".join(text.lower().split()) for text in asked)
        if not _chosen(sample, options):
            left_out["filtered"] += 1
        elif not case["prompt"]:
            left_out["without text"] += 1
        elif any(redaction.found(text) for text in _texts([case, sample.get("pair")])):
            left_out["not redacted"] += 1
        elif words in cases:
            left_out["duplicate"] += 1
        else:
            cases[words] = case
    chosen = _stratified(list(cases.values()), options.size)
    left_out["beyond the size"] = len(cases) - len(chosen)
    if not chosen:
        raise InvalidArgument("samples", f"must have some that can be used, got {dict(+left_out)}")
    stem = f"{options.name}-{date:%Y-%m-%d}"
    files: dict[str, str] = {}
    for kind in sorted({"schema" if "schema" in case else "instructions" for case in chosen}):
        lines = [json.dumps(case, sort_keys=True) for case in chosen if ("schema" in case) == (kind == "schema")]
        files[f"{stem}-{kind}.yaml"] = yaml.safe_dump({"kind": kind, "about": f"samples, {stem}"})
        files[f"{stem}-{kind}.jsonl"] = "\n".join(lines) + "\n"
    kept = ("seed", "size", "since", "until", "pairs", *_FILTERS)
    manifest: dict[str, Any] = {
        "name": stem,
        "options": {name: str(getattr(options, name)) for name in kept},
        "sources": {_sha256(task.text(path)): path.name for path in options.samples},
        "cases": len(chosen),
        "reasons": Counter(case["provenance"]["reasons"][0] for case in chosen),
        "left_out": +left_out,
        "files": {name: _sha256(text) for name, text in files.items()},
    }
    manifest["sha256"] = _sha256(json.dumps(manifest, sort_keys=True))
    files[f"{stem}.manifest.json"] = json.dumps(manifest, indent=1) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (options.out / name).write_text(text, "utf-8")
    if options.pairs:
        names = [Path(name).stem for name in files if name.endswith(".yaml")]
        for side in ("baseline", "candidate"):
            results = _side(side, task.read(options.out, names), samples, f"{date:%Y-%m-%d}")
            (options.out / f"{stem}.{side}.json").write_text(results.model_dump_json(indent=1) + "\n", "utf-8")
    print(f"{options.out / stem}: {len(chosen)} cases, sha256 {manifest['sha256'][:12]}; left out: {dict(+left_out)}")
    return 0


def _case(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's case; its prompt is empty where the sample has only token ids."""
    messages, guide = sample.get("messages") or [], sample.get("guide") or {}
    asked = [turn["content"] for turn in messages if turn["role"] == "user" and isinstance(turn.get("content"), str)]
    case = {"id": sample["id"], "prompt": sample.get("text_input") or (asked[-1] if asked else "")}
    if len(messages) > 1:
        case["messages"] = messages
    rule = {"schema": json.loads(guide["text"])} if guide.get("kind") == "json_schema" else {"rules": _ANSWERED}
    return case | rule | {"provenance": {name: sample[name] for name in _PROVENANCE if name in sample}}


def _chosen(sample: Mapping[str, Any], options: argparse.Namespace) -> bool:
    """Return whether the filters take a sample."""
    made = datetime.fromtimestamp(sample["time"], timezone.utc)
    if (options.since and made < options.since) or (options.until and made >= options.until):
        return False
    for option, field in _FILTERS.items():
        wanted, values = getattr(options, option), sample[field]
        if wanted and not set(wanted).intersection([values] if isinstance(values, str) else values):
            return False
    return "pair" in sample or not options.pairs


def _stratified(cases: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return up to ``size`` cases, one of each reason in turn."""
    strata = defaultdict(list)
    for case in cases:
        strata[case["provenance"]["reasons"][0]].append(case)
    turns = [(turn, reason, case) for reason, own in strata.items() for turn, case in enumerate(own)]
    return [case for *_, case in sorted(turns, key=lambda entry: entry[:2])][: max(0, size)]


def _side(side: str, tasks: Sequence[task.Task], samples: Mapping[str, Any], created: str) -> Results:
    """Return the answers of the pools, or of their copies, as results of the set's tasks."""
    found, pools = dict[str, TaskResult](), set[str]()
    for one in tasks:
        cases = []
        for case in one.cases:
            answer = samples[case["id"]] if side == "baseline" else samples[case["id"]]["pair"]
            pools.add(answer["pool"])
            output = answer["output"]
            score, refused = chat_run.SCORES[one.kind](case, output), checks.refused(output)
            cases.append(Case(id=case["id"], score=score, output=output, refused=refused))
        found[one.name] = TaskResult(kind=one.kind, about=one.about, sha256=one.sha256, cases=cases)
    return Results(created=created, target=Target(url="", model=", ".join(sorted(pools))), tasks=found)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for place, sample in task.lines(path, task.text(path)):
        missing = [name for name in ("id", "time", "reasons", *_FILTERS.values()) if name not in sample]
        if missing:
            raise InvalidArgument(f"{place}: {missing[0]}", "must be set, as `samples export` writes it")
        yield sample


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a value but names and ids."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner) if name not in ("id", "request_id") else ()
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


def day(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
