"""Kernels that are compiled ahead are those that calls launch, and each is compiled by one rank of a node. Without a GPU."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime._async_compile import active_mode

from overlap_train.config import OverlapConfig
from overlap_train.gpu import compiling as under_test
from overlap_train.gpu.launch import LaunchCache
from overlap_train.group.domain import OneNode, OverlapDomain
from overlap_train.group.memory import Request
from overlap_train.group.signals import FaultRecord, Tag
from overlap_train.group.slots import Layout
from overlap_train.group.waits import BoundedWaits
from overlap_train.group.workspace import Workspace
from overlap_train.linear import column_backward, column_forward, in_fp8, row_backward, row_forward
from overlap_train.ops.blocks import new_packed
from overlap_train.ops.experts import make_expert_plan
from overlap_train.ops.gemm_ar import all_reduced
from overlap_train.ops.grouped import BlockProduct, GroupedProduct
from overlap_train.ops.plan import Plan, make_plan
from overlap_train.ops.plan_cache import PlanCache
from overlap_train.ops.planned import PlannedOp
from overlap_train.ops.rehearsal import (
    _NoCopies,
    compile_ahead,
    compile_experts_ahead,
    compile_routing_ahead,
    launches_of,
)
from overlap_train.ops.routing import Routing
from overlap_train.ops.spec import (
    ALL_GATHER_LINEAR,
    ALL_TO_ALL_LINEAR,
    DISPATCH_LINEAR,
    LINEAR_ALL_REDUCE,
    LINEAR_ALL_TO_ALL,
    LINEAR_DGRAD_ALL_REDUCE,
    LINEAR_REDUCE_SCATTER,
)
from overlap_train.schedule.order import Topology
from overlap_train.select.table import UNTUNED

ROWS, K, N = 512, 256, 128  # of x [M, K] and w [N, K] as a rank has them


class Engine(_NoCopies):
    def begin(self) -> None: ...

    join = begin


class Domain(OverlapDomain):
    """Rank 1 of two of a node of H200s, with slots in host memory."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.device, self.on_gpu = 1, 2, torch.device("cuda", 0), True
        self.config, self.layout = OverlapConfig(), Layout(2, 1 << 20, 1 << 22)
        self.fault = FaultRecord(torch.device("cpu"), 1, 1.0)
        self.nodes: Any = SimpleNamespace(topology=Topology(1, 2, 1), problem=None)
        self.engine, self.launcher, self.in_use = Engine(), object(), threading.RLock()  # type: ignore[assignment]
        self.closed = self.graphed = self.captured = False
        self.agreement: Any = SimpleNamespace(peers=SimpleNamespace(takes_back=False))
        self.span = OneNode(self)
        waits = BoundedWaits(1, 2, self.config.timeout_s, self.fault, self.launcher)
        memory = [torch.zeros(self.layout.nbytes + 512, dtype=torch.uint8) for _ in range(2)]
        self.heap: Any = SimpleNamespace(view=lambda peer: memory[peer][-memory[peer].data_ptr() % 512 :])
        self.workspace = Workspace(self.heap, self.layout, torch.device("cpu"), waits)


