"""What a comparison leaves: a row for each model and variant in mfu.json, a table in mfu.md and on the screen, and mfu.png."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpt.program import say
from gpt.settings import Settings
from mfu.plan import VARIANTS, Plan, bare, baseline_of, is_graph
from overlap_train.select.system import system_of
from overlap_train.tools.measure import results as output
from overlap_train.tools.measure.results import Row
from overlap_train.tools.measure.world import World
from overlap_train.tools.pictures.bars import Bar, Scale, bars

if TYPE_CHECKING:
    from mfu.run import Comparison

FIGURES = (
    "step_ms", "step_ms_rounds", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "speed_up", "forward_backward_ms",
    "exposed_ms", "losses", "loss_difference", "same_bits",
)  # fmt: skip


def step_flops(settings: Settings) -> float:
    """Floating-point operations of one optimizer step of the model, over all ranks.

    Counted as Megatron-LM counts them (num_floating_point_operations, after arXiv 2104.04473): GEMMs only, each three times
    (forward and two in backward), the causal half of attention, nothing that is computed a second time. For B samples of s
    tokens, with q = heads x head width and k = groups x head width:

        6 B s [ layers ( h (q + 2 k) + s q + q h + MLPs a token x 3 h ffn ) + h x padded vocabulary ]      s q: 2 (s / 2) q

    With --lora the GEMMs of frozen weights count twice, as they have no gradient, and adapters do not count.
    """
    h, s, width = settings.hidden_size, settings.seq_length, settings.kv_channels
    width = width or h // settings.num_attention_heads
    q, k = settings.num_attention_heads * width, settings.num_query_groups * width
    mlps = settings.moe_router_topk if settings.num_moe_experts else 1
    weights = settings.num_layers * (h * (q + 2 * k) + q * h + mlps * 3 * h * settings.ffn_hidden_size)
    weights += h * settings.vocabulary_rows
    passes = 2 if settings.lora else 3
    return 2.0 * settings.global_batch_size * s * (passes * weights + 3 * settings.num_layers * s * q)


def row_of(found: Comparison, name: str, losses: Mapping[str, list[float]], is_same: bool | None) -> Row:
    """Times are medians over rounds, MFU is a fraction of the peak, losses are nats per byte of each step.

    FIGURES of a variant that did not run are None, and `status` says why.
    """
    settings, world, variant = found.settings, found.world, found.running.get(name)
    sheet = system_of(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    peak = found.plan.peak_tflops or (None if sheet is None else sheet.peak_tflops)
    row: Row = {
        "model": settings.model, "title": settings.title, "layers": settings.num_layers, "variant": name, "gpus": world.size,
        "gbs": settings.global_batch_size, "mbs": settings.micro_batch_size, "seq": settings.seq_length, "tp": settings.tp,
        "cp": settings.cp, "lora": settings.lora, "deterministic": bool(settings.deterministic), "peak_tflops": peak,
        "weight_gradient_fusion": found.plan.weight_gradient_fusion, "status": found.absent.get(name, "ran"),
    } | dict.fromkeys(FIGURES)  # fmt: skip
    if variant is None:
        return row
    medians = {name: statistics.median(variant.step_ms) for name, variant in found.running.items()}
    baseline, others = baseline_of(medians, name), losses[baseline_of(medians, "") or next(iter(medians))]
    gpu_seconds = 1e-3 * medians[name] * world.size
    tflops = step_flops(settings) / gpu_seconds / 1e12
    if variant.passes_ms is not None and variant.alone_ms is not None:
        row["exposed_ms"] = variant.passes_ms - variant.alone_ms
    return row | {
        "step_ms": medians[name],
        "step_ms_rounds": variant.step_ms,
        "tokens_per_s_per_gpu": settings.global_batch_size * settings.seq_length / gpu_seconds,
        "tflops_per_gpu": tflops,
        "mfu": None if peak is None else tflops / peak,
        "speed_up": None if baseline is None else medians[baseline] / medians[name],
        "forward_backward_ms": variant.passes_ms,
        "losses": losses[name],
        "loss_difference": float(np.abs(np.subtract(losses[name], others)).max()),
        "same_bits": is_same,
    }


def _label(row: Row) -> str:
    name = row["variant"]
    return VARIANTS[bare(name)] + name[len(bare(name)) :]


COLUMNS: output.Columns = (
    ("Model", lambda row: f"{row['title']}, {row['layers']} layers: {_label(row)}"),
    ("Step ms", lambda row: row["step_ms"]),
    ("Speed-up", lambda row: row["speed_up"]),
    ("MFU %", lambda row: row["mfu"] and 100 * row["mfu"]),
    ("Tokens/s/GPU", lambda row: row["tokens_per_s_per_gpu"] and f"{row['tokens_per_s_per_gpu']:.0f}"),
    ("Exposed %", lambda row: row["exposed_ms"] and f"{100 * row['exposed_ms'] / row['forward_backward_ms']:.1f}"),
    ("Last loss", lambda row: row["losses"] and row["losses"][-1]),
    ("Loss difference", lambda row: row["losses"] and f"{row['loss_difference']:.1e}"),
    ("Same bits", lambda row: None if row["same_bits"] is None else "yes" if row["same_bits"] else "no"),
)


def notes_of(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know, and what it does not show."""
    row, has_te = rows[0], any(row["variant"].startswith("te") for row in rows)
    return [
        f"{row['gpus']} ranks, TP {row['tp']}, CP {row['cp']}, sequence {row['seq']}, {row['gbs']} samples a step in "
        f"micro-batches of {row['mbs']}; weight-gradient fusion: {plan.weight_gradient_fusion}; "
        + (
            f"MFU against {row['peak_tflops']:g} TFLOP/s a GPU"
            if row["peak_tflops"]
            else "no peak is known (--peak-tflops)"
        ),
        f"{plan.steps} steps or more in rounds of {plan.round_steps}, variants in turns; median of rounds, slowest rank",
        *(f"{COLUMNS[0][1](row)} did not run: {row['status']}" for row in rows if row["status"] != "ran"),
        *["TransformerEngine's modules: Megatron-Core takes TransformerEngine's Adam for all variants of this run"]
        * has_te,
        *[f"LoRA of {row['lora']} features around every linear of a layer: its weights, and all else, are frozen"]
        * (row["lora"] > 0),
        *["deterministic kernels: these times are not those of ordinary training"] * plan.bitwise,
    ]


