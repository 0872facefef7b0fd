"""The forms of index that JAX tests its own `.at` with, three in a hundred by a seed: values and gradients are JAX's.

Each form is a tuple of parts for a shape: ints, slices of either direction, new dimensions, an ellipsis, integer arrays
of one and two dimensions (with repetitions and negative numbers), masks. Forms with a mask or with several arrays apart
follow numpy in both libraries.
"""

import itertools
import os
import random

import pytest
import torch

import gradgate as gg

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
jax = pytest.importorskip("jax", reason="JAX is not installed: the comparison with jax.numpy.ndarray.at is not made")

pytestmark = pytest.mark.slow  # importing JAX is
SHAPES = [(3,), (3, 4), (2, 3, 4)]
PARTS = ["int", "negative int", "slice", "step", "backwards", "new", "ellipsis", "array", "grid", "repeated", "mask"]
OPERATIONS = ["set", "add", "subtract", "multiply", "min", "max"]
SHARE = 0.03


def table():
    """Every shape with every tuple of at most three parts that fits it."""
    for shape in SHAPES:
        for count in range(1, 4):
            for parts in itertools.product(PARTS, repeat=count):
                taken = sum(part not in ("new", "ellipsis") for part in parts)
                if taken <= len(shape) and parts.count("ellipsis") <= 1 and parts.count("mask") <= 1:
                    yield shape, parts


def index_of(shape, parts, rng):
    """Give the index, its arrays as lists; arrays side by side have lengths that broadcast."""
    after = (
        sum(part not in ("new", "ellipsis") for part in parts[parts.index("ellipsis") :]) if "ellipsis" in parts else 0
    )
    found, dim = [], 0
    for part in parts:
        if part == "ellipsis":
            found.append(...)
            dim = len(shape) - after
            continue
        if part == "new":
            found.append(None)
            continue
        size = shape[dim]
        dim += 1
        found.append(
            {
                "int": lambda size=size: rng.randrange(size),
                "negative int": lambda size=size: -1 - rng.randrange(size),
                "slice": lambda size=size: slice(rng.randrange(size), None),
                "step": lambda size=size: slice(None, None, 2),
                "backwards": lambda size=size: slice(None, None, -1),
                "array": lambda size=size: [rng.randrange(-size, size) for _ in range(2)],
                "grid": lambda size=size: [[rng.randrange(size) for _ in range(2)] for _ in range(3)],
                "repeated": lambda size=size: [rng.randrange(size)] * 2,
                "mask": lambda size=size: [True] * min(2, size) + [False] * (size - min(2, size)),
            }[part]()
        )
    return found


def in_torch(index):
    return tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)


def in_jax(index):
    return tuple(jax.numpy.asarray(part) if isinstance(part, list) else part for part in index)


def mixed(index):
    kinds = {type(part) for part in index}
    return int in kinds and list in kinds


def repeats(x, index):
    numbers = torch.arange(x.numel()).reshape(x.shape)
    chosen = gg.at(numbers)[in_torch(index)].get()
    return chosen.unique().numel() < chosen.numel()


def cases():
    rng = random.Random(17)
    rows = list(table())
    return [(*row, rng.choice(OPERATIONS)) for row in rng.sample(rows, int(SHARE * len(rows)))]


def test_the_table_is_large_and_its_sample_meets_every_part():
    drawn = cases()
    assert len(drawn) > 40
    assert {part for _, parts, _ in drawn for part in parts} == set(PARTS)


@pytest.mark.parametrize("slot", range(3))
def test_values_and_gradients_are_those_of_jax(slot):
    rng = random.Random(slot)
    generator = torch.Generator().manual_seed(slot)
    compared = 0
    for shape, parts, operation in cases()[slot::3]:
        index = index_of(shape, parts, rng)
        x = torch.randn(shape, generator=generator)
        try:
            read = jax.numpy.asarray(x.numpy())[in_jax(index)]
        except (IndexError, TypeError, ValueError):
            with pytest.raises((IndexError, ValueError, TypeError)):  # what JAX refuses as an index, so do we
                gg.at(x)[in_torch(index)].get()
            continue
        case = f"{operation} {shape} {index}"
        mine = gg.at(x)[in_torch(index)].get()
        if mixed(index):  # an int is an array to numpy and JAX, which moves dimensions; by torch's rules it is not
            if not any(isinstance(part, slice) and part.step == -1 for part in index):  # torch has no such slice
                assert torch.equal(mine, x[in_torch(index)]), case
            continue
        assert mine.tolist() == read.tolist(), case
        v = torch.randn(tuple(read.shape), generator=generator)
        again = repeats(x, index)
        if again and operation == "set":
            continue  # JAX does not say which of them wins
        compared += 1
        ours_x, ours_v = x.clone().requires_grad_(), v.clone().requires_grad_()
        ours = getattr(gg.at(ours_x)[in_torch(index)], operation)(ours_v)
        weights = torch.randn(shape, generator=generator)

        settings = {"unique_indices": True} if not again and operation == "multiply" else {}

        def theirs(x, v, index=index, operation=operation, settings=settings):
            return getattr(x.at[in_jax(index)], operation)(v, **settings)

        arrays = jax.numpy.asarray(x.numpy()), jax.numpy.asarray(v.numpy())
        if again and operation == "multiply":  # JAX has no gradient there
            torch.testing.assert_close(ours.detach(), torch.tensor(theirs(*arrays).tolist()).reshape(shape), msg=case)
            continue
        value, pull = jax.vjp(theirs, *arrays)
        torch.testing.assert_close(ours.detach(), torch.tensor(value.tolist()).reshape(shape), msg=case)
        gradients = torch.autograd.grad(ours, (ours_x, ours_v), weights)
        for mine, other in zip(gradients, pull(jax.numpy.asarray(weights.numpy())), strict=True):
            torch.testing.assert_close(mine, torch.tensor(other.tolist()).reshape(mine.shape), msg=case)
    assert compared > 3
