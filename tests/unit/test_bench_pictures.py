"""Pictures: nothing is cut, one colour a thing, and bars that end early say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from overlap_train.tools.bench import layer_plots, operator_plots, plots, size_plots, timeline
from overlap_train.tools.measure.results import ranks_of, write_json
from overlap_train.tools.pictures import bars, style
from tests.unit.test_bench_output import layer_row, operator_row

METHODS = ("auto", "fused", "direct", "chunked", "collective")


Drawn = tuple[list[Path], list[Any]]  # files and their figures


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """The pictures of a folder with everything in it."""
    folder, figures = tmp_path_factory.mktemp("results"), []

    def keep(figure: Any, path: Path) -> Path:
        figures.append(figure)
        return style.save(figure, path)

    write(folder)
    with pytest.MonkeyPatch.context() as patch:
        for module in (bars, operator_plots, size_plots, timeline):
            patch.setattr(module, "save", keep)
        return plots.draw(folder), figures


def texts(figure: Any) -> list[Any]:
    """That are seen, outside legends as well as inside."""
    from matplotlib.text import Text

    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def write(folder: Path) -> None:
    """Operators of two shapes and sizes, six layers, and a call by two methods."""
    ops = [operator_row(m=m) | {"method": method} for m in (256, 8192) for method in METHODS]
    write_json(folder / "operators.json", [*ops, *({**row, "op": "gemm_rs"} for row in ops)], {})
    names = ("auto", "auto_graph", "fused")
    layers = [layer_row() | {"layer": f"llama3-{n}b-attn", "method": name} for n in range(70, 76) for name in names]
    layers[0] |= {"async_tp_ms": 9.9 * layers[0]["gemms_ms"], "te_ms": 3.4, "te_userbuffers_ms": 3.2}
    del layers[-1]["te_ms"], layers[-1]["te_userbuffers_ms"]  # a record of before there were any
    write_json(folder / "layers.json", layers, {})
    marks = [{"name": "FillFunctor", "stream": 7, "start": t, "end": t + 1} for t in (0, 400)]
    kernel = {"name": "all_gather_gemm_kernel", "stream": 7, "start": 2, "end": 390}
    copy = {"name": "Memcpy PtoP", "stream": 9, "start": 1, "end": 200}
    calls = {"all_gather_linear fused": [*marks, copy, kernel], "all_gather_linear direct": [*marks, kernel]}
    shape = {"m": 8192, "hidden": 4096, "ffn": 14336, "world": 4}
    (folder / "timeline.json").write_text(json.dumps({"hardware": "NVIDIA H200", "shape": shape, "calls": calls}))


def test_a_ulysses_block_is_drawn_as_the_linears_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file with other names and sizes, in one column."""
    write(tmp_path)
    recorded = json.loads((tmp_path / "timeline.json").read_text())
    recorded["calls"] = {
        name.replace("all_gather_linear", "attention"): spans for name, spans in recorded["calls"].items()
    }
    recorded["shape"] = {"model": "llama3-8b", "tokens": 8192, "world": 2}
    words = words_of(recorded, tmp_path, monkeypatch)
    assert any("Ulysses attention block of llama3-8b, 8192 tokens" in line for line in words)
    assert [line.partition(":")[0] for line in words if line.startswith("attention by")] == [
        "attention by fused",
        "attention by direct",
    ]


def test_the_picture_of_several_nodes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    recorded = json.loads((tmp_path / "timeline.json").read_text())
    recorded["shape"] |= {"nodes": 2}
    words = words_of(recorded, tmp_path, monkeypatch)
    assert any("FFN 14336, 2 nodes, bf16" in line for line in words)


