"""What a block of each quantised type means, read off ``ggml-common.h`` and ``ggml-quants.c``.

Independent of the ``gguf`` library and of tunix. A block is some bytes that hold 32 or (K-quants)
256 numbers; functions take ``[blocks, bytes]`` and give ``[blocks, numbers]`` in float64.
"""

import numpy as np


def half(raw, start):
    """A little-endian float16 in each block, as a column."""
    return raw[:, start : start + 2].copy().view("<f2").astype(np.float64)


def nibbles(raw):
    """Low halves of all bytes, then high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=1).astype(np.float64)


def fifth_bits(raw):
    """Bit i of a 32-bit word belongs to number i."""
    word = raw.copy().view("<u4").astype(np.int64)
    return ((word >> np.arange(32)) & 1) * 16.0


def q4_0(raw):
    return half(raw, 0) * (nibbles(raw[:, 2:18]) - 8)


def q4_1(raw):
    return half(raw, 0) * nibbles(raw[:, 4:20]) + half(raw, 2)


def q5_0(raw):
    return half(raw, 0) * (nibbles(raw[:, 6:22]) + fifth_bits(raw[:, 2:6]) - 16)


def q5_1(raw):
    return half(raw, 0) * (nibbles(raw[:, 8:24]) + fifth_bits(raw[:, 4:8])) + half(raw, 2)


def q8_0(raw):
    return half(raw, 0) * raw[:, 2:34].copy().view(np.int8)


def scale_and_minimum(packed, j):
    """``get_scale_min_k4``: the 6-bit scale and minimum of group j of 8, in 12 bytes."""
    if j < 4:
        return packed[:, j] & 63, packed[:, j + 4] & 63
    high, low = packed[:, j - 4] >> 6, packed[:, j + 4] & 15
    return low | (high << 4), (packed[:, j + 4] >> 4) | ((packed[:, j] >> 6) << 4)


def q4_k(raw, high_bits=None, quants=16):
    d, minimum = half(raw, 0), half(raw, 2)
    groups = []
    for j in range(8):
        scale, offset = scale_and_minimum(raw[:, 4:16], j)
        byte = raw[:, quants + 32 * (j // 2) : quants + 32 * (j // 2) + 32]
        q = (byte >> 4 if j % 2 else byte & 15).astype(np.float64)
        if high_bits is not None:
            q += 16 * ((high_bits >> j) & 1)
        groups.append(d * scale[:, None] * q - minimum * offset[:, None])
    return np.concatenate(groups, axis=1)


def q5_k(raw):
    return q4_k(raw, high_bits=raw[:, 16:48], quants=48)


def q6_k(raw):
    low, high = raw[:, :128], raw[:, 128:192]
    scales, d = raw[:, 192:208].copy().view(np.int8).astype(np.float64), half(raw, 208)
    groups = []
    for j in range(8):  # 32 numbers each
        part, k = divmod(j, 4)
        byte = low[:, 64 * part + 32 * (k % 2) : 64 * part + 32 * (k % 2) + 32]
        byte = byte >> 4 if k >= 2 else byte & 15
        two = (high[:, 32 * part : 32 * part + 32] >> (2 * k)) & 3
        q = (byte | (two << 4)).astype(np.float64) - 32
        groups.append(d * np.repeat(scales[:, 2 * j : 2 * j + 2], 16, axis=1) * q)
    return np.concatenate(groups, axis=1)


def q2_k(raw):
    scales, quants = raw[:, :16], raw[:, 16:80]
    d, minimum = half(raw, 80), half(raw, 82)
    groups = []
    for j in range(16):  # 16 numbers each
        start = 32 * (j // 8) + 16 * (j % 2)
        q = (quants[:, start : start + 16] >> (2 * (j % 8 // 2))) & 3
        groups.append(d * (scales[:, j : j + 1] & 15) * q - minimum * (scales[:, j : j + 1] >> 4))
    return np.concatenate(groups, axis=1)


def q3_k(raw):
    mask, quants, packed, d = raw[:, :32], raw[:, 32:96], raw[:, 96:108], half(raw, 108)
    groups = []
    for j in range(16):
        low = packed[:, j] & 15 if j < 8 else packed[:, j - 8] >> 4
        scale = (low | (((packed[:, 8 + j % 4] >> (2 * (j // 4))) & 3) << 4)).astype(float) - 32
        start = 32 * (j // 8) + 16 * (j % 2)
        q = ((quants[:, start : start + 16] >> (2 * (j % 8 // 2))) & 3).astype(float)
        unset = 1 - ((mask[:, 16 * (j % 2) : 16 * (j % 2) + 16] >> (j // 2)) & 1).astype(float)
        groups.append(d * scale[:, None] * (q - 4 * unset))
    return np.concatenate(groups, axis=1)


BLOCKS = {
    "Q8_0": (34, [0], q8_0),
    "Q4_0": (18, [0], q4_0),
    "Q4_1": (20, [0, 2], q4_1),
    "Q5_0": (22, [0], q5_0),
    "Q5_1": (24, [0, 2], q5_1),
    "Q2_K": (84, [80, 82], q2_k),
    "Q3_K": (110, [108], q3_k),
    "Q4_K": (144, [0, 2], q4_k),
    "Q5_K": (176, [0, 2], q5_k),
    "Q6_K": (210, [208], q6_k),
}
"""Bytes of a block, where its float16 scales are, and what it means."""


def random_rows(kind, shape, seed):
    """Random blocks for a matrix: its bytes ``[rows, bytes]`` and its values ``shape``."""
    size, scales, meaning = BLOCKS[kind]
    random = np.random.default_rng(seed)
    count = shape[0] * shape[1] // (256 if kind.endswith("K") else 32)
    raw = random.integers(0, 256, (count, size), np.uint8)
    for start in scales:
        drawn = random.normal(0, 0.01, (count, 1)).astype("<f2")
        raw[:, start : start + 2] = drawn.view(np.uint8)
    return raw.reshape(shape[0], -1), meaning(raw).reshape(shape)
