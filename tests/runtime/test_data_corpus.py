"""Texts become documents in a fixed order, with what is given but not learnt marked."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from ppruntime.data.corpus import Text, build, file_texts, stdlib_texts
from ppruntime.data.token_file import DataError, TokenFile
from ppruntime.data.tokenizer import ByteTokenizer, load_tokenizer


@pytest.fixture
def tokenizer_json(tmp_path):
    """A word-level tokenizer.json with six ids and an end-of-document token."""
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, "<eod>": 4, "d": 5}
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )
    return path


def documents(prefix):
    file = TokenFile.open(prefix)
    ends = file.document_starts[1:-1]
    learn = np.ones(file.num_tokens, int) if file.learn is None else file.learn
    return [
        (ids.tolist(), mask.tolist())
        for ids, mask in zip(np.split(file.tokens, ends), np.split(learn, ends), strict=True)
    ]


def test_folders_files_and_lines_become_documents_in_order(tmp_path):
    (tmp_path / "in" / "b").mkdir(parents=True)
    (tmp_path / "in" / "b" / "x.txt").write_bytes(b"\xff\0")
    (tmp_path / "in" / "a.txt").write_text("hi")
    (tmp_path / "in" / "empty.txt").write_text("")
    (tmp_path / "lines.jsonl").write_text(
        '{"text": "é", "other": 1}\n\n{"prompt": "ab", "completion": "c"}\n'
    )
    texts = list(file_texts([tmp_path / "lines.jsonl", tmp_path / "in"]))
    build(tmp_path / "out", texts, ByteTokenizer())
    assert documents(tmp_path / "out") == [
        ([0xC3, 0xA9], [1, 1]),
        ([97, 98, 99], [0, 0, 1]),
        ([104, 105], [1, 1]),
        ([255, 0], [1, 1]),
    ]


def test_a_tokenizer_json_makes_ids_and_ends_documents(tmp_path, tokenizer_json):
    (tmp_path / "t.jsonl").write_text('{"text": "a b"}\n{"prompt": "c", "completion": "zzz"}\n')
    tokenizer = load_tokenizer(str(tokenizer_json))
    assert tokenizer.vocab_size == 6
    build(tmp_path / "out", file_texts([tmp_path / "t.jsonl"]), tokenizer, eod="<eod>")
    assert documents(tmp_path / "out") == [([1, 2, 4], [1, 1, 1]), ([3, 0, 4], [0, 1, 1])]
    info = TokenFile.open(tmp_path / "out").info
    assert (info.tokenizer, info.vocab_size, info.eod) == ("tokenizer.json", 6, 4)
    assert len(info.tokenizer_sha256) == 64


def test_the_byte_tokenizer_is_the_identity_on_bytes():
    assert ByteTokenizer().encode(bytes(range(256))).tolist() == list(range(256))
    assert ByteTokenizer().id_of("0") == 0


def test_what_cannot_be_tokenized_says_where(tmp_path, tokenizer_json):
    (tmp_path / "latin.txt").write_bytes(b"ab\xff")
    tokenizer = load_tokenizer(str(tokenizer_json))
    for call, text in (
        (
            lambda: build(tmp_path / "o", file_texts([tmp_path / "latin.txt"]), tokenizer),
            f"{tmp_path}/latin.txt: byte 2 is not UTF-8; use the byte tokenizer",
        ),
        (
            lambda: tokenizer.id_of("<eos>"),
            "tokenizer.json has no token '<eos>'; give one of its tokens or an id",
        ),
        (
            lambda: ByteTokenizer().id_of("256"),
            "the byte tokenizer has no token '256'; give a number below 256",
        ),
        (
            lambda: load_tokenizer("nix.json"),
            "nix.json: cannot be read (No such file or directory)",
        ),
        (lambda: list(file_texts(["nix"])), "nix: no such file or folder"),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value) == text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "Input data was truncated"),
        ('{"text": 3}', "Expected `str | null`, got `int` - at `$.text`"),
        ('{"prompt": "a"}', 'no "text", and no "prompt" with a "completion"'),
    ],
)
def test_a_wrong_line_is_named(line, text, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(DataError) as caught:
        list(file_texts([path]))
    assert str(caught.value) == f"{path}:2: {text}"


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match=r"t\.json: not a tokenizer\.json \("):
        load_tokenizer(str(tmp_path / "t.json"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs the package tokenizers; install ppruntime"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_the_standard_library_has_no_tests_and_one_order():
    texts = list(stdlib_texts())
    names = [text.origin for text in texts]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert {"os.py", "json/decoder.py"} <= set(names)
    assert not any(
        part in ("test", "tests", "site-packages") for n in names for part in n.split("/")
    )
    os_text = next(text.text for text in texts if text.origin == "os.py")
    assert os_text == Path(os.__file__).read_bytes()


def _build_and_read(rank, prefix):
    """What a rank does when it opens the standard library's token file."""
    texts = (Text(str(n), bytes(range(256)) * 100) for n in range(100))
    build(prefix, texts, ByteTokenizer(), if_exists="keep")
    file = TokenFile.open(prefix)
    file.check_content()
    return file.fingerprint


def test_processes_that_build_it_at_once_all_get_the_same_file(tmp_path, run_ranks):
    fingerprints = run_ranks(4, _build_and_read, tmp_path / "lib")
    assert len(set(fingerprints)) == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".idx", ".json"]
