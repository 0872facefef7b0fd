"""What docs/compared.md says about PyTorch and JAX; a test fails when one of them gains a feature."""

import inspect
import subprocess
import sys
import warnings

import pytest
import torch

NAN = float("nan")

# In an interpreter of its own: JAX starts threads, and other tests fork.
JAX = """
import inspect, jax, jax.numpy as jnp, jax.scipy.stats
x, keep = jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])
for function in (jnp.sum, jnp.mean):
    assert jnp.isfinite(jax.grad(lambda x: function(x, where=keep))(x)).all()
assert jnp.isfinite(jax.grad(lambda x: jnp.max(x, where=keep, initial=0.0))(x)).all()
for function in (jnp.var, jnp.std):
    assert jnp.isnan(jax.grad(lambda x: function(x, where=keep))(x)).any(), "where= of var is exact now"
assert jnp.isfinite(jax.grad(jnp.nanvar)(x)).all()
for function in (jnp.median, jnp.quantile):
    assert "where" not in inspect.signature(function).parameters
assert "nan_policy" in inspect.signature(jax.scipy.stats.mode).parameters
nothing = jnp.zeros(3, bool)
assert (jax.nn.softmax(jnp.zeros(3), where=nothing) == 0).all()
assert (jax.grad(lambda s: jax.nn.softmax(s, where=nothing)[0])(jnp.zeros(3)) == 0).all()
assert jnp.isnan(jax.grad(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).sum())(jnp.array([4.0, 0.0]))[1])
for function in (jnp.cov, jnp.histogram, jnp.cumsum, jnp.average):
    assert "where" not in inspect.signature(function).parameters
ones, values = jnp.ones((1, 3, 1, 4)), jnp.arange(12.0).reshape(1, 3, 1, 4)
attend = jax.nn.dot_product_attention
alone = attend(ones, ones, values, mask=jnp.array([[[[True] * 3, [False] * 3, [True] * 3]]]))[0, 1, 0]
assert jnp.allclose(alone, values.mean(1)[0, 0]), "a query without keys is another value now"
assert jnp.isnan(attend(ones, ones, values.at[0, 2].set(jnp.nan), mask=jnp.array([[[[True, True, False]] * 3]]))).any()
edit = lambda v: jnp.zeros(3).at[jnp.array([1, 1])].set(v)
values = jnp.array([5.0, 7.0])
assert edit(values)[1] == 7 and jax.grad(lambda v: edit(v).sum())(values).tolist() == [0, 1]
print("as the page says")
"""


def gradient(function, values):
    x = torch.tensor(values, requires_grad=True)
    function(x).sum().backward()
    return x.grad


@pytest.mark.slow
def test_what_jax_does():
    done = subprocess.run([sys.executable, "-c", JAX], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "as the page says", done.stderr


def test_torch_has_some_reductions_without_nan():
    assert all(hasattr(torch, name) for name in ("nansum", "nanmean", "nanmedian", "nanquantile"))
    assert not any(hasattr(torch, name) for name in ("nanvar", "nanstd", "nanmax", "nanmin", "nanmode"))
    assert list(inspect.signature(torch.masked.median).parameters)
    assert not hasattr(torch.masked, "quantile")
    assert not hasattr(torch.masked, "mode")
    assert all(hasattr(torch.masked, name) for name in ("cumsum", "cumprod"))
    assert not any(hasattr(torch.masked, name) for name in ("cummax", "histogram", "cov", "avg_pool", "average"))


def test_nan_in_the_padding_spreads_through_attention():
    attend = torch.nn.functional.scaled_dot_product_attention
    x, keep = torch.ones(1, 3, 4), torch.tensor([[True, True, False]] * 3)
    bad = x.clone()
    bad[0, 2] = NAN
    assert attend(x, x, bad, keep).isnan().any()
    assert (attend(x, x, x, torch.zeros(3, 3, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
def test_torch_masked_is_exact_for_plain_reductions(name):
    keep = torch.tensor([True, False, True])
    assert gradient(lambda x: getattr(torch.masked, name)(x, mask=keep), [1.0, NAN, 3.0]).isfinite().all()


@pytest.mark.parametrize("name", ["var", "std"])
def test_the_variance_of_torch_masked_has_a_nan_gradient(name):
    keep = torch.tensor([True, False, True])
    found = gradient(lambda x: getattr(torch.masked, name)(x, mask=keep, unbiased=True), [1.0, NAN, 3.0])
    assert found.isnan().any()


def test_a_softmax_of_nothing_is_nan_in_torch():
    nothing = torch.zeros(3, dtype=torch.bool)
    assert torch.zeros(3).masked_fill(~nothing, -torch.inf).softmax(0).isnan().all()
    assert torch.masked.softmax(torch.zeros(3), 0, mask=nothing).isnan().all()


def test_where_lets_nan_into_the_gradient():
    assert gradient(lambda x: torch.where(x > 0, x.sqrt(), 0.0), [4.0, 0.0])[1].isnan()


def test_a_masked_tensor_does_not_pass_a_linear_layer_or_a_loss_or_meet_another_mask():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it is a prototype
        tensor = torch.masked.masked_tensor(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
        with pytest.raises(TypeError, match="Multiple dispatch failed"):
            torch.nn.Linear(3, 1)(tensor)
        with pytest.raises(TypeError, match="Multiple dispatch failed"):
            torch.nn.functional.mse_loss(tensor, tensor)
        other = torch.masked.masked_tensor(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
        with pytest.raises(ValueError, match="Input masks must match"):
            tensor + other


def test_torch_sends_the_gradient_to_all_values_of_one_element():
    v = torch.tensor([5.0, 7.0], requires_grad=True)
    y = torch.zeros(3).index_put((torch.tensor([1, 1]),), v)
    y.sum().backward()
    assert v.grad.tolist() == [1.0, 1.0]


def test_second_derivatives_are_wrong_where_torch_allows_overwrites():
    def cubed(x):
        y = x.exp()
        z = y * x
        y.add_(1)
        return (z * y).sum()

    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradgradcheck(cubed, [x])


def test_torch_has_no_function_for_an_edit():
    assert not hasattr(torch.Tensor, "at")
    assert hasattr(torch, "index_put")
    assert hasattr(torch, "select_scatter")


def test_anomaly_mode_sees_neither_a_nan_in_forward_nor_an_infinite_gradient():
    with torch.autograd.set_detect_anomaly(True):
        x = torch.zeros(2, requires_grad=True)
        assert (x / 0).isnan().all()
        x.sqrt().sum().backward()
    assert x.grad.isinf().all()
