"""Read text from files and write its tokens to one file: bytes, characters, or a tokenizer file's.

They are written once per machine, to a file in TMPDIR that all its ranks map. Once they have, the
file loses its name: nothing is left behind, and no later job meets what somebody else has put
there.

A text has a part to train on and one to test on: names of files tell which, or the last tenth of
the tokens is to test on, as in nanoGPT. It is read in pieces that end where a line does, at most
`PIECE_BYTES` long, the same ones for any number of ranks: tokens do not depend on who reads.
"""

import codecs
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from prunex_mpi.base.errors import FAILURE, UNREADABLE, UserError, listed, one_line, quote
from prunex_mpi.base.files import open_regular
from prunex_mpi.base.imports import require_packages
from prunex_mpi.data.request import Request

BYTES, CHARS = "bytes", "chars"
# Of ten parts of a text whose names don't tell, those to train on.
TRAINED, PARTS = 9, 10
# Names of the files to train on; of those to test on the first that there is.
TRAIN, TEST = "train", ("test", "val", "valid", "validation")
# The character that stands for those that the part to train on does not have.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# How what stands for the tokens of a file begins; its digest follows.
FILE_NAME = "tokenizer of SHA-256 "
PIECE_BYTES = 2**20
# Pieces that a tokenizer file's own threads get at a time.
PIECES_AT_ONCE = 16
ADVICE = "give --data-dir a file or a folder of text"
TEMPORARY = "prunex_mpi-tokens-"


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes numbers from 0 to `size` - 1.

    `name` is bytes, chars, or the path of a tokenizer file; `characters` are those of chars in the
    order of their tokens, `digest` is the SHA-256 of a file.
    """

    name: str
    size: int
    characters: str = ""
    digest: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What tells its tokens from those of others: all characters, or the digest of a file."""
        return tuple(self.characters) or (
            f"{FILE_NAME}{self.digest}" if self.digest else self.name,
        )


@dataclass(frozen=True)
class Tokens:
    """All tokens of a text, in memory or in a file that is mapped."""

    array: np.ndarray

    def __len__(self) -> int:
        return len(self.array)

    def rows(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each start on, int64 [starts, length]."""
        places = np.asarray(starts, dtype=np.int64)[:, None] + np.arange(length)
        return self.array[places].astype(np.int64)


@dataclass(frozen=True)
class Text:
    """A text of which all has been read once, by one rank of a machine.

    Its tokens, each of `type`, are in `file`, and in `tokens` once that is mapped. The text has
    `length` bytes; tokens from `begin` on are to test on, `test_bytes` of it. `digest` tells the
    text and its parts apart from others. `told` says whether names have told the parts, and
    `lacking` what is not in the tokens, "" for nothing.
    """

    file: str
    type: str
    tokenizer: Tokenizer
    length: int
    begin: int
    test_bytes: int
    digest: str
    told: bool
    found: str
    lacking: str
    tokens: Tokens | None = None

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a token, the mean over the part to test on, or over all where none is."""
        if self.begin == len(self.tokens):
            return self.length / len(self.tokens)
        return self.test_bytes / (len(self.tokens) - self.begin)


def map_text(facts: Mapping[str, Any]) -> Text:
    """Return a text of these facts, as `asdict` gives them, mapped. Raises UserError."""
    text = Text(**{**facts, "tokenizer": Tokenizer(**facts["tokenizer"])})
    try:
        array = np.memmap(text.file, dtype=text.type, mode="r")
    except OSError as error:
        raise UserError(f"cannot map {text.file}: {error.strerror}", UNREADABLE) from None
    return replace(text, tokens=Tokens(np.asarray(array)))


def read_text_data(request: Request, known: Tokenizer | None = None) -> Text:
    """Prepare and map a text for this process alone. Raises UserError as `prepare` does."""
    prepared = prepare(request, known)
    try:
        return map_text(asdict(prepared))
    finally:
        forget(prepared.file)


def find_text_files(data_dir: str) -> list[Path]:
    """Return the file, or all visible files of a folder and those in it, in order of their paths.

    Raises UserError (UNREADABLE) where there is none.
    """
    path = Path(data_dir)
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"there is no text in {quote(data_dir, 250)}: {ADVICE}", UNREADABLE)
        return [path]

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"cannot read folder {error.filename}: {error.strerror}", UNREADABLE)

    found = []
    for folder, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if links := [name for name in folders if os.path.islink(Path(folder, name))]:
            raise UserError(
                f"folder {quote(str(Path(folder, links[0])), 250)} is a link, which is not "
                "followed: put the files there, or give the folder that it names",
                UNREADABLE,
            )
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    if not found:
        raise UserError(f"folder {quote(data_dir, 250)} holds no file: {ADVICE}", UNREADABLE)
    return sorted(found)


