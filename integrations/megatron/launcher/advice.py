"""What a user's script might do better, said when its model is built. Megatron is imported by then."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

OUR_SPEC = "--spec overlap_train.integrations.megatron.spec gpt_block_spec"
# Of a mask in one sample. Megatron-LM's data loader copies each sample's. With 32768 tokens (1 GiB) steps of 312 ms took 540 to
# 840 when the samples that were ready before training were used up; without the mask none took longer than the others (2 layers
# of Llama-3 8B, 2 x H200).
_LARGE_MASK_BYTES = 1 << 28


def arguments_of_script() -> Any:
    """Megatron-LM's arguments; None of a script that has a configuration of its own, and perhaps other data."""
    from megatron.training.global_vars import get_args

    try:
        return get_args()
    except AssertionError:
        return None


def say_what_masks_cost() -> None:
    """Print, on rank 0, how to leave out masks that the data loader makes for long causal sequences."""
    args = arguments_of_script()
    tokens = getattr(args, "seq_length", None) or 0
    makes_masks = getattr(args, "create_attention_mask_in_dataloader", False)
    separates_documents = getattr(args, "reset_attention_mask", False)  # by its mask, which is not the causal one then
    if not makes_masks or separates_documents or tokens**2 < _LARGE_MASK_BYTES:
        return
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(
            f"overlap_train: each sample comes with a mask of {tokens} x {tokens} ({tokens**2 / (1 << 30):.2g} GiB), for which "
            "the data loader may take longer than a step takes; causal attention needs none: pass "
            "--no-create-attention-mask-in-dataloader",
            flush=True,
        )


def add_to(error: Exception) -> None:
    """Say what helps where Megatron failed to build the model for want of a norm or an attention for parallel sequences."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.training.global_vars import get_args

    args = get_args()
    if not HAVE_TE and args.sequence_parallel and not args.spec:
        error.add_note(
            "overlap_train: without TransformerEngine Megatron has no norm for sequence parallelism; if that is what is "
            f"missing here, build the model with --transformer-impl local {OUR_SPEC}"
        )
    elif args.context_parallel_size > 1 and not args.spec:
        error.add_note(
            "overlap_train: without TransformerEngine Megatron has no core attention for context parallelism; if that is what is "
            f"missing here, build the model with --transformer-impl local {OUR_SPEC} and --cp-comm-type a2a"
        )
