"""Forward, a gate is not there: the same values, strides and memory; and nothing is ever written to."""

import pytest
import torch
from torch import nn

import gradgate as gg

KEEP = torch.tensor([True, False, True])
GATES = {
    "gate": lambda x: gg.gate(x, KEEP.expand(x.shape) if x.dim() and x.shape[-1] == 3 else torch.tensor(True)),
    "gate open": lambda x: gg.gate(x, True),
    "gate shut": lambda x: gg.gate(x, False),
    "gate callable": lambda x: gg.gate(x, lambda g: g == g),
    "scale_grad": lambda x: gg.scale_grad(x, 0.5),
    "reverse_grad": gg.reverse_grad,
    "clip_grad": lambda x: gg.clip_grad(x, max_norm=1.0),
    "finite_grad": gg.finite_grad,
    "straight_through": lambda x: gg.straight_through(x, x),
}
each_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())


def address(tensor):
    """Where the data lies, asked in a way that does not count as wanting to write there."""
    return torch._C._data_address(tensor)


def tensors():
    """Leaves and activations of many kinds."""
    plain = torch.tensor([[float("nan"), -0.0, float("inf")], [1.0, -2.0, 1e-45]])
    yield "plain", plain
    yield "transposed", plain.t().contiguous().t()
    yield "every second", torch.arange(12.0).reshape(2, 6)[:, ::2]
    yield "expanded", torch.ones(3).expand(2, 3)
    yield "channels last", torch.randn(2, 3, 4, 3).to(memory_format=torch.channels_last)
    yield "0-dim", torch.tensor(2.0)
    yield "empty", torch.ones(0, 3)
    yield "bfloat16", plain.to(torch.bfloat16)
    yield "float64", plain.double()
    yield "complex", torch.complex(plain, plain)


