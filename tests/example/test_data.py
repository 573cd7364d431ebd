"""Samples come from the right documents, once each over the data-parallel ranks; the entropy is the textbook's."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt import data
from gpt.config import ConfigError, load
from gpt.corpus import Corpus
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import Tokenizer, models

CPU = Path(__file__).resolve().parents[2] / "configs" / "gpt_cpu.yaml"
VOCAB = 50


@pytest.fixture
def corpus(tmp_path: Path):
    """100 documents of 40 ids: document n holds only id n // 2, and the last 10 documents are ids 45 to 49."""
    prefix = tmp_path / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(VOCAB))
    for number in range(100):
        builder.add_document(np.full(40, number // 2), [40])
    builder.finalize(f"{prefix}.idx")
    tokens = {f"t{n}": n for n in range(VOCAB)}
    Tokenizer(models.WordLevel(tokens, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    return Corpus(str(prefix), str(tmp_path / "tokenizer.json"), "made up")


@pytest.fixture
def config():
    return load(
        CPU,
        [
            "data.held_out=0.1",
            "data.end_of_document=t0",
            "model.seq_length=16",
            "train.steps=4",
            "train.global_batch_size=8",
            "train.micro_batch_size=2",
            "train.eval_batches=2",
        ],
    )


@pytest.fixture
def splits(corpus, config, tmp_path: Path):
    vocabulary = data.Vocabulary(corpus.tokenizer, config.data.end_of_document)
    return data._open_splits(config, corpus, vocabulary, tmp_path / "index")


def test_held_out_documents_are_not_trained_on(splits) -> None:
    train, held_out = splits
    trained = {int(t) for i in range(len(train)) for t in train[i]["tokens"]}
    judged = {int(t) for i in range(len(held_out)) for t in held_out[i]["tokens"]}
    assert trained == set(range(45))
    assert judged == set(range(45, 50))


def test_labels_are_the_next_tokens(splits) -> None:
    train, _ = splits
    boundaries = 0
    for i in range(len(train)):
        item = train[i]
        assert torch.equal(item["tokens"][1:], item["labels"][:-1])
        boundaries += int((item["tokens"] != item["labels"]).sum())
        assert item["loss_mask"].min() == 1.0
    assert boundaries > 0


def test_data_parallel_ranks_share_the_samples(splits, config) -> None:
    """4 steps of 8 samples: every sample once over the ranks, and the global batch of a step the same for any split."""
    train, _ = splits
    device = torch.device("cpu")

    def steps(dp_size: int) -> list[list[list[int]]]:
        """Per step, the samples of all ranks."""
        per_rank = [list(data.micro_batches(train, config, rank, dp_size, device)) for rank in range(dp_size)]
        passes = config.train.global_batch_size // (config.train.micro_batch_size * dp_size)
        count = len(per_rank[0]) // passes
        return [
            sorted(
                row.tolist()
                for batches in per_rank
                for batch in batches[step * passes : (step + 1) * passes]
                for row in batch["tokens"]
            )
            for step in range(count)
        ]

    alone = steps(1)
    assert len(alone) >= config.train.steps
    assert alone[0] == sorted(train[i]["tokens"].tolist() for i in range(8))
    assert steps(2) == alone
    assert steps(4) == alone


def test_entropy_is_that_of_the_counts(corpus) -> None:
    vocabulary = data.Vocabulary(corpus.tokenizer, "t0")
    assert data.unigram_entropy(corpus, vocabulary) == pytest.approx(math.log(50), abs=1e-12)


def test_entropy_of_unequal_counts(corpus, tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{corpus.prefix}.bin", dtype=DType.optimal_dtype(VOCAB))
    builder.add_document(np.array([7] * 6 + [1] * 2), [8])
    builder.finalize(f"{corpus.prefix}.idx")
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    vocabulary = data.Vocabulary(corpus.tokenizer, "t0")
    assert data.unigram_entropy(corpus, vocabulary) == pytest.approx(expected, abs=1e-12)


def test_ids_past_the_vocabulary_are_refused(corpus) -> None:
    vocabulary = data.Vocabulary(corpus.tokenizer, "t0")
    vocabulary.vocab_size = 49
    with pytest.raises(ConfigError, match=r"expected token ids below the vocabulary size 49, found 49"):
        data.unigram_entropy(corpus, vocabulary)


def test_tokenizer_of_the_user_is_judged(corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.end_of_document: expected a token of .*, found '<end>'"):
        data.Vocabulary(corpus.tokenizer, "<end>")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"data.tokenizer: expected a tokenizer.json, found .*bad.json"):
        data.Vocabulary(str(tmp_path / "bad.json"), "<end>")


def test_too_few_held_out_tokens(corpus, config) -> None:
    data._check_split(config, corpus)
    config.model.seq_length = 400
    with pytest.raises(
        ConfigError, match=r"more than model.seq_length = 400 held-out tokens, found 400 in 100 documents"
    ):
        data._check_split(config, corpus)


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(8192, 2, 8192), (8193, 2, 8448), (50257, 1, 50304), (50257, 2, 50432), (1, 8, 1024)]
)
def test_vocabulary_is_padded_as_megatron_does(vocab: int, tp: int, padded: int) -> None:
    assert data.padded_vocab_size(vocab, 128, tp) == padded
