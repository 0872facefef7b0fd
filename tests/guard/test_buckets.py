"""How gradients are cut into buffers: few, in the order in which they become ready, each of one dtype."""

import torch

from gradgate.guard.distributed import _replicas


def cut(*sizes, dtypes=None, limit=40):
    parameters = [torch.zeros(n, dtype=(dtypes or {}).get(i, torch.float32)) for i, n in enumerate(sizes)]
    before = _replicas.FIRST_BYTES, _replicas.BYTES
    _replicas.FIRST_BYTES, _replicas.BYTES = 4, limit
    try:
        return _replicas._cut(parameters)
    finally:
        _replicas.FIRST_BYTES, _replicas.BYTES = before


def test_the_last_parameters_come_first_in_a_small_buffer():
    assert cut(4, 4, 4, 4, 4) == [[4], [3, 2, 1], [0]]


def test_a_small_model_is_one_buffer():
    assert _replicas._cut([torch.zeros(3), torch.zeros(4)]) == [[1, 0]]


def test_nothing_to_train_is_no_buffer_but_numbers_are_sent():
    assert _replicas._cut([]) == []
    assert _replicas.Buckets([], None, 3, torch.device("cpu")).numbers.shape == (3,)


def test_dtypes_lie_apart_and_the_buffer_that_is_complete_last_is_sent_last():
    cuts = cut(4, 4, 4, 4, dtypes={1: torch.bfloat16, 3: torch.bfloat16})
    assert cuts == [[3], [1], [2, 0]]


def test_numbers_are_never_in_half_precision():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64):
        buckets = _replicas.Buckets([torch.zeros(3, dtype=dtype, requires_grad=True)], None, 5, torch.device("cpu"))
        assert buckets.numbers.dtype in (torch.float32, torch.float64)
        assert buckets.numbers.shape == (5,)
        shared = buckets.numbers.untyped_storage().data_ptr() == buckets._buckets[0].buffer.untyped_storage().data_ptr()
        assert shared == (dtype.itemsize >= 4)