class Activation(torch.autograd.Function):
    """Makes a tensor that is no leaf of one that is, strides and all."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def as_bytes(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


@each_gate
@pytest.mark.parametrize("values", [values for _, values in tensors()], ids=[kind for kind, _ in tensors()])
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "activation"])
def test_same_values_strides_and_memory(gate, values, leaf):
    x = values.detach().requires_grad_()
    x = x if leaf else Activation.apply(x)
    y = gate(x)
    assert y is not x
    assert type(y) is torch.Tensor
    assert (y.shape, y.stride(), y.dtype, y.device, y.layout) == (x.shape, x.stride(), x.dtype, x.device, x.layout)
    assert address(y) == address(x), "no copy"
    assert as_bytes(y) == as_bytes(x)


@each_gate
def test_the_same_where_no_gradient_comes(gate):
    data = torch.ones(2, 3)
    leaf = torch.ones(2, 3, requires_grad=True)
    hidden = leaf * 1
    for recording, x in ((True, data), (False, data), (False, leaf), (False, hidden)):
        with torch.set_grad_enabled(recording):
            y = gate(x)
        assert not y.requires_grad
        assert y is not x
        assert address(y) == address(x)
        assert y.stride() == x.stride()


def test_numbers_that_have_no_gradient_come_back_themselves():
    labels = torch.tensor([1, 2, 3])
    assert gg.gate(labels, KEEP) is labels
    assert gg.reverse_grad(labels) is labels


@each_gate
def test_evaluation_gives_what_training_gives_with_an_in_place_operation_behind(gate):
    """The residual connection: x is used again after the result was overwritten."""

    def block(x):
        return gate(x).relu_() + x

    layer = nn.Linear(3, 3)
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    trained = block(layer(x))
    with torch.no_grad():
        assert torch.equal(block(layer(x)), trained)
    with torch.inference_mode():
        assert torch.equal(block(layer(x)), trained)


@each_gate
def test_an_in_place_operation_on_the_result_leaves_x_as_it_is(gate):
    leaf = torch.tensor([[-1.0, 2.0, -3.0]], requires_grad=True)
    x = leaf * 1
    y = gate(x)
    before = x.detach().clone()
    y.relu_()
    assert torch.equal(x, before)
    assert torch.equal(y, before.relu())
    (y.sum() + (3 * x).sum()).backward()  # x is used after the write: the residual connection
    expected = torch.tensor([[-1.0, 2.0, -3.0]], requires_grad=True)
    inner = expected * 1
    (torch.relu(gate(inner)).sum() + (3 * inner).sum()).backward()
    assert torch.equal(leaf.grad, expected.grad)


@each_gate
def test_writing_to_x_afterwards_leaves_the_result_as_it_is(gate):
    x = torch.ones(1, 3, requires_grad=True) * 1
    y = gate(x)
    x.mul_(5)
    assert torch.equal(y, torch.ones(1, 3))


@pytest.mark.parametrize("module", [gg.Gate(KEEP), gg.ReverseGrad(), gg.ClipGrad(max_norm=1.0), gg.FiniteGrad()])
def test_a_gate_before_an_in_place_activation(module):
    ours = nn.Sequential(nn.Linear(3, 3), module, nn.ReLU(inplace=True))
    theirs = nn.Sequential(ours[0], module, nn.ReLU())
    gradients = []
    for net in (ours, theirs):
        net.zero_grad()
        net(torch.linspace(-1, 1, 12).reshape(4, 3)).sum().backward()
        gradients.append(net[0].weight.grad.clone())
    assert torch.equal(*gradients)


def test_what_no_one_holds_any_more_is_overwritten_without_a_copy():
    leaf = torch.ones(4, 3, requires_grad=True)
    x = leaf * 2
    y = gg.gate(x, KEEP)
    place = address(y)
    del x
    y.relu_()
    assert address(y) == place


def test_asking_for_a_raw_pointer_copies_once():
    x = torch.ones(3, requires_grad=True) * 1
    y = gg.gate(x, KEEP)
    assert address(y) == address(x)
    assert y.data_ptr() != address(x)
    place = address(y)
    assert y.data_ptr() == place


def test_a_parameter_stays_where_it_is_so_its_gate_cannot_be_overwritten():
    weight = nn.Parameter(torch.ones(3))
    place = address(weight)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        gg.gate(weight, KEEP).relu_()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        gg.gate(weight[:2], KEEP[:2]).relu_()
    gg.gate(weight, KEEP).clone().relu_().sum().backward()
    held = gg.gate(weight, KEEP)
    with torch.no_grad():
        weight.mul_(3)
        gg.gate(weight, KEEP).mul_(2)  # torch.no_grad() allows this, as it allows weight.mul_(2)
    gg.gate(weight, False).mul_(2)  # so does torch for weight.detach().mul_(2)
    assert weight.tolist() == [12, 12, 12]
    assert address(weight) == place == address(held)


def test_memory_that_torch_does_not_own_is_shared_too():
    array = torch.ones(3).numpy()
    x = torch.from_numpy(array)
    x.mul_(torch.ones(3, requires_grad=True))
    y = gg.gate(x, KEEP)
    assert y.data_ptr() == x.data_ptr() == array.ctypes.data
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.relu_()


@each_gate
def test_the_gradient_that_was_given_and_the_sibling_branch_are_not_edited(gate):
    x = torch.ones(2, 3, requires_grad=True)
    given = torch.tensor([[5.0, float("nan"), 7.0]]).expand(2, 3).clone()
    before = given.clone()
    h = x * 1
    closed, sibling = gate(h), h.view_as(h)
    sibling.retain_grad()
    both = closed + sibling  # one and the same gradient tensor goes into both branches
    both.backward(given)
    assert torch.equal(given.nan_to_num(-1), before.nan_to_num(-1))
    assert torch.equal(sibling.grad.nan_to_num(-1), before.nan_to_num(-1))


def test_the_gradient_of_the_result_itself_is_the_one_before_the_gate():
    x = torch.ones(3, requires_grad=True)
    y = gg.gate(x * 1, KEEP)
    y.retain_grad()
    (3 * y).sum().backward()
    assert y.grad.tolist() == [3, 3, 3]
    assert x.grad.tolist() == [3, 0, 3]
