"""The documentation builds as a site without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("mkdocs", "material") if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.slow
needs_mkdocs = pytest.mark.skipif(
    bool(MISSING), reason=f"the documentation needs {' and '.join(MISSING)}: pip install mkdocs mkdocs-material"
)


@needs_mkdocs
def test_the_site_builds_without_a_warning_and_holds_what_pages_link_to(tmp_path: Path) -> None:
    # Not --quiet: what is not logged is not counted, and nothing would fail the build.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the theme's notice about its successor
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"#:]+)[^":]*"', page.read_text()):
            assert (page.parent / target).exists() or target.startswith("/"), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    named = set(re.findall(r"[\w/-]+\.md", navigation))
    outside = {"benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    written = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert named == written | {"all-messages.md"} | {f"repository/{page}" for page in outside}
