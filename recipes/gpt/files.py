"""Whole or not at all: folders and small files that a process killed at any moment cannot leave half written."""

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
    """Flush the files below `folder` to disk and list them.

    Each of several ranks takes a part: one rank alone would need longer for a terabyte than the others wait.
    """
    found: Listing = {}
    contents = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    for path in contents[part::parts]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[str(path.relative_to(folder))] = (path.stat().st_size, _hash(path))
    return found


def publish(draft: Path, files: Listing, folder: Path) -> None:
    """Seal the folder `draft` with a manifest and give it the name `folder`, in place of a folder of that name."""
    write_atomically(draft / MANIFEST, json.dumps(files, indent=1, sort_keys=True))
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(draft, folder)
    shutil.rmtree(old, ignore_errors=True)


def damage(folder: Path, part: int = 0, parts: int = 1, by_hash: bool = True) -> str:
    """What is wrong with the sealed `folder`, or with a part of its files; empty where all is as it was sealed.

    Without `by_hash` only sizes are compared, which takes no time.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())
        for name, (size, digest) in list(files.items())[part::parts]:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{folder / name} has {found} bytes instead of {size}"
            if by_hash and _hash(folder / name) != digest:
                return f"{folder / name} was changed after it was written"
    except (OSError, ValueError, TypeError, AttributeError) as error:  # the last two: JSON, but not a listing
        return f"{folder / MANIFEST} or a file that it lists is missing or unreadable ({error})"
    return ""


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
