"""What is put into Megatron while a user's script runs under our launcher: five functions and a class.

    megatron.training.arguments.add_megatron_arguments    adds our flags to the script's parser
    megatron.training.training.setup_model_and_optimizer  enables overlap between the build of the model and its DDP
    megatron.training.training.training_log               writes our counters next to Megatron's
    megatron.core.full_cuda_graph.FullCudaGraphWrapper    brackets what it captures
    megatron.core.datasets.utils.compile_helpers          skips `make` where the wheel brings the compiled helpers
    megatron.core.transformer.transformer_block._get_block_submodules
                                                          calls a `--spec` that is a function, as Megatron 0.19 does

The second to fourth only with --overlap-train. They fit Megatron-LM core_v0.16 to 0.20-dev and the `megatron.training` of
the megatron-core 0.19 wheel. In another Megatron that lacks one of them, the import of that module raises.

A user's script decides when Megatron is imported, and from which folder. Nothing here may import Megatron, or a module of ours
that does, before the script has. `after_import` sees each module before the first `from module import name` of somebody else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import overlap_train
from overlap_train import OverlapConfig
from overlap_train.flags import add_flags

if TYPE_CHECKING:
    import argparse

    import torch

Action = Callable[[ModuleType], None]


@contextmanager
def after_import(actions: Mapping[str, Action]) -> Iterator[None]:
    """Call `actions[name](module)` once for each module of that name that is imported inside the block, or is there already."""
    waiting = dict(actions)
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)(sys.modules[name])
    finder = _Finder(waiting)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds nothing itself: it asks the other finders, and lets the action follow what their loader executes."""

    def __init__(self, waiting: dict[str, Action]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = self._waiting.pop(name, None)  # the question below goes past this finder
        if action is None:
            return None
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._waiting[name] = action
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._waiting.pop(name)(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_ENABLE = (
    "call overlap_train.integrations.megatron.enable(model) where the script builds its model, before DDP wraps it"
)
SUPPORTED = "Megatron-LM core_v0.16 to 0.20-dev, or the megatron-core 0.19 wheel"


def replace(functions: Mapping[str, Callable[..., Any]], module: ModuleType) -> None:
    """Replace each named function of a module by `wrapper(function)`."""
    for name, wrapper in functions.items():
        if not callable(getattr(module, name, None)):
            raise no_place(module.__name__, name)
        setattr(module, name, wrapper(getattr(module, name)))


def no_place(where: str, what: str) -> RuntimeError:
    lacks = f"this Megatron's {where} has no {what}"
    return RuntimeError(f"{lacks}, which overlap_train hooks into; supported: {SUPPORTED}")


def with_our_flags(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def add_megatron_arguments(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        return add_flags(add(parser, *args, **kwargs))

    return add_megatron_arguments


def calling_spec_functions(get: Callable[..., Any]) -> Callable[..., Any]:
    """_get_block_submodules, for a `--spec` that is a function: Megatron before 0.19 takes finished specs only."""

    @functools.wraps(get)
    def _get_block_submodules(config: Any, spec: Any, vp_stage: int | None = None, *rest: Any, **kwargs: Any) -> Any:
        if inspect.isfunction(spec):
            spec = spec(config, vp_stage=vp_stage) if "vp_stage" in inspect.signature(spec).parameters else spec(config)
        return get(config, spec, vp_stage, *rest, **kwargs)

    return _get_block_submodules


def without_makefile(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    """Megatron's compile_helpers, which calls `make` at every start, also for wheels: these bring the helpers compiled, without a
    Makefile."""
    folder = Path(inspect.getfile(compile_helpers)).parent

    @functools.wraps(compile_helpers)
    def compile_or_load() -> None:
        if (folder / "Makefile").is_file():
            compile_helpers()
            return
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError as error:
            raise RuntimeError(
                f"{folder} has neither a Makefile nor a helpers_cpp that this Python can load ({error}); install megatron-core "
                "from a wheel for this Python and platform, or run from a Megatron-LM checkout"
            ) from error
        print(f"> dataset helpers: compiled ones of the megatron-core wheel in {folder}", flush=True)

    return compile_or_load


OUR_SPEC = "--spec overlap_train.integrations.megatron.spec gpt_block_spec"


def add_advice(error: Exception) -> None:
    """Say what helps where Megatron failed to build the model for want of a norm or an attention."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.training.global_vars import get_args

    args = get_args()
    if args.spec:
        return
    if not HAVE_TE and args.sequence_parallel:
        lacks, others = "norm for sequence parallelism", ""
    elif args.context_parallel_size > 1:
        lacks, others = "core attention for context parallelism", " and --cp-comm-type a2a"
    else:
        return
    error.add_note(
        f"overlap_train: without TransformerEngine Megatron has no {lacks}; if that is what is missing here, build the model "
        f"with --transformer-impl local {OUR_SPEC}{others}"
    )


class ScriptHooks:
    """The hooks of one run, and the chunks of the models that were enabled. `overlap` None: without --overlap-train."""

    def __init__(self, overlap: OverlapConfig | None) -> None:
        self._overlap = overlap
        self._chunks: list[torch.nn.Module] = []

    def by_module(self) -> Mapping[str, Action]:
        hooks: dict[str, dict[str, Callable[..., Any]]] = {
            "megatron.training.arguments": {"add_megatron_arguments": with_our_flags},
            "megatron.core.datasets.utils": {"compile_helpers": without_makefile},
            "megatron.core.transformer.transformer_block": {"_get_block_submodules": calling_spec_functions},
        }
        if self._overlap is not None:
            training = {"setup_model_and_optimizer": self._enabling, "training_log": self._counting}
            hooks["megatron.training.training"] = training
            hooks["megatron.core.full_cuda_graph"] = {"FullCudaGraphWrapper": _bracketing}
        return {name: functools.partial(replace, functions) for name, functions in hooks.items()}

    def finish(self) -> None:
        """The script has ended well: check that a model was enabled, release graphs and symmetric memory (collective)."""
        if self._overlap is None:
            return
        self._assert_enabled("the script has ended")
        from overlap_train.integrations.megatron.graphing import release_full_iteration_graphs
        from overlap_train.integrations.megatron.table import print_table

        overlap_train.check()
        print_table(self._chunks)  # of a run without a training step
        release_full_iteration_graphs()
        if dist.is_initialized():
            overlap_train.shutdown()

    def _enabling(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(setup)

        @functools.wraps(setup)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            before = len(self._chunks)
            self._enter(call.arguments)
            try:
                result = setup(*call.args, **call.kwargs)
            except Exception as error:
                if len(self._chunks) == before:
                    add_advice(error)
                raise
            if len(self._chunks) == before:
                raise RuntimeError(
                    "--overlap-train: Megatron's setup_model_and_optimizer built a model in a way that overlap_train does not "
                    f"know (supported: {SUPPORTED}); {_ENABLE}"
                )
            return result

        return setup_model_and_optimizer

    def _enter(self, arguments: dict[str, Any]) -> None:
        """Let enable() follow whatever builds the model: a hook list since Megatron 0.19, else the model provider."""
        config, provider = getattr(arguments.get("cfg_container"), "model", None), arguments.get("model_provider_func")
        built: list[torch.nn.Module] = []

        def enable_overlap(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
            if not built:  # the hook list may be used for another model later
                built.extend(chunks)
                self._enable(chunks)
            return chunks

        def model_provider(*args: Any, **kwargs: Any) -> Any:
            """Makes one chunk a call; overlap is enabled when all of them are there."""
            result = provider(*args, **kwargs)  # type: ignore[misc]
            built.extend(result if isinstance(result, list) else [result])
            if len(built) == _chunks_of_this_stage():
                self._enable(built)
            return result

        if config is not None:
            if not hasattr(config, "pre_wrap_hooks"):
                raise no_place(type(config).__name__, "pre_wrap_hooks")
            config.pre_wrap_hooks.append(enable_overlap)
        elif callable(provider):
            arguments["model_provider_func"] = functools.wraps(provider)(model_provider)
        else:
            raise no_place("setup_model_and_optimizer", "argument model_provider_func or cfg_container.model")

    def _enable(self, chunks: list[torch.nn.Module]) -> None:
        from overlap_train.integrations.megatron.enabling import enable

        enable(chunks, self._overlap)
        self._chunks.extend(chunks)
        _note_how_packs_are_cut(chunks)

    def _counting(self, log: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(log)
        if "iteration" not in signature.parameters:
            raise no_place("training_log", "argument iteration")

        @functools.wraps(log)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            self._assert_enabled("training has begun")
            overlap_train.check()  # replays of a CUDA graph call no operator that would
            result = log(*args, **kwargs)
            _write_counters(self._chunks, signature.bind(*args, **kwargs).arguments["iteration"])
            return result

        return training_log

    def _assert_enabled(self, when: str) -> None:
        if not self._chunks:
            raise RuntimeError(
                f"--overlap-train: {when}, and no model was built by megatron.training's setup_model_and_optimizer, so nothing "
                f"overlaps; {_ENABLE}, or leave the flag out"
            )


def _write_counters(chunks: list[torch.nn.Module], iteration: int) -> None:
    """Where Megatron writes, at its own interval (--tensorboard-log-interval)."""
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    from overlap_train.integrations.megatron.table import counters

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not (tensorboard or wandb) or iteration % get_args().tensorboard_log_interval:
        return
    values = counters(chunks)
    if tensorboard:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(values, iteration)


def _bracketing(wrapper: type[Any]) -> type[Any]:
    """The class with the bracket around what it captures; its graphs stay those of the class."""

    class FullCudaGraphWrapper(wrapper):  # type: ignore[misc]
        __doc__ = wrapper.__doc__

        def __init__(self, forward_backward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            from overlap_train.integrations.megatron.graphing import graphed_passes

            super().__init__(graphed_passes(forward_backward_func), *args, **kwargs)

    return FullCudaGraphWrapper


def _note_how_packs_are_cut(chunks: list[torch.nn.Module]) -> None:
    """Megatron-LM's scripts cut the packs of --dataloader-inter-document-masking as if they were sequences of one document.

    Raises:
        RuntimeError: this Megatron's packs say themselves how they are cut, and how they do with this flag is not known here.
    """
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.training.global_vars import get_args

    from overlap_train.integrations.megatron.attention import UlyssesSelfAttention
    from overlap_train.integrations.megatron.packed import cuts_packs_as_sequences

    try:
        args = get_args()
    except AssertionError:  # of a script with a configuration of its own, and perhaps other data
        return
    if not getattr(args, "dataloader_inter_document_masking", False) or getattr(args, "sft", False):
        return
    ours = [module for chunk in chunks for module in chunk.modules() if isinstance(module, UlyssesSelfAttention)]
    if ours and hasattr(PackedSeqParams, "cp_partition_mode"):
        raise RuntimeError(
            "--dataloader-inter-document-masking: how this Megatron cuts such packs over context-parallel ranks is not known to "
            "overlap_train, and a wrong guess would give wrong results; leave out the flag, or --cp-comm-type a2a, or take "
            f"{SUPPORTED}"
        )
    for module in ours:
        cuts_packs_as_sequences(module.config)


def _chunks_of_this_stage() -> int:
    """How many chunks get_model builds: one, or one a virtual stage where there is a pipeline."""
    from megatron.training.global_vars import get_args

    args = get_args()
    stages = args.virtual_pipeline_model_parallel_size
    return stages if stages is not None and args.pipeline_model_parallel_size > 1 else 1
