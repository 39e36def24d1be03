"""A user's training script for the `megatron.training` of the megatron-core 0.19 wheel; it knows nothing of overlap_train.

Like Megatron-LM's pretrain_gpt.py: mock data, GPT from the arguments, pretrain(). Beside it lies a module of its own, and it
takes Megatron's functions by value.
"""

import json
import os
from functools import partial

import on_cpu  # noqa: F401 -- beside this script
import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, global_vars, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class Writer:
    """In place of the TensorBoard and W&B writers, which are not installed here: collects what is written."""

    def __init__(self):
        self.values, self.config = {}, {}

    def add_scalar(self, name, value, iteration):
        self.values[f"{name} {iteration}"] = float(value)

    def log(self, values, iteration=None):
        for name, value in values.items():
            self.add_scalar(name, value, iteration)

    def __getattr__(self, name):  # add_text, flush, finish and whatever else
        return lambda *args, **kwargs: None


def datasets(counts, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, split="1,1,1", tokenizer=get_tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(MockGPTDataset, counts, lambda: True, config).build()


def mean_loss(mask, losses):
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.to(torch.int), {"lm loss": torch.stack([total.detach(), tokens])}


def forward_step(batches, model):
    batch = get_batch_on_this_cp_rank({**next(batches), "cu_seqlens": None}, False, mpu.get_context_parallel_group())
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(mean_loss, batch["loss_mask"])


if __name__ == "__main__":
    datasets.is_distributed = True
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    tensorboard, wandb = Writer(), Writer()
    if args.rank == args.world_size - 1:
        global_vars._GLOBAL_TENSORBOARD_WRITER = tensorboard
        global_vars._GLOBAL_WANDB_WRITER = wandb
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)
    if args.rank == args.world_size - 1:
        with open(os.environ["WRITTEN"], "w") as file:
            json.dump({"tensorboard": tensorboard.values, "wandb": wandb.values}, file)
