"""The pages for people: the README stays short, names every stabilizer, and no link leads nowhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "outputs" / "README.md"]
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


@pytest.mark.parametrize("page", ["README.md", "docs/stabilizers/README.md"])
def test_page_links_to_each_stabilizer(page: str) -> None:
    path = ROOT / page
    linked = {(path.parent / link).resolve() for link in LINK.findall(path.read_text(encoding="utf-8"))}
    names = {option.stem for option in (ROOT / "configs" / "stabilizer").glob("*.yaml")}
    assert names
    assert {ROOT / "docs" / "stabilizers" / f"{name}.md" for name in names} <= linked
