"""Which instructions of a kernel's PTX can be reached without passing a given one."""

from __future__ import annotations

import re

_LABEL = re.compile(r"^(\$\w+):", flags=re.MULTILINE)
_ENDS = re.compile(r"^\s*(?:bra|ret|exit|brx\.idx)\b", flags=re.MULTILINE)  # without a predicate: nothing falls through


def reachable_without(ptx: str, instruction: str) -> str:
    """The text of all blocks that the kernel can get to from its entry if `instruction`, a pattern, lets nobody pass."""
    blocks, order = _blocks(ptx)
    seen, todo = set(), [order[0]]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        barred = re.search(instruction, blocks[name])
        text = blocks[name] = blocks[name][: barred.start()] if barred else blocks[name]
        todo += [label for label in re.findall(r"\$\w+", text) if label in blocks]
        if not barred and not _ENDS.search(text) and name != order[-1]:
            todo.append(order[order.index(name) + 1])
    return "".join(blocks[name] for name in order if name in seen)


def _blocks(ptx: str) -> tuple[dict[str, str], list[str]]:
    """Text by label, and the labels in their order."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    first, *rest = _LABEL.split(body)
    blocks = {"entry": first} | dict(zip(rest[::2], rest[1::2], strict=True))
    return blocks, list(blocks)
