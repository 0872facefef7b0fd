"""Which bytes a tensor covers, and whether two tensors have any in common."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Region(NamedTuple):
    """The memory of a tensor."""

    storage: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size: int


def region_of(tensor: torch.Tensor) -> Region:
    """Describe the memory of a tensor."""
    try:
        storage = tensor.untyped_storage().data_ptr()
        return Region(storage, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())
    except (RuntimeError, NotImplementedError):
        return Region(0, 0, (), (), 1)


def overlaps(one: Region, other: Region) -> bool:
    """Tell whether two tensors share at least one byte."""
    if not one.storage or one.storage != other.storage or 0 in one.shape or 0 in other.shape:
        return False
    first, last = _span(one)
    begin, end = _span(other)
    if last <= begin or end <= first:
        return False
    if _is_dense(one) and _is_dense(other):
        return True
    low, high = min(first, begin), max(last, end)
    marks = torch.zeros(high - low, dtype=torch.bool)
    _bytes(marks, one, low).fill_(True)
    return bool(_bytes(marks, other, low).any())


def _span(region: Region) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(region.shape, region.stride, strict=True))
    return region.start, region.start + (reach + 1) * region.size


def _is_dense(region: Region) -> bool:
    first, last = _span(region)
    return last - first == math.prod(region.shape) * region.size


def _bytes(marks: torch.Tensor, region: Region, low: int) -> torch.Tensor:
    strides = [stride * region.size for stride in region.stride]
    return marks.as_strided((*region.shape, region.size), (*strides, 1), region.start - low)
