"""Whole or not at all: folders and small files that a process killed half way cannot leave in between."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

MANIFEST = "manifest.json"

Listing = dict[str, tuple[int, str]]  # file -> its size and hash


def write_atomically(path: Path, text: str) -> None:
    """Replace the file `path` by `text`; a reader sees the old text or the new one."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def listing(folder: Path, part: int = 0, parts: int = 1) -> Listing:
    """Flush the files below `folder` and list them; of several ranks each takes a part, since a terabyte takes one of them longer
    than the others wait."""
    found: Listing = {}
    for path in _contents(folder)[part::parts]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[str(path.relative_to(folder))] = (path.stat().st_size, _hash(path))
    return found


def seal(folder: Path, files: Listing) -> None:
    """Write the manifest of `folder`, for `damage` to check."""
    write_atomically(folder / MANIFEST, json.dumps(files, indent=1, sort_keys=True))


def publish(draft: Path, folder: Path) -> None:
    """Give the sealed folder `draft` its name `folder`, in place of a folder of that name."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(draft, folder)
    shutil.rmtree(old, ignore_errors=True)


def damage(folder: Path, part: int = 0, parts: int = 1) -> str:
    """What is wrong with the sealed `folder`, or with a part of its files, in words; empty where all is as it was sealed."""
    try:
        files = json.loads((folder / MANIFEST).read_text())
        for name, (size, digest) in list(files.items())[part::parts]:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{folder / name} has {found} bytes instead of {size}"
            if _hash(folder / name) != digest:
                return f"{folder / name} was changed after it was written"
    except (OSError, ValueError, TypeError, AttributeError) as error:  # the last two: JSON, but not a listing
        return f"{folder / MANIFEST} or a file that it lists is missing or unreadable ({error})"
    return ""


def _contents(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
