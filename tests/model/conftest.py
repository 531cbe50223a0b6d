"""What the model runs say at the end: steps made, and for each mutant at which step it was noticed."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    lines = sorted(
        (report.nodeid.split("::")[-1], report.user_properties)
        for report in reports
        if report.when == "call" and "tests/model/test_model" in report.nodeid and report.user_properties
    )
    if lines:
        terminalreporter.section("model")
    for name, properties in lines:
        terminalreporter.line(f"{name}: " + ", ".join(f"{key} {value}" for key, value in properties))
