"""Arguments of the wrong kind end in a word of this room, not in one of torch's."""

import math

import numpy
import pytest
import torch

import gradgate as gg
from gradgate import masked
from gradgate.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError

X = torch.arange(12.0).reshape(3, 4)
KEEP = X != 3


def refused(error, text):
    return pytest.raises(error, match=text)


@pytest.mark.parametrize("q", [None, 1j, object(), b"0.5", torch.tensor(0.5j)])
def test_quantiles_are_real_numbers(q):
    with refused(ArgumentTypeError, r"(?s)masked.quantile\(\): `q` has .*from 0 to 1.*q=0.5   # or \[0.25, 0.75\]"):
        masked.quantile(X, q)


def test_quantiles_of_numpy():
    assert masked.quantile(X, numpy.float32(0.5)) == 5.5
    assert masked.quantile(X, numpy.array([0.5, 1], dtype=numpy.float32)).tolist() == [5.5, 11]


@pytest.mark.parametrize("order", [None, "fro", 2j, [2], True])
@pytest.mark.parametrize("name", ["norm", "normalize", "safe_norm", "safe_normalize"])
def test_orders_are_numbers(name, order):
    with refused(ArgumentTypeError, rf"(?s)masked.{name}\(\): `ord` is .*norms of matrices.*ord=2"):
        getattr(masked, name)(X, ord=order)
    with refused(ArgumentValueError, rf"masked.{name}\(\): `ord` is the float nan"):
        getattr(masked, name)(X, ord=math.nan)


@pytest.mark.parametrize("keep", [None, KEEP])
@pytest.mark.parametrize("correction", [None, "1", True, 1j, [1]])
def test_a_correction_is_a_number(correction, keep):
    for function in (masked.var, masked.std):
        with refused(ArgumentTypeError, r"(?s)`correction` is .*taken from the number.*correction=1"):
            function(X, correction=correction, keep=keep)


@pytest.mark.parametrize("eps", [None, "small", 1j])
def test_eps_is_a_number(eps):
    with refused(ArgumentTypeError, r"(?s)masked.normalize\(\): `eps` is .*eps=1e-12"):
        masked.normalize(X, eps=eps)
    with refused(ArgumentTypeError, r"(?s)masked.layer_norm\(\): `eps` is .*added to the variance.*eps=1e-5"):
        masked.layer_norm(X, [4], eps=eps, keep=KEEP)
    with refused(ArgumentTypeError, r"masked.batch_norm\(\): `eps` is "):
        masked.batch_norm(X, None, None, training=True, eps=eps, keep=KEEP)


@pytest.mark.parametrize("dtype", ["float32", numpy.float32, 32])
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "norm", "softmax", "log_softmax", "cumsum"])
def test_a_dtype_is_one_of_torch(name, dtype):
    with refused(ArgumentTypeError, rf"(?s)masked.{name}\(\): `dtype` is .*dtype=torch.float32"):
        getattr(masked, name)(X, dtype=dtype)


@pytest.mark.parametrize("keepdim", [1, None, "yes"])
def test_keepdim_is_yes_or_no(keepdim):
    for function in (masked.sum, masked.amax, masked.median):
        with refused(ArgumentTypeError, r"(?s)`keepdim` is .*either stay with size 1.*keepdim=True"):
            function(X, keepdim=keepdim, keep=KEEP)


def test_dimensions_of_the_safe_norms():
    for function in (masked.safe_norm, masked.safe_normalize):
        with refused(ArgumentIndexError, r"(?s)`dim` has 7, x of shape \(3, 4\).*dim=-1"):
            function(X, 7)
        with refused(ArgumentValueError, r"`dim` \(0, 0\) names a dimension twice"):
            function(X, [0, 0])
        with refused(ArgumentTypeError, r"`dim` has the str 'rows'"):
            function(X, "rows")


def test_the_shape_of_a_layer():
    assert torch.equal(masked.layer_norm(X, 4, keep=KEEP), masked.layer_norm(X, [4], keep=KEEP))
    for shape in (None, 4.0, [], (4.0,), "4"):
        with refused(ArgumentTypeError, r"(?s)`normalized_shape` is .*sizes of the last.*x.shape\[-1:\]"):
            masked.layer_norm(X, shape, keep=KEEP)
    with refused(ArgumentTypeError, r"(?s)layer_norm\(\): `weight` is the float 2.0.*weight=torch.full\(\(4,\), 2.0\)"):
        masked.layer_norm(X, 4, 2.0)
    with refused(ArgumentValueError, r"(?s)`bias` is a float32 tensor of shape \(1,\).*bias=bias.expand\(4\)"):
        masked.layer_norm(X, 4, None, torch.ones(1), keep=KEEP)


