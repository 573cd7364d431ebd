"""Text on disk becomes token ids in Megatron's indexed format, once; later runs find them in the cache.

A corpus is a list of documents in an order shuffled by a fixed seed, so that the last ones, which are held out,
are like the rest. A byte-level BPE vocabulary is trained on it. All files of a cache entry are written to a
folder beside it that is renamed when complete: an entry that exists is whole, whatever happened to its writer.
The entry's name is a hash of the documents' names, sizes and times and of the vocabulary size.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpt.config import ConfigError, DataConfig

FORMAT = 1  # raise it when what is written changes
CHECKOUT = Path(__file__).resolve().parents[2]
# A single file is cut into documents of about this many characters, at line ends; a folder's files stay whole.
PIECE = 16_384
# The vocabulary is learned from this many characters at most; more does not change a vocabulary of this size.
LEARN_FROM = 50_000_000
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """`prefix`.bin and `prefix`.idx hold the token ids of the documents, `tokenizer` the vocabulary."""

    prefix: str
    tokenizer: str
    description: str


def preprocessed(data: DataConfig) -> Corpus:
    """The user's own indexed data."""
    return Corpus(str(data.prefix), str(data.tokenizer), f"indexed data {data.prefix}")


def prepare(data: DataConfig, say: Callable[[str], None]) -> Corpus:
    """Finds or makes the cache entry of the text that `data` names. For one process only; raises ConfigError."""
    entry = entry_folder(data)
    if not entry.is_dir():
        _make_entry(data, entry, say)
    about = json.loads((entry / "about.json").read_text())
    return Corpus(str(entry / "text"), str(entry / "tokenizer.json"), about["description"])


def entry_folder(data: DataConfig) -> Path:
    """Where the token ids of this text with this vocabulary belong, whether or not they are there."""
    root, files = text_files(data.path)
    key = hashlib.sha256(f"{FORMAT} {data.vocab_size} {data.end_of_document} {root}".encode())
    for file in files:
        status = file.stat()
        key.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return _cache_folder(data) / key.hexdigest()[:16]


def _cache_folder(data: DataConfig) -> Path:
    if data.cache is not None:
        return Path(data.cache)
    if os.access(CHECKOUT, os.W_OK):
        return CHECKOUT / ".cache" / "example"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "te_ce" / "example"


def text_files(path: str | None) -> tuple[Path, list[Path]]:
    """`(root, files in a fixed order)`; without a path, the source of the running Python's standard library."""
    root = Path(path or sysconfig.get_path("stdlib")).resolve()
    if root.is_file():
        return root, [root]
    files = []
    for folder, subfolders, names in os.walk(root):
        if path is None:
            subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
            names = [name for name in names if name.endswith(".py")]
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files += [Path(folder) / name for name in names if not name.startswith(".")]
    return root, sorted(file for file in files if file.is_file())


def documents(root: Path, files: list[Path]) -> Iterator[str]:
    """The text of each file that is UTF-8, in an order that depends on nothing but the list."""
    if files == [root]:
        pieces = _cut(_read(root) or "")
        random.Random(FORMAT).shuffle(pieces)
        yield from pieces
        return
    order = list(files)
    random.Random(FORMAT).shuffle(order)
    for file in order:
        if text := _read(file):
            yield text


def _read(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text


def _cut(text: str) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1
        pieces.append(text[start : end or len(text)])
        start = end or len(text)
    return pieces


def _make_entry(data: DataConfig, entry: Path, say: Callable[[str], None]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(entry.parent)
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=entry.parent) as folder:
        made = Path(folder) / "entry"
        made.mkdir()
        _write_entry(data, made, say)
        try:
            made.rename(entry)
        except OSError:
            # Another run may have finished the same entry meanwhile: it is as good as this one.
            if not entry.is_dir():
                raise


def _remove_leftovers(cache: Path) -> None:
    """Folders of writers that were killed; a living one is younger than a day."""
    for folder in cache.glob("unfinished-*"):
        if time.time() - folder.stat().st_mtime > 86_400:
            shutil.rmtree(folder, ignore_errors=True)


def _write_entry(data: DataConfig, folder: Path, say: Callable[[str], None]) -> None:
    root, files = text_files(data.path)
    started = time.perf_counter()
    name = f"{len(files)} files of {root}" if data.path else f"source of Python {sys.version.split()[0]}"
    say(f"learning a vocabulary of {data.vocab_size} from the {name} ...")
    tokenizer = _learn(data, documents(root, files))
    tokenizer.save(str(folder / "tokenizer.json"))
    count, characters, tokens = _write_tokens(tokenizer, data, documents(root, files), folder / "text")
    text = f"{name}: {count} documents, {characters / 1e6:.1f} M characters, {tokens / 1e6:.2f} M tokens"
    (folder / "about.json").write_text(json.dumps({"description": text}))
    say(f"tokenized in {time.perf_counter() - started:.0f} s")


def _learn(data: DataConfig, texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.vocab_size,
        special_tokens=[data.end_of_document],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, LEARN_FROM), trainer)
    if tokenizer.get_vocab_size() < data.vocab_size:
        raise ConfigError(
            f"data.vocab_size: expected at most the {tokenizer.get_vocab_size()} tokens that this text yields, "
            f"found {data.vocab_size}; lower it or give more text"
        )
    return tokenizer


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def _write_tokens(tokenizer: Tokenizer, data: DataConfig, texts: Iterator[str], prefix: Path) -> tuple[int, int, int]:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(data.vocab_size))
    end = [tokenizer.token_to_id(data.end_of_document)]
    count = characters = tokens = 0
    batch: list[str] = []

    def flush() -> None:
        nonlocal count, characters, tokens
        for text, encoding in zip(batch, tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True):
            ids = encoding.ids + end
            builder.add_document(np.array(ids), [len(ids)])
            count, characters, tokens = count + 1, characters + len(text), tokens + len(ids)
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == 128:
            flush()
    flush()
    builder.finalize(f"{prefix}.idx")
    return count, characters, tokens
