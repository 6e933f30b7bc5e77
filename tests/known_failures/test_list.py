"""`tests/known_failures.md` and the tests beside this file are in step."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
LIST = HERE.parent / "known_failures.md"
ROW = re.compile(r"^\| (F\d+) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)
NAMED = re.compile(r"`(test_\w+)`( \(open\))?")
CODE = re.compile(r"\w[\w/.-]*#\d+")
"""A source as rows name it: `dyn#589`."""


def functions():
    """Test functions of known failures: name -> (docstring, expected to fail)."""
    found = {}
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        marks = {
            node.targets[0].id: ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_f"):
                decorators = [ast.unparse(each) for each in node.decorator_list]
                is_open = any("xfail" in marks.get(each, each) for each in decorators)
                assert node.name not in found, f"{node.name} is there twice"
                found[node.name] = (ast.get_docstring(node) or "", is_open)
    return found


def rows():
    return {row[1]: row for row in ROW.finditer(LIST.read_text(encoding="utf-8"))}


def test_every_known_failure_has_a_row():
    assert list(rows()) == [f"F{number}" for number in range(1, 51)]


def test_every_test_is_listed_in_its_row_and_every_listed_test_exists():
    listed = {}
    for name, row in rows().items():
        for test, is_open in NAMED.findall(row[5]):
            assert test.startswith(f"test_f{int(name[1:]):02}_"), f"{test} is in the row of {name}"
            assert test not in listed
            listed[test] = bool(is_open)
    assert listed == {test: is_open for test, (_, is_open) in functions().items()}


def test_a_row_has_tests_or_says_what_it_waits_for():
    for name, row in rows().items():
        assert NAMED.search(row[5]) or "later: " in row[5], name


def test_the_tests_of_a_row_name_its_sources():
    found = functions()
    for name, row in rows().items():
        sources = set(CODE.findall(row[2]))
        assert sources, name
        tests = [test for test, _ in NAMED.findall(row[5])]
        texts = " ".join(found[test][0] for test in tests)
        if tests and "later: " not in row[5]:
            assert sources <= set(CODE.findall(texts)), f"{name}: sources in no docstring"
        for test in tests:
            assert found[test][0], f"{test} has no docstring"
