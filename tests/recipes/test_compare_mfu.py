"""recipes/compare_mfu.py on two CPU processes, and its parts: what it writes, and that it would notice what it is to notice."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.settings import Settings
from mfu.layer_timeline import MARKER, cut
from mfu.measured import Measured
from mfu.plan import read_flags
from mfu.rows import BELOW_0, largest_difference, notes_of, rows_of
from overlap_train.tools.pictures.lanes import exposed, kind_of
from tests.megatron.workers import Workers

COMPARE = Path(__file__).parents[2] / "recipes" / "compare_mfu.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL = (
    "--model small,small --layers 1,2 --seq-length 32 --steps 2 --round-steps 2 --variants megatron,collective,overlap"
)
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
WIDTH = 120  # what a page and a terminal have room for


@dataclass(frozen=True)
class Ended:
    folder: Path
    output: str
    rows: list[dict[str, Any]]

    def row(self, layers: int, variant: str) -> dict[str, Any]:
        (row,) = [row for row in self.rows if (row["layers"], row["variant"]) == (layers, variant)]
        return row


def run(line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*TORCHRUN, str(COMPARE), *line.split()], env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two models, with the overlapped variant trained twice."""
    folder = tmp_path_factory.mktemp("mfu")
    done = run(f"{SMALL} --bitwise --peak-tflops 0.1 --out {folder}/out")
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((folder / "out" / "mfu.json").read_text())
    assert document.keys() == {"hardware", "versions", "date", "rows"}
    return Ended(folder / "out", done.stdout, document["rows"])


def test_every_variant_of_every_model_has_a_row(ended: Ended) -> None:
    variants = ["megatron", "collective", "overlap", "overlap again"]
    assert [row["variant"] for row in ended.rows] == 2 * variants
    assert [row["layers"] for row in ended.rows] == 4 * [1] + 4 * [2]
    assert {row["status"] for row in ended.rows} == {"ran"}


def test_what_did_not_run_has_a_row_with_the_reason() -> None:
    """And no figures."""
    measured = Measured(Settings(tp=2), absent={"async_tp": "PyTorch's async-TP needs CUDA devices"})
    plan = read_flags(["--variants", "async_tp"])[0]
    (row,) = rows_of(plan, measured, 2, None, "FP32")
    assert row["status"] == "PyTorch's async-TP needs CUDA devices"
    assert row["step_ms"] is None and row["last_loss"] is None and row["exposed_ms"] is None
    notes = notes_of(plan, [row])
    assert any(note.endswith("async-TP did not run: " + row["status"]) for note in notes)
    assert any(note.startswith(f"loss difference: the largest of {plan.trained_steps} steps") for note in notes)


@pytest.mark.parametrize(("alone", "is_below"), [(12.0, True), (8.0, False)])
def test_exposed_communication_below_0_is_explained(alone: float, is_below: bool) -> None:
    measured = Measured(Settings(tp=2, cp=2), passes_ms={"overlap": 10.0}, alone_ms={"overlap": alone})
    plan = read_flags(["--variants", "overlap"])[0]
    (row,) = rows_of(plan, measured, 4, None, "FP32")
    assert row["exposed_ms"] == 10.0 - alone
    assert (BELOW_0 in notes_of(plan, [row])) == is_below


def test_figures_follow_from_times_and_sizes(ended: Ended) -> None:
    row = ended.row(1, "overlap")
    seconds = 1e-3 * row["step_ms"]
    assert row["tokens_per_s_per_gpu"] == pytest.approx(32 / seconds / 2)
    # one layer of hidden 128: qkv 256, attention over 32 keys, proj, three matrices of 384, and 256 logits
    flops = 6 * 32 * (128 * 256 + 32 * 128 + 128 * 128 + 3 * 128 * 384 + 128 * 256)
    assert row["tflops_per_gpu"] == pytest.approx(flops / seconds / 2 / 1e12)
    assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 0.1)
    assert row["speed_up"] == pytest.approx(ended.row(1, "megatron")["step_ms"] / row["step_ms"])
    assert row["exposed_ms"] == pytest.approx(row["forward_backward_ms"] - row["alone_ms"])


