"""What GPUs should reach: the model that measurements are judged by. An unknown GPU is reported and not judged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """nvlink_lanes: of one GPU; push_gbs: copy engine to one peer, 128 MiB, GB/s; gemm_tflops: bf16 8192^3 in a long run."""

    nvlink_lanes: int
    push_gbs: float
    gemm_tflops: float


# NVLink 4: 18 lanes of 25 GB/s each way, 450 GB/s in all. push_gbs and gemm_tflops were measured on 4 x H200 (380 GB/s; 650 to
# 690 TFLOP/s under the 700 W cap). The H100 with HBM3 has the same NVLink, SMs and power; the PCIe and NVL cards do not.
_NVLINK4 = Hardware(nvlink_lanes=18, push_gbs=380.0, gemm_tflops=650.0)
KNOWN = {"NVIDIA H200": _NVLINK4, "NVIDIA H100 80GB HBM3": _NVLINK4}

WARN_BELOW = 0.8  # of the model: clocks move figures by 10 %
FAIL_BELOW = 0.6
ODD_BELOW = 0.8  # of the median over ranks or links: one is slower than the others


def model_of(device_name: str) -> Hardware | None:
    """By the name that CUDA reports."""
    return KNOWN.get(device_name)
