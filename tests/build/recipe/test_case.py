"""Rules in a book: each is named once, and what it finds carries its name and severity."""

import pytest
from gpu_recipes import case

from build.recipe.case import Case, Finding, RuleBook, Severity


def test_a_book_reports_every_rule_that_has_a_reason():
    book = RuleBook()
    book.rule("A1", Severity.REFUSE)(lambda case: f"tp is {case.recipe.tp}")
    book.rule("A2", Severity.WARN)(lambda case: None)
    assert book.check(case(tp=2)) == [Finding("A1", Severity.REFUSE, "tp is 2")]


def test_a_name_is_given_once():
    book = RuleBook()
    book.rule("A1", Severity.WARN)(lambda case: None)
    with pytest.raises(AssertionError, match="two rules are called A1"):
        book.rule("A1", Severity.WARN)(lambda case: None)


def test_a_finding_with_an_alternative_names_it():
    finding = Finding("A1", Severity.REFUSE, "too wide", instead="tp = 2")
    assert finding.message == "too wide; nearest recipe that works: tp = 2"


@pytest.mark.parametrize(("value", "is_on"), [("disable", False), ("float16", True), ("fp8", True)])
def test_a_plugin_is_on_unless_it_is_disabled(value, is_on):
    drawn: Case = case(build={"gemm_plugin": value})
    assert drawn.on("gemm_plugin") is is_on
