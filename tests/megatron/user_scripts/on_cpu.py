"""Lets `megatron.training` run on CPU processes, for the tests: it asks for CUDA in its own source.

Imported first by train_small.py. Goes one step further than run_without_cuda(): modules of megatron.training see a CUDA that
is there and has no memory, and `.cuda()` of modules and tensors leaves them where they are.
"""

import contextlib
import importlib
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch

from overlap_train.integrations.megatron import run_without_cuda


class Stream:
    """A stream whose work is always done."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass


assert run_without_cuda()
torch_on_cpu = importlib.import_module("megatron.core.utils").torch
vars(torch_on_cpu.cuda).update(
    Stream=Stream,
    current_stream=lambda device=None: Stream(),
    device_count=lambda: 1,
    get_device_properties=lambda device=None: SimpleNamespace(name="none", major=9, minor=0, total_memory=1),
    is_available=lambda: True,
    max_memory_allocated=lambda device=None: 0,
    max_memory_reserved=lambda device=None: 0,
    mem_get_info=lambda device=None: (1, 1),
    memory_allocated=lambda device=None: 0,
    memory_reserved=lambda device=None: 0,
    memory_stats=lambda device=None: defaultdict(int),
    set_device=lambda device: None,
    stream=lambda stream: contextlib.nullcontext(),
)
torch.nn.Module.cuda = lambda self, device=None: self
torch.Tensor.cuda = lambda self, *args, **kwargs: self

importlib.import_module("megatron.training.training")
for name, module in list(sys.modules.items()):
    if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
        module.torch = torch_on_cpu
