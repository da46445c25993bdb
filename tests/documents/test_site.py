"""The site builds without a warning: every page is in the navigation, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    # Not with --quiet: warnings that are not logged are not counted, and none of them fails.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}
    assert pages <= built
    shown = (tmp_path / "site" / "reference" / "api.html").read_text(encoding="utf-8")
    assert {"fusion.fuse", "fusion.explain"} <= set(re.findall(r'id="([\w.]+)"', shown))


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Here\n\n[there](#nowhere)\n", encoding="utf-8")
    validation = re.search(
        r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert validation is not None
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: x\ntheme: mkdocs\n{validation[0]}", encoding="utf-8")
    done = build(tmp_path / "site", config)
    assert done.returncode != 0 and "#nowhere" in done.stderr
