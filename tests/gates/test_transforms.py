"""Gates inside torch.compile, torch.func and forward mode: what the witness does not ask, and what is refused."""

import copy
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import gradgate as gg

KEEP = torch.tensor([True, False, True])
LINEAR = {
    "gate": lambda x: gg.gate(x, KEEP),
    "scale_grad": lambda x: gg.scale_grad(x, torch.tensor([0.5, 0.0, -1.0])),
    "reverse_grad": gg.reverse_grad,
    "straight_through": lambda x: gg.straight_through(x.round(), 2 * x),
}
LOOKING = {
    "gate callable": lambda x: gg.gate(x, lambda g: g > 0),
    "clip_grad": lambda x: gg.clip_grad(x, max_norm=1.0),
    "finite_grad": gg.finite_grad,
}
WITH_A_FUNCTION = {**{name: f for name, f in LINEAR.items() if name != "gate"}, **LOOKING}


def each(gates):
    return pytest.mark.parametrize("gate", gates.values(), ids=gates.keys())


@each(LINEAR)
def test_forward_and_backward_mode_agree(gate):
    x = torch.tensor([0.3, 1.2, -2.0])
    assert torch.equal(jacfwd(gate)(x), jacrev(gate)(x))
    _, expected = jvp(gate, (x,), (torch.ones(3),))
    with forward_ad.dual_level():
        dual = gate(forward_ad.make_dual(x, torch.ones(3)))
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, expected)


@each(LINEAR)
def test_second_derivatives_agree_whichever_way_they_are_taken(gate):
    def loss(x):
        return (gate(x) ** 3).sum()

    x = torch.tensor([0.3, 1.2, -2.0])
    assert torch.allclose(hessian(loss)(x), jacrev(jacrev(loss))(x))
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert torch.allclose(second, jacrev(jacrev(loss))(x).sum(0))


@each(LOOKING)
def test_a_rule_that_looks_at_the_gradient_has_no_forward_mode_and_says_so(gate):
    x = torch.ones(3)
    with pytest.raises(gg.GradgateError, match=r"have no forward-mode derivative(.|\n)*Why:(.|\n)*Fix: torch.func.vjp"):
        jvp(gate, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(gg.GradgateError, match="have no forward-mode derivative"):
        gate(forward_ad.make_dual(x, x))


def test_each_sample_is_clipped_alone_under_vmap():
    samples = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    slopes = vmap(grad(lambda x: (gg.clip_grad(x, max_norm=1.0) ** 2).sum() / 2))(samples)
    assert torch.allclose(slopes, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    again = vmap(vmap(grad(lambda x: (gg.clip_grad(x, max_norm=1.0) ** 2).sum() / 2)))(samples.expand(2, 3, 2))
    assert torch.allclose(again, slopes.expand(2, 3, 2))


def test_vmap_along_another_dimension():
    x = torch.tensor([[3.0, 0.3], [4.0, 0.4]])
    slopes = vmap(grad(lambda x: (gg.clip_grad(x, max_norm=1.0) ** 2).sum() / 2), in_dims=1, out_dims=1)(x)
    assert torch.allclose(slopes, torch.tensor([[0.6, 0.3], [0.8, 0.4]]))


def test_a_function_may_answer_false_for_all_samples_under_vmap():
    slopes = vmap(grad(lambda x: gg.gate(x, lambda g: False).sum()))(torch.ones(2, 3))
    assert torch.equal(slopes, torch.zeros(2, 3))


@pytest.mark.slow
@each({**LINEAR, **LOOKING})
def test_nan_does_not_leak_under_transforms_and_compile(gate):
    """The same gradient as eagerly, also where NaN arrives; `gate` and a factor of 0 stop it there too."""
    weights = torch.tensor([2.0, float("nan"), 3.0])
    x = torch.zeros(3, requires_grad=True)
    (gate(x) * weights).sum().backward()
    in_func = grad(lambda x: (gate(x) * weights).sum())(torch.zeros(3))
    y = torch.zeros(3, requires_grad=True)
    (torch.compile(gate, fullgraph=True, backend="aot_eager")(y) * weights).sum().backward()
    torch._dynamo.reset()
    for other in (in_func, y.grad):
        torch.testing.assert_close(other, x.grad, rtol=0, atol=0, equal_nan=True)


# --- torch.compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@each(WITH_A_FUNCTION)
def test_torch_func_inside_compile_is_refused_where_the_rule_would_be_lost(gate):
    """Dynamo drops the backward of an autograd Function there without a word; so we do not let it."""
    sloped = torch.compile(grad(lambda x: (gate(x) * 2).sum()), fullgraph=True, backend="aot_eager")
    # The Dynamo of older versions gives the class of an error and not its words.
    words = r"torch.func inside torch.compile would lose the rule|raised exception .*ArgumentError"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        sloped(torch.ones(3))


@pytest.mark.usefixtures("_fresh_dynamo")
def test_the_plain_function_is_lost_there():
    """So that the refusal can be taken back when torch before 2.15, which learned it, is not supported."""

    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    def sloped(x):
        return grad(lambda x: Reversed.apply(x).sum())(x)

    assert sloped(torch.ones(3)).tolist() == [-1, -1, -1]
    there = torch.compile(sloped, fullgraph=True, backend="aot_eager")(torch.ones(3))
    assert there.tolist() == ([1, 1, 1] if torch.__version__ < "2.15" else [-1, -1, -1])


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_mask_works_in_torch_func_inside_compile():
    sloped = torch.compile(vmap(grad(lambda x: gg.gate(x, KEEP).sum())), fullgraph=True, backend="aot_eager")
    assert sloped(torch.ones(2, 3)).tolist() == [[1, 0, 1], [1, 0, 1]]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_function_inside_torch_func():
    compiled = torch.compile(lambda x: (gg.reverse_grad(x) * 2).sum(), backend="aot_eager")
    assert grad(compiled)(torch.ones(3)).tolist() == [-2, -2, -2]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_with_the_default_compiler():
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 3),
        gg.Gate(KEEP),
        torch.nn.ReLU(inplace=True),
        gg.ReverseGrad(0.5),
        gg.ClipGrad(max_norm=1.0),
    )
    x = torch.randn(4, 3)
    gradients = []
    for run in (net, torch.compile(net, fullgraph=True)):
        net.zero_grad()
        run(x).sum().backward()
        gradients.append(net[0].weight.grad.clone())
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_strength_in_a_tensor_follows_a_schedule_without_compiling_again():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), gg.ReverseGrad(torch.tensor(0.0)))
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for step in range(12):
        net[1].strength.fill_(step / 10)
        net.zero_grad()
        compiled(torch.ones(1, 2)).sum().backward()
        assert torch.allclose(net[0].bias.grad, torch.tensor(-step / 10).expand(2))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_strength_that_is_a_number_is_right_under_a_schedule_too():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), gg.ReverseGrad(0.0))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for step in range(5):
        net[1].strength = step / 10
        net.zero_grad()
        compiled(torch.ones(1, 2)).sum().backward()
        assert torch.allclose(net[0].bias.grad, torch.tensor(-step / 10).expand(2))


