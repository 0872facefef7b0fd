"""Which value is the most frequent one: on the CPU counted in the way that suits the data, anywhere else by sorting.

On the CPU, few elements in a row (votes) are compared in pairs, and values of a small range (labels) are counted in
bins. A wide range is cut into parts that are counted in the same way; where a part holds more than one value, very long
rows are sorted, and for others torch.mode is given rows in which nothing that is left out can win.

All of that goes block by block, because fresh memory costs more than arithmetic. torch's kernels are fast where all
tensors are of one narrow integer type and slow where they make booleans or choose by them; hence masks that are
multiplied, and comparisons that write 0 and 1 into integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from gradgate.masked._bits import CPU
from gradgate.masked._valid import SMALL

__all__ = ["in_bytes", "vote_anywhere", "vote_on_cpu"]

MOST_VOTES = 16
LONG = 4096
BLOCK = 1 << 18

Limits = tuple[int, int]
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of each row: the index, how often, and the value's code


def vote_anywhere(x: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the most frequent value of each row without a look at the data, so that it can be traced and batched.

    Args:
        x: Values, not complex, without a gradient; the last dimension is a row, of size 1 or more.
        mask: True where an element takes part, in the shape of x; None if all do.

    Returns:
        The index of the last kept element with the smallest of the most frequent values, -1 if nothing is kept; and
        how many elements have that value.
    """
    ordered, order = x.sort(dim=-1, stable=True)
    kept = (torch.ones_like(order, dtype=torch.bool) if mask is None else mask.gather(-1, order)).to(torch.int64)
    differs = ordered[..., 1:] != ordered[..., :-1]
    if x.is_floating_point():
        differs = differs & ~(ordered[..., 1:].isnan() & ordered[..., :-1].isnan())
    starts = torch.cat([torch.ones_like(kept[..., :1], dtype=torch.bool), differs], -1)
    total = kept.cumsum(-1)
    before = torch.where(starts, total - kept, 0).cummax(-1).values
    # How many kept equals each element has, itself included, up to its place: the first maximum is the last kept
    # occurrence of the smallest of the most frequent values.
    counts, place = (total - before).max(-1)
    return torch.where(counts == 0, -1, order.gather(-1, place.unsqueeze(-1)).squeeze(-1)), counts


def in_bytes(x: torch.Tensor) -> tuple[torch.Tensor, Limits | None]:
    """Give wide integers in a byte each, if they fit: all that follows reads them several times.

    Args:
        x: Values, on the CPU.

    Returns:
        The values, and the least and the largest of them if they have been looked at.
    """
    if x.dtype not in (torch.int64, torch.int32, torch.int16) or x.numel() < SMALL:
        return x, None
    low, high = limits = _limits(x)
    for narrow in (torch.uint8, torch.int8):
        if torch.iinfo(narrow).min <= low and high <= torch.iinfo(narrow).max:
            return x.to(narrow), limits
    return x, limits


