"""Token ids are read back through Megatron's GPTDataset, and judged by their unigram entropy.

Documents are split in order: the last share is held out. Every rank of a tensor-parallel group reads the same
samples itself, so no batch is broadcast.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from gpt.config import Config, ConfigError
from gpt.corpus import Corpus, prepare, preprocessed
from gpt.device import Ranks

# The entropy of a larger corpus is that of its first tokens.
COUNTED = 100_000_000


class Vocabulary:
    """What GPTDataset asks of a tokenizer, answered from a tokenizer.json."""

    def __init__(self, path: str, end_of_document: str) -> None:
        try:
            tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"data.tokenizer: expected a tokenizer.json, found {path}: {error}") from None
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.eod = tokenizer.token_to_id(end_of_document)
        if self.eod is None:
            raise ConfigError(f"data.end_of_document: expected a token of {path}, found {end_of_document!r}")
        self.pad = -1  # samples are cut from one stream of ids: nothing is padded
        self.unique_identifiers = {"path": path, "vocab_size": self.vocab_size}


@dataclass(frozen=True)
class Text:
    """The two splits, datasets whose item i is a dict of tensors [seq_length], and what is known of the ids.

    `unigram_entropy` (nats a token) is known on rank 0 alone, and NaN elsewhere.
    """

    train: GPTDataset
    held_out: GPTDataset
    vocab_size: int
    unigram_entropy: float


def load(config: Config, ranks: Ranks, say: Callable[[str], None]) -> Text:
    """Prepares the corpus on rank 0 while the others wait, then opens it on all. Collective.

    Raises ConfigError, on all ranks. Megatron takes any index that it finds, also a half-written one; a run therefore
    makes its own.
    """
    index_folder = Path(config.output.dir) / "index"
    found: list[Any] = [None]
    entropy = math.nan
    if ranks.is_first:
        shutil.rmtree(index_folder, ignore_errors=True)
        try:
            found = [_find(config, say)]
            entropy = unigram_entropy(*found[0])
        except ConfigError as error:
            found = [error]
    torch.distributed.broadcast_object_list(found, device=ranks.device)
    if isinstance(found[0], ConfigError):
        raise found[0]
    corpus, vocabulary = found[0]
    train, held_out = _open_splits(config, corpus, vocabulary, index_folder)
    return Text(train, held_out, vocabulary.vocab_size, entropy)


def _find(config: Config, say: Callable[[str], None]) -> tuple[Corpus, Vocabulary]:
    corpus = preprocessed(config.data) if config.data.prefix else prepare(config.data, say)
    vocabulary = Vocabulary(corpus.tokenizer, config.data.end_of_document)
    _check_split(config, corpus)
    say(f"corpus: {corpus.description}")
    return corpus, vocabulary


def _open_splits(
    config: Config, corpus: Corpus, vocabulary: Vocabulary, index_folder: Path
) -> tuple[GPTDataset, GPTDataset]:
    held_out = config.data.held_out
    dataset_config = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.model.seq_length,
        blend=([corpus.prefix], None),
        split=f"{1 - held_out:.6f},{held_out:.6f},0",
        tokenizer=vocabulary,
        path_to_cache=str(index_folder),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    batch = config.train.global_batch_size
    sizes = [config.train.steps * batch, config.train.eval_batches * batch, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config).build()
    return train, valid


def _check_split(config: Config, corpus: Corpus) -> None:
    # A copy: the dataset unmaps its file when it is collected, under any array that still looks into it.
    indexed = IndexedDataset(corpus.prefix)
    lengths = np.array(indexed.sequence_lengths)
    first = round(len(lengths) * (1 - config.data.held_out))
    for name, tokens in (("training", lengths[:first].sum()), ("held-out", lengths[first:].sum())):
        if tokens <= config.model.seq_length:
            raise ConfigError(
                f"data: expected more than model.seq_length = {config.model.seq_length} {name} tokens, found {tokens} "
                f"in {len(lengths)} documents; give more text or change data.held_out = {config.data.held_out}"
            )


def micro_batches(
    dataset: GPTDataset, config: Config, dp_rank: int, dp_size: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's micro-batches in order, tensors [micro_batch_size, seq_length] on `device`."""
    size, batch = config.train.micro_batch_size, config.train.global_batch_size
    for start in range(0, len(dataset) - batch + 1, batch):
        own = range(start + dp_rank * size, start + batch, dp_size * size)
        for first in own:
            items = [dataset[i] for i in range(first, first + size)]
            yield {name: torch.stack([item[name] for item in items]).to(device) for name in items[0]}


def unigram_entropy(corpus: Corpus, vocabulary: Vocabulary) -> float:
    """Entropy, in nats a token, of the token frequencies: what a model scores that knows them and no context."""
    dtype = IndexedDataset(corpus.prefix).index.dtype
    ids = np.memmap(f"{corpus.prefix}.bin", dtype=dtype, mode="r")[:COUNTED]
    if int(ids.max()) >= vocabulary.vocab_size or int(ids.min()) < 0:
        raise ConfigError(
            f"data.prefix: expected token ids below the vocabulary size {vocabulary.vocab_size}, "
            f"found {int(ids.max())}; give the tokenizer that made {corpus.prefix}.bin"
        )
    counts = np.bincount(ids, minlength=vocabulary.vocab_size)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Megatron's rule: every rank's shard of the vocabulary has the same, conveniently divisible width."""
    multiple = divisible_by * tp
    return math.ceil(vocab_size / multiple) * multiple
