"""The gradient witness: one call that compares a function with its slow, obviously right oracle, in every way promised.

`witness(fn, oracle, *inputs)` checks value, gradient and second gradient against the oracle, and then, for each
promise: gradcheck, gradgradcheck, torch.func.grad, vmap over every subset of the inputs (and backward through it),
jvp, torch.compile(fullgraph=True), non-contiguous input, expanded input, empty input, half precisions, complex, and
FakeTensorMode, which proves that nothing depends on the data on the host: no synchronisation on a GPU.

Inputs that are floating or complex are differentiated; bool and integer inputs (masks, indices) are passed along.
The single checks are functions of their own, so that the truth table can ask them one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

Function = Callable[..., Any]

ALL = frozenset(
    {
        "gradcheck",
        "gradgradcheck",
        "func_grad",
        "vmap",
        "jvp",
        "compile",
        "noncontiguous",
        "expanded",
        "bfloat16",
        "float16",
        "float64",
        "complex",
        "fake",
    }
)
REAL = ALL - {"complex"}
# For rules that differ from the true derivative on purpose (gates): a numeric check would be wrong there.
RULE = ALL - {"gradcheck", "gradgradcheck"}


def witness(
    fn: Function,
    oracle: Function,
    *inputs: torch.Tensor,
    promises: Iterable[str] = REAL,
    empty: Sequence[torch.Tensor] | None = None,
    exact: bool = False,
) -> None:
    """Check fn against its oracle on these inputs, and everything in promises.

    Args:
        fn: The function under test.
        oracle: The slow and obvious one, of the same signature.
        *inputs: Tensors; float32 or float64 ones are differentiated.
        promises: Which further checks to make, names from ALL.
        empty: Inputs with a dimension of size 0, on which both must agree too.
        exact: Ask for bit-equality of value and gradient instead of closeness.
    """
    promises = frozenset(promises)
    assert promises <= ALL, f"unknown promises {sorted(promises - ALL)}"
    check_against(fn, oracle, inputs, exact=exact)
    if empty is not None:
        check_against(fn, oracle, empty, exact=exact)
    for name in sorted(promises):
        CHECKS[name](fn, oracle, inputs)


def differentiable(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def fresh(inputs: Sequence[Any], requires_grad: bool = True) -> list[Any]:
    """Copy the inputs into leaves of their own, strides kept."""
    return [
        value.detach().clone(memory_format=torch.preserve_format).requires_grad_(requires_grad)
        if differentiable(value)
        else value
        for value in inputs
    ]


def outputs_of(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype=out.dtype, device=out.device)
        for out in outputs
    ]


def value_and_gradients(fn: Function, inputs: Sequence[Any], order: int = 1) -> tuple[list[Any], list[Any]]:
    """Run fn on fresh leaves; give all outputs, and the gradient of each differentiable input (order 1 or 2)."""
    inputs = fresh(inputs)
    leaves = [value for value in inputs if differentiable(value)]
    outputs = outputs_of(fn(*inputs))
    roots = [out for out in outputs if out.requires_grad]
    if not roots or not leaves:
        return outputs, []
    first = torch.autograd.grad(
        roots, leaves, cotangents(roots), create_graph=order == 2, allow_unused=True, materialize_grads=True
    )
    if order == 1:
        return outputs, list(first)
    again = [gradient for gradient in first if gradient.requires_grad]
    if not again:
        return outputs, [torch.zeros_like(leaf) for leaf in leaves]
    second = torch.autograd.grad(again, leaves, cotangents(again), allow_unused=True, materialize_grads=True)
    return outputs, list(second)


def assert_same(
    ours: Sequence[Any], theirs: Sequence[Any], *, what: str, exact: bool = False, dtype: Any = None
) -> None:
    assert len(ours) == len(theirs), f"{what}: {len(ours)} against {len(theirs)} tensors"
    low = dtype in (torch.bfloat16, torch.float16)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 3e-2, "atol": 3e-2} if low else {}
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            a,
            b,
            equal_nan=True,
            check_dtype=not low,
            check_stride=False,
            **tolerance,
            msg=lambda m, number=number: f"{what} {number}: {m}",
        )


def check_against(fn: Function, oracle: Function, inputs: Sequence[Any], *, exact: bool = False) -> None:
    """Value, gradient and second gradient agree with the oracle, and the inputs are left untouched."""
    before = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    for order, what in ((1, "gradient"), (2, "second gradient")):
        ours, our_gradients = value_and_gradients(fn, inputs, order)
        theirs, their_gradients = value_and_gradients(oracle, inputs, order)
        assert_same(ours, theirs, what="value", exact=exact)
        if not our_gradients and their_gradients:
            assert all((g == 0).all() for g in their_gradients), f"{what}: ours is not connected to any input"
            continue
        if not their_gradients and our_gradients:
            their_gradients = [torch.zeros_like(g) for g in our_gradients]
        assert_same(our_gradients, their_gradients, what=what, exact=exact)
    for value, old in zip(inputs, before, strict=True):
        if isinstance(value, torch.Tensor):
            assert_same([value.detach()], [old], what="input after the call", exact=True)


def _to(inputs: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    return [value.detach().to(dtype) if differentiable(value) else value for value in inputs]


def check_gradcheck(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    assert torch.autograd.gradcheck(_floating_outputs(fn), fresh(_to(inputs, torch.float64)), fast_mode=False)


def check_gradgradcheck(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    assert torch.autograd.gradgradcheck(_floating_outputs(fn), fresh(_to(inputs, torch.float64)))


def _floating_outputs(fn: Function) -> Function:
    def only(*inputs: Any) -> Any:
        return tuple(out for out in outputs_of(fn(*inputs)) if differentiable(out) and out.requires_grad)

    return only


def _summed(fn: Function) -> Function:
    """Make a real scalar of all differentiable outputs, weighted so that no two of them can cancel."""

    def scalar(*inputs: Any) -> torch.Tensor:
        total = torch.zeros(())
        for out in outputs_of(fn(*inputs)):
            if differentiable(out):
                weights = torch.arange(1, out.numel() + 1, dtype=torch.float64).reshape(out.shape) / max(out.numel(), 1)
                product = out * weights.to(out.dtype)
                total = total + (product.real + product.imag if product.is_complex() else product).sum().float()
        return total

    return scalar


def check_func_grad(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """torch.func.grad gives the oracle's gradient."""
    where = tuple(i for i, value in enumerate(inputs) if differentiable(value))
    plain = fresh(inputs, requires_grad=False)
    ours = torch.func.grad(_summed(fn), argnums=where)(*plain)
    leaves = fresh(inputs)
    theirs = torch.autograd.grad(
        _summed(oracle)(*leaves), [leaves[i] for i in where], allow_unused=True, materialize_grads=True
    )
    assert_same(ours, theirs, what="torch.func.grad")


