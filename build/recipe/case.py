"""What a rule looks at, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from build.base.architecture import Architecture
from build.base.shape import Shape
from build.recipe import commands
from build.recipe.recipe import Recipe, SpeculativeDecoding
from build.recipe.schema import TRTLLM


class Severity(str, Enum):
    """REFUSE: no plan. WARN: it builds, and something is lost or changed. INFORM: worth knowing."""

    REFUSE = "refuse"
    WARN = "warn"
    INFORM = "inform"


@dataclass(frozen=True)
class Finding:
    """One rule's answer. instead: the nearest recipe for which the rule is silent and nothing is refused."""

    rule: str
    severity: Severity
    reason: str
    instead: str = ""

    @property
    def message(self) -> str:
        """One sentence."""
        return f"{self.reason}; nearest recipe that works: {self.instead}" if self.instead else self.reason


@dataclass(frozen=True)
class Case:
    """A recipe on a model, with what is known of the machine that will run it.

    memory_here: bytes of this machine's memory, None where it does not matter. draft: of the draft model, None without
    one and where it is not known.
    """

    recipe: Recipe
    shape: Shape
    memory_here: int | None = None
    draft: Architecture | None = None

    @cached_property
    def algo(self) -> str | None:
        return commands.QUANT_ALGO[self.recipe.precision]

    @cached_property
    def options(self) -> dict[str, object]:
        """Options of trtllm-build as they will be passed."""
        return commands.build_options(self.recipe, self.shape)

    @cached_property
    def route(self) -> str:
        return commands.checkpoint_route(self.recipe, self.shape)

    @property
    def quantizes(self) -> bool:
        return self.route == commands.QUANTIZE

    @property
    def arch(self) -> Architecture:
        return self.shape.architecture

    @property
    def is_llama(self) -> bool:
        return self.arch.name == "LlamaForCausalLM"

    @property
    def is_trtllm(self) -> bool:
        return self.recipe.kind == TRTLLM

    @property
    def is_sm100(self) -> bool:
        return 100 <= self.recipe.sm < 120

    @property
    def spec(self) -> SpeculativeDecoding | None:
        return self.recipe.speculative_decoding

    @property
    def mode(self) -> str | None:
        """How draft tokens are made, None where none are."""
        return commands.draft_mode(self.recipe)

    def on(self, option: str) -> bool:
        """Whether a switch or plugin of trtllm-build is in use."""
        return self.options.get(option) not in (None, False, "disable")


Reason = Callable[[Case], "str | None"]


@dataclass(frozen=True)
class Rule:
    """A named check: says why not, or None."""

    name: str
    severity: Severity
    reason: Reason


class RuleBook(dict[str, Rule]):
    """Rules by name, in the order they were written down."""

    def rule(self, name: str, severity: Severity) -> Callable[[Reason], Reason]:
        def register(reason: Reason) -> Reason:
            assert name not in self, f"two rules are called {name}"
            self[name] = Rule(name, severity, reason)
            return reason

        return register

    def rows(self, severity: Severity) -> Callable[[Callable[[Case], object], str], None]:
        """Adds rules with one reason each: ``when`` finds something in a case, and "NAME: text" says what, of
        str.format, with recipe, arch, spec, case and what was found, a list's entries joined by "and"."""

        def add(when: Callable[[Case], object], named: str) -> None:
            name, _, text = named.partition(": ")

            def reason(case: Case) -> str | None:
                found = when(case)
                if not found:
                    return None
                words = " and ".join(found) if isinstance(found, list) else found
                return text.format(recipe=case.recipe, arch=case.arch, spec=case.spec, case=case, found=words)

            self.rule(name, severity)(reason)

        return add

    def check(self, case: Case) -> list[Finding]:
        answers = ((rule, rule.reason(case)) for rule in self.values())
        return [Finding(rule.name, rule.severity, reason) for rule, reason in answers if reason]