def test_only_the_overlapped_variants_overlapped(ended: Ended) -> None:
    steps = 3 + 3
    for variant, calls in (("megatron", 0), ("overlap", 5 * steps), ("overlap again", 5 * steps)):
        row = ended.row(1, variant)
        assert (row["overlapped_calls"], row["fallen_back_calls"]) == (calls, 0)
        assert (row["symmetric_bytes"] is None) == (calls == 0)


def test_all_variants_train_the_same_model_on_the_same_data(ended: Ended) -> None:
    rows = json.loads((ended.folder / "losses.json").read_text())["rows"]
    losses = {(row["layers"], row["variant"]): row["losses"] for row in rows}
    for (layers, variant), values in losses.items():
        assert len(values) == 6
        assert values == pytest.approx(losses[layers, "megatron"], rel=1e-5), variant
        assert len(set(values)) == 6  # of other weights or other data at every step
    assert losses[1, "megatron"] != losses[2, "megatron"]


def test_a_second_overlapped_run_has_the_same_bits(ended: Ended) -> None:
    assert ended.row(1, "overlap again")["same_bits"] is True
    assert ended.row(1, "overlap")["same_bits"] is None
    assert "overlap again: losses and weights have the same bits" in ended.output


def test_four_narrow_tables_say_how_it_was_trained_how_fast_and_what_came_out(ended: Ended) -> None:
    setup, speed, communication, outcome, *_ = (ended.folder / "mfu.md").read_text().split("\n\n")
    assert setup.splitlines()[0] == "| Model | #-GPUs | Precision | GBS | MBS | Sequence Length | TP | CP | GA |"
    assert setup.splitlines()[2:] == [
        f"| small GPT, {layers} layers | 2 | FP32 | 1 | 1 | 32 | 2 | 1 | 1 |" for layers in (1, 2)
    ]
    for table, heading in ((speed, "Step ms"), (communication, "Exposed comm ms"), (outcome, "Loss difference")):
        first, _, *lines = table.splitlines()
        assert heading in first and len(lines) == len(ended.rows)
        assert max(map(len, lines)) <= WIDTH and lines[0].startswith("| small GPT, 1 layers: Megatron-Core | ")
    printed = [line for line in ended.output.splitlines() if "Megatron-Core" in line and "layers:" in line]
    assert printed and max(map(len, printed)) <= WIDTH


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_pictures_are_drawn(ended: Ended) -> None:
    for name in ("mfu.png", "loss-small-1-layers.png", "loss-small-2-layers.png"):
        assert (ended.folder / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_pictures_are_drawn_anew_from_json_alone(ended: Ended) -> None:
    before = {path: path.read_bytes() for path in ended.folder.glob("*.png")}
    for path in before:
        path.unlink()
    command = [sys.executable, str(COMPARE), "--redraw", str(ended.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {Path(line) for line in done.stdout.splitlines()} == before.keys()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "line",
    [
        "--model llama9",
        "--model llama3-8b --layers 1 --seq-length 31",
        "--model small --seq-length 32 --variants async_tp",
    ],
)
def test_what_cannot_be_compared_is_one_line_of_rank_0(line: str) -> None:
    done = run(line)
    assert done.returncode != 0
    assert done.stderr.count("compare_mfu: error: ") == 1
    assert line.split()[-1] in done.stderr


def test_without_communication_products_are_right_and_everything_comes_back(workers: Workers) -> None:
    assert workers.call(compute_alone) == [[], []]


def compute_alone() -> list[str]:
    """Called on two ranks: what is wrong. All ranks hold equal shards, so repeating one is the same as gathering all."""
    from mfu.alone import Wholes, parallel_linears, without_communication
    from tests.megatron.models import LLAMA, Recipe, gpt

    model = gpt(Recipe(LLAMA))
    linears = parallel_linears(model)
    classes = [type(linear) for linear in linears]
    column = next(linear for linear in linears if linear.weight.shape[0] != linear.output_size)
    x = torch.randn(4, 2, column.input_size, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def results() -> list[torch.Tensor]:
        y = column(x)[0]
        dy = torch.linspace(-1, 1, y.numel()).view_as(y)
        # a reduce-scatter adds the other rank's half; alone, the own partial sum is cut
        return [y.detach(), *torch.autograd.grad(y, [column.weight], dy)]

    expected = results()
    with without_communication(model, Wholes(2, "off")):
        inside = [type(linear) for linear in linears]
        found = results()
    problems = [
        f"result {n} differs" for n, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.allclose(a, b)
    ]
    with without_communication(model, Wholes(2, "accumulate")):
        column.weight.main_grad = torch.ones_like(column.weight)
        results_in_place = column(x)[0]
        results_in_place.backward(torch.linspace(-1, 1, results_in_place.numel()).view_as(results_in_place))
    if not torch.allclose(column.weight.main_grad, 1 + expected[1], atol=1e-6):
        problems.append("the weight gradient was not added into main_grad")
    problems += [] if len(linears) >= 5 and not set(inside) & set(classes) else ["some linear kept its class inside"]
    problems += [] if classes == [type(linear) for linear in linears] else ["some linear lost its class"]
    return problems + (["something was left behind"] if any(hasattr(linear, "wholes") for linear in linears) else [])


def test_async_tp_linears_have_megatrons_gradients(workers: Workers) -> None:
    assert workers.call(compare_async_tp) == [[], []]


def compare_async_tp() -> list[str]:
    """Called on two ranks: parameters whose gradient differs, with plain collectives in place of the CUDA operators."""
    from unittest.mock import patch

    from mfu.variants import AsyncColumnLinear, AsyncRowLinear, use_async_tp
    from tests.megatron.models import LLAMA, Recipe, gpt

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        loss_of(model).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients(gpt(Recipe(LLAMA)))
    model = gpt(Recipe(LLAMA))
    use_async_tp(model)
    assert sum(isinstance(module, AsyncColumnLinear | AsyncRowLinear) for module in model.modules()) == 9
    here = "overlap_train.tools.bench.async_tp"
    mm = torch.mm  # the CPU's has no out_dtype
    with (
        patch(f"{here}.async_all_gather_matmul", all_gather_matmul),
        patch(f"{here}.async_matmul_reduce_scatter", matmul_reduce_scatter),
        patch("torch.mm", lambda a, b, out_dtype=None: mm(a, b)),
    ):
        found = gradients(model)
    return [
        name for name, gradient in expected.items() if not torch.allclose(gradient, found[name], rtol=1e-4, atol=1e-6)
    ]


def all_gather_matmul(shard: torch.Tensor, b: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    whole = shard.new_empty(2 * len(shard), *shard.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, shard, group=group)
    return whole, whole @ b


def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group: Any) -> torch.Tensor:
    partial = a @ b
    torch.distributed.all_reduce(partial, group=group)
    return partial.chunk(2)[torch.distributed.get_rank(group)].contiguous()


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    """Of the first batch of the test models."""
    from tests.megatron.models import SEQUENCE, batches

    tokens = next(batches())
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()


def test_other_weights_and_other_losses_are_not_the_same_bits(workers: Workers) -> None:
    assert workers.call(notice_differences) == [[True, False, False], [True, False, False]]


def notice_differences() -> list[bool]:
    """Called on two ranks: equal runs, a run whose weights differ in one bit on one rank, and one of another loss."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from mfu.after_training import are_the_same
    from overlap_train.tools.measure.world import World

    here = World(dist.group.WORLD, torch.device("cpu"), dist.get_rank(), 2)

    def trained(name: str, value: float) -> Any:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, value)
        torch.nn.init.zeros_(model.bias)
        trainer = SimpleNamespace(model=SimpleNamespace(bare=model))
        return SimpleNamespace(name=name, trainer=trainer, fingerprint=torch.zeros(1))

    one, same = trained("a", 1.0), trained("b", 1.0)
    other = trained("b", 1.0 + 2**-23 * dist.get_rank())
    losses = {"a": [2.0, 1.0], "b": [2.0, 1.0]}
    return [
        are_the_same(one, same, losses, here),
        are_the_same(one, other, losses, here),
        are_the_same(one, same, {**losses, "b": [2.0, 1.0 + 2**-52]}, here),
    ]


def test_the_largest_difference_of_losses() -> None:
    assert largest_difference([1.0, 2.0, 3.0], [1.0, 2.5, 2.75]) == 0.5
    assert largest_difference([1.0, float("nan")], [1.0, 1.0]) != largest_difference([1.0, 1.0], [1.0, 1.0])


def spans() -> list[dict[str, Any]]:
    """A recording: a head start, then forward and backward of one layer between markers, all in microseconds."""
    rows = [
        ("spin_kernel(long)", 7, 0, 100), ("earlier gemm", 7, 100, 110),
        (MARKER, 7, 110, 111), ("nvjet_gemm", 7, 111, 211), ("Memcpy PtoP", 9, 151, 251), ("wait_kernel", 7, 211, 231),
        ("elementwise", 7, 231, 241), (MARKER, 7, 301, 302),
        ("later gemm", 7, 302, 310),
        (MARKER, 7, 400, 401), ("ncclDevKernel_AllGather", 8, 401, 431), ("nvjet_gemm", 7, 431, 531), (MARKER, 7, 531, 532),
        ("adam", 7, 540, 600),
    ]  # fmt: skip
    return [dict(zip(("name", "stream", "start", "end"), row, strict=True)) for row in rows]


def test_a_layer_is_cut_out_between_its_markers() -> None:
    found = [(span["pass"], span["kind"], span["start"], span["end"]) for span in cut(spans())]
    assert found == [
        ("forward", "gemm", 0, 100),
        ("forward", "communication", 40, 140),
        ("forward", "waiting", 100, 120),
        ("forward", "compute", 120, 130),
        ("backward", "communication", 0, 30),
        ("backward", "gemm", 30, 130),
    ]


def test_hooks_mark_where_a_layer_begins_and_ends_in_both_passes(workers: Workers) -> None:
    assert workers.call(marked_events) == [["marker", "marker", "loss", "marker", "marker"]] * 2


def marked_events() -> list[str]:
    """Called on two ranks: what happens in one forward and backward of a model whose second layer is marked."""
    from unittest.mock import patch

    from mfu.layer_timeline import _mark
    from tests.megatron.models import LLAMA, Recipe, gpt

    model, events = gpt(Recipe(LLAMA)), []
    handles = _mark(model.decoder.layers[1])
    with patch("torch.nextafter", lambda one, other: events.append("marker")):
        loss = loss_of(model)
        events.append("loss")
        loss.backward()
    for handle in handles:
        handle.remove()
    return events


def test_a_recording_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 markers"):
        cut([span for span in spans() if span["start"] < 400])


def test_exposed_is_what_no_kernel_covers() -> None:
    forward = [span for span in cut(spans()) if span["pass"] == "forward"]
    assert exposed(forward) == [(100, 120), (130, 140)]


def test_a_layers_marker_has_no_kind() -> None:
    assert kind_of({"name": f"void {MARKER}(long)", "stream": 7}, 7, MARKER) == ""


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    from mfu.pictures import draw_timeline

    rows = [{**span, "variant": name} for name in ("megatron", "overlap") for span in cut(spans())]
    assert draw_timeline(rows, "a layer", tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_timeline_says_what_hosts_held_up_in_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward here is empty for a sixth of its time at first. The forward takes 10 ms, so all is in milliseconds."""
    pytest.importorskip("matplotlib")
    from mfu import pictures

    figures: list[Any] = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure) or path)
    spans = [
        {
            "pass": name,
            "variant": "fused",
            "name": "hopper_all_gather_gemm_kernel",
            "kind": "gemm",
            "start": start,
            "end": end,
        }
        for name, start, end in (("forward", 0.0, 1e4), ("backward", 500.0, 3000.0))
    ]
    pictures.draw_timeline(spans, "a layer", tmp_path / "timeline.png")
    assert "Gaps: the GPU waits for the host." in [text.get_text() for text in figures[0].texts]
    titles, labels = zip(*((axes.get_title(loc="left"), axes.get_xlabel()) for axes in figures[0].axes), strict=True)
    assert titles == ("fused:\nforward 10.00 ms, 0.00 exposed", "backward 3.00 ms, 0.00 exposed")
    assert set(labels) == {"milliseconds"}
    assert [len(axes.texts) for axes in figures[0].axes] == [0, 0], "fused stores nothing to peers"


@pytest.mark.parametrize(("device", "machine"), [("NVIDIA H100 80GB HBM3", "4 x H100"), ("cpu", "4 CPU processes")])
def test_the_title_names_the_gpus(device: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from mfu import pictures

    headers: list[tuple[str, ...]] = []
    monkeypatch.setattr(pictures, "bars", lambda panels, header, scale, path: headers.append(header) or path)
    rows = [{**row, "cp": 1} for row in mfu_rows()]
    pictures.draw_speed(rows, {"device": device}, tmp_path / "mfu.png")
    assert headers[0][0] == f"Training on {machine}: MFU, and speed-up of a step over Megatron-Core"


def mfu_rows() -> list[dict[str, Any]]:
    """Four variants of one model; a graph's exposed communication is unknown."""
    shape = {
        "model": "llama3-8b",
        "title": "Llama-3 8B",
        "layers": 4,
        "seq": 2048,
        "tp": 4,
        "gpus": 4,
        "peak_tflops": 100.0,
    }
    figures = {
        "megatron": (200.0, 50.0),
        "overlap": (180.0, 20.0),
        "megatron_graph": (120.0, None),
        "overlap_graph": (100.0, None),
    }
    return [
        {**shape, "variant": name, "step_ms": ms, "exposed_ms": bare, "mfu": 30 / ms, "speed_up": 200 / ms}
        for name, (ms, bare) in figures.items()
    ]


def test_a_graph_is_compared_with_a_graph_and_has_no_bound() -> None:
    pytest.importorskip("matplotlib")
    from mfu.pictures import bars_of

    found = {bar.name: bar for bar in bars_of(mfu_rows(), "mfu", 100.0)}
    assert found["overlap"].text.split() == ["16.7", "(1.11x)"]
    assert found["overlap_graph"].text.split() == ["30.0", "(1.20x)"]
    assert {name: bar.bound and round(bar.bound, 9) for name, bar in found.items()} == {
        "megatron": 18.75, "megatron_graph": None, "overlap": 18.75, "overlap_graph": None,
    }  # fmt: skip


def test_all_bars_have_the_bound_of_overlap_and_ours_come_last() -> None:
    pytest.importorskip("matplotlib")
    from mfu.pictures import bars_of

    faster = {**mfu_rows()[0], "variant": "chunked", "step_ms": 150.0, "exposed_ms": 100.0}
    drawn = bars_of([faster, *mfu_rows()[1::-1]], "mfu", 100.0)
    assert [bar.name for bar in drawn] == ["megatron", "chunked", "overlap"]
    assert {round(bar.bound or 0.0, 9) for bar in drawn} == {18.75}
    (alone,) = bars_of([faster], "mfu", 100.0)
    assert alone.bound is None