def check_vmap(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """vmap over each subset of the inputs equals a loop; so does the backward through vmap, and vmap of grad."""
    size = 3
    where = tuple(i for i, value in enumerate(inputs) if differentiable(value))
    tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    for count in range(1, len(tensors) + 1):
        for batched in itertools.combinations(tensors, count):
            stacked = [_stack_variants(value, size) if i in batched else value for i, value in enumerate(inputs)]
            in_dims = tuple(0 if i in batched else None for i in range(len(inputs)))
            loop_inputs = [[v[k] if i in batched else v for i, v in enumerate(stacked)] for k in range(size)]

            def looped(*args: Any, _batched: Any = batched) -> Any:
                results = [
                    outputs_of(oracle(*[a[k] if i in _batched else a for i, a in enumerate(args)])) for k in range(size)
                ]
                return [torch.stack(column) for column in zip(*results, strict=True)]

            mapped = torch.vmap(fn, in_dims=in_dims)
            ours, our_gradients = value_and_gradients(mapped, stacked)
            theirs, their_gradients = value_and_gradients(looped, stacked)
            assert_same(ours, theirs, what=f"vmap over inputs {batched}")
            if our_gradients or their_gradients:
                assert_same(our_gradients, their_gradients, what=f"backward through vmap over inputs {batched}")
            if where and their_gradients:
                per_row = torch.vmap(torch.func.grad(_summed(fn), argnums=where), in_dims=in_dims)(*stacked)
                for k in range(size):
                    leaves = fresh(loop_inputs[k])
                    row = torch.autograd.grad(
                        _summed(oracle)(*leaves),
                        [leaves[i] for i in where],
                        allow_unused=True,
                        materialize_grads=True,
                    )
                    assert_same([g[k] for g in per_row], row, what=f"vmap(grad) over inputs {batched}, row {k}")


def _stack_variants(value: torch.Tensor, size: int) -> torch.Tensor:
    """Several different inputs of one shape: rolled along, so that masks and values differ from row to row."""
    flat = value.detach().reshape(-1)
    return torch.stack([torch.roll(flat, k).reshape(value.shape) for k in range(size)])


def check_jvp(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """Forward mode agrees with the oracle's backward mode: <cotangent, J tangent> = <J^T cotangent, tangent>."""
    where = [i for i, value in enumerate(inputs) if differentiable(value)]
    plain = fresh(inputs, requires_grad=False)
    tangents = tuple(torch.randn_like(plain[i]) for i in where)

    def of_primals(*primals: torch.Tensor) -> list[torch.Tensor]:
        values = list(plain)
        for i, primal in zip(where, primals, strict=True):
            values[i] = primal
        return [out for out in outputs_of(fn(*values)) if differentiable(out)]

    _, out_tangents = torch.func.jvp(of_primals, tuple(plain[i] for i in where), tangents)
    leaves = fresh(inputs)
    roots = [out for out in outputs_of(oracle(*leaves)) if differentiable(out)]
    weights = cotangents(roots)
    pairs = [(root, weight) for root, weight in zip(roots, weights, strict=True) if root.requires_grad]
    gradients = torch.autograd.grad(
        [root for root, _ in pairs],
        [leaves[i] for i in where],
        [weight for _, weight in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    forward = sum(torch.vdot(w.flatten(), t.flatten()).real for w, t in zip(weights, out_tangents, strict=True))
    backward = sum(torch.vdot(g.flatten(), t.flatten()).real for g, t in zip(gradients, tangents, strict=True))
    torch.testing.assert_close(forward, backward, rtol=1e-4, atol=1e-4)


def check_compile(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """torch.compile(fullgraph=True) gives the same value and gradient."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=False)
    try:
        ours, our_gradients = value_and_gradients(compiled, inputs)
    finally:
        torch._dynamo.reset()
    theirs, their_gradients = value_and_gradients(oracle, inputs)
    assert_same(ours, theirs, what="compiled value")
    assert_same(
        our_gradients or [torch.zeros_like(g) for g in their_gradients],
        their_gradients,
        what="compiled gradient",
    )


def check_noncontiguous(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """Every second element of a larger storage, with the dimensions in reverse order in memory."""
    check_against(fn, oracle, [_scattered(v) if isinstance(v, torch.Tensor) else v for v in inputs])


def _scattered(value: torch.Tensor) -> torch.Tensor:
    storage = value.new_zeros([*reversed(value.shape), 2])
    view = storage[..., 0].permute(tuple(reversed(range(value.dim()))))
    view.copy_(value.detach())
    return view


def check_expanded(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """An input whose elements share memory (stride 0)."""
    expanded = [v.detach()[:1].expand_as(v) if differentiable(v) and v.dim() and len(v) > 1 else v for v in inputs]
    before = [v.clone() for v in expanded if isinstance(v, torch.Tensor)]
    ours = outputs_of(fn(*expanded))
    assert_same(
        ours,
        outputs_of(oracle(*[v.clone() if isinstance(v, torch.Tensor) else v for v in expanded])),
        what="expanded",
    )
    assert_same(
        [v for v in expanded if isinstance(v, torch.Tensor)],
        before,
        what="expanded input after the call",
        exact=True,
    )


def _check_dtype(dtype: torch.dtype) -> Function:
    def check(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
        converted = _to(inputs, dtype)
        ours, our_gradients = value_and_gradients(fn, converted)
        for out in ours:
            assert not out.is_floating_point() or out.dtype == dtype, f"{dtype} became {out.dtype}"
        reference = _to(converted, torch.float64)
        theirs, their_gradients = value_and_gradients(oracle, reference)
        theirs = [t.to(o.dtype) for t, o in zip(theirs, ours, strict=True)]
        assert_same(ours, theirs, what=str(dtype), dtype=dtype)
        if our_gradients and their_gradients:
            assert all(g.dtype == dtype for g in our_gradients)
            assert_same(our_gradients, [g.to(dtype) for g in their_gradients], what=f"{dtype} gradient", dtype=dtype)

    return check


def check_complex(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """Complex inputs: value and gradient agree with the oracle."""
    generator = torch.Generator().manual_seed(3)
    turned = [
        torch.complex(v.detach().double(), torch.randn(v.shape, generator=generator, dtype=torch.float64))
        if differentiable(v)
        else v
        for v in inputs
    ]
    check_against(fn, oracle, turned)


def check_fake(fn: Function, oracle: Function, inputs: Sequence[Any]) -> None:
    """Forward and backward run on tensors without data: nothing asks the host for a value."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked = [mode.from_tensor(v.detach()) if isinstance(v, torch.Tensor) else v for v in inputs]
        leaves = [v.requires_grad_() if differentiable(v) else v for v in faked]
        outputs = outputs_of(fn(*leaves))
        roots = [out for out in outputs if out.requires_grad]
        if roots:
            torch.autograd.grad(
                roots,
                [v for v in leaves if differentiable(v)],
                [torch.ones_like(out) for out in roots],
                allow_unused=True,
            )
    real = outputs_of(oracle(*fresh(inputs, requires_grad=False)))
    for ours, theirs in zip(outputs, real, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype


CHECKS: dict[str, Function] = {
    "gradcheck": check_gradcheck,
    "gradgradcheck": check_gradgradcheck,
    "func_grad": check_func_grad,
    "vmap": check_vmap,
    "jvp": check_jvp,
    "compile": check_compile,
    "noncontiguous": check_noncontiguous,
    "expanded": check_expanded,
    "bfloat16": _check_dtype(torch.bfloat16),
    "float16": _check_dtype(torch.float16),
    "float64": _check_dtype(torch.float64),
    "complex": check_complex,
    "fake": check_fake,
}
