"""What the doctor does not do; each is a line of LIMITATIONS.md."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradgate as gg
from tests.doctor.programs import X, two


@pytest.mark.slow
def test_limit_torch_func_is_run_but_not_explained():
    m = nn.Linear(4, 1)

    def step():
        def loss(weight):
            return torch.func.functional_call(m, {"weight": weight}, X).detach().sum()

        return torch.func.grad(loss)(m.weight), torch.func.jvp(m, (X,), (X,)), torch.func.vmap(m)(X)

    diagnosis = gg.diagnose(step, model=m)
    assert diagnosis.healthy
    assert not diagnosis.findings


def test_limit_other_threads_are_not_traced():
    m = two()

    def step():
        thread = threading.Thread(target=lambda: m.head(m.encoder(X).detach()).mean().backward())
        thread.start()
        thread.join()

    assert gg.diagnose(step, model=m).healthy


def test_limit_a_number_that_left_torch_is_only_suspected():
    """What Python does with a number cannot be seen: here it was only printed, and the loss never used it."""
    m = two()

    def step():
        shown = m.encoder(X).mean().item()
        assert shown < 1e9
        return m.head(X).mean()

    finding = gg.diagnose(step, model=m).findings[0]
    assert finding.code == "GG101"
    assert ".item()" in finding.title


def test_limit_inside_a_reentrant_checkpoint_a_birth_is_named_by_its_first_line():
    m = two()

    def block(x):
        h = m.encoder(x)  # this line is named
        return (h * 0).sqrt()

    def step():
        return checkpoint(block, X.clone().requires_grad_(), use_reentrant=True).mean()

    finding = gg.diagnose(step, model=nn.ModuleDict({"encoder": m.encoder})).findings[0]
    assert finding.code == "GG403"
    assert finding.source.startswith("h = m.encoder(x)")


def test_limit_a_guard_on_another_tensor_is_not_recognised_before_it_bites():
    m = two()
    nn.init.constant_(m.encoder.bias, 5.0)
    keep = X > 0

    def step():
        return m.head(torch.where(keep, m.encoder(X).sqrt(), X)).mean()

    assert gg.diagnose(step, model=m).healthy


def test_limit_meta_and_fake_tensors_have_no_values_to_look_at():
    layer = nn.Linear(3, 1, device="meta")
    assert gg.diagnose(lambda: (layer(torch.empty(4, 3, device="meta")) / 0).sum(), model=layer).healthy
