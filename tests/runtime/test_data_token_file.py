"""Token files: what is written is read back, and what is broken is a DataError, never more."""

from __future__ import annotations

import os
import resource
import signal
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppruntime.data.token_file import DataError, TokenFile, parse_index
from ppruntime.data.token_writer import Document, Vocabulary, write

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def documents(lists):
    return [Document(np.asarray(ids, np.int64)) for ids in lists]


@pytest.fixture
def prefix(tmp_path):
    """A token file of 9 tokens in 3 documents, vocabulary 256."""
    write(tmp_path / "data", documents(DOCUMENTS), Vocabulary("bytes", 256))
    return tmp_path / "data"


@given(
    st.lists(st.lists(st.integers(0, 199), max_size=20), min_size=1).filter(any),
    st.sampled_from([(200, np.uint8), (256, np.uint8), (65536, np.uint16), (65537, np.int32)]),
)
def test_documents_are_read_back_as_written(tmp_path_factory, lists, size_and_type):
    vocab_size, dtype = size_and_type
    path = tmp_path_factory.getbasetemp() / "round-trip"
    write(path, documents(lists), Vocabulary("t", vocab_size), if_exists="replace")
    file = TokenFile.open(path)
    starts = file.document_starts.tolist()
    found = [file.tokens[a:b].tolist() for a, b in pairwise(starts)]
    assert found == [ids for ids in lists if ids]
    assert file.tokens.dtype == dtype
    assert file.learn is None
    file.check_content()


def test_the_files_are_megatron_s_byte_for_byte(prefix):
    index = prefix.with_name("data.idx").read_bytes()
    assert index == (
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 1, 3, 4)
        + struct.pack("<3i", 3, 1, 5)
        + struct.pack("<3q", 0, 3, 4)
        + struct.pack("<4q", 0, 1, 2, 3)
    )
    assert prefix.with_name("data.bin").read_bytes() == bytes(range(1, 10))


def test_a_document_of_several_sequences_and_a_mode_per_sequence_are_read(tmp_path):
    """Files that Megatron makes: sentence splitting, and multimodal indices."""
    (tmp_path / "m.bin").write_bytes(np.arange(6, dtype="<u2").tobytes())
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 3)
    index += struct.pack("<3i", 1, 2, 3) + struct.pack("<3q", 0, 2, 6) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "m.idx").write_bytes(index + b"\0\1\0")
    file = TokenFile.open(tmp_path / "m")
    assert file.document_starts.tolist() == [0, 3, 6]
    assert file.info is None
    file.check_content()


def test_a_mask_is_read_back_and_left_out_when_all_is_learnt(tmp_path):
    ids = np.arange(4)
    learn = np.array([False, False, True, True])
    write(
        tmp_path / "a",
        [Document(ids, learn), Document(ids), Document(ids, ~learn)],
        Vocabulary("bytes", 256),
    )
    file = TokenFile.open(tmp_path / "a")
    assert file.learn.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    assert file.summary().endswith(
        "12 tokens in 3 documents, uint8, tokenizer bytes, 8 to be learnt"
    )
    write(
        tmp_path / "a",
        [Document(ids, np.ones(4, bool))],
        Vocabulary("bytes", 256),
        if_exists="replace",
    )
    assert TokenFile.open(tmp_path / "a").learn is None


def error_of(path):
    with pytest.raises(DataError) as caught:
        TokenFile.open(path)
    return str(caught.value).replace(str(path), "PREFIX")


HEADER_ERRORS = [
    (0, b"X", "not the index of a token file, it does not begin with b'MMIDIDX\\x00\\x00'"),
    (9, b"\2", "format version 2, only 1 can be read"),
    (17, b"\6", "type code 6 is no integer type; ids have [1, 2, 3, 4, 5, 8]"),
    (
        18,
        b"\4",
        "102 bytes, 4 sequences and 4 document bounds want 114; the file is truncated or broken",
    ),
    (
        25,
        b"\x7f",
        "102 bytes, 9151314442816847875 sequences and 4 document bounds want "
        "109815773313802174566; the file is truncated or broken",
    ),
    (34, b"\0", "sequence 0 has 0 tokens, at least 1 wanted"),
    (37, b"\xff", "sequence 0 has -16777213 tokens, at least 1 wanted"),
    (
        54,
        b"\2",
        "sequence 1 begins at byte 2, the lengths before it end at byte 3; the file is broken",
    ),
    (
        70,
        b"\1",
        "document bounds have to rise from 0 to 3, without empty documents; the file is broken",
    ),
    (
        86,
        b"\1",
        "document bounds have to rise from 0 to 3, without empty documents; the file is broken",
    ),
    (
        94,
        b"\4",
        "document bounds have to rise from 0 to 3, without empty documents; the file is broken",
    ),
]


