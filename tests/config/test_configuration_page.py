"""docs/configuration.md names every key, with what schema and YAML say of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from stability_lab.config import ROLES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("configuration", ROOT / "scripts" / "configuration.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python scripts/configuration.py"
    rows = list(script.key_rows())
    sets = script.chosen()
    assert {row[0].strip("`") for row in rows} >= ROLES.keys() - sets.keys() - {"hydra"}
    unexplained = [row[0] for row in rows if not row[-1]]
    assert not unexplained, "say on the key's line in its YAML file what it means"
