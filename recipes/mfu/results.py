"""What a comparison leaves: a row for each model and variant in mfu.json, a table in mfu.md and on the screen, and mfu.png."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gpt.program import RecipeError, say
from gpt.settings import Settings
from mfu.plan import ONE_METHOD, VARIANTS, Plan, baseline_of, is_graph, is_transformer_engine, label_of
from mfu.run import Measured
from overlap_train.select.system import system_of
from overlap_train.tools.measure import results as output
from overlap_train.tools.measure.results import Row
from overlap_train.tools.pictures.bars import Bar, Scale, bars

NOISE = 0.01  # of forward and backward: less than this cannot be told from nothing


def step_flops(settings: Settings) -> float:
    """Floating-point operations of one optimizer step of the model, over all ranks.

    Counted as Megatron-LM counts them (num_floating_point_operations, after arXiv 2104.04473): GEMMs only, each three times
    (forward and two in backward), the causal half of attention, nothing that is computed a second time. For B samples of s
    tokens, with q = heads x head width and k = groups x head width:

        6 B s [ layers ( h (q + 2 k) + s q + q h + MLPs a token x 3 h ffn ) + h x padded vocabulary ]      s q: 2 (s / 2) q
    """
    attention, mlp = settings.matrices
    attention += settings.seq_length * settings.num_attention_heads * settings.head_width
    layer = attention + (settings.moe_router_topk if settings.num_moe_experts else 1) * mlp
    tokens = settings.global_batch_size * settings.seq_length
    return 6.0 * tokens * (settings.num_layers * layer + settings.hidden_size * settings.vocabulary_rows)


def row_of(plan: Plan, name: str, measured: Measured, peak: float | None) -> Row:
    """Times are medians over rounds, MFU is a fraction of the peak, losses are nats per byte.

    Figures of a variant that did not run are None, and `status` says why.
    """
    settings, run, ranks = measured.settings, measured.ran.get(name), dist.get_world_size()
    row: dict[str, Any] = {
        "model": settings.model, "title": settings.title, "layers": settings.num_layers, "variant": name, "gpus": ranks,
        "gbs": settings.global_batch_size, "mbs": settings.micro_batch_size, "seq": settings.seq_length, "tp": settings.tp,
        "cp": settings.cp, "deterministic": bool(settings.deterministic), "weight_gradient_fusion": plan.weight_gradient_fusion,
        "status": measured.absent.get(name, "ran"), "flops_per_step": step_flops(settings), "peak_tflops": peak,
    }  # fmt: skip
    unknown = (
        "step_ms", "step_ms_rounds", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "speed_up", "forward_backward_ms",
        "alone_ms", "exposed_ms", "losses", "last_loss", "loss_difference", "same_bits",
    )  # fmt: skip
    if run is None:
        return row | dict.fromkeys(unknown)
    step_ms, baseline = measured.median_ms(name), baseline_of(measured.ran, name)
    gpu_seconds = 1e-3 * step_ms * ranks
    tflops = step_flops(settings) / gpu_seconds / 1e12
    losses, others = measured.losses[name], measured.losses[baseline_of(measured.ran, "") or next(iter(measured.ran))]
    return row | {
        "step_ms": step_ms,
        "step_ms_rounds": run.step_ms,
        "tokens_per_s_per_gpu": settings.global_batch_size * settings.seq_length / gpu_seconds,
        "tflops_per_gpu": tflops,
        "mfu": None if peak is None else tflops / peak,
        "speed_up": None if baseline is None else measured.median_ms(baseline) / step_ms,
        "forward_backward_ms": run.passes_ms,
        "alone_ms": run.alone_ms,
        "exposed_ms": None if run.alone_ms is None or run.passes_ms is None else run.passes_ms - run.alone_ms,
        "losses": losses,
        "last_loss": losses[-1],
        "loss_difference": float(np.abs(np.subtract(losses, others)).max()),
        "same_bits": measured.same.get(name),
    }


def exposed_part(row: Row) -> str:
    """How much of forward and backward is exposed communication, in percent, as far as that can be told."""
    if row["exposed_ms"] is None:
        return "-"
    part = row["exposed_ms"] / row["forward_backward_ms"]
    if part < -NOISE:
        return "not measurable"
    return f"{100 * part:.1f}" if part > NOISE else f"< {100 * NOISE:.0f}"


def _title(row: Row) -> str:
    return f"{row['title']}, {row['layers']} layers: {label_of(row['variant'])}"


COLUMNS: output.Columns = (
    ("Model", _title),
    ("Step ms", lambda row: row["step_ms"]),
    ("Speed-up", lambda row: row["speed_up"]),
    ("MFU %", lambda row: None if row["mfu"] is None else 100 * row["mfu"]),
    ("Tokens/s/GPU", lambda row: row["tokens_per_s_per_gpu"] and f"{row['tokens_per_s_per_gpu']:.0f}"),
    ("Exposed %", exposed_part),
    ("Last loss", lambda row: row["last_loss"]),
    ("Loss difference", lambda row: row["losses"] and f"{row['loss_difference']:.1e}"),
)


def notes_of(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """What a reader of the table must know, and what it does not show."""
    first, names = rows[0], {row["variant"] for row in rows}
    peak = first["peak_tflops"]
    return [
        f"{first['gpus']} ranks, TP {first['tp']}, CP {first['cp']}, sequence {first['seq']}, {first['gbs']} samples a step in "
        f"micro-batches of {first['mbs']}; weight-gradient fusion: {plan.weight_gradient_fusion}",
        f"MFU against {peak:g} TFLOP/s a GPU" if peak else "no MFU: no peak is known for this device (--peak-tflops)",
        f"step: forward, backward and optimizer; {plan.steps} steps or more in rounds of {plan.round_steps}, variants in turns; "
        "median of rounds, slowest rank",
        "exposed: what forward and backward take longer than without the linears' communication, all GEMMs by cuBLAS; '-': "
        "unknown (CUDA graphs, TransformerEngine's modules, --cp)",
        f"loss difference: the largest of {plan.trained_steps} steps, in nats; --repeat shows how far two equal runs differ",
        *(f"{_title(row)} did not run: {row['status']}" for row in rows if row["status"] != "ran"),
        *overtakers(rows),
        *(
            f"{_title(row)}: losses and weights have {'the same' if row['same_bits'] else 'other'} bits as those of the first run"
            for row in rows
            if row["same_bits"] is not None
        ),
        *["TransformerEngine's modules: Megatron-Core takes TransformerEngine's Adam for all variants of this run"]
        * any(map(is_transformer_engine, names)),
        *["deterministic kernels: these times are not those of ordinary training"] * plan.bitwise,
    ]


def overtakers(rows: Sequence[Row]) -> list[str]:
    """A word on each model of which one method for all linears was faster than the default, which chooses for each linear."""
    words = []
    for ours in (row for row in rows if row["variant"] == "overlap" and row["step_ms"]):
        same = [row for row in rows if (row["model"], row["layers"]) == (ours["model"], ours["layers"])]
        methods = [row for row in same if row["variant"] in ONE_METHOD and row["step_ms"]]
        best = min(methods, key=lambda row: row["step_ms"], default=ours)
        if best["step_ms"] < ours["step_ms"]:
            faster = 100 * (ours["step_ms"] / best["step_ms"] - 1)
            title = f"{ours['title']}, {ours['layers']} layers"
            words.append(
                f"{title}: {best['variant']} for all linears is {faster:.1f} % faster than overlap_train's choices"
            )
    return words


def draw(folder: Path) -> Path:
    """Draw mfu.png of a folder from its mfu.json: MFU of each model and variant, or tokens/s of a rank where no peak is known.

    Raises:
        ValueError: matplotlib is not installed, or the folder has no mfu.json.
    """
    if not (folder / "mfu.json").exists():
        raise ValueError(f"{folder}: no mfu.json; run compare_mfu.py with --out {folder}")
    document = json.loads((folder / "mfu.json").read_text())
    known = [row for row in document["rows"] if row["step_ms"] is not None and row["variant"] in VARIANTS]
    has_peak = all(row["mfu"] is not None for row in known)
    key, factor, what = ("mfu", 100.0, "MFU") if has_peak else ("tokens_per_s_per_gpu", 1.0, "tokens/s of a rank")
    unit = f"MFU, % of {known[0]['peak_tflops']:g} TFLOP/s a GPU" if has_peak else what
    panels: dict[str, list[Row]] = {}
    for row in sorted(known, key=lambda row: list(VARIANTS).index(row["variant"])):
        layout = f"TP {row['tp']}" + (f", CP {row['cp']}" if row["cp"] > 1 else "")
        panels.setdefault(f"{row['title']}, {row['layers']} layers, s = {row['seq']}, {layout}", []).append(row)
    drawn = {title: bars_of(rows, key, factor) for title, rows in panels.items()}
    device, baseline = document["hardware"]["device"], baseline_of({row["variant"] for row in known}, "") or "megatron"
    has_bound = any(bar.bound is not None for some in drawn.values() for bar in some)
    ranks = "CPU processes" if device == "cpu" else f"x {device.removeprefix('NVIDIA ').split()[0]}"
    header = (
        f"Training on {known[0]['gpus']} {ranks}: {what}, and speed-up of a step over {VARIANTS[baseline]}",
        "Higher is better." + " Perfect overlap: overlap_train's step without its exposed communication." * has_bound,
        *overtakers(known),
        *["A CUDA graph is compared with a graph; how much of it is exposed is not known."]
        * any(is_graph(row["variant"]) for row in known),
    )
    return bars(drawn, header, Scale(unit), folder / "mfu.png")


def bars_of(rows: Sequence[Row], key: str, factor: float) -> list[Bar]:
    """The bars of one model, each with its speed-up, against the bound of `overlap`, the variant that a user runs."""
    known = {row["variant"]: row for row in rows}
    ours, bound = known.get("overlap"), None
    if ours is not None and ours["exposed_ms"] is not None:
        bound = factor * ours[key] * ours["step_ms"] / (ours["step_ms"] - max(0.0, ours["exposed_ms"]))
    found = []
    for name, row in known.items():
        baseline, text = baseline_of(known, name), f"{factor * row[key]:.1f}"
        if baseline not in (None, name):
            text += f"  ({known[baseline]['step_ms'] / row['step_ms']:.2f}x)"
        found.append(Bar(label_of(name), name, factor * row[key], text, None if is_graph(name) else bound))
    return found


class Writer:
    """Collects the rows of all models; every rank calls it, rank 0 writes after each model, so that none is lost."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.hardware, self.rows = plan, output.hardware(device, dist.get_world_size()), list[Row]()
        sheet = system_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak = plan.peak_tflops or (None if sheet is None else sheet.peak_tflops)

    def add(self, measured: Measured) -> None:
        """Take over one model's results and write all files."""
        self.rows += [row_of(self.plan, name, measured, self.peak) for name in self.plan.names]
        if dist.get_rank() != 0:
            return
        folder = Path(self.plan.out)
        output.write_json(folder / "mfu.json", self.rows, self.hardware)
        (folder / "mfu.md").write_text(output.markdown(self.rows, notes_of(self.plan, self.rows), COLUMNS))
        if importlib.util.find_spec("matplotlib") is None:
            say(" no picture: matplotlib is not installed (pip install matplotlib)")
        else:
            draw(folder)

    def conclude(self) -> None:
        """Print the table.

        Raises:
            RecipeError: on every rank, where a variant did not run. Async-TP may be absent.
        """
        table = output.screen(self.rows, notes_of(self.plan, self.rows), COLUMNS)
        say(f"\n{table}\n {self.plan.out}/mfu.json, mfu.md, mfu.png")
        missing = [row for row in self.rows if row["status"] != "ran" and row["variant"] != "async_tp"]
        if missing:
            reasons = "; ".join(f"{row['model']} {row['variant']}: {row['status']}" for row in missing)
            raise RecipeError(f"--variants {','.join(self.plan.variants)}: not all of them ran: {reasons}")