def _run(op: PlannedOp, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Forward and backward, as the autograd functions make them."""
    dw: Any = SimpleNamespace(add=lambda dy, x: None, is_delayed=False)
    spec, domain = op.plan.spec, op.domain
    if (fp8 := in_fp8(op)) is not None:
        column = spec == ALL_GATHER_LINEAR
        forward, backward = (fp8.column_forward, fp8.column_backward) if column else (fp8.row_forward, fp8.row_backward)
        y, saved = forward(op, x, w, bias, True, True)
        backward(op, y, saved, w, SimpleNamespace(add_scaled=lambda dy, x: None, is_delayed=False), True)  # type: ignore[arg-type]
    elif spec == ALL_GATHER_LINEAR:
        y, kept = column_forward(op, x, w, bias)
        column_backward(op, y, kept, w, dw, True)
    elif spec == LINEAR_REDUCE_SCATTER:
        row_backward(op, row_forward(op, x, w, bias), lambda: x, w, dw, True)
    elif spec == LINEAR_ALL_REDUCE:
        all_reduced(op, x, w.t())
    elif spec == LINEAR_DGRAD_ALL_REDUCE:
        all_reduced(op, x.new_zeros(ROWS, N), w)
    else:  # Ulysses, without its passes around

        def blocks(part: torch.Tensor) -> torch.Tensor:
            return part.unflatten(0, (2, -1))

        receives = spec == ALL_TO_ALL_LINEAR
        gathers, scatters = (op.plan.fprop, op.plan.dgrad) if receives else (op.plan.dgrad, op.plan.fprop)
        sent, a, b_in, b_out = (
            (x, x.new_zeros(ROWS // 2, N), w.t(), w) if receives else (x.new_zeros(2 * ROWS, N // 2), x, w, w.t())
        )
        with op.forward:
            received = gathers.start(domain, op.tags.fprop, blocks(sent))
            received.matmul(b_in, sent.new_zeros(len(sent) // 2, b_in.shape[1]))
            received.received_view()
        with op.backward[True, False]:
            scatters.start(domain, op.tags.dgrad, a, b_out).received()


def _plan(domain: Domain, spec: Any, config: OverlapConfig, x: torch.Tensor, w: torch.Tensor) -> Plan:
    """That of operands like x and w on the GPU."""
    x_there: Any = SimpleNamespace(
        shape=x.shape, dtype=x.dtype, device=domain.device, element_size=x.element_size, requires_grad=x.requires_grad
    )
    return make_plan(spec, config, UNTUNED, domain.topology, x_there, w)


@contextmanager
def _watched(device: int) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """(kernels that were started, those that were launched, the kernels that these have compiled) as on a Hopper GPU of this
    number, for which Triton has compiled nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    started: list[str] = []
    launches: list[str] = []
    late: list[str] = []

    def compile_once(key: str, compile_fn: Any) -> SimpleNamespace:
        started.append(key)
        return SimpleNamespace()

    def run(cache: LaunchCache, key: Any, values: tuple[int, ...], describe: Any, *told: Any) -> None:
        one = describe(*told)
        assert (
            len(values) == len(one.replaced)
            and {name for names in one.replaced for name in names} <= one.arguments.keys()
        )
        before = len(started)
        under_test.compiled(one.kernel, one.grid, one.arguments, one.constants)
        launches.append(one.kernel.fn.__name__)
        late.extend([one.kernel.fn.__name__] * (len(started) - before))

    card = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_stream=lambda device: 0,
        get_current_device=lambda: device,
    )  # fmt: skip
    under_test._mode.cache_clear()
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=card),
        mock.patch.object(under_test, "_compile_once", compile_once),
        mock.patch.object(LaunchCache, "run", run),
        mock.patch.object(driver, "_active", target),
        mock.patch("overlap_train.group.domain._is_capturing", return_value=False),
    ):
        yield started, launches, late


def _all_compiled() -> None:
    for future in under_test._mode().future_kernels.values():
        future.result()


