"""Runs tests with one fault planted at a time, in copies of the repository."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .mutation import ROOT, Mutation

CAUGHT = ("caught", "hangs")
_SHORTEST_LIMIT_S = (
    60.0  # the tests of a mutation that hangs are ended after this, or five times what they usually take
)
# One test: its ranks start in 15 s, and compile the changed kernel for all its shapes in up to 80.
_GPU_LIMIT_S = 120.0
_MARK = "OVERLAP_TRAIN_MUTATION"  # in the environment of every process that a test run starts, to find them all again
_IGNORED = (".venv", ".whl", "runs")  # gigabytes, where git does not say what to leave out
_BROKEN = r"errors? during collection|CompilationError|SyntaxError|NameError"


@dataclass(frozen=True)
class How:
    """How tests are run.

    confirm: run the test that failed once more without the fault; for machines whose load alone can make it fail.
    ranks: of torchrun, for tests that need GPUs. provider: of symmetric memory there. total_s: after so many seconds no
    mutation is started any more.
    """

    jobs: int = 1
    confirm: bool = False
    ranks: int = 2
    provider: str = "torch"
    total_s: float = float("inf")


@dataclass(frozen=True)
class Outcome:
    """What running the tests of a mutation showed.

    what: caught (a test failed), hangs (they did not end in time), survived, broken (no test ran, or it does not compile),
    doubtful (the test failed once more without the fault), or not run. test: the first that failed, or why nothing ran.
    """

    mutation: Mutation
    what: str
    seconds: float = 0.0
    test: str = ""

    @property
    def fine(self) -> bool:
        """Caught, or known to survive."""
        return self.what in CAUGHT or (self.what == "survived" and bool(self.mutation.survives))


def run_all(mutations: list[Mutation], how: How, say: Callable[[str], None], root: Path = ROOT) -> list[Outcome]:
    """The outcome of each, in order. `say` gets a line as each is known. root: of the repository, or a folder without git."""
    end = time.monotonic() + how.total_s
    trees: queue.SimpleQueue[_Tree] = queue.SimpleQueue()
    with _copies(root, how.jobs) as copies:
        for folder in copies:
            trees.put(_Tree(folder, how))
        usual = _Usual(_of_gpus(mutations))

        def outcome(mutation: Mutation) -> Outcome:
            tree = trees.get()
            try:
                left = end - time.monotonic()
                known = (
                    Outcome(mutation, "not run", test="no time left") if left <= 0 else tree.try_out(mutation, usual)
                )
            finally:
                trees.put(tree)
            say(f"{known.what:9} {known.seconds:6.1f} s  {mutation.name}{f'  ({known.test})' if known.test else ''}")
            return known

        with ThreadPoolExecutor(how.jobs) as threads:
            return list(threads.map(outcome, mutations))


def _of_gpus(mutations: list[Mutation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(test for mutation in mutations if mutation.gpu for test in mutation.tests))


class _Usual:
    """Seconds that sets of tests take without a fault, or why they fail; each is run once.

    together: tests that run in one session. On GPUs each of fifteen sets would take longer to start than to run.
    """

    def __init__(self, together: tuple[str, ...] = ()) -> None:
        self._together = together
        self._known: dict[tuple[str, ...], float | str] = {}
        self._one_at_a_time = threading.Lock()

    def of(self, tests: tuple[str, ...], tree: _Tree, gpu: bool) -> float | str:
        if not gpu:
            return self._of(tests, tree, gpu)
        with self._one_at_a_time:
            return self._of(self._together, tree, gpu)

    def _of(self, tests: tuple[str, ...], tree: _Tree, gpu: bool) -> float | str:
        if tests not in self._known:
            code, output, seconds = tree.run(tests, gpu, 1200.0)
            end = "they do not end in 20 minutes" if code is None else output[-2000:]
            self._known[tests] = seconds if code == 0 else f"the tests fail without a fault: {end}"
        return self._known[tests]


class _Tree:
    """A copy of the repository in which one fault at a time is planted."""

    def __init__(self, folder: Path, how: How) -> None:
        self._folder, self._how = folder, how

    def try_out(self, mutation: Mutation, usual: _Usual) -> Outcome:
        """Plant it, run its tests, take it out again."""
        seconds = usual.of(mutation.tests, self, mutation.gpu)
        if isinstance(seconds, str):
            return Outcome(mutation, "not run", test=seconds)
        with self._planted(mutation):
            limit_s = _GPU_LIMIT_S if mutation.gpu else max(_SHORTEST_LIMIT_S, 5 * seconds)
            code, output, took = self.run(mutation.tests, mutation.gpu, limit_s, "-x")
        if code is None:
            return Outcome(mutation, "hangs", took, "time limit")
        if code == 0:
            return Outcome(mutation, "survived", took, mutation.survives)
        failed = re.search(r"^(?:\[\w+\]:)?(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)
        broken = re.search(_BROKEN, output)
        if broken or not failed:
            return Outcome(mutation, "broken", took, output[broken.start() :][:1000] if broken else output[-500:])
        test = failed[1]
        if self._how.confirm and self.run((test,), mutation.gpu, 5 * _SHORTEST_LIMIT_S)[0] != 0:
            return Outcome(mutation, "doubtful", took, test)
        return Outcome(mutation, "caught", took, test)

    def run(self, tests: tuple[str, ...], gpu: bool, limit_s: float, *options: str) -> tuple[int | None, str, float]:
        """(pytest's exit status or None if it was ended, its output, seconds)."""
        mark, begin = uuid.uuid4().hex, time.monotonic()
        environment = (
            os.environ
            | {
                _MARK: mark,
                "PYTHONPATH": os.pathsep.join(filter(None, (str(self._folder), os.environ.get("PYTHONPATH")))),
                "PYTHONDONTWRITEBYTECODE": "1",  # a mutant of the same length in the same second would be taken for the original
                "OMP_NUM_THREADS": "1",
            }
        )
        command = [sys.executable, "-m", "pytest", "-q"]
        if gpu:
            command = ["launch/test_gpu.sh", sys.executable]
            ranks = str(self._how.ranks)
            environment |= {"PROVIDERS": self._how.provider, "RANKS": ranks, "SIZES": ranks, "CONNECTIONS": "1"}
            environment["LOGS"] = str(self._folder / "runs")
        command += ["-p", "no:cacheprovider", "--tb=short", *options, *tests]
        process = subprocess.Popen(
            command, cwd=self._folder, env=environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            _end(mark)
            (output, _), code = process.communicate(), None
        finally:
            _end(mark)
        return code, output, time.monotonic() - begin

    @contextlib.contextmanager
    def _planted(self, mutation: Mutation) -> Iterator[None]:
        path = self._folder / mutation.file
        source = path.read_text()
        path.write_text(mutation.apply(source))
        try:
            yield
        finally:
            path.write_text(source)


@contextlib.contextmanager
def _copies(root: Path, count: int) -> Iterator[list[Path]]:
    """Copies of what git has or would add; removed at the end."""
    names = _listed(root)
    parent = Path(os.environ.get("TMPDIR", "/tmp")) / f"overlap_train_mutations_{uuid.uuid4().hex[:8]}"
    folders = [parent / str(number) for number in range(count)]
    try:
        for folder in folders:
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, folder / name, follow_symlinks=False)
        yield folders
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _listed(root: Path) -> list[str]:
    if not (root / ".git").exists():  # a copy of the tree, as on a GPU machine
        names = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return [str(name) for name in names if name.parts[0] not in _IGNORED]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=root, text=True).split("\0")
    return [name for name in listed if name and (root / name).exists()]


def _end(mark: str) -> None:
    """Kill every process that a run has started, stopped ones and those in sessions of their own included."""
    wanted = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # gone, or somebody else's
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
