"""Pytest plugin (`-p strict_oracles`): a skipped oracle test fails the session, and so does having none.

A module that skips itself while it is collected (a reference package is missing) hides its tests and their
marks, so every skip at collection counts as well.
"""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):
        return  # one of several processes: the first one has the reports of all
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None, "the strict oracle check needs pytest's terminal reporter"
    stats = reporter.stats
    skipped = [
        report.nodeid
        for report in stats.get("skipped", [])
        if isinstance(report, pytest.CollectReport) or "oracle" in report.keywords
    ]
    ran = [
        report
        for outcome in ("passed", "failed")
        for report in stats.get(outcome, [])
        if isinstance(report, pytest.TestReport) and "oracle" in report.keywords
    ]
    if not skipped and ran:
        return
    reason = "skipped: " + ", ".join(sorted(set(skipped))) if skipped else "no oracle test ran"
    reporter.write_line("")
    reporter.write_line(f"strict oracles: {reason}", red=True)
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