@pytest.mark.parametrize(("at", "change", "text"), HEADER_ERRORS)
def test_a_broken_index_says_what_is_broken(at, change, text, prefix):
    path = prefix.with_name("data.idx")
    index = bytearray(path.read_bytes())
    index[at : at + len(change)] = change
    path.write_bytes(index)
    assert error_of(prefix) == f"PREFIX.idx: {text}"


def test_files_of_the_wrong_size_say_so(prefix):
    ids, index = prefix.with_name("data.bin"), prefix.with_name("data.idx")
    ids.write_bytes(ids.read_bytes()[:-1])
    assert error_of(prefix) == (
        "PREFIX.bin: 8 bytes, its index wants 9; the file is truncated or belongs to another index"
    )
    index.write_bytes(index.read_bytes()[:20])
    assert error_of(prefix) == "PREFIX.idx: 20 bytes, a header has 34; the file is truncated"
    index.write_bytes(b"")
    assert error_of(prefix) == "PREFIX.idx: 0 bytes, a header has 34; the file is truncated"
    index.write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, 0, 1) + bytes(8))
    assert error_of(prefix) == "PREFIX.idx: holds no documents"


def test_a_missing_file_says_how_to_make_it(prefix):
    prefix.with_name("data.bin").unlink()
    text = "no such file; make it with: ppruntime data build --out PREFIX FILES"
    assert error_of(prefix) == f"PREFIX.bin: {text}"
    prefix.with_name("data.idx").unlink()
    assert error_of(prefix) == f"PREFIX.idx: {text}"


def test_a_mask_and_a_description_have_to_fit(prefix):
    prefix.with_name("data.mask").write_bytes(bytes(8))
    assert error_of(prefix) == (
        "PREFIX.mask: 8 bytes, wanted one for each of the 9 tokens; build the file anew"
    )
    prefix.with_name("data.mask").unlink()
    described = prefix.with_name("data.json").read_text()
    prefix.with_name("data.json").write_text(described.replace(": 9", ": 10"))
    assert error_of(prefix) == (
        "PREFIX.json: speaks of 10 tokens in 3 documents, the index of 9 in 3; build the file anew"
    )
    prefix.with_name("data.json").write_text("{")
    assert error_of(prefix).startswith("PREFIX.json: cannot be read (")


def test_any_changed_index_is_read_or_is_a_data_error(prefix):
    """Nothing but DataError, and nothing is allocated that the size of the file does not warrant:
    the counts in it may claim 2^64 entries."""
    good = np.frombuffer(prefix.with_name("data.idx").read_bytes(), np.uint8)
    random = np.random.default_rng(7)
    num_read = 0
    for _ in range(20_000):
        index = good.copy()
        at = random.integers(len(index), size=random.integers(1, 4))
        index[at] = random.integers(256, size=len(at))
        if random.random() < 0.2:
            index = np.resize(index, random.integers(150))
        try:
            starts, _ = parse_index(index, prefix)
        except DataError:
            continue
        assert 2 <= len(starts) <= 4
        num_read += 1
    assert 0 < num_read < 2000


@settings(max_examples=300)
@given(st.binary(max_size=120), st.binary(max_size=30))
def test_any_index_opens_or_is_a_data_error(tmp_path_factory, tail, ids):
    path = tmp_path_factory.getbasetemp() / "any"
    path.with_name("any.bin").write_bytes(ids)
    for index in (tail, b"MMIDIDX\0\0" + struct.pack("<QB", 1, 1) + tail):
        path.with_name("any.idx").write_bytes(index)
        try:
            file = TokenFile.open(path)
        except DataError:
            continue
        assert file.num_tokens == len(ids)


def test_an_id_outside_the_vocabulary_is_named_with_its_byte(tmp_path):
    write(tmp_path / "a", documents([[0] * 5000 + [70000]]), Vocabulary("t", 100_000))
    file = TokenFile.open(tmp_path / "a")
    file.check_ids(70001)
    for num_pages in (None, 64):
        with pytest.raises(DataError) as caught:
            file.check_ids(70000, num_pages=num_pages)
        assert str(caught.value) == (
            f"{tmp_path}/a.bin: token 70000 at byte 20000, the vocabulary has ids 0 to 69999; "
            "build the file with the model's tokenizer"
        )


