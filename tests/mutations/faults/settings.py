"""Faults of settings, of the notes about a job, of shared memory between processes, and of the weight gradient."""

from __future__ import annotations

from tests.mutations.mutation import In

CONFIG = In("overlap_train/config.py", ("tests/unit/test_config.py",))
HEAP = In("overlap_train/symmetric/host.py", ("tests/protocol/test_footprint.py",))
LAUNCH = In("overlap_train/tools/slurm/command.py", ("tests/launch/test_render.py",))
WEIGHT_GRADIENT = In("overlap_train/operators/weight_gradient.py", ("tests/unit/test_weight_gradient.py",))

FAULTS = [
    CONFIG("NCCL may hold any number of SMs", "or 0 to measure it\", 0, MOST_CTAS)", "or 0 to measure it\", 0)"),
    CONFIG("the hash travels to another process", 'if name != "_hash"', "if name"),
    CONFIG("a limit of 0 is accepted", "0 < value < math.inf", "0 <= value < math.inf"),
    CONFIG("an endless limit is accepted", "0 < value < math.inf", "0 < value <= math.inf"),
    CONFIG("a number in words is compared", "_is_number(value, int | float) and 0", "0"),
    CONFIG("a switch is taken for a number", " and not isinstance(value, bool)", ""),
    CONFIG("nothing but choices is looked at", "if rule is not None and not rule.allows(value)", "if False"),
    CONFIG("a named method has steps that try others", 'if self.tune_steps and self.method != "auto"', "if False"),
    CONFIG("NVSHMEM has SMs that it does not take", 'if self.network_sms and self.network == "nvshmem"', "if False"),
    CONFIG("a named method keeps the steps of auto", ", tune_steps=0)", ")"),
    CONFIG("an empty choice is accepted", "if wrong or not values", "if wrong"),
    CONFIG("a name is taken for a tuple", "if isinstance(value, tuple) is not several", "if False"),
    CONFIG("only the first of several is looked at", "for item in values if item", "for item in values[:1] if item"),
    CONFIG("flags have underscores", 'field_name.replace("_", "-")', "field_name"),
    CONFIG("no folder is accepted", " and bool(value)", "", "tests/unit/test_tuning_table.py"),
    LAUNCH("notes are part of the script", "print(f\"note: {note}\", file=sys.stderr)", "print(f\"note: {note}\")"),
    LAUNCH("an older checkpoint is not looked for", "    if newest:\n", "    if False:\n"),
    LAUNCH("a checkpoint that cannot be read ends the command", "except (OSError, UnicodeDecodeError):",
           "except FileNotFoundError:"),
    LAUNCH("any value does for Megatron", 'os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"',
           'not os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")'),
    LAUNCH("any module is taken for Megatron's launcher", "job.module == OUR_LAUNCHER", "job.module"),
    LAUNCH("ranks on CPUs are told of GPUs", "OUR_LAUNCHER and job.gpus_per_node and", "OUR_LAUNCHER and"),
    HEAP("a file is closed before all peers have mapped it", "agreement.all_succeed(error, _OPEN)  #", "pass  #"),
    HEAP("a file stays open", "        if descriptor >= 0:\n            os.close(descriptor)", "        pass"),
    HEAP("memory is never unmapped", "        self._views = []\n", "        pass\n"),
    HEAP("every rank maps the memory of the last",
         "for pid, number, _ in places], None",
         "for pid, number, _ in places[-1:] * len(places)], None"),
    HEAP("memory is one byte too small", "_map(pid, number, nbytes) for", "_map(pid, number, nbytes - 1) for"),
    HEAP(
        "ranks of two machines go on", "places}) > 1", "places}) > 2",
        "tests/protocol/test_modes.py::test_cpu_ranks_of_several_machines_are_refused_on_all_of_them",
    ),
    HEAP(
        "other nodes do not hear of a node of two machines", "        return [], error\n", "        raise ValueError(error)\n",
        "tests/protocol/test_modes.py::test_other_nodes_hear_of_a_node_of_two_machines",
    ),
    HEAP("machines are told apart by their start only", ' + os.readlink("/proc/self/ns/pid")', "",
         survives="containers of one machine that cannot see each other's processes fail to map memory instead"),
    WEIGHT_GRADIENT(
        "products are rounded before they are added to main_grad",
        "target.addmm_(dy.t().float(), x.float())", "target.add_((dy.t() @ x).float())",
    ),
    WEIGHT_GRADIENT("main_grad is overwritten", "target.addmm_(dy.t().float(), x.float())",
                    "torch.mm(dy.t().float(), x.float(), out=target)"),
    WEIGHT_GRADIENT("main_grad of the same dtype is overwritten", "target.addmm_(dy.t(), x)",
                    "target.copy_(dy.t() @ x)"),
    WEIGHT_GRADIENT("main_grad of another 16-bit dtype is overwritten", "target.add_(dy.t() @ x)",
                    "target.copy_(dy.t() @ x)"),
    WEIGHT_GRADIENT("main_grad is used although it is off", 'if main_grad == "accumulate" else None', ""),
    WEIGHT_GRADIENT("a hook is not told", "weight.grad_added_to_main_grad = True", "pass"),
    WEIGHT_GRADIENT("a hook gets no gradient", "return placeholder(self._weight)", "return None"),
    WEIGHT_GRADIENT("a main_grad of 16 bits is rounded by each part",
                    "(self._target is None or self._target.dtype != torch.float32)", "self._target is None"),
    WEIGHT_GRADIENT("the sum of parts does not reach main_grad", "self._target.add_(self._dw)", "pass"),
    WEIGHT_GRADIENT("every weight has a hook", 'if not hasattr(self._weight, "grad_added_to_main_grad")', "if False"),
    WEIGHT_GRADIENT("the placeholder of a tied weight is added",
                    'torch.zeros_like if getattr(self._weight, "zero_out_wgrad", False) else torch.empty_like',
                    "torch.ones_like"),
]  # fmt: skip