def vote_on_cpu(
    x: torch.Tensor, mask: torch.Tensor | None, limits: Limits | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Do the same as `vote_anywhere`, faster, for tensors whose data can be looked at.

    Args:
        x: As there, on the CPU.
        mask: As there.
        limits: The least and the largest of integers, if that is known already.
        dtype: The dtype of the values to give.

    Returns:
        As there; the values, if they are integers (anything where nothing is kept, and for others); and whether
        something is kept in every row.
    """
    shape, size = x.shape[:-1], x.shape[-1]
    if not x.numel():
        nothing = torch.empty(shape, dtype=torch.int64, device=CPU)
        return nothing, nothing, nothing.to(dtype), True
    if mask is not None and mask.view(torch.uint8).amin().item():
        mask = None  # what was to be left out is not there
    few = size <= MOST_VOTES
    # For votes a range that leaves room for count and index in 16 or 32 bits, for others one that is worth a table.
    width = 1 << (15 if x.element_size() == 1 else 31) - _bits_of_keys(size, 0, 0) if few else 4 * size
    low, high, far = _range(x, mask, limits, width)
    way: Callable[..., Found]
    if few and _bits_of_keys(size, low, high) < 64:
        way, dim = _by_pairs, 1
        by_rows = x.is_contiguous()
        x, mask = _planes(x, by_rows), None if mask is None else _planes(mask, by_rows)
    else:
        way, dim = _by_bins if high - low < 4 * size else _by_torch if size <= LONG else _by_sorting, 0
        x, mask = x.reshape(-1, size), None if mask is None else mask.reshape(-1, size)

    def exact(x: torch.Tensor, kept: torch.Tensor | None) -> Found:
        codes = _codes(x)
        return way(codes.clamp(low, high) if far else codes, kept, low, high)

    wide = way in (_by_torch, _by_sorting)
    count = partial(_by_parts, exact=exact) if wide and _parts_tell(x, mask) else exact
    step = max(1, (BLOCK << dim) // size)  # comparing pairs makes many small steps, which pay in larger blocks
    blocks, certain = [], True
    for start in range(0, x.shape[dim], step):
        length = min(step, x.shape[dim] - start)
        kept = None if mask is None else mask.narrow(dim, start, length).view(torch.uint8)
        indices, counts, best = count(x.narrow(dim, start, length), kept)
        blocks.append((indices.to(torch.int64), counts.to(torch.int64), best.to(dtype)))
        certain = certain and (kept is None or counts.amin().item() > 0)
    indices, counts, values = blocks[0] if len(blocks) == 1 else map(torch.cat, zip(*blocks, strict=True))
    return indices.reshape(shape), counts.reshape(shape), values.reshape(shape), certain


def _planes(x: torch.Tensor, by_rows: bool) -> torch.Tensor:
    """Give rows as columns: in memory the rows one after the other, or element i of every row together."""
    size = x.shape[-1]
    return x.reshape(-1, size).t() if by_rows else x.movedim(-1, 0).reshape(size, -1)


# --- values as integers -----------------------------------------------------------------------------------------------


def _codes(x: torch.Tensor) -> torch.Tensor:
    """Give integers in the order of the values: one for 0.0 and -0.0, one above all others for all NaNs."""
    if x.dtype is torch.bool:
        return x.to(torch.uint8)
    if not x.is_floating_point():
        return x
    x = x.float() if x.element_size() < 4 else x
    whole = torch.int32 if x.element_size() == 4 else torch.int64
    # Without their sign the bits of floats are in the order of the floats.
    bits = torch.nan_to_num(x, nan=math.nan, posinf=math.inf, neginf=-math.inf).view(whole)
    return torch.sign(bits).mul_(bits.bitwise_and_(torch.iinfo(whole).max))


def _code_of_nan(whole: torch.dtype) -> int:
    return 0x7FC00000 if whole is torch.int32 else 0x7FF8000000000000


def _range(x: torch.Tensor, mask: torch.Tensor | None, limits: Limits | None, width: int) -> tuple[int, int, bool]:
    """Give a range that holds the codes of all that is kept, and whether others lie outside of it."""
    if x.is_floating_point():
        nan = _code_of_nan(torch.int64 if x.dtype is torch.float64 else torch.int32)
        return -nan, nan, False
    if x.dtype is torch.bool:
        return 0, 1, False
    low, high = limits or _limits(x)
    if mask is None or high - low < width:
        return low, high, False
    # What is left out may lie far away. Multiplied by 0 it does not; then 0 is in the range as well. A first look at
    # a part spares the whole where the kept values themselves are far apart.
    least = most = 0
    first = min(len(x), max(1, BLOCK // 16 // x[0].numel()))
    kept = mask.view(torch.uint8)
    for part, present in ((x[:first], kept[:first]), (x[first:], kept[first:])):
        if len(part):
            some = _limits(part * present)
            least, most = min(least, some[0]), max(most, some[1])
        if most - least >= width:
            return low, high, False
    return least, most, True


def _limits(x: torch.Tensor) -> Limits:
    # aminmax copies what is not contiguous; amin and amax do not, but are slow for int64.
    for view in (x, x.movedim(-1, 0)):
        if view.is_contiguous():
            low, high = torch.aminmax(view)
            return int(low), int(high)
    return int(x.amin()), int(x.amax())


def _narrowest(low: int, high: int) -> torch.dtype | None:
    """Give the narrowest signed dtype that holds all from low to high."""
    for dtype in (torch.int16, torch.int32, torch.int64):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return dtype
    return None


def _holds(compare: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compare, and give 0 and 1 as integers of a dtype."""
    return compare(a, b, out=torch.empty(a.shape, dtype=dtype, device=CPU))


def _equals(codes: torch.Tensor, best: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Say, as 0 and 1, which kept elements have their row's value; wide enough for numbers up to the row's size."""
    # torch compares fast where it may write what it reads.
    whole = torch.int32 if codes.element_size() == 1 or codes.shape[1] >= 1 << 15 else codes.dtype
    equal = _holds(torch.eq, codes, best.unsqueeze(1), whole)
    return equal if kept is None else equal.mul_(kept)


def _last(equal: torch.Tensor) -> torch.Tensor:
    """Give the index of the last 1 in each row, -1 if there is none."""
    return equal.mul_(torch.arange(1, equal.shape[1] + 1, dtype=equal.dtype, device=CPU)).amax(1).sub_(1)


# --- ways of counting, for one block ----------------------------------------------------------------------------------


def _bits_of_keys(size: int, low: int, high: int) -> int:
    return size.bit_length() + (high - low).bit_length() + (size - 1).bit_length()


def _by_pairs(planes: torch.Tensor, kept: torch.Tensor | None, low: int, high: int) -> Found:
    """Compare all pairs; planes[i] holds element i of every row.

    Count, value and index of an element make one number, its key: larger for more votes and, among these, for the
    smaller value. Each element counts itself and its equals before it, so the last of them has the full count, and
    the largest key of each row says it all.
    """
    size = planes.shape[0]
    index_bits, value_bits = (size - 1).bit_length(), (high - low).bit_length()
    one_vote = 1 << value_bits + index_bits
    bits = _bits_of_keys(size, low, high)
    whole = torch.int16 if bits < 16 else torch.int32 if bits < 32 else torch.int64
    # Values count from 1; what is left out becomes 0, which none of the kept equals. Narrow numbers are fast numbers.
    fits = torch.iinfo(whole).min <= low and high < torch.iinfo(whole).max
    # Fresh memory costs more than what is done in it, so the same three pieces serve for everything.
    values, keys, equal = torch.empty((3, *planes.shape), dtype=whole, device=CPU)
    _turn(planes if fits else planes - low, kept, low - 1 if fits else -1, values, keys, equal)
    numbers = torch.arange(size, dtype=whole, device=CPU).unsqueeze(1)
    torch.add(numbers + 2 * one_vote, values, alpha=-(1 << index_bits), out=keys)
    for distance in range(1, size):
        same = torch.eq(values[:-distance], values[distance:], out=equal[distance:])
        keys[distance:].add_(same, alpha=one_vote)
    if kept is not None:
        keys.mul_(values.clamp_(max=1))
    best = keys.amax(0)
    counts = best >> value_bits + index_bits
    nobody = torch.eq(counts, 0, out=torch.empty_like(counts))
    all_bits = (1 << value_bits) - 1
    value = (best >> index_bits).bitwise_and_(all_bits).bitwise_xor_(all_bits)
    value = (value if fits else value.long()).add_(low)
    return best.bitwise_and_((1 << index_bits) - 1).sub_(nobody), counts, value


def _turn(
    planes: torch.Tensor,
    kept: torch.Tensor | None,
    below: int,
    values: torch.Tensor,
    spare: torch.Tensor,
    other: torch.Tensor,
) -> None:
    """Write what planes have above a number, 0 where they are left out, into values; the others are room to work in.

    torch turns a matrix around faster plane by plane, and after it is narrow.
    """
    if planes.stride(0) >= planes.stride(1):
        values.copy_(planes).sub_(below)
        if kept is not None:
            values.mul_(other.copy_(kept))
        return
    by_rows = spare.view(planes.t().shape).copy_(planes.t()).sub_(below)
    if kept is not None:
        by_rows.mul_(other.view(by_rows.shape).copy_(kept.t()))
    for plane, column in zip(values, by_rows.unbind(1), strict=True):
        plane.copy_(column)


def _by_bins(codes: torch.Tensor, kept: torch.Tensor | None, low: int, high: int) -> Found:
    """Count every value of the range; what is left out counts 0, in whatever bin it falls."""
    whole = _narrowest(min(low, 0), max(high, high - low))
    codes = codes if codes.element_size() == 1 else codes.to(whole)
    if kept is not None:
        # What is left out is often far away. Multiplied by 0 it is not; then 0 is in the range as well.
        nearer = codes * (kept.view(codes.dtype) if codes.element_size() == 1 else kept.to(whole))
        least, most = _limits(nearer)
        if most - least < high - low:
            codes, low, high = nearer, least, most
    values = codes.to(whole)
    values = values - low if low else values
    bits = (high - low).bit_length()
    keys = _narrowest(0, values.shape[1] + 1 << bits)
    weights = torch.ones((), dtype=keys, device=CPU).expand(values.shape) if kept is None else kept.to(keys)
    table = torch.zeros((len(values), high - low + 1), dtype=keys, device=CPU)
    table.scatter_add_(1, values.to(torch.int64), weights)
    # Count and value in one number, as in the comparison of pairs; torch.max with indices is slow.
    all_bits = (1 << bits) - 1
    smaller_first = torch.arange(all_bits, all_bits - table.shape[1], -1, dtype=keys, device=CPU)
    best = table.mul_(1 << bits).add_(smaller_first).amax(1)
    value = (best & all_bits).bitwise_xor_(all_bits).to(values.dtype)
    return _last(_equals(values, value, kept)), best >> bits, value.long().add_(low)


def _by_parts(x: torch.Tensor, kept: torch.Tensor | None, exact: Callable[..., Found]) -> Found:
    """Count parts of the range, which are few, and leave to `exact` the rows in which that does not tell the value."""
    rough = _in_parts(x, kept)
    if rough is None:
        return exact(x, kept)
    *found, sure = rough
    if not sure.all():
        again = sure.logical_not().nonzero().squeeze(1)
        for all_rows, some_rows in zip(found, exact(x[again], None if kept is None else kept[again]), strict=True):
            all_rows[again] = some_rows.to(all_rows.dtype)
    return found[0], found[1], found[2]


def _parts_tell(x: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Look at some rows whether counting parts is worth while."""
    if x.numel() < 4 * LONG:
        return False
    first = x[0, :LONG] if mask is None else x[0, :LONG][mask[0, :LONG]]
    if 1 < first.numel() == torch.unique(first).numel():
        return False  # all different, so that most parts hold several
    some = max(1, LONG // x.shape[1])
    kept = None if mask is None else mask[:some, :LONG].view(torch.uint8)
    rough = _in_parts(x[:some, :LONG], kept)
    return rough is not None and int(rough[3].sum()) > 0.9 * some


def _in_parts(
    x: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Give index, count and value of each row's fullest part, and whether that is the answer; None if x is not finite.

    Rounding keeps the order, and equal values are in one part. So if there is but one value in the fullest part of a
    row, the lowest if several are as full, then no other value is more frequent, and no smaller one as frequent.
    """
    size = x.shape[1]
    near = x.to(torch.float32, copy=True)
    if kept is not None:
        near.view(torch.int32).mul_(kept.to(torch.int32))  # whatever was left out is 0.0 now
    low, high = (limit.item() for limit in torch.aminmax(near))
    if not high - low < 1e38:
        return None
    parts = min(2 * size, 1 << 15)
    near.sub_(low).mul_((parts - 1) / (high - low) if high - low > 1e-30 else 0.0)
    index, counts, _ = _by_bins(near.to(torch.int16), kept, 0, parts - 1)
    value = x.gather(1, index.clamp(min=0).to(torch.int64).unsqueeze(1))
    same = (x == value).view(torch.uint8)
    if kept is not None:
        same.bitwise_and_(kept)
    return index, counts, value.squeeze(1), same.to(torch.int32).sum(1, dtype=torch.int32) == counts


def _by_torch(codes: torch.Tensor, kept: torch.Tensor | None, low: int, high: int) -> Found:
    """Let torch.mode count; each element that is left out becomes a value of its own, above all that are kept."""
    size = codes.shape[1]
    whole = _narrowest(low, high + size)
    if whole is None:
        index, counts = vote_anywhere(codes, None if kept is None else kept.view(torch.bool))
        return index, counts, codes.gather(1, index.clamp(min=0).unsqueeze(1)).squeeze(1)
    codes = codes.to(whole)
    if kept is not None:
        alone = torch.arange(high + 1, high + 1 + size, dtype=whole, device=CPU)
        codes = codes - alone
        torch.addcmul(alone, kept.to(whole), codes, out=codes)  # a difference that wraps around comes back again
    best = codes.mode(1).values
    equal = _equals(codes, best, None)
    counts, index = equal.sum(1, dtype=equal.dtype), _last(equal)
    if kept is None or best.amax() <= high:
        return index, counts, best
    some = torch.le(best, high, out=torch.empty_like(best))  # 0 where the best was left out, so nothing was kept
    return index.add_(1).mul_(some).sub_(1), counts.mul_(some), best


def _by_sorting(codes: torch.Tensor, kept: torch.Tensor | None, low: int, high: int) -> Found:
    """Sort each row alone, with what is left out at its end, and count its runs."""
    whole = _narrowest(low, high)
    codes = codes.to(whole)
    best = torch.zeros(len(codes), dtype=whole, device=CPU)
    counts = torch.zeros(len(codes), dtype=torch.int64, device=CPU)
    for i, row in enumerate(codes):
        number = row.numel()
        if kept is not None:
            chosen = kept[i].to(whole)
            number = int(chosen.sum())
            row = (row * chosen).add_(chosen.neg_().add_(1).mul_(torch.iinfo(codes.dtype).max))
        if number:
            values, repeats = torch.unique_consecutive(row.sort().values[:number], return_counts=True)
            counts[i], place = repeats.max(0)
            best[i] = values[place]
    return _last(_equals(codes, best, kept)), counts, best
