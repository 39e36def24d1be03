"""Run Megatron-Core on CPU processes: nothing here is used where CUDA is available.

Megatron-Core names the CUDA device in its own source and draws random numbers from the CUDA generator. `run_without_cuda()` gives
the modules listed in `CUDA_USERS` a stand-in for their global name `torch` which answers those requests with the CPU, and
replaces five functions that cannot be answered that way. `torch` itself stays as it is.

What this does not cover: `DistributedOptimizer` and the 16-bit optimizers (they sort parameters by the string
"torch.cuda.FloatTensor"), a virtual pipeline, the dispatcher of experts `flex`, CUDA graphs, TransformerEngine.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")

# Megatron module -> what it asks CUDA for. Only modules on the path of a GPT, with experts or without, are listed.
CUDA_USERS: dict[str, str] = {
    "megatron.core.utils": "the global memory buffer that holds gathered inputs, and the parameter-norm report",
    "megatron.core.tensor_parallel.layers": "weights of the linears and the embedding, and the gradient buffers",
    "megatron.core.tensor_parallel.mappings": "outputs of all-gather and reduce-scatter",
    "megatron.core.tensor_parallel.utils": "pieces of activations split over ranks by recomputation",
    "megatron.core.tensor_parallel.random": "the generator behind dropout, initialisation and recomputation",
    "megatron.core.models.common.embeddings.rope_utils": "the index by which context parallelism slices rotary frequencies",
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "rotary frequencies",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": "rotary frequencies, YaRN",
    "megatron.core.transformer.dot_product_attention": "softmax offsets",
    "megatron.core.transformer.utils": "the default causal mask",
    "megatron.core.distributed.param_and_grad_buffer": "the buffers behind param.main_grad, and the current stream",
    "megatron.core.optimizer.optimizer": "the loss scale of FP32Optimizer",
    "megatron.core.optimizer.clip_grads": "gradient norms and counts of zeros",
    "megatron.core.pipeline_parallel.schedules": "the token count of each step",
    "megatron.core.pipeline_parallel.p2p_communication": "what a pipeline stage receives, and synchronize() after it",
    "megatron.core.transformer.moe.router": "counts of tokens",
    "megatron.core.transformer.moe.token_dispatcher": "a stream in which counts are copied to the host",
    "megatron.core.timers": "synchronize() around a timer, and the gathered times",
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "synchronize() before tensors are written",
    "megatron.core.dist_checkpointing.strategies.fully_parallel": "synchronize() after the exchange of tensors",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver": "flags agreed between the ranks that save",
    "megatron.core.dist_checkpointing.strategies.async_utils": "synchronize() before an asynchronous save",
}

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "tensor", "zeros", "zeros_like")


class _Idle:
    """A stream, or an event, whose work is complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> _Idle:
        return self

    def synchronize(self) -> None:
        pass


class _CudaOnCpu(ModuleType):
    """Stands in for `torch.cuda`: the CPU is the current device, and its work is always complete."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        vars(self).update(
            current_device=lambda: CPU,
            synchronize=lambda device=None: None,
            current_stream=lambda device=None: None,  # the callers only hold on to the result
            empty_cache=lambda: None,
            Stream=_Idle,
            stream=lambda stream: nullcontext(),
            get_rng_state=lambda device=None: torch.get_rng_state(),
            manual_seed=torch.manual_seed,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchOnCpu(ModuleType):
    """Stands in for `torch`: same contents, but tensors asked for on CUDA are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CudaOnCpu()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def run_without_cuda() -> bool:
    """Let Megatron-Core run in this process without CUDA. Call before models are built; more calls change nothing.

    Returns True where Megatron now runs on the CPU, False where CUDA is available and nothing was touched.
    """
    if torch.cuda.is_available():
        return False
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    if isinstance(random.torch, _TorchOnCpu):
        return True
    stand_in = _TorchOnCpu()
    for name in CUDA_USERS:
        module = importlib.import_module(name)
        module.torch = stand_in
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            module.maybe_move_tensor_to_cpu = _as_on_the_host
        if hasattr(module, "get_pos_emb_on_this_cp_rank"):
            module.get_pos_emb_on_this_cp_rank = _zigzag_part
    _use_cpu_generator(random)
    # Its assertion compares a type name with "torch.cuda.FloatTensor"; no stand-in for torch can change that.
    importlib.import_module("megatron.core.optimizer.optimizer").clip_grad_by_total_norm_fp32 = _clip_by_total_norm
    return True


def _as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """A tensor that Megatron's dispatcher of experts moves to the host, where it is."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _zigzag_part(pos_emb: torch.Tensor, seq_dim: int, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """The two of 2 W equal chunks along seq_dim that this of W ranks has, as Megatron cuts them."""
    chunks, rank = pos_emb.chunk(2 * cp_group.size(), seq_dim), cp_group.rank()
    return torch.cat((chunks[rank], chunks[-1 - rank]), seq_dim)


def _use_cpu_generator(random: ModuleType) -> None:
    """Point Megatron's random states (default, model-parallel, recomputation) at the CPU generator."""
    # Megatron warns in every fork that the CPU generator moved: here that is the point.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # A tracker that was made earlier has states of a generator that does not exist.
    random._CUDA_RNG_STATE_TRACKER = None
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False


def _clip_by_total_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, total_norm: float | torch.Tensor,
    use_decoupled_grad: bool = False,
) -> None:  # fmt: skip
    """Scale gradients (fp32, in place) by max_norm / (total_norm + 1e-6) where that is below 1, as Megatron does."""
    scale = min(1.0, max_norm / (float(total_norm) + 1.0e-6))
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        grad = getattr(parameter, "decoupled_grad" if use_decoupled_grad else "grad", None)
        if grad is not None:
            grad.mul_(scale)
