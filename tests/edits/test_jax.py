"""The same edits in JAX: values and gradients agree on thousands of random cases, duplicates included.

For each shape and form of index JAX runs many draws of indices and values at once (vmap); ours runs them one by one.
JAX has no gradient of `multiply`, `divide` and `power` with repeated indices, nor of `apply`: there the values are
compared, and the gradients where no index repeats; tests/edits/test_laws.py has the rest.
"""

import os

import pytest
import torch

import gradgate as gg
from tests.edits import oracle

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each form is compiled once and run once, so the compiler need not try hard.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
jax = pytest.importorskip("jax", reason="JAX is not installed: the comparison with jax.numpy.ndarray.at is not made")

pytestmark = pytest.mark.slow  # importing JAX is
DRAWS = 32
ALL = slice(None)
# Shape, and the index as a function of the drawn index arrays; `draw` says the shape of each array.
FORMS = {
    "rows": ((5, 2), [(4,)], lambda i: i),
    "one row": ((5, 2), [()], lambda i: i),
    "a grid of rows": ((4, 2), [(2, 3)], lambda i: i),
    "columns": ((2, 5), [(4,)], lambda i: (ALL, i)),
    "the last dimension": ((2, 2, 4), [(5,)], lambda i: (..., i)),
    "pairs": ((3, 4), [(6,), (6,)], lambda i, j: (i, j)),
    "pairs that broadcast": ((3, 4), [(2, 1), (3,)], lambda i, j: (i, j)),
    "pairs apart": ((3, 2, 3), [(4,), (4,)], lambda i, j: (i, ALL, j)),
    "beside a slice": ((4, 4), [(3,)], lambda i: (slice(1, 3), i)),
    "beside a slice backwards": ((4, 4), [(3,)], lambda i: (i, slice(None, None, -2))),
    "with a new dimension": ((4, 2), [(3,)], lambda i: (None, i)),
    "none at all": ((4, 2), [(0,)], lambda i: i),
    "a slice": ((5, 2), [], lambda: slice(1, 4)),
    "a slice backwards": ((5, 3), [], lambda: (slice(None, None, -1), slice(2, None, -2))),
    "an int and a slice": ((3, 4), [], lambda: (-1, slice(None, 3))),
    "everything": ((2, 2), [], lambda: ...),
    "a number": ((), [], lambda: ()),
    "a number with a new dimension": ((), [], lambda: None),
}


def drawn(form, name, margin=0, unique=False):
    """Random x, index arrays and values, DRAWS of each; small whole numbers, so that ties and zeros occur."""
    shape, arrays, index = FORMS[form]
    generator = torch.Generator().manual_seed(len(form) * 31 + len(name))
    dims = _dims(form)
    indices = []
    for array, dim in zip(arrays, dims, strict=True):
        size = shape[dim]
        count = torch.Size(array).numel()
        if unique:
            assert count <= size
            rows = [torch.randperm(size, generator=generator)[:count] for _ in range(DRAWS)]
            indices.append(torch.stack(rows).reshape(DRAWS, *array))
        else:
            low, high = -size - margin, size + margin
            indices.append(torch.randint(low, high, (DRAWS, *array), generator=generator))
    chosen = torch.zeros(shape)
    selection = gg.at(chosen)[index(*(i[0].clamp(-1, 0) for i in indices))].get()
    x = torch.randint(-2, 3, (DRAWS, *shape), generator=generator).float()
    v = torch.randint(-2, 3, (DRAWS, *selection.shape), generator=generator).float()
    if name == "divide":
        v = v.abs() + 1
    if name == "power":
        x, v = x.abs() + 1, v.abs()
    return x, v, indices


def _dims(form):
    return {
        "columns": [1],
        "the last dimension": [2],
        "pairs": [0, 1],
        "pairs that broadcast": [0, 1],
        "pairs apart": [0, 2],
        "beside a slice": [1],
    }.get(form, [0] * len(FORMS[form][1]))


def weights(shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) / 4


