"""What GPUs can do: figures of data sheets, and what was measured. For the choice of methods, MFU and the doctor."""

from __future__ import annotations

from dataclasses import dataclass

# What the untuned choice and the benchmark's pace reckon with, on every GPU: bf16 products in a long run on H100 and H200, and
# NVLink 4 with the gaps between copies.
GEMM_TFLOPS = 650.0
COPY_GBS = 300.0
SUM_GBS = 3700.0  # of local memory, read and written where partial sums are added: reached on H200
NETWORK_CTA_GBS = 20.0  # what one CTA of NCCL sends or receives between nodes; about, not measured here


@dataclass(frozen=True)
class Hardware:
    """One GPU model.

    peak_tflops: dense bf16, data sheet. nvlink_lanes: of one GPU; 0: none, or not the same in all machines.
    gemm_tflops: bf16 product of 8192 x 8192 x 8192 in a long run. push_gbs: copy engine to one peer, 128 MiB. Both were measured;
    None: not measured here, so that the doctor does not judge by it.
    """

    peak_tflops: float
    nvlink_lanes: int = 0
    gemm_tflops: float | None = None
    push_gbs: float | None = None


# Measured on 4 x H200: 380 GB/s to a peer; 650 to 690 TFLOP/s under the 700 W cap. The H100 with HBM3 (SXM) has the same NVLink,
# SMs and power.
_HOPPER_SXM = Hardware(989.4, nvlink_lanes=18, gemm_tflops=GEMM_TFLOPS, push_gbs=380.0)

# By a part of the name that CUDA reports; the first that fits counts.
HARDWARE = {
    "H200 NVL": Hardware(835.5),
    "H200": _HOPPER_SXM,
    "H100 80GB HBM3": _HOPPER_SXM,
    "H100 PCIe": Hardware(756.0),
    "H100 NVL": Hardware(835.5),
    "H100": Hardware(989.4),
    "H20": Hardware(148.0, nvlink_lanes=18),
    "GB200": Hardware(2500.0, nvlink_lanes=18),
    "B200": Hardware(2250.0, nvlink_lanes=18),
    "A100-SXM": Hardware(312.0, nvlink_lanes=12),
    "A100": Hardware(312.0),
}


def hardware_of(device_name: str) -> Hardware | None:
    """The figures of a GPU by the name that CUDA reports; None for one that is not in the table."""
    return next((figures for name, figures in HARDWARE.items() if name in device_name), None)
