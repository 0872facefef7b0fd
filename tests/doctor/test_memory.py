"""Do two tensors share a byte? Against the slow oracle that lists them."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradgate.doctor._trace import overlaps, region_of

DTYPES = [torch.float32, torch.float64, torch.int16, torch.uint8, torch.bool]


@st.composite
def views(draw):
    """A random strided view of one storage of 48 bytes."""
    storage = torch.zeros(48, dtype=torch.uint8)

    def view():
        dtype = draw(st.sampled_from(DTYPES))
        whole = storage.view(dtype)
        sizes = draw(st.lists(st.integers(0, 3), min_size=0, max_size=3))
        strides = [draw(st.integers(0, 4)) for _ in sizes]
        reach = sum(max(size - 1, 0) * stride for size, stride in zip(sizes, strides, strict=True))
        if reach >= whole.numel():
            sizes, strides, reach = [2], [1], 1
        offset = draw(st.integers(0, whole.numel() - 1 - reach))
        return whole.as_strided(sizes, strides, offset)

    return storage, view(), view()


def bytes_of(view, storage):
    """Every byte that a view covers, one by one."""
    places = [view.data_ptr() - storage.data_ptr()]
    for size, stride in zip(view.shape, view.stride(), strict=True):
        places = [place + stride * view.element_size() * index for index in range(size) for place in places]
    return {place + byte for place in places for byte in range(view.element_size())}


@given(views())
def test_it_is_exact(made):
    storage, one, other = made
    expected = not bytes_of(one, storage).isdisjoint(bytes_of(other, storage))
    assert overlaps(region_of(one), region_of(other)) == expected
    assert overlaps(region_of(other), region_of(one)) == expected


def test_tensors_of_different_storages_and_without_memory():
    one, other = torch.zeros(4), torch.zeros(4)
    assert not overlaps(region_of(one), region_of(other))
    assert not overlaps(region_of(torch.zeros(3).to_sparse()), region_of(one))
    assert not overlaps(region_of(torch.empty(3, device="meta")), region_of(torch.empty(3, device="meta")))