def theirs(form, name, x, v, indices, **keywords):
    """JAX: values, and gradients of a weighted sum (None where JAX has none)."""
    jnp = jax.numpy
    index = FORMS[form][2]
    weight = jnp.asarray(weights(x.shape[1:]).numpy())

    def edit(x, v, *indices):
        return getattr(x.at[index(*indices)], name)(v, **keywords)

    def total(x, v, *indices):
        new = edit(x, v, *indices)
        return (new * weight).sum(), new

    arguments = [jnp.asarray(t.numpy()) for t in (x, v, *indices)]
    missing = name in ("multiply", "divide", "power") and indices and not keywords.get("unique_indices")
    # Clipped to a place twice, JAX 0.10 divides by a count that was not clipped: its gradient is inf.
    wrong = name in ("min", "max") and keywords.get("mode") == "clip"
    if missing or wrong:
        return jax.jit(jax.vmap(edit))(*arguments), None
    gradients, values = jax.jit(jax.vmap(jax.grad(total, argnums=(0, 1), has_aux=True)))(*arguments)
    return values, gradients


def compare(form, name, x, v, indices, ours=None, **keywords):
    index = FORMS[form][2]
    values, gradients = theirs(form, name, x, v, indices, **keywords)
    for draw in range(DRAWS):
        a, b = x[draw].clone().requires_grad_(), v[draw].clone().requires_grad_()
        selection = gg.at(a)[index(*(i[draw] for i in indices))]
        new = getattr(selection, name)(b, **(keywords if ours is None else ours))
        same(new.detach(), values[draw], f"{form} {name} value, draw {draw}")
        if gradients is not None:
            (new * weights(a.shape)).sum().backward()
            same(a.grad, gradients[0][draw], f"{form} {name} gradient to x, draw {draw}")
            same(b.grad, gradients[1][draw], f"{form} {name} gradient to v, draw {draw}")


def same(ours, expected, what):
    expected = torch.from_numpy(jax.numpy.array(expected).__array__().copy())
    torch.testing.assert_close(ours, expected, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name", oracle.NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_values_and_gradients(form, name):
    compare(form, name, *drawn(form, name))


@pytest.mark.parametrize("name", ["multiply", "divide", "power"])
@pytest.mark.parametrize("form", ["rows", "columns", "beside a slice backwards"])
def test_the_same_gradients_where_no_index_repeats(form, name):
    compare(form, name, *drawn(form, name, unique=True), unique_indices=True)


@pytest.mark.parametrize("mode", ["drop", "clip"])
@pytest.mark.parametrize("name", ["set", "add", "multiply", "max"])
@pytest.mark.parametrize("form", ["one row", "columns", "pairs", "beside a slice"])
def test_the_same_out_of_range(form, name, mode):
    compare(form, name, *drawn(form, name, margin=3), mode=mode)


def doubled(t):
    return 2 * t + 1


@pytest.mark.parametrize("form", ["rows", "pairs", "columns", "a slice backwards", "an int and a slice"])
def test_apply_and_get(form):
    x, _, indices = drawn(form, "apply")
    index = FORMS[form][2]
    for draw in range(6):
        mine, other = gg.at(x[draw]), jax.numpy.asarray(x[draw].numpy()).at
        own = index(*(i[draw] for i in indices))
        their = index(*(jax.numpy.asarray(i[draw].numpy()) for i in indices))
        same(mine[own].apply(doubled), other[their].apply(doubled), form)
        same(mine[own].get(), other[their].get(), form)


def test_get_with_a_fill_value():
    x, _, (indices,) = drawn("rows", "get", margin=4)
    for draw in range(6):
        mine = gg.at(x[draw])[indices[draw]].get(fill_value=9)
        array = jax.numpy.asarray(x[draw].numpy())
        same(mine, array.at[jax.numpy.asarray(indices[draw].numpy())].get(mode="fill", fill_value=9.0), "fill")


@pytest.mark.parametrize("name", oracle.NAMES)
def test_masks(name):
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        x = torch.rand(3, 4, generator=generator) + 0.5
        keep = torch.rand(3, 4, generator=generator) > 0.5
        value = 1.5
        array = jax.numpy.asarray(x.numpy())
        same(getattr(gg.at(x)[keep], name)(value), getattr(array.at[keep.numpy()], name)(value), name)
        v = torch.rand(int(keep.sum()), generator=generator)
        same(getattr(gg.at(x)[keep], name)(v), getattr(array.at[keep.numpy()], name)(v.numpy()), name)


def test_where_torch_and_jax_differ_torch_is_followed():
    x = torch.zeros(2, 3, 4)
    assert gg.at(x)[0, :, [1, 2]].get().shape == x[0, :, [1, 2]].shape == (3, 2)
    assert jax.numpy.zeros((2, 3, 4)).at[0, :, jax.numpy.array([1, 2])].get().shape == (2, 3)
