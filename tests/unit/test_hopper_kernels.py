"""The Hopper kernels compile without a GPU, keep their registers, and have every wait and signal in their PTX, in order.

They cannot run in the interpreter; compilers are known to move or drop such instructions, so the PTX itself is checked.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from overlap_train.operators.hopper import _LAUNCH, BLOCK_K, BLOCK_M, BLOCK_N, GROUP_M, STAGES  # noqa: E402

WORDS = ("counter_ptr", "complete_ptr", "signals_ptr", "epoch_ptr", "abort_ptr", "record_ptr")
ACQUIRE, RELEASE_ADD = r"ld\.global\.sys\.acquire", r"(?:atom|red)\S*\.release\S*\.add"
TMA_LOAD, TMA_STORE = r"cp\.async\.bulk\.tensor\.2d\.shared", r"cp\.async\.bulk\.tensor\.2d\.global\.shared"
FENCE, WRITTEN = r"fence\.proxy\.async\.global", r"cp\.async\.bulk\.wait_group 0;"


@pytest.fixture(autouse=True)
def compiled_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@functools.cache
def compiled(kernel_name: str, b_is_nk: bool, whole_tiles: bool | None = None) -> Any:
    """A kernel for 4 ranks and 2 chunks in bf16, for sm_90."""
    module = __import__(f"overlap_train.kernels.{kernel_name}", fromlist=["kernel"])
    kernel = getattr(module, f"{kernel_name}_kernel")
    constants: dict[str, Any] = dict(
        WORLD=4, CHUNKS=2, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, STAGES=STAGES,
        B_IS_NK=b_is_nk, num_warps=_LAUNCH["num_warps"],
    )  # fmt: skip
    constants |= {} if whole_tiles is None else {"WHOLE_TILES": whole_tiles}
    panel, out = _descriptor(BLOCK_M, BLOCK_K), _descriptor(BLOCK_M, BLOCK_N // 2)
    b = _descriptor(BLOCK_N, BLOCK_K) if b_is_nk else _descriptor(BLOCK_K, BLOCK_N)
    types = {
        "own_desc": panel,
        "gathered_desc": panel,
        "a_desc": panel,
        "b_desc": b,
        "y_desc": out,
        "staging_desc": out,
    }
    types |= dict.fromkeys(WORDS, "*i64") | {"received_ptr": "*bf16", "y_ptr": "*bf16", "limit": "i64"}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr") or name in "nk"}
    source = GluonASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=_LAUNCH)


def _descriptor(rows: int, cols: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {cols}],{layout!r}>"


def in_order(ptx: str, *patterns: str) -> bool:
    """Whether matches of the patterns can be found one behind the other."""
    return re.search(".*?".join(patterns), ptx, flags=re.DOTALL) is not None


@pytest.mark.parametrize("whole_tiles", [True, False])
def test_the_gathering_kernel_waits_and_fences_before_it_loads_a_peers_shard(whole_tiles: bool) -> None:
    ptx = compiled("hopper_all_gather_gemm", True, whole_tiles).asm["ptx"]
    assert in_order(ptx, r"globaltimer", ACQUIRE, FENCE, TMA_LOAD)
    assert len(re.findall(ACQUIRE, ptx)) == 2, "one poll before the loop, one inside"
    # the own shard's panels (A and B) come from loads that no wait guards, the peers' from loads behind the fence
    assert len(re.findall(TMA_LOAD, ptx.split("fence.proxy.async.global")[0])) == 2
    assert len(re.findall(TMA_LOAD, ptx.split("fence.proxy.async.global")[1])) == 2
    assert (re.search(TMA_STORE, ptx) is not None) == whole_tiles


def test_the_scattering_kernel_counts_a_tile_only_when_it_is_written() -> None:
    ptx = compiled("hopper_gemm_reduce_scatter", True).asm["ptx"]
    releases = [match.start() for match in re.finditer(RELEASE_ADD, ptx)]
    written = [match.start() for match in re.finditer(WRITTEN, ptx)]
    assert len(releases) == len(written) == 2, "one behind the next tile, one behind the last"
    for done, release in zip(written, releases, strict=True):
        assert done < release
        assert "bar.sync" in ptx[done:release] or "barrier.sync" in ptx[done:release]
        assert not re.search(TMA_STORE, ptx[done:release])


def test_the_scattering_kernel_waits_before_it_adds_each_peers_partial() -> None:
    ptx = compiled("hopper_gemm_reduce_scatter", True).asm["ptx"]
    assert len(re.findall(ACQUIRE, ptx)) == 2 * 4, "a wait for each source rank, the own one skipped at run time"


@pytest.mark.parametrize("kernel", ["hopper_all_gather_gemm", "hopper_gemm_reduce_scatter"])
@pytest.mark.parametrize("b_is_nk", [True, False])
def test_nothing_spills_and_four_stages_fit(kernel: str, b_is_nk: bool) -> None:
    binary = compiled(kernel, b_is_nk, True if kernel == "hopper_all_gather_gemm" else None)
    assert binary.metadata.shared <= 232_448, "what one CTA may take on Hopper"
    assert ".local" not in binary.asm["ptx"]
    assert len(re.findall(r"wgmma\.mma_async", binary.asm["ptx"])) >= 4
    assert "setmaxnreg.inc" in binary.asm["ptx"]