def write(plan: Plan, rows: list[Row], world: World) -> str:
    """Write mfu.json, mfu.md and mfu.png from rank 0; returns the table for the screen."""
    folder, notes = Path(plan.out), notes_of(plan, rows)
    if world.rank == 0:
        output.write_json(folder / "mfu.json", rows, output.hardware(world.device, world.size))
        (folder / "mfu.md").write_text(output.markdown(rows, notes, COLUMNS))
        if importlib.util.find_spec("matplotlib") is None:
            say(" no picture: matplotlib is not installed (pip install matplotlib)")
        else:
            draw(folder)
    return output.screen(rows, notes, COLUMNS)


def draw(folder: Path) -> Path:
    """Draw mfu.png of a folder from its mfu.json: MFU of each model and variant, or tokens/s of a rank where no peak is known.
    Raises ValueError without matplotlib or mfu.json."""
    if not (folder / "mfu.json").exists():
        raise ValueError(f"{folder}: no mfu.json; run compare_mfu.py with --out {folder}")
    document = json.loads((folder / "mfu.json").read_text())
    rows = [row for row in document["rows"] if row["step_ms"] is not None and row["variant"] in VARIANTS]
    key, factor, unit = "tokens_per_s_per_gpu", 1.0, "tokens/s of a rank"
    if all(row["mfu"] is not None for row in rows):
        key, factor, unit = "mfu", 100.0, f"MFU, % of {rows[0]['peak_tflops']:g} TFLOP/s a GPU"
    panels: dict[str, list[Bar]] = {}
    for row in sorted(rows, key=lambda row: list(VARIANTS).index(row["variant"])):
        layout = f"TP {row['tp']}" + f", CP {row['cp']}" * (row["cp"] > 1)
        value, speed_up = factor * row[key], row["speed_up"]
        text = f"{value:.1f}" + f"  ({speed_up:.2f}x)" * (speed_up not in (None, 1.0))
        panel = panels.setdefault(f"{row['title']}, {row['layers']} layers, s = {row['seq']}, {layout}", [])
        panel.append(Bar(_label(row), row["variant"], value, text, None))
    device, graphs = document["hardware"]["device"], any(is_graph(row["variant"]) for row in rows)
    ranks = "CPU processes" if device == "cpu" else f"x {device.removeprefix('NVIDIA ').split()[0]}"
    baseline = VARIANTS[baseline_of({row["variant"] for row in rows}, "") or "megatron"]
    header = (
        f"Training on {rows[0]['gpus']} {ranks}, and speed-up of a step over {baseline}",
        "Higher is better." + " A CUDA graph is compared with a graph." * graphs,
    )
    return bars(panels, header, Scale(unit), folder / "mfu.png")