def words_of(recorded: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of the picture of a recording."""
    figures: list[Any] = []
    monkeypatch.setattr(timeline, "save", lambda figure, path: figures.append(figure) or path)
    timeline.draw(recorded, folder / "timeline.png")
    figures[0].canvas.draw()  # numbers of ticks are made here
    return [text.get_text() for text in texts(figures[0])]


def test_everything_in_a_folder_is_drawn(drawn: Drawn) -> None:
    assert [path.name for path in drawn[0]] == ["speedup.png", "speedup_m.png", "layers.png", "timeline.png"]
    assert all(1000 < path.stat().st_size < 200_000 for path in drawn[0])


def test_nothing_is_cut_or_small_or_unexplained(drawn: Drawn) -> None:
    for figure in drawn[1]:
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        assert width == style.WIDTH
        assert min(text.get_fontsize() for text in texts(figure)) >= style.SMALL
        words = {text.get_text() for text in texts(figure)}
        held_against = "GEMMs alone" if figure is drawn[1][2] else style.PERFECT
        assert held_against in words and any("is better" in line for line in words)


def test_titles_of_measurements_name_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    for module in (bars, operator_plots, size_plots):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure) or path)
    write_json(tmp_path / "operators.json", [operator_row(m=m) for m in (256, 8192)], {"device": "NVIDIA H200"})
    write_json(tmp_path / "layers.json", [layer_row()], {"device": "NVIDIA H200"})
    plots.draw(tmp_path)
    assert [figure.texts[0].get_text().rpartition(", ")[2] for figure in figures] == 3 * ["4 x H200"]


def test_the_picture_of_operators_across_nodes_says_what_the_nodes_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    for module in (operator_plots, size_plots):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure) or path)
    rows = [operator_row(m=m) | {"network_sms": 2, "probe_sms": 2, "nodes": 2} for m in (256, 8192)]
    write_json(tmp_path / "operators.json", rows, {"device": "NVIDIA H200"})
    plots.draw(tmp_path)
    for figure in figures:
        title, _, nodes = (text.get_text() for text in figure.texts)
        assert title.endswith("4 x H200 as 2 nodes") and nodes.startswith("2 nodes of 2 GPUs, emulated on one machine")


def test_layers_are_held_against_their_gemms_alone(drawn: Drawn) -> None:
    """Which nothing reaches where copies take longer than products: it is no perfect overlap."""
    words = [text.get_text() for text in texts(drawn[1][2])]
    assert any(line.startswith("Lower is better. 1.00: the GEMMs alone; out of reach where") for line in words)
    assert style.PERFECT not in " ".join(words)


def test_blocks_are_held_against_the_same_without_exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"layer": "llama3-8b-ulysses", "world": 2, "seq": 8192, "method": "auto", "ms": 1.1, "alone_ms": 1.0}
    figures: list[Any] = []
    monkeypatch.setattr(bars, "save", lambda figure, path: figures.append(figure))
    layer_plots.draw_blocks({"rows": [row]}, tmp_path / "layers.png")
    words = [text.get_text() for text in texts(figures[0])]
    assert "without exchanges" in words and style.PERFECT not in " ".join(words)


def test_auto_by_the_tuners_winners_is_a_bar_beside_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(bars, "save", lambda figure, path: figures.append(figure))
    row = layer_row() | {"method": "auto", "tuned_ms": 1.5 * layer_row()["gemms_ms"]}
    layer_plots.draw_layers({"rows": [row]}, tmp_path / "layers.png")
    (axes,) = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Megatron-Core", "auto, tuned", "auto"]
    assert axes.texts[1].get_text().strip() == "1.50"


def test_communication_inside_a_kernel_is_named(drawn: Drawn) -> None:
    fused, direct = ([text.get_text() for text in texts(axes)] for axes in drawn[1][-1].axes)
    assert "inside the kernel: stores to peers" in direct
    assert "inside the kernel: stores to peers" not in fused


def test_a_bar_beyond_the_limit_is_broken_and_keeps_its_number(drawn: Drawn) -> None:
    axes = drawn[1][2].axes[0]
    numbers = [text.get_text().strip() for text in axes.texts]
    assert numbers[numbers.index("//") + 1] == "9.90"
    assert max(bar.get_width() for bar in axes.patches) == pytest.approx(layer_plots.LAYERS.limit - 1)


def test_baselines_come_first_and_ours_last(drawn: Drawn) -> None:
    names = [label.get_text() for label in drawn[1][2].axes[0].get_yticklabels()]
    assert names == [
        "Megatron-Core", "async-TP", "TransformerEngine", "TE userbuffers", "fused", "auto", "auto, CUDA graph",
    ]  # fmt: skip
    assert style.in_order(["overlap again", "overlap_graph", "bound", "overlap", "megatron_graph", "megatron"]) == [
        "megatron", "megatron_graph", "overlap", "overlap again", "overlap_graph", "bound",
    ]  # fmt: skip


def test_where_panels_have_other_bars_each_has_names_of_its_own(drawn: Drawn) -> None:
    """In the first layer async-TP ran, in the others it did not. Three columns of names would leave titles no room."""
    first, second, third = ([label.get_text() for label in axes.get_yticklabels()] for axes in drawn[1][2].axes[:3])
    assert "async-TP" in first and "async-TP" not in second
    assert second == third == ["Megatron-Core", "fused", "auto", "auto, CUDA graph"]
    columns = {round(axes.get_position().x0, 2) for axes in drawn[1][2].axes[:3]}
    assert len(columns) == 2


@pytest.mark.parametrize(("title", "columns"), [("short", 3), ("llama3-70b-ulysses, s = 131072", 2)])
def test_panels_of_equal_names_share_them_unless_a_title_is_long(
    title: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(bars, "save", lambda figure, path: figures.append(figure))
    some = [bars.Bar("auto", "auto", 1.1, "1.10", 1.0)]
    scale = bars.Scale("time")
    bars.bars({"a": some, "b": some, title: some}, ("title", "Lower is better."), scale, tmp_path / "bars.png")
    names = [[label.get_text() for label in axes.get_yticklabels()] for axes in figures[0].axes[:3]]
    assert names == [["auto"] if place % columns == 0 else [""] for place in range(3)]


@pytest.mark.parametrize("bound", [1.0, None])
def test_perfect_overlap_is_explained_where_it_is_drawn(
    bound: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(bars, "save", lambda figure, path: figures.append(figure))
    panels = {"a layer": [bars.Bar("auto", "auto", 1.1, "1.10", bound), bars.Bar("TE", "te", 1.2, "1.20", None)]}
    bars.bars(panels, ("title", "Lower is better."), bars.Scale("time"), tmp_path / "bars.png")
    assert (style.PERFECT in [text.get_text() for text in texts(figures[0])]) == (bound is not None)


def test_perfect_overlap_is_seen_however_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(bars, "save", lambda figure, path: figures.append(figure))
    far = {"a": [bars.Bar("auto", "auto", 1.0, "1.0", 3.0)]}
    bars.bars(far, ("title", "Higher is better."), bars.Scale("MFU"), tmp_path)
    assert figures[0].axes[0].get_xlim()[1] > 3.0


def test_long_calls_are_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    recorded = json.loads((tmp_path / "timeline.json").read_text())
    assert "microseconds" in words_of(recorded, tmp_path, monkeypatch)
    for spans in recorded["calls"].values():
        for span in spans:
            span |= {"start": 40 * span["start"], "end": 40 * span["end"]}
    words = words_of(recorded, tmp_path, monkeypatch)
    assert "milliseconds" in words and "microseconds" not in words
    assert any(" ms, 0.00 exposed" in line for line in words) and {"0", "4", "16"} <= set(words)


def test_one_long_call_makes_the_unit_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader compares 2.73 ms with 5.79 ms, not 2730 µs."""
    write(tmp_path)
    recorded = json.loads((tmp_path / "timeline.json").read_text())
    for span in recorded["calls"]["all_gather_linear fused"]:
        span |= {"start": 40 * span["start"], "end": 40 * span["end"]}
    titles = [line for line in words_of(recorded, tmp_path, monkeypatch) if line.startswith("all_gather_linear by")]
    assert [title.partition(": ")[2] for title in titles] == ["15.56 ms, 0.04 exposed", "0.39 ms, 0.00 exposed"]


def test_a_call_that_hosts_held_up_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    recorded = json.loads((tmp_path / "timeline.json").read_text())
    assert not any("host" in line for line in words_of(recorded, tmp_path, monkeypatch))
    kernel = recorded["calls"]["all_gather_linear direct"][-1]
    kernel["start"] = 100  # a quarter of the call is over by then
    assert "Gaps: the GPU waits for the host." in words_of(recorded, tmp_path, monkeypatch)


def test_ranks_without_gpus_are_not_called_gpus() -> None:
    assert ranks_of({"device": "cpu"}, 2) == "2 CPU processes"
    assert ranks_of({"device": "NVIDIA H200"}, 4) == ranks_of({}, 4) == "4 GPUs"


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no operators\.json"):
        plots.draw(tmp_path)