def test_an_id_outside_the_vocabulary_is_not_written(tmp_path):
    for ids in ([1, 256], [-1]):
        with pytest.raises(
            DataError, match=r"document 1 has ids .* vocabulary of bytes ends at 255"
        ):
            write(tmp_path / "a", documents([[1], ids]), Vocabulary("bytes", 256))
    assert list(tmp_path.iterdir()) == []


def test_changed_content_is_found_by_its_checksum(prefix):
    file = TokenFile.open(prefix)
    file.check_content()
    prefix.with_name("data.bin").write_bytes(bytes(9))
    with pytest.raises(DataError, match=r"data.bin: sha256 differs \(want .*, got .*\)"):
        TokenFile.open(prefix).check_content()


def test_a_file_that_is_cut_short_while_open_is_an_error_and_not_the_end(prefix):
    file = TokenFile.open(prefix)
    file.check_unchanged()
    os.truncate(prefix.with_name("data.bin"), 4)
    with pytest.raises(DataError, match=r"data\.bin: 4 bytes, 9 when it was opened"):
        file.check_unchanged()


def test_a_file_that_is_replaced_while_open_is_still_the_old_one(prefix):
    file = TokenFile.open(prefix)
    write(prefix, documents([[7, 7]]), Vocabulary("bytes", 256), if_exists="replace")
    file.check_unchanged()
    assert file.tokens.tolist() == list(range(1, 10))
    assert TokenFile.open(prefix).tokens.tolist() == [7, 7]


def test_an_existing_file_is_kept_unless_told_otherwise(prefix):
    before = prefix.with_name("data.bin").read_bytes()
    with pytest.raises(DataError, match=r"data\.idx exists; remove it or choose another prefix"):
        write(prefix, documents([[7]]), Vocabulary("bytes", 256))
    write(prefix, documents([[7]]), Vocabulary("bytes", 256), if_exists="keep")
    assert prefix.with_name("data.bin").read_bytes() == before


def test_a_failed_write_leaves_nothing_and_harms_nothing(prefix):
    def breaks():
        yield Document(np.arange(5))
        raise RuntimeError("the tokenizer broke")

    before = {path: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(RuntimeError, match="broke"):
        write(prefix, breaks(), Vocabulary("bytes", 256), if_exists="replace")
    with pytest.raises(DataError, match="no document has a token"):
        write(prefix, documents([[], []]), Vocabulary("bytes", 256), if_exists="replace")
    assert {path: path.read_bytes() for path in prefix.parent.iterdir()} == before


def _write_with_little_space(rank, prefix):
    """In a process of its own: the limit on file sizes cannot be raised again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    with pytest.raises(DataError) as caught:
        write(prefix, documents([[1] * 100_000]), Vocabulary("bytes", 256))
    return str(caught.value)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, run_ranks):
    (text,) = run_ranks(1, _write_with_little_space, tmp_path / "a")
    assert text == f"{tmp_path}/a: cannot be written (File too large)"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/a: cannot be written \((File exists|Not a dir)"):
        write(tmp_path / "file" / "a", documents([[1]]), Vocabulary("bytes", 256))


def test_offsets_beyond_four_gigabytes_are_read(tmp_path):
    """A sparse file of 5 GB whose last document is the only one with anything in it."""
    num_sequences, length = 5, 1 << 30
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(num_sequences * length)
        file.seek(num_sequences * length - 3)
        file.write(b"\1\2\3")
    starts = np.arange(num_sequences, dtype=np.int64) * length
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, num_sequences, num_sequences + 1)
    index += np.full(num_sequences, length, "<i4").tobytes() + starts.astype("<i8").tobytes()
    index += np.arange(num_sequences + 1, dtype="<i8").tobytes()
    (tmp_path / "big.idx").write_bytes(index)
    file = TokenFile.open(tmp_path / "big")
    assert file.num_tokens == 5 << 30
    assert file.tokens[-4:].tolist() == [0, 1, 2, 3]


def test_the_fingerprint_tells_files_apart(prefix, tmp_path):
    write(tmp_path / "same", documents(DOCUMENTS), Vocabulary("bytes", 256))
    write(
        tmp_path / "other", documents([[1, 2, 3], [4, 5], [6, 7, 8, 9]]), Vocabulary("bytes", 256)
    )
    first, same, other = (
        TokenFile.open(p) for p in (prefix, tmp_path / "same", tmp_path / "other")
    )
    assert first.fingerprint == same.fingerprint != other.fingerprint
