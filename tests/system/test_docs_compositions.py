"""The page of compositions is made from marks of tests, and the marks say what the tests run."""

import ast
import runpy

from tests.support.pages import ROOT

PROGRAM = runpy.run_path(str(ROOT / "docs/site/compositions.py"))
MARKED, WITHOUT_TEST = PROGRAM["marked"](), list(PROGRAM["without_test"]())


def strings_of(row):
    """All texts in the file of a row's test, but for those of marks."""
    tree = ast.parse((ROOT / row.file).read_text())
    marks = [
        x
        for x in ast.walk(tree)
        if isinstance(x, ast.Call) and ast.unparse(x.func) == "pytest.mark.composes"
    ]
    of_marks = {id(x) for mark in marks for x in ast.walk(mark)}
    return [
        str(x.value)
        for x in ast.walk(tree)
        if isinstance(x, ast.Constant) and id(x) not in of_marks
    ]


def test_the_page_of_compositions_is_made_from_marks():
    page = ROOT / "docs/reference/compositions.md"
    assert page.read_text() == PROGRAM["page"](), "run python docs/site/compositions.py"


def test_a_row_says_what_is_equal_or_refused():
    for row in MARKED:
        assert bool(row.equal) != bool(row.refused), row
        assert row.ranks and all(row.ranks.values()) and row.rule and (row.has_run or row.needs), (
            row
        )


def test_cases_and_refusals_occur_in_the_tests():
    for row in MARKED:
        strings = strings_of(row)
        assert not row.case or row.case in strings or set(row.case.split("-")) <= {*strings}, row
        assert any(row.refused in x.replace("\\", "") for x in strings), row


def test_what_has_a_test_is_not_listed_without_one():
    for row in WITHOUT_TEST:
        tested = [x for x in MARKED if x.framework == row.framework]
        assert not [x for x in tested if row.ranks.keys() <= x.ranks.keys()], row
        assert row.rule, row
