"""What a comparison leaves: a row for each model and variant in mfu.json, a table in mfu.md and on the screen, and mfu.png."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpt.program import say
from gpt.settings import Settings
from gpt.training import per_byte
from mfu.plan import Plan, baseline_of, is_graph
from overlap_train.select.system import system_of
from overlap_train.tools.measure import results as output
from overlap_train.tools.measure.results import Row
from overlap_train.tools.measure.world import World
from overlap_train.tools.pictures.bars import Bar, Scale, bars
from overlap_train.tools.pictures.style import in_order, look_of

if TYPE_CHECKING:
    from mfu.run import Comparison


def step_flops(settings: Settings) -> float:
    """Floating-point operations of one optimizer step of the model, over all ranks.

    Counted as Megatron-LM counts them (num_floating_point_operations, after arXiv 2104.04473): GEMMs only, each three times
    (forward and two in backward), the causal half of attention, nothing that is computed a second time. For B samples of s
    tokens, with q = heads x head width and k = groups x head width:

        6 B s [ layers ( h (q + 2 k) + s q + q h + 3 h ffn ) + h x padded vocabulary ]      s q: 2 (s / 2) q

    With --lora the GEMMs of frozen weights count twice, as they have no gradient, and adapters do not count.
    """
    h, s, width = settings.hidden_size, settings.seq_length, settings.kv_channels
    width = width or h // settings.num_attention_heads
    q, k = settings.num_attention_heads * width, settings.num_query_groups * width
    weights = settings.num_layers * (h * (q + 2 * k) + q * h + 3 * h * settings.ffn_hidden_size)
    weights += h * settings.vocabulary_rows
    passes = 2 if settings.lora else 3
    return 2.0 * settings.global_batch_size * s * (passes * weights + 3 * settings.num_layers * s * q)


def rows_of(found: Comparison) -> list[Row]:
    """A row for each variant; collective. Times are medians over rounds, MFU is a fraction of the peak, losses are nats per byte
    of each step, over all replicas and parts of sequences."""
    settings, world, plan = found.settings, found.world, found.plan
    sheet = system_of(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    peak = plan.peak_tflops or (None if sheet is None else sheet.peak_tflops)
    common: Row = {
        "model": settings.model, "title": settings.title, "layers": settings.num_layers, "gpus": world.size,
        "gbs": settings.global_batch_size, "mbs": settings.micro_batch_size, "seq": settings.seq_length, "tp": settings.tp,
        "cp": settings.cp, "lora": plan.lora, "deterministic": plan.deterministic, "peak_tflops": peak,
        "weight_gradient_fusion": plan.weight_gradient_fusion, "sequence_parallel": settings.sequence_parallel,
        "te_fp8": plan.te_fp8, "seed": plan.seed,
    }  # fmt: skip
    medians = {name: statistics.median(variant.step_ms) for name, variant in found.variants.items()}
    losses = {name: per_byte(torch.stack(variant.totals)) for name, variant in found.variants.items()}
    first, rows = losses[baseline_of(medians, "") or next(iter(medians))], []
    for name, variant in found.variants.items():
        baseline, gpu_seconds = baseline_of(medians, name), 1e-3 * medians[name] * world.size
        tflops = step_flops(settings) / gpu_seconds / 1e12
        figures = {
            "variant": name,
            "step_ms": medians[name],
            "step_ms_rounds": variant.step_ms,
            "tokens_per_s_per_gpu": settings.global_batch_size * settings.seq_length / gpu_seconds,
            "tflops_per_gpu": tflops,
            "mfu": None if peak is None else tflops / peak,
            "speed_up": None if baseline is None else medians[baseline] / medians[name],
            "forward_backward_ms": variant.passes_ms,
            "exposed_ms": variant.exposed_ms,
            "busy_ms": variant.busy_ms,
            "losses": losses[name],
            "loss_difference": float(np.abs(np.subtract(losses[name], first)).max()),
        }
        rows.append(common | figures)
    return rows


COLUMNS: output.Columns = (
    ("Model", lambda row: f"{row['title']}, {row['layers']} layers: {look_of(row['variant']).label}"),
    ("Step ms", lambda row: row["step_ms"]),
    ("GPU busy ms", lambda row: row["busy_ms"]),
    ("Speed-up", lambda row: row["speed_up"]),
    ("MFU %", lambda row: row["mfu"] and 100 * row["mfu"]),
    ("Tokens/s/GPU", lambda row: f"{row['tokens_per_s_per_gpu']:.0f}"),
    ("Exposed %", lambda row: row["exposed_ms"] and f"{100 * row['exposed_ms'] / row['forward_backward_ms']:.1f}"),
    ("Last loss", lambda row: row["losses"][-1]),
    ("Loss difference", lambda row: f"{row['loss_difference']:.1e}"),
)


def write(plan: Plan, rows: list[Row], world: World) -> str:
    """Write mfu.json, mfu.md and mfu.png from rank 0; returns the table for the screen."""
    folder, row = Path(plan.out), rows[0]
    peak = (
        f"MFU against {row['peak_tflops']:g} TFLOP/s a GPU"
        if row["peak_tflops"]
        else "no peak is known (--peak-tflops)"
    )
    notes = [
        f"{row['gpus']} ranks, TP {row['tp']}, CP {row['cp']}, sequence {row['seq']}, {row['gbs']} samples a step in "
        f"micro-batches of {row['mbs']}; weight-gradient fusion: {plan.weight_gradient_fusion}; seed {plan.seed}; {peak}",
        f"{plan.steps} steps or more in rounds of {plan.round_steps}, variants in turns; median of rounds, slowest rank",
    ]
    if plan.lora:
        notes.append(
            f"LoRA of {plan.lora} features around every linear of a layer: its weights, and all else, are frozen"
        )
    if plan.no_sequence_parallel:
        notes.append("without sequence parallelism: every rank has all rows, which linears all-reduce")
    if plan.deterministic:
        notes.append("deterministic kernels: these times are not those of ordinary training")
    if any(row["variant"].startswith("te") for row in rows):
        notes.append(
            "TransformerEngine's modules: Megatron-Core takes TransformerEngine's Adam for all variants of this run"
            + f"; fp8: {plan.te_fp8}"
        )
    if world.rank == 0:
        hardware = output.hardware(world.device, world.size)
        output.write_json(folder / "mfu.json", rows, hardware)
        (folder / "mfu.md").write_text(output.markdown(rows, notes, COLUMNS))
        if importlib.util.find_spec("matplotlib") is None:
            say(" no picture: matplotlib is not installed (pip install matplotlib)")
        else:
            draw(rows, hardware["device"], folder / "mfu.png")
    return output.screen(rows, notes, COLUMNS)


def draw(rows: list[Row], device: str, path: Path) -> None:
    """MFU of each model and variant, or tokens/s of a rank where no peak is known."""
    key, factor, unit = "tokens_per_s_per_gpu", 1.0, "tokens/s of a rank"
    if rows[0]["mfu"] is not None:
        key, factor, unit = "mfu", 100.0, f"MFU, % of {rows[0]['peak_tflops']:g} TFLOP/s a GPU"
    panels: dict[str, list[Bar]] = {}
    names = in_order({row["variant"] for row in rows})
    for row in sorted(rows, key=lambda row: names.index(row["variant"])):
        layout = f"TP {row['tp']}" + f", CP {row['cp']}" * (row["cp"] > 1)
        value, speed_up = factor * row[key], row["speed_up"]
        text = f"{value:.1f}" + (f"  ({speed_up:.2f}x)" if speed_up not in (None, 1.0) else "")
        panel = panels.setdefault(f"{row['title']}, {row['layers']} layers, s = {row['seq']}, {layout}", [])
        panel.append(Bar(look_of(row["variant"]).label, row["variant"], value, text, None))
    ranks = "CPU processes" if device == "cpu" else f"x {device.removeprefix('NVIDIA ').split()[0]}"
    baseline = look_of(baseline_of(names, "") or "megatron").label
    header = (
        f"Training on {rows[0]['gpus']} {ranks}, and speed-up of a step over {baseline}",
        "Higher is better." + " A CUDA graph is compared with a graph." * any(map(is_graph, names)),
    )
    bars(panels, header, Scale(unit), path)