def split_files(data_dir: str, files: list[Path]) -> list[list[Path]]:
    """Return the files to train on and those to test on, or all as one where names don't tell.

    What tells is the name of a folder at the top, or a word in the name of a file there.
    """
    if len(files) < 2:
        return [files]
    by_word: dict[str, list[Path]] = {}
    for path in files:
        top, *inside = path.relative_to(data_dir).parts
        words = {top.lower()} if inside else {*re.split("[^a-z]+", top.lower())}
        # A name that has several tells nothing.
        if len(named := words & {TRAIN, *TEST}) == 1:
            by_word.setdefault(named.pop(), []).append(path)
    test = next((by_word[word] for word in TEST if word in by_word), [])
    return [by_word[TRAIN], test] if test and TRAIN in by_word else [files]


def embedded_text() -> bytes:
    """Return text that comes with every Python: its language reference, by topic (466 kB)."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "this Python comes without pydoc_data, the embedded text: give --data-dir"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def pieces_of(
    files: Sequence[Path], look: Callable[[bytes], None] = lambda data: None
) -> Iterator[str]:
    """Yield all text, the embedded one without files, in pieces; show all bytes to `look`.

    Raises UserError (UNREADABLE) for what can't be read or is no UTF-8.
    """
    if not files:
        text = embedded_text()
        look(text)
        yield from _cut(text.decode())
        return
    for path in files:
        try:
            with open_regular(path) as file:
                yield from _pieces_of_file(file, path, look)
        except OSError as error:
            raise UserError(
                f"cannot read {quote(str(path), 250)}: {error.strerror}", UNREADABLE
            ) from None


def _pieces_of_file(file: Any, path: Path, look: Callable[[bytes], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done, text = 0, ""
    while True:
        data = file.read(PIECE_BYTES)
        look(data)
        pending = len(decoder.getstate()[0])
        try:
            text += decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = done - pending + error.start
            raise UserError(
                f"{quote(str(path), 250)} is not UTF-8 (byte {place:,}): convert it, or take it "
                "out of the folder",
                UNREADABLE,
            ) from None
        done += len(data)
        if not data:
            break
        *whole, text = _cut(text)
        yield from whole
    if text:
        yield text


def _cut(text: str) -> Iterator[str]:
    """Yield `text` in pieces of PIECE_BYTES characters at most, each up to the end of a line."""
    first = 0
    while len(text) - first > PIECE_BYTES:
        last = text.rfind("\n", first, first + PIECE_BYTES) + 1
        last = last or first + PIECE_BYTES
        yield text[first:last]
        first = last
    yield text[first:]


@dataclass
class _Look:
    """What all bytes of a text come to."""

    length: int = 0
    crc32: int = 0

    def __call__(self, data: bytes) -> None:
        self.length += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)


def prepare(request: Request, known: Tokenizer | None = None) -> Text:
    """Read a text, the embedded one without a place, and write its tokens to a file, not mapped.

    With chars the vocabulary is that of the part to train on, or of a tokenizer that is `known`.
    Files whose names say that they are to test on are opened where test windows are asked for.
    Raises UserError (UNREADABLE) for text that is missing, empty or no UTF-8, UserError (USAGE) for
    a tokenizer that can't be used.
    """
    data_dir, name = request.data_dir, request.tokenizer
    files = find_text_files(data_dir) if data_dir else []
    parts = split_files(data_dir, files)
    told = len(parts) > 1
    if told and request.test_samples is None:
        files = parts[0]
        parts = [files]
    read = [path for part in parts for path in part]
    lost: Counter[str] = Counter()
    place: Callable[[str, int], int] | None = None
    if name == BYTES:
        tokenizer = Tokenizer(BYTES, 256)
        encode = partial(map, lambda piece: np.frombuffer(piece.encode(), dtype=np.uint8))
    elif name == CHARS:
        tokenizer = known or _of_characters([pieces_of(part) for part in parts])
        encode = partial(map, lambda piece: encode_characters(piece, tokenizer.characters, lost))
        place = lambda piece, number: number  # noqa: E731
    else:
        tokenizer, encoder = read_tokenizer(name)
        encode, place = partial(_encoded, encoder, lost), partial(_place_of_token, encoder)
    looks = [_Look() for _ in parts]
    texts = (encode(pieces_of(part, look)) for part, look in zip(parts, looks, strict=True))
    kind = np.min_scalar_type(tokenizer.size - 1).name
    path, counts = _write(texts, kind)
    length, count = sum(look.length for look in looks), sum(map(sum, counts))
    try:
        if not length:
            raise UserError(f"{quote(data_dir, 250)} is empty: {ADVICE}", UNREADABLE)
        if not count:
            raise UserError(
                f"--tokenizer {quote(name, 250)} makes no tokens of the text: give one that knows "
                "its characters",
                UNREADABLE,
            )
        if told:
            begin = sum(counts[0])
            test_bytes = sum(look.length for look in looks[1:])
        else:
            begin = count * TRAINED // PARTS
            test_bytes = count - begin
            if place:
                test_bytes = _bytes_from(begin, pieces_of(read), counts[0], place)
    except BaseException:
        forget(path)
        raise
    seen = [number for look in looks for number in (look.length, look.crc32)]
    # Wherever the tokenizer's file lies.
    by = replace(tokenizer, name="") if tokenizer.digest else tokenizer
    digest = sha256(repr((by, *seen)).encode()).hexdigest()
    rest = sorted({*files}.difference(*parts))
    lacking = [f"not read: {listed(str(path.relative_to(data_dir)) for path in rest)}"] * bool(rest)
    if lost:
        counted = listed(f"{one!r} ({count:,})" for one, count in lost.most_common())
        lacking += [f"the tokenizer loses {lost.total():,} characters: {counted}"]
    found = _found(data_dir, files, parts, length)
    sizes = length, begin, test_bytes
    return Text(path, kind, tokenizer, *sizes, digest, told, found, "; ".join(lacking))


def _bytes_from(
    begin: int, text: Iterable[str], counts: Iterable[int], place: Callable[[str, int], int]
) -> int:
    """Return the bytes of a text from token `begin` on.

    `counts` are the tokens of its pieces; `place` finds the character where one of a piece begins.
    """
    first, length = 0, 0
    for piece, count in zip(text, counts, strict=False):
        if begin <= first:
            length += len(piece.encode())
        elif begin < first + count:
            length += len(piece[place(piece, begin - first) :].encode())
        first += count
    return length


def _found(
    data_dir: str, files: Sequence[Path], parts: Sequence[Sequence[Path]], length: int
) -> str:
    if not files:
        return f"text: the language reference of this Python, {length:,} bytes"
    if len(files) == 1:
        return f"text: {files[0]}, {length:,} bytes"

    def span(part: Sequence[Path]) -> str:
        ends = dict.fromkeys(str(path.relative_to(data_dir)) for path in (part[0], part[-1]))
        return " to ".join(ends)

    spans, count = span(parts[0]), sum(map(len, parts))
    if len(parts) > 1:
        spans = f"train on {spans}, test on {span(parts[1])}"
    return f"text: {count:,} files in {data_dir}, {spans}, {length:,} bytes"


def forget(file: str) -> None:
    """Take away the name of a file, if it has one still; who has mapped the file keeps it."""
    with suppress(OSError):
        os.unlink(file)


def _write(parts: Iterable[Iterable[np.ndarray]], kind: str) -> tuple[str, list[list[int]]]:
    """Write tokens to a new file in TMPDIR that only this user can read.

    Return its path, and how many tokens each array of each part has.
    """
    path, complete = "", False
    counts: list[list[int]] = []
    try:
        # Made anew under a name that nobody can know before: no link leads elsewhere.
        descriptor, path = tempfile.mkstemp(prefix=TEMPORARY)
        with os.fdopen(descriptor, "wb") as file:
            for numbers in parts:
                counts.append([])
                for array in numbers:
                    file.write(array.astype(kind).tobytes())
                    counts[-1].append(len(array))
        complete = True
    except OSError as error:
        raise UserError(
            f"the tokens can't be written to {tempfile.gettempdir()} ({error.strerror}): name a "
            "folder with room for them in TMPDIR",
            FAILURE,
        ) from None
    finally:
        if path and not complete:
            forget(path)
    return path, counts


# --------------------------------------------------------------------------------------------------
# Tokenizers
# --------------------------------------------------------------------------------------------------


def _of_characters(parts: Sequence[Iterable[str]]) -> Tokenizer:
    """Return the tokenizer of all characters of the part to train on, and of one for all others."""
    first: dict[str, int] = {}  # where in the text each character is met first
    ends, done = [], 0
    for pieces in parts:
        for piece in pieces:
            first |= {one: done + piece.index(one) for one in {*piece} - first.keys()}
            done += len(piece)
        ends.append(done)
    begin = ends[0] if len(ends) > 1 else done * TRAINED // PARTS
    letters = {one for one, place in first.items() if place < begin}
    if done and len(letters) < 2:
        raise UserError("the text is one character over and over: give another one", UNREADABLE)
    characters = "".join(sorted({*letters, UNKNOWN}))
    return Tokenizer(CHARS, len(characters), characters)


def encode_characters(text: str, characters: str, lost: Counter[str]) -> np.ndarray:
    """Return the places of the characters of `text` in `characters`, which are sorted; int64 [n].

    Those that are not among them become UNKNOWN, and `lost` counts them. Raises UserError
    (UNREADABLE) where that is not among them either.
    """
    known, wanted = (np.frombuffer(t.encode("utf-32-le"), dtype="<u4") for t in (characters, text))
    places = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    odd = np.flatnonzero(known[places] != wanted)
    if len(odd):
        if UNKNOWN not in characters:
            raise UserError(
                f"character {text[odd[0]]!r} is beyond the vocabulary of {len(known):,} characters "
                "of the network, which knows none for others: give text of these alone",
                UNREADABLE,
            )
        lost.update(text[place] for place in odd)
        places[odd] = characters.index(UNKNOWN)
    return places


def read_tokenizer(path: str) -> tuple[Tokenizer, Any]:
    """Return a tokenizer file's description and what it makes; raise UserError where it can't."""
    require_packages("--tokenizer FILE", "text", "tokenizers")
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise UserError(
            f"--tokenizer {quote(path, 250)}: {error.strerror}; give bytes, chars, or a "
            "tokenizer.json",
            UNREADABLE,
        ) from None
    try:
        encoder = _parsed(data)
    # The package raises plain exceptions.
    except Exception as error:
        raise UserError(
            f"--tokenizer {quote(path, 250)} is no tokenizer.json of Hugging Face's tokenizers "
            f"({one_line(error)})",
            UNREADABLE,
        ) from None
    # Numbers need not be without gaps.
    size = 1 + max(encoder.get_vocab(with_added_tokens=True).values(), default=-1)
    return Tokenizer(path, size, digest=sha256(data).hexdigest()), encoder


@lru_cache(maxsize=1)
def _parsed(data: bytes) -> Any:
    """Return what a tokenizer file makes; a large one takes seconds, and callers read it again."""
    from tokenizers import Tokenizer as Encoder

    encoder = Encoder.from_str(data.decode())
    encoder.no_padding()
    encoder.no_truncation()
    return encoder


def _encoded(encoder: Any, lost: Counter[str], text: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the tokens of each piece; count in `lost` the characters that they don't give back."""
    model = json.loads(encoder.to_str())["model"]
    unknown = model.get("unk_id")
    if unknown is None and model.get("unk_token") is not None:
        unknown = encoder.token_to_id(model["unk_token"])
    pieces = iter(text)
    while batch := list(islice(pieces, PIECES_AT_ONCE)):
        encoded = [found.ids for found in encoder.encode_batch(batch, add_special_tokens=False)]
        # The name of the unknown token has characters that the text may lack.
        known = [[number for number in numbers if number != unknown] for numbers in encoded]
        decoded = encoder.decode_batch(known, skip_special_tokens=False)
        for piece, given in zip(batch, decoded, strict=True):
            if piece != given:
                lost += Counter(piece) - Counter(given)
        yield from (np.array(numbers, dtype=np.int64) for numbers in encoded)


def _place_of_token(encoder: Any, piece: str, number: int) -> int:
    """Return which character of a piece its token of this number begins at."""
    return encoder.encode(piece, add_special_tokens=False).offsets[number][0]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a short text. Raises UserError as `encode_characters` does."""
    if tokenizer.name == BYTES:
        return list(text.encode(errors="surrogateescape"))
    if tokenizer.name == CHARS:
        return encode_characters(text, tokenizer.characters, Counter()).tolist()
    return read_tokenizer(tokenizer.name)[1].encode(text, add_special_tokens=False).ids


def decode(tokenizer: Tokenizer, numbers: Sequence[int]) -> str:
    """Return the text of some tokens; what is no UTF-8 is shown as U+FFFD."""
    if tokenizer.name == BYTES:
        return bytes(numbers).decode(errors="replace")
    if tokenizer.name == CHARS:
        return "".join(tokenizer.characters[number] for number in numbers)
    return read_tokenizer(tokenizer.name)[1].decode(list(numbers))
