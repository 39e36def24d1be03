"""A hook of MkDocs: pages link to files of the repository as they lie there, and the links work in the built site too.

The pages of docs/ are the root of the site. A file outside docs/ that a page links to is taken into the site under `repository/`,
at its own path, and links between the two are rewritten. So MkDocs' own check sees every link.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
INSIDE = "repository"  # where files from outside docs/ are in the site
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to, and what these link to in turn."""
    waiting = sorted(ROOT.glob("docs/*.md"))
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in seen or not target.is_file():
                continue
            seen.add(target)
            if target.parent != ROOT / "docs":
                uri = f"{INSIDE}/{target.relative_to(ROOT).as_posix()}"
                files.append(File.generated(config, uri, abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave or enter docs/."""
    here = page.file.src_uri
    source = here.removeprefix(f"{INSIDE}/") if here.startswith(f"{INSIDE}/") else f"docs/{here}"

    def rewritten(link: re.Match[str]) -> str:
        target = in_site(posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2])))
        return link[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + link[3]

    return LINK.sub(rewritten, markdown)


def in_site(path: str) -> str:
    """Where a file of the repository is in the site, before MkDocs gives it its address."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{INSIDE}/{path}"


def _targets(page: Path) -> list[Path]:
    return [(page.parent / link[2]).resolve() for link in LINK.finditer(page.read_text())]
