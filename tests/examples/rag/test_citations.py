"""Citations are checked against what their sources say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from examples.rag.citations import check, extract, words

SOURCES = ["A permit is the right to generate that admission gives.", "A pool is replicas with a common name."]


def test_a_citation_stays_only_where_its_source_says_so():
    right = check("The permit is the right to generate [1].", SOURCES)
    assert (right.text, right.cited) == ("The permit is the right to generate . [1]", (1,))
    assert right.grounded == 1.0
    wrong = check("A pool is replicas with a common name [1]. It has seven colours [9].", SOURCES)
    assert wrong.cited == (2,) and "[9]" not in wrong.text and wrong.grounded < 1.0


def test_a_sentence_without_a_citation_gets_its_source():
    assert check("Replicas with a common name are a pool.", SOURCES).text.endswith("[2]")
    assert check("Bananas are yellow.", SOURCES).cited == ()
    assert check("", SOURCES).grounded == 0.0 and check("Bananas.", []).cited == ()


@given(st.text("ab [1]239.", max_size=60))
def test_no_citation_of_a_source_that_is_not_there_stays(text: str):
    checked = check(text, SOURCES)
    assert set(checked.cited) <= {1, 2} and 0.0 <= checked.grounded <= 1.0


def test_the_sources_answer_by_themselves():
    assert extract("What is a pool?", SOURCES) == SOURCES[1]
    assert extract("What?", []) == "" and words("The replicas") == {"replica"}
