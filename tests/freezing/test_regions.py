"""Regions against masks: every form reads, writes and clears exactly the elements it should, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gradgate.freezing._freeze_state import FrozenRegion, MaskedRegion, region_of, union
from gradgate.freezing._verify import fingerprint

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.5, -3.25, 5e-8]


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@st.composite
def tensors_with_masks(draw):
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    count = torch.Size(shape).numel()
    values = torch.tensor(draw(st.lists(st.sampled_from(SPECIAL), min_size=count, max_size=count)))
    values = values.reshape(shape).to(draw(st.sampled_from(DTYPES)))
    kind = draw(st.sampled_from(["elements", "rows", "one", "all", "none"]))
    mask = torch.zeros(shape, dtype=torch.bool)
    if kind == "elements":
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool).reshape(
            shape
        )
    elif kind == "rows" and shape:
        for row in range(shape[0]):
            mask[row] = draw(st.booleans())
    elif kind == "one" and count:
        mask.view(-1)[draw(st.integers(0, count - 1))] = True
    elif kind == "all":
        mask[...] = True
    if draw(st.booleans()) and len(shape) > 1:
        values = values.transpose(0, 1).contiguous().transpose(0, 1)  # the same values, strides reversed
    return values, mask


@given(tensors_with_masks())
def test_each_form_does_what_the_mask_says(case):
    values, mask = case
    forms = [region_of(mask), MaskedRegion(mask)]
    forms += [FrozenRegion(mask.nonzero(as_tuple=True), int(mask.sum()))] if mask.dim() else []
    forms += [FrozenRegion((...,), mask.numel())] if mask.all() else []
    noise = torch.full_like(values, 7.0)
    for region in forms:
        assert region.count == int(mask.sum())
        assert torch.equal(region.mask(mask.shape, mask.device).expand(mask.shape), mask)
        assert torch.equal(bits(region.gather(values)), bits(values[mask]))
        moved = noise.clone()
        region.write(moved, region.read(values))
        assert torch.equal(bits(moved), bits(torch.where(mask, values, noise)))
        gradient = values.clone()
        region.clear(gradient)
        assert torch.equal(bits(gradient), bits(values.masked_fill(mask, 0)))
        assert torch.equal(bits(region.cleared(values)), bits(values.masked_fill(mask, 0)))
        for number, place in enumerate(mask.nonzero().tolist()):
            assert region.place(number, mask.shape) == tuple(place)


@given(tensors_with_masks(), st.integers(1, 2))
def test_sparse_gradients_are_cleared_like_dense_ones(case, sparse_dims):
    values, mask = case
    if values.dim() < sparse_dims or not values.numel() or values.dtype in (torch.bfloat16, torch.float16):
        return
    sparse = values.nan_to_num().to_sparse(sparse_dims)
    cleared = region_of(mask).cleared(torch.cat([sparse, sparse]).narrow_copy(0, 0, len(values)))
    torch.testing.assert_close(cleared.to_dense(), sparse.to_dense().masked_fill(mask, 0))


@given(tensors_with_masks(), st.data())
def test_the_union_is_the_or_of_the_masks(case, data):
    _, mask = case
    count = mask.numel()
    other = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    together = union([region_of(mask), region_of(other.reshape(mask.shape))], mask.shape, mask.device)
    assert torch.equal(together.mask(mask.shape, mask.device).expand(mask.shape), mask | other.reshape(mask.shape))


@pytest.mark.parametrize("kind", ["rows", "points", "elements", "everything"])
def test_a_step_asks_the_host_for_nothing(kind):
    """On tensors without data everything that happens in a step runs, so nothing waits for a device."""
    mask = torch.zeros(40, 40, dtype=torch.bool)
    mask[0, 1] = kind == "points"
    mask[::2, ::2] |= kind == "elements"
    mask[3] |= kind == "rows"
    region = FrozenRegion((...,), 1600) if kind == "everything" else region_of(mask)
    with FakeTensorMode(allow_non_fake_inputs=True):
        values, gradient = torch.empty(40, 40), torch.empty(40, 40)
        region.write(values, region.read(values))
        region.clear(gradient)
        region.cleared(gradient)
        fingerprint(values)


def test_the_cheapest_form_is_chosen():
    mask = torch.zeros(40, 40, dtype=torch.bool)
    assert [len(part) for part in region_of(mask).index] == [0]
    mask[3] = True
    assert [part.tolist() for part in region_of(mask).index] == [[3]], "rows"
    mask[3, 3] = False
    assert [len(part) for part in region_of(mask).index] == [39, 39], "single elements"
    mask[::2, ::2] = True
    assert isinstance(region_of(mask), MaskedRegion)
    assert isinstance(region_of(torch.tensor(True)), MaskedRegion)
    mask[1:] = True
    assert isinstance(region_of(mask), MaskedRegion), "nearly all rows"


@pytest.mark.parametrize("frozen", [1, 39])
def test_few_and_many_rows_clear_alike(frozen):
    mask = torch.zeros(40, 3, dtype=torch.bool)
    mask[:frozen] = True
    gradient = torch.full((40, 3), float("nan"))
    gradient[-1] = 2.0
    region_of(mask).clear(gradient)
    assert torch.equal(gradient[:frozen], torch.zeros(frozen, 3))
    assert torch.equal(gradient[-1], torch.full((3,), 2.0))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["plain", "transposed", "every second row", "every second column"])
def test_many_rows_come_back_and_the_others_keep_what_they_learned(dtype, layout):
    shape = {"transposed": (3, 40), "every second row": (80, 3), "every second column": (40, 6)}.get(layout, (40, 3))
    whole = torch.randn(shape, dtype=dtype)
    values = {"transposed": whole.t(), "every second row": whole[::2], "every second column": whole[:, ::2]}.get(
        layout, whole
    )
    beside = whole.clone()
    mask = torch.ones(40, 3, dtype=torch.bool)
    mask[[4, 17]] = False
    region = region_of(mask)
    values[0] = torch.tensor([-0.0, float("nan"), float("inf")])
    start = values.clone()
    kept = region.read(values)
    for step in (1.0, 2.0):
        values.copy_(torch.full((40, 3), step))
        region.write(values, kept)
        assert torch.equal(bits(values[mask]), bits(start[mask]))
        assert (values[~mask] == step).all()
    if layout.startswith("every"):
        unused = (slice(1, None, 2),) if layout == "every second row" else (slice(None), slice(1, None, 2))
        assert torch.equal(bits(whole[unused]), bits(beside[unused])), "what lies in between is not ours"
