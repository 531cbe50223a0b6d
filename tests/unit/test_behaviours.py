"""docs/behaviours.md and the `ids` marks of the tests say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| (?P<id>[A-Z]\w?-?\d+) \| `(?P<test>[^`]+)` \| (?P<breaks>.+) \|$")


def rows() -> set[tuple[str, str]]:
    """(id, file::test) of the page; a row that cannot be read or says nothing fails here."""
    lines = (ROOT / "docs/behaviours.md").read_text(encoding="utf-8").splitlines()
    body = lines[lines.index("|---|---|---|") + 1 :]
    matches = [(line, ROW.match(line)) for line in body if line.strip()]
    assert not [line for line, match in matches if match is None or len(match["breaks"]) < 15]
    return {(match["id"], match["test"]) for _, match in matches if match}


def marks() -> dict[str, list[str]]:
    """file::test → ids it carries."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (ids := _ids(node)):
                found[f"{path.relative_to(ROOT)}::{node.name}"] = ids
    return found


def _ids(node: ast.FunctionDef) -> list[str]:
    calls = (d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) == "pytest.mark.ids")
    return [ast.literal_eval(argument) for call in calls for argument in call.args]


def test_page_and_marks_say_the_same():
    marked = {(identifier, test) for test, ids in marks().items() for identifier in ids}
    assert rows() == marked


def test_no_test_carries_more_than_three_ids():
    assert not [test for test, ids in marks().items() if len(ids) > 3]
