"""Random tensors and random indices into them, as Hypothesis makes them small again when something fails."""

import torch
from hypothesis import strategies as st


def slices(size, negative=True):
    bound = st.none() | st.integers(-size - 2, size + 2)
    steps = st.none() | st.integers(1, 3) | (st.integers(-3, -1) if negative else st.nothing())
    return st.builds(slice, bound, bound, steps)


def integers(size, margin=0):
    return st.integers(-size - margin, size - 1 + margin)


@st.composite
def shapes(draw, smallest=0):
    return tuple(draw(st.lists(st.integers(smallest, 4), min_size=0, max_size=3)))


@st.composite
def basic_indices(draw, shape, negative=True):
    """Ints, slices, None and an ellipsis; never too many."""
    items = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if draw(st.integers(0, 4)) == 0:
            items.append(None)
        items.append(draw(slices(size, negative) | (integers(size) if size else st.nothing())))
    return _with_ellipsis(draw, items, shape)


@st.composite
def advanced_indices(draw, shape, margin=0, masks=True, ints=True):
    """Index tensors that broadcast, with duplicates, mixed with slices, ints, None and masks."""
    entries = draw(st.lists(st.integers(0, 3), min_size=0, max_size=2))
    items = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if draw(st.integers(0, 6)) == 0:
            items.append(None)
        kind = draw(
            st.sampled_from(["tensor", "tensor", "slice", "mask" if masks else "slice", "int" if ints else "slice"])
        )
        if kind == "mask":
            items.append(torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool))
            if entries != [int(items[-1].sum())] and any(_is_index(item) for item in items[:-1]):
                items[-1] = slice(None)  # its number of True would not broadcast
            elif any(_is_index(item) for item in items):
                entries = [int(items[-1].sum())]
        elif kind == "tensor" and (size or margin or 0 in entries):
            narrow = size and draw(st.booleans())
            wide = [n if draw(st.booleans()) else 1 for n in entries] if narrow else entries
            count = torch.Size(wide).numel()
            values = draw(
                st.lists(integers(size, margin) if size or margin else st.just(0), min_size=count, max_size=count)
            )
            items.append(torch.tensor(values, dtype=torch.int64).reshape(wide))
        elif kind == "int" and size:
            items.append(draw(integers(size)))
        else:
            items.append(draw(slices(size)))
    return _with_ellipsis(draw, items, shape)


def _is_index(item):
    return isinstance(item, torch.Tensor)


def _with_ellipsis(draw, items, shape):
    if draw(st.booleans()):
        # Everything after the ellipsis speaks of the last dimensions, so it is only put where that changes nothing.
        used = sum(item is not None for item in items)
        if used == len(shape):
            items.insert(draw(st.integers(0, len(items))), Ellipsis)
        else:
            items.append(Ellipsis)
    return items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)


def positive(index):
    """Say whether plain torch takes the index: it has no negative step."""
    items = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(item, slice) and (item.step or 1) < 0 for item in items)


def values_for(draw, shape):
    """A shape that broadcasts to a shape: some leading dimensions left away, some of size 1."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in kept)
