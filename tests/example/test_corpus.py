"""Text becomes indexed token ids that decode to the text, the same ones every time, and never half of them."""

import dataclasses
import os
from pathlib import Path

import pytest
from gpt import corpus
from gpt.config import ConfigError, DataConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer


@pytest.fixture
def settings(small_text: Path, tmp_path: Path):
    return DataConfig(path=str(small_text), vocab_size=600, cache=str(tmp_path / "cache"))


def quiet(_: str) -> None:
    pass


def test_ids_decode_to_the_documents_in_their_shuffled_order(settings) -> None:
    made = corpus.prepare(settings, quiet)
    tokenizer = Tokenizer.from_file(made.tokenizer)
    assert tokenizer.get_vocab_size() == 600
    end = tokenizer.token_to_id(settings.end_of_document)
    root, files = corpus.text_files(settings.path)
    texts = list(corpus.documents(root, files))
    in_name_order = [text for file in files if file.suffix == ".py" and (text := file.read_text("utf-8"))]
    assert sorted(texts) == sorted(in_name_order)
    assert texts != in_name_order  # shuffled: the held-out ones are like the others
    indexed = IndexedDataset(made.prefix)
    assert len(indexed) == len(texts)
    for number, text in enumerate(texts):
        ids = indexed[number].tolist()
        assert ids[-1] == end
        assert tokenizer.decode(ids[:-1]) == text


def test_second_run_finds_the_first_ones_work(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    first = corpus.prepare(settings, quiet)
    monkeypatch.setattr(corpus, "_write_entry", lambda *_: pytest.fail("made again"))
    assert corpus.prepare(settings, quiet) == first


def test_entry_depends_on_text_and_vocabulary(settings, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one")
    settings = dataclasses.replace(settings, path=str(text))
    entry = corpus.entry_folder(settings)
    assert corpus.entry_folder(settings) == entry
    assert corpus.entry_folder(dataclasses.replace(settings, vocab_size=601)) != entry
    (text / "a.txt").write_text("three")
    changed = corpus.entry_folder(settings)
    assert changed != entry
    (text / "b.txt").write_text("four")
    assert corpus.entry_folder(settings) not in (entry, changed)


@pytest.mark.parametrize("file", ["tokenizer.json", "text.bin", "text.idx"])
def test_crash_leaves_no_entry(settings, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As each of the files appears, the writer dies; the next run makes the whole entry."""

    class Died(BaseException):
        pass

    write = corpus._write_entry

    def die_after(data, folder: Path, say) -> None:
        write(data, folder, say)
        assert (folder / file).stat().st_size > 0
        (folder / file).write_bytes(b"half")
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "_write_entry", die_after)
        with pytest.raises(Died):
            corpus.prepare(settings, quiet)
    assert not corpus.entry_folder(settings).exists()
    made = corpus.prepare(settings, quiet)
    assert Path(f"{made.prefix}.bin").stat().st_size > 4


def test_two_writers_at_once_both_succeed(settings, monkeypatch: pytest.MonkeyPatch) -> None:
    write = corpus._write_entry

    def overtaken(data, folder: Path, say) -> None:
        monkeypatch.setattr(corpus, "_write_entry", write)
        corpus.prepare(data, quiet)  # another run, from start to end
        write(data, folder, say)

    monkeypatch.setattr(corpus, "_write_entry", overtaken)
    made = corpus.prepare(settings, quiet)
    assert Path(f"{made.prefix}.idx").is_file()
    assert [child.name for child in Path(settings.cache).iterdir()] == [corpus.entry_folder(settings).name]


def test_leftovers_of_killed_writers_go(settings) -> None:
    cache = Path(settings.cache)
    for name, age in (("unfinished-old", 2 * 86_400), ("unfinished-new", 0)):
        (cache / name).mkdir(parents=True)
        then = (cache / name).stat().st_mtime - age
        os.utime(cache / name, (then, then))
    corpus.prepare(settings, quiet)
    assert not (cache / "unfinished-old").exists()
    assert (cache / "unfinished-new").exists()


def test_single_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    lines = [f"line {n} of a book\n" for n in range(10_000)] + ["the last line has no end"]
    file.write_text("".join(lines))
    pieces = list(corpus.documents(file, [file]))
    assert len(pieces) > 5
    assert all(len(piece) < corpus.PIECE + 100 for piece in pieces)
    assert sorted(line for piece in pieces for line in piece.splitlines(keepends=True)) == sorted(lines)


def test_what_is_not_text_is_skipped(tmp_path: Path) -> None:
    for name, content in (
        ("a.txt", b"good\n"),
        ("latin.txt", b"caf\xe9"),
        ("image.png", b"\x89PNG\0\0"),
        ("empty.txt", b""),
        (".hidden", b"no"),
    ):
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    assert list(corpus.documents(*corpus.text_files(str(tmp_path)))) == ["good\n"]


def test_standard_library_is_large_and_has_no_other_packages() -> None:
    _, files = corpus.text_files(None)
    assert sum(file.stat().st_size for file in files) > 8e6
    assert not [file for file in files if {"site-packages", "dist-packages", "test"} & set(file.parts)]
    assert files == sorted(files)


def test_too_little_text_for_the_vocabulary(settings, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hardly any text")
    settings = dataclasses.replace(settings, path=str(tmp_path / "a.txt"))
    with pytest.raises(ConfigError, match=r"data.vocab_size: expected at most the \d+ tokens .* found 600; lower it"):
        corpus.prepare(settings, quiet)
    assert not corpus.entry_folder(settings).exists()