def _compiled(
    spec: Any, method: str, gathered_input: str, has_bias: bool, in_fp8: str = "off"
) -> tuple[int, int, list[str]]:
    """(kernels that were started ahead, launches of a forward and backward pass, the kernels that these have compiled)."""
    with _watched(hash((spec.name, method, gathered_input, has_bias, in_fp8))) as (started, launches, late):
        domain = Domain()
        x = torch.zeros(ROWS, K // 2 if spec == ALL_TO_ALL_LINEAR else K, dtype=torch.bfloat16, requires_grad=True)
        w = torch.zeros(N, K, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.zeros(N, dtype=torch.bfloat16) if has_bias else None
        config = OverlapConfig(method=method, gathered_input=gathered_input, fp8=in_fp8)
        plan = _plan(domain, spec, config, x, w)
        # The heap grows for a linear that is foreseen when it is called.
        there, domain.layout = domain.layout, Layout(2, 0)
        compile_ahead(domain, [(plan, (x, w, bias))])
        domain.layout = there
        _all_compiled()
        ahead = len(started)
        with torch.no_grad():
            _run(PlannedOp(domain, plan, "linear", (), True), x.detach(), w.detach(), bias)
    return ahead, len(launches), late


LINEARS = (ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER, LINEAR_ALL_REDUCE, LINEAR_DGRAD_ALL_REDUCE)
METHODS = ("fused", "direct", "low_latency", "chunked")
CASES = [(spec, method, "regather", False) for spec in LINEARS for method in METHODS]
CASES += [(spec, method, "regather", True) for spec in LINEARS[:2] for method in METHODS]
EXCHANGES = (ALL_TO_ALL_LINEAR, LINEAR_ALL_TO_ALL)
CASES += [(spec, method, "regather", False) for spec in EXCHANGES for method in ("fused", "direct")]
CASES += [(ALL_GATHER_LINEAR, method, "keep", False) for method in ("fused", "direct")]


@pytest.mark.parametrize(
    ("spec", "method", "gathered_input", "has_bias"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_what_was_compiled_ahead_is_what_calls_launch(
    compiling: ProcessPoolExecutor, spec: Any, method: str, gathered_input: str, has_bias: bool
) -> None:
    ahead, launches, compiled = compiling.submit(_compiled, spec, method, gathered_input, has_bias).result(timeout=120)
    assert ahead and launches and not compiled


@pytest.mark.parametrize(
    ("method", "gathered_input", "fp8", "least"),
    [
        ("fused", "regather", "tensorwise", 6),
        ("direct", "regather", "tensorwise", 6),
        ("fused", "regather", "blockwise", 5),
        ("direct", "keep", "blockwise", 5),
        ("chunked", "regather", "blockwise", 5),
        ("chunked", "keep", "blockwise", 5),
    ],
)
@pytest.mark.parametrize("spec", LINEARS[:2], ids=lambda spec: spec.name)
def test_what_calls_in_fp8_launch_is_what_kernels_take(
    compiling: ProcessPoolExecutor, spec: Any, method: str, gathered_input: str, fp8: str, least: int
) -> None:
    """Our products are compiled ahead; not the kernels for largest elements, quantisers and transposes."""
    told = (spec, method, gathered_input, True, fp8)
    ahead, launches, late = compiling.submit(_compiled, *told).result(timeout=120)
    assert ahead > 0
    assert launches > len(late) >= least and not any("hopper" in name for name in late)


@pytest.mark.usefixtures("hopper_gpu")
def test_nothing_is_compiled_for_what_is_not_sent() -> None:
    """A column linear with a frozen input: there is no symmetric memory, either."""
    domain, x, w = Domain(), torch.zeros(ROWS, K, dtype=torch.bfloat16), torch.zeros(N, K, dtype=torch.bfloat16)
    domain.layout = Layout(2, 0)
    plan = _plan(domain, LINEAR_DGRAD_ALL_REDUCE, OverlapConfig(method="fused"), x, w.requires_grad_())
    assert not launches_of(domain, plan, x, w, None)


def _compiled_experts(has_probs: bool, fp8: str) -> tuple[int, int, list[str]]:
    """(kernels of experts that were started ahead, waits, kernels that were late)."""
    (n, k), here, bf16 = (256, 128), 2, torch.bfloat16
    with _watched(100 + has_probs + 2 * (fp8 != "off")) as (started, launches, late):
        domain, weights = Domain(), [torch.zeros(n, k, dtype=bf16)] * here
        domain.places_of_weights = SimpleNamespace(get=lambda at: torch.tensor(at, dtype=torch.int32))  # type: ignore[assignment]
        request, config = Request("dispatch_linear", "", 1 << 19), OverlapConfig(method="fused", fp8=fp8)
        plan = make_expert_plan(DISPATCH_LINEAR, config, domain.topology, bf16, request, None, here)
        compile_routing_ahead(domain, 70, 2 * here)
        compile_experts_ahead(domain, plan, weights, has_probs)
        _all_compiled()
        ahead, tag = len(started), Tag("experts", "")
        chosen, counts = torch.ones(70, 2 * here, dtype=torch.bool), torch.full((2, 2 * here), 70, dtype=torch.int32)
        routing = Routing(chosen, counts, domain)
        numbers = torch.zeros(70, 2 * here) if has_probs else None
        for transposed in (True, False):
            x, product = torch.zeros(70, k if transposed else n, dtype=bf16), GroupedProduct(weights, transposed)
            if fp8 != "off":
                x, product = new_packed(x).view(torch.uint8), BlockProduct(domain, weights, transposed, None)
            a = x.new_zeros(routing.rows_received, x.shape[1])
            of_dispatch, of_combine = (numbers, None) if transposed else (None, numbers)
            with domain.operator(tag, 2):
                plan.fprop.start(domain, tag, routing, x, of_dispatch, False).matmul(product)
                plan.dgrad.start(domain, tag, routing, a, product, of_combine).finish()
    return ahead, launches.count("wait_kernel"), late


@pytest.mark.parametrize("fp8", ["off", "blockwise"])
@pytest.mark.parametrize("has_probs", [False, True])
def test_kernels_of_experts_are_compiled_ahead(compiling: ProcessPoolExecutor, has_probs: bool, fp8: str) -> None:
    """Of a routing, and of both operators, forward and backward, at the first call of either; not the small ones that wait, nor
    what rounds weights."""
    ahead, waits, late = compiling.submit(_compiled_experts, has_probs, fp8).result(timeout=120)
    products = 2 if fp8 != "off" and not has_probs else 4  # in fp8 all weights lie along the contraction
    assert ahead == 1 + products and set(late) <= {"wait_kernel", "barrier_kernel", "quantize_squares_kernel"}
    assert waits == 4, "each operator waits for all ranks, also those without rows for its tiles"


@pytest.mark.usefixtures("hopper_gpu")
def test_a_rank_that_cannot_compile_ahead_goes_on() -> None:
    """Its peers have agreed on the call, and would wait for it."""
    x, w = torch.zeros(ROWS, K, dtype=torch.bfloat16), torch.zeros(N, K, dtype=torch.bfloat16)
    cache, config = PlanCache(Domain(), UNTUNED), OverlapConfig(method="chunked")
    told = ALL_GATHER_LINEAR, (x, w, None), config
    with (
        mock.patch("overlap_train.ops.plan_cache.prepare"),
        mock.patch("overlap_train.ops.rehearsal.compile_ahead", side_effect=RuntimeError("can't start new thread")),
        pytest.warns(UserWarning, match="qkv: its kernels .*can't start new thread"),
    ):
        planned = cache.agree(cache.look_up(*told, False)[0], *told, "qkv")
    assert cache.look_up(*told, False)[1] is planned


def _in_three_threads(key_of: Callable[[int], str], compile_fn: Callable[[], Any]) -> None:
    """Compile in three threads at once. key_of: by the number of the thread."""
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: under_test._compile_once(key_of(number), compile_fn), range(3)))


def _meet() -> Callable[[], int]:
    """A compilation that ends when three threads are in it."""
    return threading.Barrier(3, timeout=30).wait


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder of the lock files is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("locks")
def test_a_kernel_is_compiled_by_one_at_a_time_and_others_beside_it() -> None:
    alone = threading.Lock()

    def compile_fn() -> None:
        assert alone.acquire(blocking=False), "another one is in here"
        time.sleep(0.1)
        alone.release()

    _in_three_threads(lambda number: "kernel", compile_fn)
    _in_three_threads(str, _meet())


def test_lock_files_are_the_users_own(locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may have been first to make the folder."""
    _in_three_threads(str, _meet())
    (folder,) = locks.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(list(folder.iterdir())) == 3
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    _in_three_threads(lambda number: "kernel", _meet())


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize(
    "refusal", [OSError(errno.ENOLCK, "no locks"), BlockingIOError("held by a rank that was stopped")]
)
def test_without_a_lock_each_compiles_alone(refusal: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=refusal))
    monkeypatch.setattr(under_test, "_PATIENCE_S", 0.05)
    _in_three_threads(lambda number: "kernel", _meet())


class Kernel:
    """What Triton's kernels do when they are asked for: compile, or let the scope around compile."""

    def __init__(self, key: str, compile_fn: Callable[[], Any]) -> None:
        self.key, self.compile_fn = key, compile_fn

    def warmup(self, grid: tuple[int]) -> Any:
        mode = active_mode.get()
        return self.compile_fn() if mode is None else mode.submit(self.key, self.compile_fn, lambda binary: None)


@pytest.mark.usefixtures("locks")
def test_a_failure_that_passes_is_not_kept() -> None:
    compile_fn = mock.Mock(
        side_effect=[OSError(errno.ENOSPC, "disk full"), OSError(errno.ENOSPC, "disk full"), "binary"]
    )
    kernel = Kernel("of a full disk", compile_fn)
    with pytest.raises(OSError, match="disk full"):
        under_test.compiled(kernel, (1,), {}, {})
    assert under_test.compiled(kernel, (1,), {}, {}) == "binary"


ENDS = """
import atexit, fcntl, os, threading
from overlap_train.gpu import compiling
from tests.unit.test_compiling import Kernel

def compile_fn():
    begun.set()
    threading.main_thread().join()
    os.write(1, b"compiled\\n")

begun, compiling._PATIENCE_S = threading.Event(), 1e9
held = compiling._lock_file("0").open("w")  # as by a rank that was stopped
fcntl.flock(held, fcntl.LOCK_EX)
for number in range(3 * compiling._AT_ONCE):
    compiling.start(Kernel(str(number), compile_fn), (1,), {}, {})
begun.wait()
atexit.register(lambda: print(compiling.compiled(Kernel("last", lambda: "at the end"), (1,), {}, {})))
raise SystemExit(3)
"""


def test_a_process_that_ends_waits_for_what_is_being_compiled_and_no_more(locks: Path) -> None:
    environment, folder = os.environ | {"TMPDIR": str(locks)}, Path(__file__).parents[2]
    command = [sys.executable, "-c", ENDS]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    *compiled, last = ended.stdout.splitlines()
    assert (ended.returncode, last) == (3, "at the end"), ended.stderr
    assert 0 < len(compiled) <= under_test._AT_ONCE
