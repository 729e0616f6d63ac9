"""All rules over one recipe, each refusal and warning with the nearest recipe that does not earn it.

"Nearest" is the cheapest change that leaves nothing refused and, where one exists, warns of nothing new. ``_edits``
says what a change may be and what it costs: an option or a limit is cheap, another weight format dearer, giving up
speculative decoding or the card dearest.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from build.base import hardware, layout
from build.recipe import commands, memory
from build.recipe.builder_options import BUILDER_OPTIONS
from build.recipe.case import Case, Finding, Severity
from build.recipe.fitness import CHECKS, GROUPED
from build.recipe.recipe import Recipe, RecipeError, load
from build.recipe.rules import EAGLE_BATCH, EAGLE_DRAFT, RULES
from build.recipe.schema import CPU, IMAGE, KV_CACHE_PRECISIONS, PRECISIONS, TRTLLM, Calibration
from contract.errors import InvalidArgument

# Keys in which a recipe may differ from the one that is named as an alternative.
NAMING = frozenset({"name", "description"})
NOT_THE_ENGINE = NAMING.union(
    "max_batch_size max_num_tokens max_seq_len kv_cache_tokens kv_cache_fraction calibration quality".split()
)
MAX_MENDED = 8
OPTION, LIMIT, FORMAT, RANKS, FEATURE, CARD = 1, 1, 2, 3, 4, 6  # costs


def judge(case: Case) -> tuple[Finding, ...]:
    """Every finding, refusals first, then warnings, then the rest; within one severity in the rules' order."""
    order, search = list(Severity), _Search(case)
    findings = sorted(check(case), key=lambda finding: order.index(finding.severity))
    return tuple(
        finding if finding.severity is Severity.INFORM else replace(finding, instead=search.nearest(finding.rule))
        for finding in findings
    )


def refused(findings: Sequence[Finding]) -> bool:
    return any(finding.severity is Severity.REFUSE for finding in findings)


class Refused(InvalidArgument):
    """The rules refuse a recipe; the message names the first rule and the nearest recipe that works."""


def require(recipe: Recipe, findings: tuple[Finding, ...]) -> None:
    """Raises Refused where ``judge`` of the recipe found what refuses it."""
    if refused(findings):
        first = findings[0]
        raise Refused("engine", f"{recipe.name} is refused by {first.rule}: {first.message}")


def check(case: Case) -> list[Finding]:
    """Every finding, without alternatives, in the rules' order."""
    books = [RULES] if case.recipe.kind == TRTLLM else []
    return [finding for book in (*books, CHECKS, BUILDER_OPTIONS) for finding in book.check(case)]


@dataclass(frozen=True)
class _Edit:
    """One change of a recipe: its cost, how it reads as TOML, the fields it sets and the keys it leaves out."""

    cost: int
    text: str
    changes: dict[str, Any]
    drops: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Faults:
    """Names of the rules that refuse a recipe, and of those that warn of it."""

    refused: frozenset[str]
    warned: frozenset[str]

    def left(self, rule: str) -> frozenset[str]:
        """What still stands in the way of ``rule`` being silent and nothing refused."""
        return self.refused | ({rule} & self.warned)


def _faults(case: Case) -> _Faults:
    findings, both = check(case), (Severity.REFUSE, Severity.WARN)
    return _Faults(*(frozenset(f.rule for f in findings if f.severity is severity) for severity in both))


