"""The dtypes in which keys, values, results and gradients are sent, and how they are encoded.

Keys and values, and outputs of attention, may be sent in 8 bits, with an fp32 scale s for each row
and head. s is the largest absolute value in the row divided by the largest code. An element x
becomes the code nearest to x / s. Codes are integers, or e4m3 floats with 4 exponent bits and 3
mantissa bits (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3). The table
shows errors before the decoded element is rounded to its dtype:

| code | largest code | largest error of an element |
|---|---|---|
| int8 | 127 | s / 2 |
| float8_e4m3fn | 448 | abs(x) / 16, or s / 1024 for elements below s / 64 |

e4m3 is more accurate than int8 for elements below 1/16 of the largest element of their row, and
int8 is more accurate for larger elements. e4m3 is therefore better for rows with outliers. A row
with an infinite value or a NaN is decoded to NaN.

Contributions to gradients may be sent in bf16. A rank computes its contribution in the
accumulator's dtype and rounds it once, before sending it. The rank that holds the row adds the
contributions in the accumulator's dtype, and does not round its own contribution. bf16 has 8
significant bits, so rounding changes an element by at most 1/256 of its absolute value (Higham,
"Accuracy and Stability of Numerical Algorithms", 2002, theorem 2.2). The additional error of a
gradient is therefore at most 1/256 of the sum of the absolute values of its rounded contributions.

D is the head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.core.arguments import shown
from seqpar.core.device_tables import is_on_cuda
from seqpar.softmax.wire.row_messages import Rows

CODES = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""The dtypes of codes, each with its largest finite value."""

_SCALE_BYTES = 4


def check_message_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in CODES):
        expected = " or ".join(map(str, (None, *CODES)))
        raise ValueError(f"message_dtype must be {expected}, got {shown(dtype)}")


def check_digits(message_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    if message_dtype is not None and dtype == torch.float64:
        raise ValueError("message_dtype must be None with fp64, whose digits 8 bits would lose")


def encode(x: Tensor, dims: Sequence[int], code: torch.dtype) -> Tensor:
    """Encode rows x (…, ΣD) in 8 bits.

    Args:
        x: one or more tensors, joined along their last dimension, the head dim.
        dims: the head dim of each tensor in x. Each tensor has a separate scale per row.
        code: the dtype of the codes, one of `CODES`.

    Returns:
        (…, ΣD + 4·number of tensors) as int8. The codes come first. The scales follow as bytes.
    """
    parts, limit = x.split_with_sizes(list(dims), -1), CODES[code]
    largest = torch.stack([part.abs().amax(-1) for part in parts], -1)
    scales = largest.float() / limit
    divisors = torch.where(scales == 0, 1, scales)[..., None]

    def codes(part: Tensor, divisor: Tensor) -> Tensor:
        quotient = part / divisor
        if code == torch.int8:
            quotient.round_()
        # A quotient can exceed the limit if a scale is subnormal and was rounded down. int8 would
        # then wrap around, and some versions of torch cast 465 to NaN in e4m3.
        return quotient.clamp_(-limit, limit).to(code).view(torch.int8)

    parts_as_bytes = [codes(part, divisors[..., i, :]) for i, part in enumerate(parts)]
    return torch.cat([*parts_as_bytes, scales.view(torch.int8)], -1)


def decode(
    message: Tensor, dims: Sequence[int], code: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """Decode a message from `encode`. Return the tensors (…, D) of the message, in `dtype`."""
    *codes, scales = message.split_with_sizes([*dims, _SCALE_BYTES * len(dims)], -1)
    scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return [
        x.view(code).to(torch.float32).mul_(scales[..., i : i + 1]).to(dtype)
        for i, x in enumerate(codes)
    ]


def encode_rows(
    parts: Sequence[Tensor], rows: Rows | None, code: torch.dtype, message: Tensor | None = None
) -> Tensor:
    """Encode some rows of tensors (T, B, H, D) in 8 bits. The result has the same bits as in
    `encode`.

    On a GPU, one kernel encodes up to two tensors.

    Args:
        parts: the tensors. The result joins them along D.
        rows: the rows to encode, or None for all rows.
        code: the dtype of the codes, one of `CODES`.
        message: a tensor to which the result is written, or None for a new tensor.

    Returns:
        (n, B, H, ΣD + 4·number of tensors) as int8, for n encoded rows.
    """
    dims = [part.shape[3] for part in parts]
    if not is_on_cuda(parts[0]):
        x = torch.cat(list(parts), -1) if rows is None else rows.pack(*parts)
        encoded = encode(x, dims, code)
        return encoded if message is None else message.copy_(encoded)
    from seqpar.kernels import flash_attention as kernels  # imports Triton

    chosen = slice(None) if rows is None else rows.local(parts[0].device)
    index = None if isinstance(chosen, slice) else chosen
    by_batch = [(x[chosen] if index is None else x).transpose(0, 1) for x in parts]
    count = by_batch[0].shape[1] if index is None else index.shape[0]
    if message is None:
        shape = count, *parts[0].shape[1:3], encoded_width(dims)
        message = parts[0].new_empty(shape, dtype=torch.int8)
    kernels.encode_rows(by_batch, index, code, message)
    return message


def decode_rows(
    message: Tensor, dims: Sequence[int], code: torch.dtype, dtype: torch.dtype
) -> list[Tensor]:
    """Decode a message from `encode_rows`. Return its contiguous tensors (n, B, H, D), in `dtype`.

    On a GPU, one kernel decodes up to two tensors.
    """
    if not is_on_cuda(message):
        return decode(message, dims, code, dtype)
    from seqpar.kernels import flash_attention as kernels  # imports Triton

    parts = [message.new_empty((*message.shape[:3], dim), dtype=dtype) for dim in dims]
    kernels.decode_rows(message, code, parts)
    return parts


def encoded_width(dims: Sequence[int]) -> int:
    """Return how many bytes `encode` needs for one row and head.

    `dims` are the head dims of the encoded tensors.
    """
    return sum(dims) + _SCALE_BYTES * len(dims)


def check_gradient_dtype(gradient_dtype: torch.dtype | None) -> None:
    if gradient_dtype is not None and gradient_dtype is not torch.bfloat16:
        expected = "None or torch.bfloat16"
        raise ValueError(f"gradient_dtype must be {expected}, got {shown(gradient_dtype)}")


def check_gradient_digits(gradient_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    if gradient_dtype is not None and dtype == torch.float64:
        raise ValueError("gradient_dtype must be None with fp64, whose digits bf16 would lose")
