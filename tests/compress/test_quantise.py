"""Codes by blocks of 128 equal to numpy's, ternary codes, and numbers of few bits in bytes."""

import threading

import numpy as np
import pytest
import torch

from prunex_mpi.compress.quantise import (
    BLOCK,
    PAYLOADS,
    ROW,
    add_decoded_,
    decode_,
    encode_,
    integer_type,
    pack_,
    record_bytes,
    ternarise_,
    unpack_,
)

DTYPES = (torch.float32, torch.float64)
SCALED = ("int8", "int4", "int2")
LIMITS = {"int8": 127, "int4": 7}
# More than one tile, and a last one that is not full.
BLOCKS = 1100
TINY = np.float32(2.0**-126)


def noise(blocks: int = BLOCKS, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return Gaussian blocks of magnitudes between 1e-12 and 1e3."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(blocks, BLOCK, generator=generator, dtype=dtype)
    magnitudes = torch.rand(blocks, 1, generator=generator, dtype=dtype) * 15 - 12
    return (values * 10**magnitudes).flatten()


def encode(values: torch.Tensor, payload: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records, written over rubbish, and what rounding left over."""
    records = torch.full((len(values) // BLOCK, record_bytes(payload)), 0xA5, dtype=torch.uint8)
    rest = values.clone()
    encode_(rest, records, payload)
    return records, rest


def decode(records: torch.Tensor, payload: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((len(records) * BLOCK,), float("nan"), dtype=dtype)
    decode_(records, out, payload)
    return out


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even by the bits of float32, and return these as uint16."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray, dtype: type) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(dtype)


def scales_of(records: np.ndarray, dtype: type) -> np.ndarray:
    return from_bfloat16(np.ascontiguousarray(records[:, :2]).view("<u2"), dtype)


def int2_codes(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return 0 to 3 for what is nearest to -68, -20, 20 and 68 times the scale."""
    middle = scale * blocks.dtype.type(44)
    return np.where(blocks >= 0, 2 + (blocks >= middle), blocks >= -middle)


def expected_bytes(blocks: np.ndarray, payload: str, scale: np.ndarray) -> np.ndarray:
    """Return the bytes of each block after its scale, from the definition of the code."""
    kind = blocks.dtype.type
    if payload == "fp16":
        return np.clip(blocks, -65504, 65504).astype(np.float32).astype("<f2").view(np.uint8)
    if payload == "bf16":
        return to_bfloat16(blocks).view(np.uint8)
    if payload == "int2":
        first, second, third, fourth = np.moveaxis(
            int2_codes(blocks, scale).reshape(len(blocks), 32, 4), 2, 0
        )
        return (first + 4 * second + 16 * third + 64 * fourth).astype(np.uint8)
    codes = np.rint(blocks * (kind(1) / scale))
    if payload == "int4":
        codes = codes[:, :64] + 16 * codes[:, 64:]
    return codes.astype(np.int8).view(np.uint8)


def expected_scale(blocks: np.ndarray, payload: str) -> np.ndarray:
    kind = blocks.dtype.type
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scale = np.maximum(largest * kind(1 / LIMITS[payload]), TINY.astype(kind))
    return from_bfloat16(to_bfloat16(scale), kind)


def expected_values(records: np.ndarray, payload: str, kind: type) -> np.ndarray:
    """Decode in plain numpy, byte by byte."""
    codes = np.ascontiguousarray(records[:, 2:])
    scale = scales_of(records, kind) if payload in SCALED else None
    match payload:
        case "fp16":
            return records.view("<f2").astype(kind)
        case "bf16":
            return from_bfloat16(records.view("<u2"), kind)
        case "int8":
            return codes.view(np.int8).astype(kind) * scale
        case "int4":
            signed = codes.view(np.int8).astype(int)
            low = (signed + 8) % 16 - 8
            return np.hstack([low, (signed - low) // 16]).astype(kind) * scale
        case _:
            digits = np.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
            levels = np.array([-68, -20, 20, 68])[digits]
            return levels.reshape(len(records), BLOCK).astype(kind) * scale


def squares_left(values: torch.Tensor, payload: str = "int2") -> torch.Tensor:
    """Return per block the squared error as a share of the block's squares."""
    rest = encode(values, payload)[1].view(-1, BLOCK).double().square().sum(dim=1)
    return rest / values.view(-1, BLOCK).double().square().sum(dim=1)


def test_records_have_the_promised_sizes():
    sizes = {payload: record_bytes(payload) for payload in PAYLOADS}
    assert sizes == {"fp16": 256, "bf16": 256, "int8": 130, "int4": 66, "int2": 34}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_codes_and_values_are_those_of_numpy_to_the_last_bit(payload, dtype):
    values = noise(dtype=dtype)
    records, rest = encode(values, payload)
    blocks, written = values.view(-1, BLOCK).numpy(), records.numpy()
    kind = blocks.dtype.type
    scale, header = None, 0
    if payload in SCALED:
        header, scale = 2, scales_of(written, kind)
    if payload in LIMITS:
        assert np.array_equal(scale, expected_scale(blocks, payload))
    if payload == "int2":
        # The sum of squares may be added up in any order: half a step of bfloat16 and a little.
        rms = np.sqrt((blocks.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
        assert np.all(np.abs(scale / (0.0225 * rms) - 1) <= 2**-8 + 1e-6)
    assert np.array_equal(written[:, header:], expected_bytes(blocks, payload, scale))

    decoded = decode(records, payload, dtype)
    assert np.array_equal(decoded.view(-1, BLOCK).numpy(), expected_values(written, payload, kind))
    # Products of a code and a scale are exact, so that the rest is rounded once.
    assert torch.equal(rest, values - decoded)
    out = noise(dtype=dtype, seed=1)
    total = out + decoded
    add_decoded_(records, out, payload)
    assert torch.equal(out, total)


def sparse_blocks() -> torch.Tensor:
    """Return blocks in which 1 to 128 values are 1 and the others 0, next 1e-3, or just below 1."""
    ones = torch.tril(torch.ones(BLOCK, BLOCK))
    return torch.cat([ones, ones + 1e-3, 3 * ones + 1.4, ones - 0.5, 1e3 * ones - 1]).flatten()


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        (noise(), 0.2),
        (torch.distributions.Laplace(0.0, 1e-6).sample((BLOCKS * BLOCK,)), 0.5),
        (torch.distributions.StudentT(1.5).sample((BLOCKS * BLOCK,)), 0.95),
        (torch.eye(BLOCK).flatten() * -7e-9, 0.95),
        (sparse_blocks(), 0.95),
    ],
    ids=["gaussian", "laplace", "heavy tails", "one-hot", "sparse"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int2_always_takes_away_from_the_square(values, bound, dtype):
    left = squares_left(values.to(dtype))
    assert torch.all(left <= bound)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_any_range_of_records_decodes_to_the_same_bits(payload):
    records, _ = encode(noise(), payload)
    decoded = decode(records, payload)
    for start, stop in ((0, 1), (3, 4), (1, 1030), (1023, 1025), (BLOCKS - 1, BLOCKS), (5, 5)):
        part = decoded[start * BLOCK : stop * BLOCK]
        assert torch.equal(decode(records[start:stop], payload), part)
        # As they come in from the network.
        received = torch.frombuffer(
            bytearray(records[start:stop].numpy().tobytes()) or bytearray(1), dtype=torch.uint8
        )[: (stop - start) * record_bytes(payload)].view(-1, record_bytes(payload))
        assert torch.equal(decode(received, payload), part)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_zeros_stay_zeros(payload, dtype):
    values = noise(3, dtype)
    values[BLOCK : 2 * BLOCK] = 0
    records, rest = encode(values, payload)
    for found in (rest, decode(records, payload, dtype)):
        assert torch.all(found.view(-1, BLOCK)[1] == 0)
        assert torch.all(found.isfinite())


@pytest.mark.parametrize("size", [1e-30, 1e-37, 1e-42])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_very_small_values_are_sent_or_kept(payload, dtype, size):
    values = torch.randn(2 * BLOCK, generator=torch.Generator().manual_seed(4), dtype=dtype) * size
    records, rest = encode(values, payload)
    decoded = decode(records, payload, dtype)
    assert torch.all(decoded.isfinite())
    assert torch.equal(rest, values - decoded)
    assert torch.all(rest.abs() <= values.abs().max())
    if payload in LIMITS and size > 1e-36:
        assert torch.all(rest.abs() <= 0.51 * values.abs().max() / LIMITS[payload])
    if payload in ("fp16", "int2"):
        assert torch.equal(rest, values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_is_not_finite_shows_in_its_block_alone(payload, dtype, bad):
    values = noise(3, dtype)
    values[BLOCK + 77] = bad
    records, _ = encode(values, payload)
    decoded = decode(records, payload, dtype).view(-1, BLOCK)
    assert not decoded[1, 77].isfinite()
    assert torch.all(decoded[[0, 2]].isfinite())
    assert torch.equal(decoded[0], decode(encode(values[:BLOCK], payload)[0], payload, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp16_leaves_what_is_too_large_to_error_feedback(dtype):
    values = torch.full((BLOCK,), -1e6, dtype=dtype)
    values[1], values[2] = 65519.0, 7e4
    records, rest = encode(values, "fp16")
    decoded = decode(records, "fp16", dtype)
    assert decoded[:4].tolist() == [-65504.0, 65504.0, 65504.0, -65504.0]
    assert torch.equal(rest, values - decoded)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_is_a_vector_too(payload):
    records, rest = encode(torch.empty(0), payload)
    assert len(records) == len(rest) == len(decode(records, payload)) == 0
    add_decoded_(records, rest, payload)


@pytest.mark.parametrize("payload", SCALED)
def test_threads_do_not_disturb_each_other(payload):
    many = [encode(noise(seed=seed), payload)[0] for seed in range(4)]
    wanted = [decode(records, payload) for records in many]
    wrong = []

    def context(index: int) -> None:
        for _ in range(20):
            if not torch.equal(decode(many[index], payload), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=context, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_gpu_decodes_to_the_same_bits(payload, dtype):
    values = noise(dtype=dtype)
    records, _ = encode(values, payload)
    there = torch.empty_like(values, device="cuda")
    decode_(records.cuda(), there, payload)
    assert torch.equal(there.cpu(), decode(records, payload, dtype))
    rest, written = values.cuda(), torch.empty_like(records, device="cuda")
    encode_(rest, written, payload)
    assert torch.equal(rest.cpu(), values - decode(written.cpu(), payload, dtype))


def ternarise(values: torch.Tensor, scale: float, dtype=torch.int8) -> torch.Tensor:
    out = torch.full(values.shape, 99, dtype=dtype)
    spare = torch.empty(values.shape, dtype=torch.bool), torch.empty(values.shape, dtype=torch.bool)
    ternarise_(values, values.new_tensor(scale), torch.empty_like(values), spare, out)
    return out


@pytest.mark.parametrize(
    ("workers", "dtype"),
    [
        (1, torch.int8),
        (127, torch.int8),
        (128, torch.int16),
        (32_767, torch.int16),
        (32_768, torch.int32),
    ],
)
def test_sums_of_all_workers_fit(workers, dtype):
    assert integer_type(workers) == dtype
    assert workers <= torch.iinfo(dtype).max


@pytest.mark.parametrize("integers", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_over_many_draws_is_the_value(dtype, integers):
    torch.manual_seed(0)
    values = torch.tensor([-2.0, -0.7, -1e-3, 0.0, 0.3, 1.9], dtype=dtype)
    draws = 20_000
    many = ternarise(values.repeat(draws), 2.0, integers).view(draws, -1)
    assert many.dtype == integers
    assert set(many.flatten().tolist()) == {-1, 0, 1}
    assert torch.all(many * values.sign() >= 0)
    assert torch.all(many[:, 0] == -1)
    assert torch.all(many[:, 3] == 0)
    # Five standard errors of the mean of s b, b a Bernoulli variable with p = |g| / s.
    share = values.abs() / 2
    error = 5 * 2 * (share * (1 - share) / draws).sqrt()
    assert torch.all((2.0 * many.to(dtype).mean(dim=0) - values).abs() <= error)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "width"), [(1, ROW), (3, 5 * ROW), (2, 0)])
def test_what_is_packed_comes_back(bits, rows, width):
    generator = torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 1 << bits, (rows, width), generator=generator).to(torch.uint8)
    packed = torch.full((rows, width * bits // 8), 255, dtype=torch.uint8)
    pack_(numbers, bits, packed)
    found = torch.full_like(numbers, 255)
    unpack_(packed, bits, found)
    assert torch.equal(found, numbers)


def test_parts_of_a_row_share_bytes():
    packed = torch.empty(1, 2, dtype=torch.uint8)
    pack_(torch.tensor([[0, 1, 2, 3, 1, 0, 2, 2]], dtype=torch.uint8), 2, packed)
    # Bytes hold numbers 0, 2, 4, 6 and 1, 3, 5, 7, the first in the lowest bits.
    assert packed.tolist() == [[0 + 4 * 2 + 16 * 1 + 64 * 2, 1 + 4 * 3 + 16 * 0 + 64 * 2]]