class _Search:
    """Looks for the nearest recipe; what each single edit leads to is found once and serves every rule."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def before(self) -> _Faults:
        return _faults(self.case)

    @cached_property
    def singles(self) -> list[tuple[_Edit, _Faults]]:
        edits = sorted(_edits(self.case), key=lambda edit: edit.cost)
        return [(edit, _faults(_changed(self.case, (edit,)))) for edit in edits]

    def nearest(self, rule: str) -> str:
        """The cheapest change after which ``rule`` is silent and nothing is refused, as TOML; "" if none is found. A
        recipe that no single edit mends is mended fault by fault."""
        good = [(edit, after) for edit, after in self.singles if not after.left(rule)]
        quiet = [edit for edit, after in good if after.warned <= self.before.warned] or [edit for edit, _ in good]
        edits = tuple(quiet[:1]) or self._mended(rule)
        shipped = _shipped_like(_changed(self.case, edits).recipe) if edits else ""
        return ", ".join(edit.text for edit in edits) + (f" (as {shipped})" if shipped else "")

    def _mended(self, rule: str) -> tuple[_Edit, ...]:
        """Edits that do away with one fault after the other: the cheapest that brings no new refusal, else the cheapest
        whose new refusals are mended in their turn."""
        case, faults = self.case, self.before
        done: tuple[_Edit, ...] = ()
        while faults.left(rule) and len(done) < MAX_MENDED:
            fault, touched = min(faults.left(rule)), {key for edit in done for key in edit.changes}
            steps = []
            for edit in sorted(_edits(case), key=lambda edit: edit.cost):
                changed = _changed(case, (edit,))
                after = _faults(changed)
                if fault not in after.left(rule) and (
                    after.refused <= faults.refused or not touched & edit.changes.keys()
                ):
                    steps.append((len(after.refused - faults.refused), edit, changed, after))
            if not steps:
                return ()
            _, edit, case, faults = min(steps, key=lambda step: step[0])
            done = (*done, edit)
        return () if faults.left(rule) else done


def _changed(case: Case, edits: tuple[_Edit, ...]) -> Case:
    changes: dict[str, Any] = {}
    for edit in edits:
        changes |= edit.changes
    dropped = {key for edit in edits for key in edit.drops}
    given = tuple(key for key in case.recipe.given if key not in dropped)
    return replace(case, recipe=replace(case.recipe, **changes, given=given))


def _edits(case: Case) -> Iterator[_Edit]:
    recipe, kind = case.recipe, case.recipe.kind
    for table in ("build", "quantize", "convert", "environment"):
        given = dict(getattr(recipe, table))
        for key in given:
            yield _Edit(OPTION, f"without {table}.{key}", {table: {k: v for k, v in given.items() if k != key}})
        if len(given) > 1:
            yield _Edit(OPTION * len(given), f"without [{table}]", {table: {}})
    if kind == CPU and recipe.calibration is not None:
        yield _Edit(OPTION, "without [calibration]", {"calibration": None})
    if kind != CPU and recipe.texts.dataset != "cnn_dailymail":
        dataset = replace(recipe.texts, dataset="cnn_dailymail")
        yield _Edit(OPTION, 'calibration.dataset = "cnn_dailymail"', {"calibration": dataset})
    for kv in KV_CACHE_PRECISIONS[kind]:
        if kv != recipe.kv_cache_precision:
            yield _Edit(OPTION, f'kv_cache_precision = "{kv}"', {"kv_cache_precision": kv})
    yield from _limits(case)
    yield from _formats(case)
    yield from _without_effect(case, {})
    if recipe.revision is not None:
        yield _Edit(OPTION, "without revision", {"revision": None})
    if recipe.speculative_decoding is not None:
        yield _Edit(FEATURE, "without [speculative_decoding]", {"speculative_decoding": None})
    if kind == CPU:
        return
    for tp in sorted({1, 2, 4, 8} - {recipe.tp}, key=lambda tp: (tp < recipe.tp, abs(tp - recipe.tp))):
        yield _Edit(RANKS, f"tp = {tp}", {"tp": tp})
    if recipe.pp > 1:
        yield _Edit(RANKS, "pp = 1", {"pp": 1})
    for card in sorted(hardware.CARDS.values(), key=lambda card: (abs(card.sm - recipe.sm), card.memory_gib)):
        if card.name != recipe.gpu:
            yield _Edit(CARD, f'gpu = "{card.name}"', {"gpu": card.name, "sm": card.sm})


def _formats(case: Case) -> Iterator[_Edit]:
    """Other weights and KV cache: what we ship for this model and card, what the card is best at, then by size."""
    recipe = case.recipe
    own = memory.WEIGHT_BYTES[recipe.precision]
    pairs = [(r.precision, r.kv_cache_precision) for r in _shipped() if r.model == recipe.model and r.sm == recipe.sm]
    pairs += hardware.OFFERED[recipe.sm] if recipe.kind != CPU else ()
    by_size = sorted(PRECISIONS[recipe.kind], key=lambda p: abs(memory.WEIGHT_BYTES[p] - own))
    pairs += [(p, kv) for p in by_size for kv in (recipe.kv_cache_precision, *KV_CACHE_PRECISIONS[recipe.kind])]
    for precision, kv in dict.fromkeys(pairs):
        allowed = precision in PRECISIONS[recipe.kind] and kv in KV_CACHE_PRECISIONS[recipe.kind]
        if not allowed or precision == recipe.precision:
            continue
        changes: dict[str, Any] = {"precision": precision}
        text = f'precision = "{precision}"'
        if kv != recipe.kv_cache_precision:
            text, changes = f'{text}, kv_cache_precision = "{kv}"', changes | {"kv_cache_precision": kv}
        drops: tuple[str, ...] = ()
        for edit in _without_effect(case, changes):
            text, changes, drops = f"{text}, {edit.text}", changes | edit.changes, drops + edit.drops
        yield _Edit(FORMAT, text, changes, drops)


def _without_effect(case: Case, changes: dict[str, Any]) -> Iterator[_Edit]:
    """What goes with another format: keys that have no effect on it."""
    changed = replace(case, recipe=replace(case.recipe, **changes))
    if CHECKS["U3"].reason(changed):
        yield _Edit(LIMIT, "without group_size", {"group_size": 128}, ("group_size",))
    if CHECKS["U4"].reason(changed):
        yield _Edit(OPTION, "without [calibration]", {"calibration": Calibration()}, ("calibration",))
    if CHECKS["U5"].reason(changed):
        yield _Edit(OPTION, 'optimize_for = "balanced"', {"optimize_for": "balanced"})


def _limits(case: Case) -> Iterator[_Edit]:
    recipe = case.recipe
    made_for = case.shape.architecture.max_positions if recipe.kind == CPU else case.shape.positions
    longest = min(made_for, recipe.max_seq_len or 8192)
    for length in [longest] + [n for n in (65536, 32768, 16384, 8192, 4096, 2048, 1024) if n < longest]:
        if length != recipe.max_seq_len:
            yield _Edit(LIMIT, f"max_seq_len = {length}", {"max_seq_len": length})
    tokens = {commands.max_num_tokens(recipe), min(recipe.max_num_tokens, 16384), recipe.max_seq_len or 8192}
    tokens |= {8192, 2048, recipe.max_batch_size * recipe.max_beam_width}
    for count in sorted(tokens - {recipe.max_num_tokens}, key=lambda n: abs(n - recipe.max_num_tokens)):
        yield _Edit(LIMIT, f"max_num_tokens = {count}", {"max_num_tokens": count})
    for batch in (512, 256, 128, 64, 32, 16, 8):
        if batch < recipe.max_batch_size:
            yield _Edit(LIMIT, f"max_batch_size = {batch}", {"max_batch_size": batch})
    for size in sorted({32, 64, 128} - {recipe.group_size}) if recipe.precision in GROUPED else ():
        yield _Edit(LIMIT, f"group_size = {size}", {"group_size": size})
    if recipe.kind == CPU and recipe.max_seq_len and recipe.max_seq_len > (recipe.kv_cache_tokens or 0):
        needed = -(-recipe.max_seq_len // memory.BLOCK_TOKENS) * memory.BLOCK_TOKENS
        yield _Edit(LIMIT, f"kv_cache_tokens = {needed}", {"kv_cache_tokens": needed})
    if not recipe.chunked_context:
        yield _Edit(LIMIT, "chunked_context = true", {"chunked_context": True})
    if recipe.kind == TRTLLM:
        yield from _engine_limits(recipe)


def _engine_limits(recipe: Recipe) -> Iterator[_Edit]:
    spec = recipe.speculative_decoding
    if spec is not None and spec.max_draft_len > EAGLE_DRAFT:
        shorter = replace(spec, max_draft_len=EAGLE_DRAFT)
        changes: dict[str, Any] = {"speculative_decoding": shorter}
        text = f"speculative_decoding.max_draft_len = {EAGLE_DRAFT}"
        yield _Edit(LIMIT, text, changes)
        if recipe.max_batch_size > EAGLE_BATCH:
            both = changes | {"max_batch_size": EAGLE_BATCH}
            yield _Edit(2 * LIMIT, f"max_batch_size = {EAGLE_BATCH}, {text}", both)
    for key in ("choices", "medusa_model"):
        if spec is not None and getattr(spec, key) is not None:
            without: dict[str, Any] = {key: None}
            changes = {"speculative_decoding": replace(spec, **without)}
            yield _Edit(OPTION, f"without speculative_decoding.{key}", changes)
    if recipe.image != IMAGE:
        yield _Edit(LIMIT, f'image = "{IMAGE}"', {"image": IMAGE})
    if recipe.max_beam_width > 1:
        yield _Edit(LIMIT, "max_beam_width = 1", {"max_beam_width": 1})
    if recipe.multiple_profiles:
        yield _Edit(LIMIT, "multiple_profiles = false", {"multiple_profiles": False})


def _shipped_like(recipe: Recipe) -> str:
    """The shipped recipe that is this one, or differs from it in limits alone; "" if there is none."""
    same = [other for other in _shipped() if other.name != recipe.name and _same(other, recipe, NOT_THE_ENGINE)]
    for other in same:
        if _same(other, recipe, NAMING):
            return f"build/recipes/{other.name}.toml"
    return f"build/recipes/{same[0].name}.toml, limits aside" if same else ""


def _same(a: Recipe, b: Recipe, but: frozenset[str]) -> bool:
    return all(getattr(a, f.name) == getattr(b, f.name) for f in fields(Recipe) if f.compare and f.name not in but)


@lru_cache
def _shipped() -> tuple[Recipe, ...]:
    recipes = []
    for path in sorted(layout.RECIPES.glob("*.toml")):
        with suppress(RecipeError):  # an unfinished recipe file must not stop the plan of another
            recipes.append(load(path))
    return tuple(recipes)