def test_the_tensors_of_a_batch_norm():
    for place, name in enumerate(("running_mean", "running_var", "weight", "bias")):
        given = [torch.ones(4) for _ in range(4)]
        given[place] = torch.ones(3)
        with refused(ArgumentValueError, rf"(?s)batch_norm\(\): `{name}` is .*shape \(3,\).*its shape is \(4,\)"):
            masked.batch_norm(X, *given, training=True, keep=KEEP)
    with refused(ArgumentTypeError, r"(?s)`momentum` is None.*momentum=0.1"):
        masked.batch_norm(X, None, None, training=True, momentum=None, keep=KEEP)


@pytest.mark.parametrize("exclude", [numpy.array([[1.0, 2.0]]), [torch.tensor([1.0, 2.0])]])
def test_values_to_leave_out_are_single_numbers(exclude):
    with refused(ArgumentTypeError, r"(?s)`exclude` has .*they have to be numbers"):
        masked.sum(X, exclude=exclude)


def test_tensors_that_are_not_dense():
    with refused(ArgumentTypeError, r"(?s)masked.sum\(\): `x` is a sparse_coo tensor.*x.to_dense\(\)"):
        masked.sum(X.to_sparse(), exclude=0)
    with refused(ArgumentTypeError, r"(?s)`keep` is a sparse_coo tensor.*keep.to_dense\(\)"):
        masked.mean(X, keep=KEEP.to_sparse())
    with refused(ArgumentTypeError, r"(?s)`x` is a nested tensor.*to_padded_tensor"):
        masked.amax(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))


def test_operands_of_the_safe_functions():
    with refused(ArgumentTypeError, r"(?s)safe_divide\(\): `y` is the str 'two'.*y=torch.as_tensor\(y\)"):
        masked.safe_divide(X, "two")
    with refused(ArgumentTypeError, r"safe_divide\(\): `x` is the list \[1\]"):
        masked.safe_divide([1], X)
    with refused(ArgumentTypeError, r"(?s)safe_pow\(\): `exponent` is None.*safe_pow\(x, 0.5\)"):
        masked.safe_pow(X, None)
    with refused(ArgumentTypeError, r"(?s)`x` is an int64 tensor.*`exponent` is -1.*safe_pow\(x.float\(\), -1\)"):
        masked.safe_pow(X.long(), -1)
    with refused(ArgumentValueError, r"(?s)`x` has shape \(3, 4\), `y` has \(3,\).*y.unsqueeze\(-1\)"):
        masked.safe_divide(X, torch.ones(3))
    with refused(ArgumentValueError, r"`x` has shape \(3, 4\), `exponent` has \(3,\)"):
        masked.safe_pow(X, torch.ones(3))


def test_functions_and_fill_values_of_apply():
    with refused(ArgumentTypeError, r"`args\[0\]` is the float 3.0"):
        gg.apply_where(KEEP, 3.0, torch.sqrt)
    with refused(ArgumentTypeError, r"(?s)`otherwise` is the float 2.0.*fn, fill_value=2.0\)"):
        gg.apply_where(KEEP, X, torch.sqrt, 2.0)
    with refused(ArgumentTypeError, r"(?s)apply_rows\(\): `fn` is a float32 tensor.*gg.apply_rows\(keep, x, fn\)"):
        gg.apply_rows(KEEP[:, 0], torch.sqrt, X)
    half = X.half()
    for call in (
        lambda: gg.apply_where(KEEP, half, torch.sqrt, fill_value=1e6),
        lambda: gg.apply_rows(KEEP[:, 3], half, torch.sqrt, fill_value=1e6),
        lambda: masked.impute(half, keep=KEEP, using=1e6),
    ):
        with refused(ArgumentValueError, r"(?s) is 1000000.0, the result is float16.*values in torch.float32"):
            call()


def test_a_tensor_to_impute_with_is_where_x_is():
    with refused(ArgumentValueError, r"(?s)`using` is on meta, x is on cpu.*using=value.to\(x.device\)"):
        masked.impute(X, keep=KEEP, using=torch.ones(4, device="meta"))
