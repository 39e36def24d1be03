"""The tuning table: measured winners, in memory, and in one JSON file for each key. Rank 0 of a group reads it for all of its
ranks.

A file is {"key": {...}, "winners": [...]}. The key has the fields of `Key`: what changes the answer and is known before anything
is sent. Each winner has the pass that was measured (kind, dtype, m, n, k), `winner`, and `timed`: each Method that ran, field by
field, with its `ms`. A file is replaced as a whole: a reader sees the old or the new one, never a part. Of two tuners that write
at once, the later one may leave out what the earlier one has just added.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..config import flag_name
from ..schedule.kinds import Kind
from ..warn import warn_user
from .cost import reach_of
from .method import NAMES, Bucket, Method, Pass, dtype_name

SAME = 0.02  # by so much two measurements of one thing differ
# Raised whenever what is measured becomes something else: a kernel, whom the kernels serve, how blocks are cut into chunks.
KERNELS = 6
_NONE = "not installed"  # of overlap-train: a checkout on the path
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Key:
    """What measurements depend on besides the shape.

    nodes: that the ranks are on, as many on each. crossings: the version of their schedule. network, queues: between nodes of
    GPUs. network: what carries data, nccl or nvshmem. queues: hardware queues of all streams of a GPU, one
    (CUDA_DEVICE_MAX_CONNECTIONS=1) or many: in one, an exchange holds up products that are enqueued after it.
    """

    gpu: str  # "cpu" without one
    torch: str
    triton: str
    driver: str
    overlap_train: str
    world: int
    kernels: int = KERNELS
    nodes: int = 1
    crossings: int = 0
    network: str = "nccl"
    queues: str = "one"

    @property
    def file_name(self) -> str:
        """The name of the key's file. It tells people the GPU and the numbers of ranks and nodes; the digest tells versions
        apart."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        nodes = f"-{self.nodes}-nodes" if self.nodes > 1 else ""
        return f"tuned-{re.sub('[^A-Za-z0-9]+', '-', self.gpu)}-{self.world}-ranks{nodes}-{digest}.json"


def key_of(device: torch.device, world: int, nodes: int = 1, network: str = "auto") -> Key:
    """The Key of this machine and installation, for `world` ranks on `nodes` nodes. network: of OverlapConfig."""
    on_gpu = device.type == "cuda"
    gpu, driver = (torch.cuda.get_device_name(device), _driver_version()) if on_gpu else ("cpu", "none")
    versions = str(torch.__version__), installed("triton") or _NONE, driver, installed("overlap-train") or _NONE
    return Key(gpu, *versions, world, **reach_of(nodes).key_fields(device, network))


@cache
def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str:
    """ "570.86.15"; the kernel module's own word, which is there in containers too."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)*", _DRIVER.read_text().splitlines()[0])
    except (OSError, IndexError):
        found = None
    return found[0] if found else "unknown"


@dataclass(frozen=True)
class Winner:
    """How all passes of a bucket are to run.

    how: the method that won, with its options. ms: of each Method that ran, for the pass that was measured. An autotune run has
    one time of each method, in the options that the rules give it, under its plain Method.
    """

    measured: Pass
    how: Method
    ms: Mapping[Method, float]


def quickest_variant(times: Mapping[Method, float], name: str) -> Method | None:
    """The fastest variant of a method that ran, which is the plain one unless another is faster by more than SAME; None where
    fewer than two were measured, or the plain one was not."""
    variants = {how: time for how, time in times.items() if how.name == name}
    plain = Method(name)
    if len(variants) < 2 or plain not in variants:
        return None
    quickest = min(variants, key=lambda how: variants[how])
    return quickest if variants[quickest] < (1 - SAME) * variants[plain] else plain


Table: TypeAlias = Mapping[Bucket, Winner]  # the winners of one key
UNTUNED: Table = {}


def path_of(folder: str, key: Key) -> Path:
    """The file that holds the winners of a key. Raises FileNotFoundError for a user without a home folder."""
    found = os.path.expanduser(folder)
    if found.startswith("~"):
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder", folder)
    return Path(found, key.file_name)


def read(folder: str, key: Key) -> dict[Bucket, Winner]:
    """The winners in a folder; none where there is no file, or none that can be used, which is a warning."""
    try:
        return _read(path_of(folder, key), key)
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn(path_of(folder, key), error)
        return {}


def _read(path: Path, key: Key) -> dict[Bucket, Winner]:
    """The winners in a file; none where it is damaged, which is a warning. Raises OSError."""
    try:
        document = json.loads(path.read_text())
        if document["key"] != asdict(key):
            raise ValueError(f"it was measured with {document['key']}, this is {asdict(key)}")
        winners = [_from_entry(entry, key.world) for entry in document["winners"]]
        return {winner.measured.bucket: winner for winner in winners}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _warn(path, error)
        return {}


def _warn(path: Path, error: Exception) -> None:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    warn_user(
        f"{path} cannot be used ({why}), so method=auto takes its defaults: delete the file and run overlap-train tune "
        f"again, or name another folder ({flag_name('tuning_dir')})"
    )


def save(folder: str, key: Key, winners: Iterable[Winner]) -> Path:
    """Add winners to those in the folder, in place of older ones of the same bucket.

    A damaged file is replaced. One that cannot be read is kept: what others have measured would be lost. Raises OSError.
    """
    path = path_of(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = _read(path, key) if path.exists() else {}
    merged |= {winner.measured.bucket: winner for winner in winners}
    document = {"key": asdict(key), "winners": [_to_entry(winner) for winner in merged.values()]}
    # On the same file system; unique over the hosts that share it; not of tempfile, whose files only their owner may read.
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        scratch.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def _to_entry(winner: Winner) -> dict[str, Any]:
    p, timed = winner.measured, [{**asdict(how), "ms": ms} for how, ms in winner.ms.items()]
    shape = {"kind": p.kind, "dtype": dtype_name(p.dtype), "m": p.m, "n": p.n, "k": p.k}
    shape |= {name: True for name in ("fp8", "blockwise", "twice") if getattr(p, name)}
    return {**shape, "winner": asdict(winner.how), "timed": timed}


def _from_entry(entry: dict[str, Any], world: int) -> Winner:
    """Raises ValueError, KeyError, TypeError or AttributeError for anything that `save` does not write."""
    kind, dtype, how = Kind(entry["kind"]), getattr(torch, entry["dtype"]), Method(**entry["winner"])
    m, n, k = (int(entry[name]) for name in ("m", "n", "k"))
    timed = {Method(**{k: v for k, v in one.items() if k != "ms"}): float(one["ms"]) for one in entry["timed"]}
    known = {how.name, *(one.name for one in timed)} <= set(NAMES) and isinstance(dtype, torch.dtype)
    if not known or min(m, n, k) < 1:
        raise ValueError(f"unknown entry {entry}")
    in_fp8 = (bool(entry.get(name)) for name in ("fp8", "blockwise", "twice"))
    return Winner(Pass(kind, m, n, k, dtype, world, *in_fp8), how, timed)
