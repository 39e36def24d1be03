"""Megatron's datasets over a corpus: indexed files made once by rank 0, GPTDataset on top, and batches from them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from gpt.corpus import Corpus, read_corpus
from gpt.errors import RecipeError
from gpt.files import damage, listing, publish, seal
from gpt.lengths import length_of
from gpt.settings import Settings
from gpt.tokenizer import EOD, ByteTokenizer
from gpt.world import on_rank_0

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Datasets:
    """Samples {tokens, labels, loss_mask, position_ids}, each [seq_length]; `key` names the text they come from."""

    train: GPTDataset
    valid: GPTDataset
    key: str


@dataclass(frozen=True)
class Share:
    """Which samples of a global batch this data-parallel rank reads; the ranks of one replica read the same ones."""

    rank: int
    size: int


def build_datasets(settings: Settings) -> Datasets:
    """Prepare the index files on rank 0 and open them on all ranks; collective.

    Raises:
        RecipeError: on every rank, for a text that cannot be used or a data folder that cannot be written.
    """
    folder = Path(on_rank_0(lambda: str(_index_folder(settings))))
    samples = settings.train_iters * settings.global_batch_size
    shuffles = folder / f"order-{settings.seq_length}-{samples}-{settings.seed}"
    # Megatron writes its order files in place, so a kill would leave half a file: draft first, then rename.
    known = on_rank_0(shuffles.exists)
    draft = shuffles if known else shuffles.with_name(f"{shuffles.name}.{on_rank_0(os.getpid)}.tmp")
    train, valid, _ = _builder(settings, folder, draft, samples).build()
    dist.barrier()
    if not known and dist.get_rank() == 0:
        _keep(draft, shuffles)
    return Datasets(train, valid, folder.name)


def batches(dataset: GPTDataset, first: int, settings: Settings, share: Share, device: torch.device) -> Iterator[Batch]:
    """Micro-batches [micro_batch_size, seq_length] of this share, from sample number `first` on, without end.

    With `variable_seq_length` each is cut to a length of its own, the same however many replicas there are.

    Past the last sample come samples whose loss mask is zero. Labels that end a document do not count either: losses
    are nats per byte.
    """
    step = settings.micro_batch_size * share.size
    start = first + share.rank * settings.micro_batch_size
    while True:
        numbers = range(start, start + settings.micro_batch_size)
        samples = [dataset[number if number < len(dataset) else None] for number in numbers]
        length = length_of(settings, start // settings.micro_batch_size)
        batch = {key: torch.stack([sample[key][:length] for sample in samples]) for key in samples[0]}
        batch["loss_mask"] = counted(batch["loss_mask"], batch["labels"])
        yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}
        start += step


def counted(loss_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """1.0 where a label is a byte of the text, 0.0 where it ends a document or fills up the last sample; same shape."""
    return loss_mask * (labels != EOD)


def _builder(settings: Settings, folder: Path, order: Path, samples: int) -> BlendedMegatronDatasetBuilder:
    config = GPTDatasetConfig(
        random_seed=settings.seed,
        sequence_length=settings.seq_length,
        blend_per_split=[([str(folder / "train")], None), ([str(folder / "valid")], None), None],
        path_to_cache=str(order),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        drop_last_partial_validation_sequence=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, None, None], lambda: True, config)


def _keep(draft: Path, final: Path) -> None:
    try:
        os.rename(draft, final)
    except OSError:  # another job was faster; our own files stay open until we end
        shutil.rmtree(draft, ignore_errors=True)


def _index_folder(settings: Settings) -> Path:
    corpus = read_corpus(settings.text)
    _check_length(corpus, settings.seq_length)
    digest = hashlib.blake2b(digest_size=8)
    for part in (corpus.train, corpus.valid):
        for document in part:
            digest.update(len(document).to_bytes(8, "little") + document)
        digest.update(b"split")
    folder = Path(settings.data_dir) / digest.hexdigest()
    try:
        if not folder.exists() or damage(folder):
            _write_index(corpus, folder)
    except OSError as error:
        raise RecipeError(f"--data-dir {settings.data_dir} cannot be written: {error.strerror or error}") from error
    return folder


def _check_length(corpus: Corpus, seq_length: int) -> None:
    for name, documents in (("training", corpus.train), ("validation", corpus.valid)):
        length = sum(map(len, documents))
        if length <= seq_length:
            raise RecipeError(
                f"--seq-length {seq_length}: the {name} part of {corpus.name} has only {length} bytes; "
                "give a longer text or a shorter --seq-length"
            )


def _write_index(corpus: Corpus, folder: Path) -> None:
    draft = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    draft.mkdir(parents=True)
    for name, documents in (("train", corpus.train), ("valid", corpus.valid)):
        prefix = str(draft / name)
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
        for document in documents:
            tokens = np.append(np.frombuffer(document, dtype=np.uint8).astype(np.uint16), np.uint16(EOD))
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(get_idx_path(prefix))
    seal(draft, listing(draft))
    publish(draft, folder)
