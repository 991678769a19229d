"""Codes of 2, 3, 4 or 8 bits in words of 32: a row's codes one after the other, from the lowest bit up.

A code of three bits may begin in one word and end in the next. This is how GPTQ and compressed-tensors have them.
"""

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK_CODES = 1 << 22  # unpacked at once; each takes four bytes while that is done


def words_for(codes: int, bits: int) -> int:
    """How many words hold so many codes."""
    return -(-codes * bits // 32)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes `[rows, n]` to int32 words `[rows, words_for(n, bits)]`; what is left of the last word is zero."""
    rows, count = codes.shape
    size = words_for(count, bits) * 4
    padded = np.zeros((rows, -(-size // bits) * 8), np.uint8)
    padded[:, :count] = codes.numpy()
    return torch.from_numpy(np.ascontiguousarray(_bytes(padded, bits)[:, :size]).view("<i4"))


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 words `[rows, ...]` to the first `count` uint8 codes of each row, `[rows, count]`."""
    packed = np.ascontiguousarray(words.numpy()).view(np.uint8)
    if bits == 8:
        return torch.from_numpy(packed[:, :count].copy())
    codes = np.empty((len(packed), count), np.uint8)
    step = max(1, CHUNK_CODES // max(count, 1))
    for start in range(0, len(packed), step):
        codes[start : start + step] = _codes(packed[start : start + step], bits)[:, :count]
    return torch.from_numpy(codes)


# Eight codes always fill `bits` whole bytes.


def _bytes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Rows of codes, a multiple of eight, to rows of bytes."""
    if bits == 8:
        return codes
    eights = np.zeros((*codes.shape[:1], codes.shape[1] // 8), np.uint32)
    for place in range(8):
        eights |= codes[:, place::8].astype(np.uint32) << np.uint32(place * bits)
    octets = eights[..., None].view(np.uint8)
    return np.ascontiguousarray(octets[..., :bits]).reshape(len(codes), -1)


def _codes(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Rows of bytes to rows of all codes that are whole in them, and some of zeros after these."""
    missing = -packed.shape[1] % bits
    octets = np.pad(packed, ((0, 0), (0, missing))).reshape(len(packed), -1, bits)
    eights = np.zeros(octets.shape[:2], np.uint32)
    for place in range(bits):
        eights |= octets[..., place].astype(np.uint32) << np.uint32(8 * place)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint32)
    codes = (eights[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(len(packed), -1)