# --- everything else that gates meet ----------------------------------------------------------------------------------


@each({**LINEAR, **LOOKING})
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_gives_the_same_gradient(gate, reentrant):
    values = torch.tensor([0.3, 1.2, -2.0])
    plain, kept = values.clone().requires_grad_(), values.clone().requires_grad_()
    (gate(plain * 2) ** 2).sum().backward()
    checkpoint(lambda x: gate(x * 2) ** 2, kept, use_reentrant=reentrant).sum().backward()
    assert torch.equal(plain.grad, kept.grad)


def test_a_mask_that_is_overwritten_before_backward_is_an_error():
    for x in (torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 1):
        keep = KEEP.clone()
        y = gg.gate(x, keep)
        keep.fill_(True)
        with pytest.raises(gg.GradgateError, match=r"overwritten between forward and backward(.|\n)*Fix: keep.clone"):
            y.sum().backward()


def test_a_mask_that_was_made_in_inference_mode():
    with torch.inference_mode():
        keep = torch.tensor([5.0, -1.0, 2.0]) > 0
    x = torch.ones(3, requires_grad=True)
    gg.gate(x * 1, keep).sum().backward()
    assert x.grad.tolist() == [1, 0, 1]


def test_the_gradient_of_a_ragged_batch():
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    gg.reverse_grad(x * 1).sum().backward()
    assert x.grad.values().unique().tolist() == [-1]


def test_a_callable_may_look_at_tensors_that_vmap_maps():
    limits = torch.tensor([0.5, 5.0])

    def gated(x, limit):
        return gg.gate(x, lambda gradient: gradient > limit) * 2

    slopes = vmap(lambda x, limit: grad(lambda x: gated(x, limit).sum())(x))(torch.ones(2, 3), limits)
    x = torch.ones(2, 3, requires_grad=True)
    vmap(gated)(x, limits).sum().backward()
    assert slopes.tolist() == x.grad.tolist() == [[2, 2, 2], [0, 0, 0]]


def test_a_model_with_gates_can_be_exported():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), gg.Gate(KEEP), gg.ReverseGrad(), gg.ClipGrad(max_norm=1.0))
    x = torch.ones(2, 3)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), net(x))


def test_backward_twice_through_a_retained_graph():
    x = torch.ones(3, requires_grad=True)
    loss = gg.gate(x, KEEP).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad.tolist() == [2, 0, 2]


def test_models_with_gates_can_be_copied_pickled_and_called_functionally():
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), gg.Gate(KEEP))
    weights = dict(net.named_parameters())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(torch.ones(1, 3)), net(torch.ones(1, 3)))
    slopes = grad(lambda weights: functional_call(net, weights, (torch.ones(1, 3),)).sum())(weights)
    assert slopes["0.bias"].tolist() == [1, 0, 1]
