"""Problems that users reported, in our own words, with the end that they should have had."""

import pytest
import torch

import gradgate as gg


def test_36_an_edit_of_a_leaf_that_requires_grad():
    w = torch.zeros(4, requires_grad=True)
    v = torch.tensor(5.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="in-place operation"):
        w[0] = 1.0
    y = gg.at(w)[1].set(v)
    assert y.tolist() == [0.0, 5.0, 0.0, 0.0]
    (y * torch.arange(4.0)).sum().backward()
    assert w.grad.tolist() == [0.0, 0.0, 2.0, 3.0]
    assert v.grad.item() == 1.0
    assert w.tolist() == [0.0] * 4


def test_36_the_whole_of_a_leaf():
    w = torch.zeros(4, requires_grad=True)
    gg.at(w)[...].add(1.0).sum().backward()
    assert w.grad.tolist() == [1.0] * 4


def pad_to_4x4(x):
    n, m = x.shape
    padded = gg.at(torch.zeros(4, 4))[:n, :m].set(x)
    return gg.at(padded)[-1, -1].set(1.0)


def test_37_padding_under_vmap():
    x = torch.randn(100, 3, 3, requires_grad=True)
    result = torch.vmap(pad_to_4x4)(x)
    assert result.shape == (100, 4, 4)
    assert torch.equal(result, torch.stack([pad_to_4x4(row) for row in x]))
    (result * torch.arange(16.0).reshape(4, 4)).sum().backward()
    assert torch.equal(x.grad, torch.arange(16.0).reshape(4, 4)[:3, :3].expand(100, 3, 3))


def test_37_each_sample_at_its_own_place_under_vmap():
    x, place = torch.zeros(5, 4), torch.tensor([3, 0, 2, 2, 1])
    one_hot = torch.vmap(lambda row, i: gg.at(row)[i].set(1.0))(x, place)
    assert torch.equal(one_hot, torch.nn.functional.one_hot(place, 4).float())


def test_37_vmap_over_the_value_alone_and_of_a_mask():
    out = torch.vmap(lambda v: gg.at(torch.zeros(3))[torch.tensor([True, False, True])].set(v))(torch.arange(2.0))
    assert out.tolist() == [[0, 0, 0], [1, 0, 1]]


def test_39_an_edit_of_an_output_that_autograd_saved():
    """`out.data.zero_()` gives a gradient of 0 without a word; the edit gives the right one."""
    a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    out = a.sigmoid()
    expected = (out * (1 - out)).detach()
    edited = gg.at(out)[0].set(0.0)
    (out.sum() + edited.sum()).backward()
    torch.testing.assert_close(a.grad, expected + expected * torch.tensor([0.0, 1.0, 1.0]))


def test_40_an_edit_of_an_activation_that_another_branch_needs():
    x, w = torch.ones(1, 2), torch.ones(2, 2, requires_grad=True)
    h = torch.sigmoid(x @ w)
    skip = h
    h = gg.at(h)[...].add(1.0)
    (h * skip).sum().backward()
    reference = torch.ones(2, 2, requires_grad=True)
    s = torch.sigmoid(x @ reference)
    ((s + 1) * s).sum().backward()
    assert torch.equal(w.grad, reference.grad)


def test_40_a_buffer_filled_in_a_loop():
    """The recurrent classic: each step reads what the last one wrote."""
    w = torch.tensor(0.5, requires_grad=True)
    history = torch.zeros(4)
    history = gg.at(history)[0].set(1.0)
    for t in range(1, 4):
        history = gg.at(history)[t].set(history[t - 1] * w)
    history.sum().backward()
    torch.testing.assert_close(w.grad, torch.tensor(1 + 2 * 0.5 + 3 * 0.25))
