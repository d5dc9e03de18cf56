"""Text files, and the tokens that are made of them."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.data import text_files
from prunex_mpi.data.request import Request
from prunex_mpi.data.text_files import (
    UNKNOWN,
    Tokenizer,
    decode,
    find_text_files,
    map_text,
    prepare,
    read_text_data,
    split_files,
)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def asked(place: Path | str, tokenizer: Path | str = "bytes", **ways: object) -> Request:
    return Request(dataset="text", data_dir=str(place), tokenizer=str(tokenizer), **ways)


def written(folder: Path, text: str) -> Path:
    (folder / "text").write_text(text)
    return folder / "text"


def write_all(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def all_tokens(data_dir: Path | str, tokenizer: str = "bytes") -> list[int]:
    tokens = read_text_data(asked(data_dir, tokenizer)).tokens
    return tokens.rows([0], len(tokens))[0].tolist()


def tokenizer_file(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["?"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["ab ab cd\n"], trainer)
    made.save(str(path))
    return path


def test_the_files_of_a_folder_come_in_the_order_of_their_paths(tmp_path):
    texts = {"b.txt": "B", "a/z.md": "Z", ".hidden": "H", "a/empty": ""}
    folder = write_all(tmp_path / "texts", texts)
    found = [path.relative_to(folder).as_posix() for path in find_text_files(str(folder))]
    assert found == ["a/empty", "a/z.md", "b.txt"]
    assert bytes(all_tokens(folder)) == b"ZB"
    prepared = prepare(asked(folder))
    assert "3 files" in prepared.found and "a/empty to b.txt" in prepared.found


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        ("README test.txt train.txt valid.txt", "train.txt", "test.txt"),
        ("train-0.txt train-1.txt val.txt", "train-0.txt train-1.txt", "val.txt"),
        ("wiki.test.raw wiki.train.raw", "wiki.train.raw", "wiki.test.raw"),
        ("test/a train/b train/test.txt train0", "train/b train/test.txt train0", "test/a"),
        ("Test/a Train/b", "Train/b", "Test/a"),
        ("training.txt test.txt", None, None),
        ("a/train.txt a/test.txt", None, None),
        ("train_test.txt train.txt", None, None),
        ("train.txt", None, None),
    ],
)
def test_names_tell_what_is_to_test_on(tmp_path, names, train, test):
    folder = write_all(tmp_path / "texts", dict.fromkeys(names.split(), "text"))
    parts = split_files(str(folder), find_text_files(str(folder)))
    found = [" ".join(path.relative_to(folder).as_posix() for path in part) for part in parts]
    assert found == ([" ".join(sorted(names.split()))] if train is None else [train, test])


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "file"])
def test_what_is_to_test_on_begins_with_its_files(tmp_path, tokenizer):
    texts = {"notes": "no", "test.txt": "cdÄ\n", "train.txt": "ab Ä cd\n"}
    folder = write_all(tmp_path / "texts", texts)
    if tokenizer == "file":
        tokenizer = str(tokenizer_file(tmp_path / "tokenizer.json"))
    prepared = map_text(json.loads(json.dumps(asdict(prepare(asked(folder, tokenizer))))))
    tokens = prepared.tokens
    begin = prepared.begin
    parts = [tokens.rows([0], begin)[0], tokens.rows([begin], len(tokens) - begin)[0]]
    assert [decode(prepared.tokenizer, part.tolist()) for part in parts] == [
        texts["train.txt"],
        texts["test.txt"],
    ]
    assert prepared.test_bytes == 5
    assert "train on train.txt, test on test.txt, 14 bytes" in prepared.found
    assert prepared.told and prepared.lacking == "not read: notes"
    joined = prepare(asked(written(tmp_path, texts["train.txt"] + texts["test.txt"]), tokenizer))
    assert joined.digest != prepared.digest


def test_no_folder_of_text_is_left_out_in_silence(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    (folder / "inside").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "inside")
    with pytest.raises(UserError, match="texts/link' is a link"):
        find_text_files(str(folder))
    (folder / "link").unlink()
    monkeypatch.setattr(os, "scandir", Mock(side_effect=PermissionError(13, "Denied", "inside")))
    with pytest.raises(UserError, match="cannot read folder inside: Denied"):
        find_text_files(str(folder))


def test_characters_are_numbered_in_order_and_their_file_is_gone_once_mapped(tmp_path, scratch):
    file = written(tmp_path, "caÄ𝄞a" * 2)
    text = read_text_data(asked(file, "chars"))
    assert text.tokenizer.characters == f"acÄ{UNKNOWN}𝄞" and text.tokenizer.size == 5
    assert text.tokens.rows([0], 5).tolist() == [[1, 0, 2, 4, 0]]
    assert decode(text.tokenizer, [4, 1]) == "𝄞c"
    assert not list(scratch.iterdir())


def test_pieces_do_not_change_the_characters(tmp_path, monkeypatch):
    file = tmp_path / "text"
    text = "".join(f"line {i} Ä𝄞\n" for i in range(40)) + "x" * 50
    file.write_text(text)
    monkeypatch.setattr(text_files, "PIECE_BYTES", 7)
    found = read_text_data(asked(file, "chars"))
    numbers = found.tokens.rows([0], len(text))[0]
    assert decode(found.tokenizer, numbers) == text


def test_a_vocabulary_above_256_takes_16_bits(tmp_path):
    file = tmp_path / "text"
    text = "".join(map(chr, range(1000, 1300)))
    file.write_text(text * 2)
    assert prepare(asked(file, "chars")).type == "uint16"
    assert all_tokens(file, "chars") == [*range(300)] * 2


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "file"])
def test_bytes_per_token_are_those_of_the_part_to_test_on(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(text_files, "PIECE_BYTES", 64)
    file = written(tmp_path, "ab cd\n" * 300 + "字" * 250)
    if tokenizer == "file":
        tokenizer = str(tokenizer_file(tmp_path / "tokenizer.json"))
    text = read_text_data(asked(file, tokenizer))
    # Those that a tokenizer was not trained on are three tokens of a byte each.
    assert text.bytes_per_token == pytest.approx(3 if tokenizer == "chars" else 1, abs=0.02)
    assert text.begin == len(text.tokens) * 9 // 10


def test_text_of_which_a_tokenizer_makes_nothing_is_refused(tmp_path, scratch):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="makes no tokens of the text") as caught:
        prepare(asked(written(tmp_path, "ÄÖ"), tmp_path / "tokenizer.json"))
    assert caught.value.exit_code == UNREADABLE and not list(scratch.iterdir())


def test_lost_and_unknown_characters_of_all_pieces_are_counted(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(text_files, "PIECE_BYTES", 4)
    file = written(tmp_path, "aU\n" + "ab\n" * 10 + "UK\n" + "ab\n" * 10)
    # What a model without an unknown token does not know vanishes.
    for unknown in ("UNK", None):
        vocabulary = {"a": 0, "b": 1, "\n": 2, "UNK": 3}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=unknown))
        made.decoder = tokenizers.decoders.Fuse()
        made.save(str(tmp_path / "tokenizer.json"))
        text = read_text_data(asked(file, tmp_path / "tokenizer.json"))
        assert text.lacking == "the tokenizer loses 3 characters: 'U' (2), 'K' (1)"
    file.write_text("ab\n" * 10)
    assert not read_text_data(asked(file, tmp_path / "tokenizer.json")).lacking


def test_every_python_has_text():
    text = read_text_data(asked(""))
    assert len(text.tokens) > 300_000 and text.bytes_per_token == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"good \xff bad", "is not UTF-8 (byte 5)"),
        (b"cut short \xc3", "is not UTF-8 (byte 10)"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_bad_text_is_refused(tmp_path, scratch, content, says, tokenizer):
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        prepare(asked(file, tokenizer))
    assert says in str(caught.value) and caught.value.exit_code == UNREADABLE
    assert not list(scratch.iterdir())


def test_the_place_of_a_bad_byte_counts_from_the_beginning_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE_BYTES", 4)
    file = tmp_path / "text"
    file.write_bytes("abcÄ".encode() * 5 + b"\xe2\x82x")
    with pytest.raises(UserError, match=r"byte 25\)"):
        prepare(asked(file))


def test_what_is_missing_or_no_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no text in"):
        prepare(asked(tmp_path / "nowhere"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="holds no file"):
        prepare(asked(tmp_path / "folder"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="cannot read"):
        prepare(asked(tmp_path / "pipe"))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    file = written(tmp_path, "some text")
    with pytest.raises(UserError, match="is no tokenizer"):
        prepare(asked(file, file))
    with pytest.raises(UserError, match="give bytes, chars, or a tokenizer"):
        prepare(asked(file, tmp_path / "nowhere.json"))


def test_characters_beyond_the_part_to_train_on_are_one_token_and_told_of(tmp_path):
    """Of one file the last tenth is to test on; names of files may tell as well."""
    alone = written(tmp_path, "ab" * 9 + "xb")
    folder = write_all(tmp_path / "texts", {"train": "ab" * 9, "test": "xb"})
    for place in (alone, folder):
        text = read_text_data(asked(place, "chars"))
        assert text.tokenizer.characters == f"ab{UNKNOWN}"
        assert text.tokens.rows([16], 4).tolist() == [[0, 1, 2, 1]]
        assert text.lacking == "the tokenizer loses 1 characters: 'x' (1)"
    trained = prepare(asked(folder, "chars", test_samples=None))
    assert trained.tokenizer == text.tokenizer and not trained.lacking
    assert decode(text.tokenizer, [0, 2]) == f"a{UNKNOWN}"


def test_a_vocabulary_that_is_known_is_kept_and_may_know_no_others(tmp_path):
    file = written(tmp_path, "ba")
    known = Tokenizer("chars", 3, "abc")
    assert read_text_data(asked(file, "chars"), known).tokens.rows([0], 2).tolist() == [[1, 0]]
    file.write_text("abx")
    with pytest.raises(UserError, match=r"'x' is beyond the vocabulary of 3 characters"):
        prepare(asked(file, "chars"), known)


def test_no_room_for_tokens_is_one_line(tmp_path, monkeypatch):
    file = written(tmp_path, "abc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="TMPDIR"):
        prepare(asked(file, "chars"))


def test_texts_differ_by_their_digest(tmp_path):
    digests = set()
    for content, tokenizer in (("abc", "bytes"), ("abd", "bytes"), ("abc", "chars")):
        (tmp_path / "text").write_text(content)
        digests.add(prepare(asked(tmp_path / "text", tokenizer)).digest)
    assert len(digests) == 3
