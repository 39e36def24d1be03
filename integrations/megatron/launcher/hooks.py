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

Nothing here may import Megatron, or a module of ours that does, before the script has: the script decides which Megatron it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import overlap_train
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.launcher import advice
from overlap_train.integrations.megatron.launcher.after_import import Action
from overlap_train.integrations.megatron.launcher.patches import (
    SUPPORTED,
    calling_spec_functions,
    no_place,
    replace,
    with_our_flags,
    without_makefile,
)

if TYPE_CHECKING:
    import torch


class ScriptHooks:
    """The hooks of one run and what they have seen. `overlap` None: without --overlap-train."""

    def __init__(self, overlap: OverlapConfig | None) -> None:
        self._overlap = overlap
        self._chunks: list[torch.nn.Module] = []  # of the models that were enabled

    def by_module(self) -> Mapping[str, Action]:
        """The action for each module of Megatron."""
        hooks: dict[str, dict[str, Callable[..., Any]]] = {
            "megatron.training.arguments": {"add_megatron_arguments": with_our_flags},
            "megatron.core.datasets.utils": {"compile_helpers": without_makefile},
            "megatron.core.transformer.transformer_block": {"_get_block_submodules": calling_spec_functions},
        }
        if self._overlap is not None:
            hooks["megatron.training.training"] = {
                "setup_model_and_optimizer": self._enabling,
                "training_log": self._counting,
            }
            hooks["megatron.core.full_cuda_graph"] = {"FullCudaGraphWrapper": _bracketing}
        return {name: functools.partial(replace, functions) for name, functions in hooks.items()}

    def finish(self) -> None:
        """The script has ended well: check that it did what the flags ask for, release graphs and symmetric memory (collective).

        Raises:
            RuntimeError: --overlap-train was given and no model was enabled.
        """
        if self._overlap is None:
            return
        self._assert_enabled("the script has ended")
        from overlap_train.integrations.megatron.enabling.first_table import print_table
        from overlap_train.integrations.megatron.enabling.graphing import release_full_iteration_graphs

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
                    advice.add_to(error)
                raise
            if len(self._chunks) == before:
                raise RuntimeError(
                    "--overlap-train: Megatron's setup_model_and_optimizer built a model in a way that overlap_train does not "
                    f"know (supported: {SUPPORTED}); call overlap_train.integrations.megatron.enable(model) where the "
                    "script builds it, before DDP wraps it"
                )
            return result

        return setup_model_and_optimizer

    def _enter(self, arguments: dict[str, Any]) -> None:
        """Let enable() follow whatever builds the model: a hook list since Megatron 0.19, else the model provider."""
        model_config = getattr(arguments.get("cfg_container"), "model", None)
        if model_config is not None:
            if not hasattr(model_config, "pre_wrap_hooks"):
                raise no_place(type(model_config).__name__, "pre_wrap_hooks")
            model_config.pre_wrap_hooks.append(self._enable_once())
        elif callable(arguments.get("model_provider_func")):
            arguments["model_provider_func"] = self._enabling_provider(arguments["model_provider_func"])
        else:
            raise no_place("setup_model_and_optimizer", "argument model_provider_func or cfg_container.model")

    def _enable_once(self) -> Callable[[list[torch.nn.Module]], list[torch.nn.Module]]:
        """A pre-wrap hook for one build: the list it is in may be used for another model later."""
        seen: list[torch.nn.Module] = []

        def enable_overlap(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
            if not seen:
                seen.extend(chunks)
                self._enable(chunks)
            return chunks

        return enable_overlap

    def _enabling_provider(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """The provider makes one chunk a call; overlap is enabled when all of them are there."""
        chunks: list[torch.nn.Module] = []

        @functools.wraps(provider)
        def model_provider(*args: Any, **kwargs: Any) -> Any:
            built = provider(*args, **kwargs)
            chunks.extend(built if isinstance(built, list) else [built])
            if len(chunks) == _chunks_of_this_stage():
                self._enable(chunks)
            return built

        return model_provider

    def _enable(self, chunks: list[torch.nn.Module]) -> None:
        from overlap_train.integrations.megatron.enabling import enable

        enable.enable(chunks, self._overlap)
        self._chunks.extend(chunks)
        _note_how_packs_are_cut(chunks)
        advice.say_what_masks_cost()

    def _counting(self, log: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(log)
        if "iteration" not in signature.parameters:
            raise no_place("training_log", "argument iteration")

        @functools.wraps(log)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            self._assert_enabled("training has begun")
            overlap_train.check()  # replays of a CUDA graph call no operator that would
            result = log(*args, **kwargs)
            from overlap_train.integrations.megatron.enabling.counters import write_counters

            write_counters(self._chunks, signature.bind(*args, **kwargs).arguments["iteration"])
            return result

        return training_log

    def _assert_enabled(self, when: str) -> None:
        if not self._chunks:
            raise RuntimeError(
                f"--overlap-train: {when}, and no model was built by megatron.training's setup_model_and_optimizer, so nothing "
                "overlaps; call overlap_train.integrations.megatron.enable(model) where the script builds its model, "
                "before DDP wraps it, or leave the flag out"
            )


def _bracketing(wrapper: type[Any]) -> type[Any]:
    from overlap_train.integrations.megatron.enabling.graphing import bracketing

    return bracketing(wrapper)


def _note_how_packs_are_cut(chunks: list[torch.nn.Module]) -> None:
    """Megatron-LM's scripts cut the packs of --dataloader-inter-document-masking as if they were sequences of one document.

    Raises:
        RuntimeError: this Megatron's packs say themselves how they are cut, and how they do with this flag is not known here.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    from overlap_train.integrations.megatron.attention.self_attention import UlyssesSelfAttention
    from overlap_train.integrations.megatron.packed import cuts_packs_as_sequences

    args = advice.arguments_of_script()
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
