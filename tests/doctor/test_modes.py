"""Modes that are not what the user thinks."""

import torch
from torch import nn

import gradgate as gg
from tests.doctor.programs import X, check_faulty, faulty, healthy, two


def loss_of(m):
    return m.head(m.encoder(X)).mean()


@faulty("GG801")
def switched_off_and_left():
    m = two()

    def step():
        loss_of(m).backward()
        torch.set_grad_enabled(False)  # HERE

    return step, m


@faulty("GG801")
def switched_off_in_a_function():
    m = two()

    def validate():
        torch.set_grad_enabled(False)  # HERE
        return loss_of(m).item()

    def step():
        loss_of(m).backward()
        validate()

    return step, m


@faulty("GG801")
def entered_and_never_left():
    m = two()

    def step():
        loss_of(m).backward()
        torch.no_grad().__enter__()  # HERE

    return step, m


@faulty("GG802")
def a_statement():
    m = two()

    def step():
        torch.no_grad()  # HERE
        loss_of(m).backward()

    return step, m


@faulty("GG802")
def a_statement_in_a_branch():
    m = two()

    def step():
        if X.numel():
            torch.inference_mode()  # HERE
        loss_of(m).backward()

    return step, m


@faulty("GG802")
def a_statement_in_a_method():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            torch.enable_grad()  # HERE
            return self.layer(x)

    m = Model()
    return lambda: m(X).mean(), m


@faulty("GG803")
def a_decorated_coroutine():
    m = two()

    @torch.no_grad()  # HERE
    async def predict():
        return loss_of(m)

    assert predict is not None
    return lambda: loss_of(m), m


@faulty("GG803")
def a_decorated_method():
    class Server:
        @torch.inference_mode()  # HERE
        async def predict(self, x):
            return x

    assert Server is not None
    m = two()
    return lambda: loss_of(m), m


@faulty("GG803")
def a_decorated_generator():
    m = two()

    @torch.no_grad()  # HERE
    async def stream():
        yield loss_of(m)

    assert stream is not None
    return lambda: loss_of(m), m


@faulty("GG804")
def a_tensor_made_in_inference_mode():
    m = two()

    def step():
        with torch.inference_mode():
            scale = torch.arange(4.0)  # HERE
        return (m.encoder(X) * scale).mean()  # ALSO

    return step, m


@faulty("GG804")
def a_lazy_cache():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.positions = nn.Linear(4, 4), None

        def forward(self, x):
            if self.positions is None:
                self.positions = torch.arange(4.0)  # HERE
            return self.layer(x * self.positions) * self.positions  # ALSO

    m = Cached()

    def step():
        with torch.inference_mode():
            m(X)
        m(X).mean().backward()

    return step, m


@faulty("GG804")
def a_cache_from_before():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            with torch.inference_mode():
                self.positions = torch.arange(4.0)

        def forward(self, x):
            return self.layer(x) * self.positions  # HERE

    m = Cached()
    return lambda: m(X).mean(), m


@faulty("GG805")
def eval_left_on_with_dropout():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)).eval()

    def step():
        return m(X).mean()  # HERE

    return step, m


@faulty("GG805")
def eval_left_on_with_batchnorm():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    m.eval()

    def step():
        m(X).mean().backward()  # HERE

    return step, m


@faulty("GG805")
def eval_in_a_validation_before():
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def step():
        m.eval()
        with torch.no_grad():
            m(X).mean().item()
        m(X).mean().backward()

    return step, m


@faulty("GG806")
def validation_in_train_mode():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def step():
        with torch.no_grad():  # ALSO
            m(X).mean()  # HERE
        return m(X).mean()

    return step, m


@faulty("GG806")
def a_decorated_validation():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    @torch.no_grad()
    def validate():
        return m(X).mean()  # HERE

    def step():
        validate()
        return m(X).mean()

    return step, m


@faulty("GG806")
def targets_of_a_teacher_in_train_mode():
    m = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.LazyLinear(1))
    x = X[:, None]
    m(x)

    def step():
        with torch.no_grad():
            target = m(x)  # HERE
        return (m(x) - target).pow(2).mean()

    return step, m


@healthy("GG801")
def a_block_restores():
    m = two()

    def step():
        with torch.set_grad_enabled(False):
            loss_of(m)
        with torch.no_grad(), torch.enable_grad():
            pass
        return loss_of(m)

    return step, m


@healthy("GG801", "GG804")
def switched_off_and_on():
    m = two()

    def step():
        torch.set_grad_enabled(False)
        loss_of(m)
        torch.set_grad_enabled(True)
        with torch.inference_mode():
            loss_of(m).item()
        return loss_of(m)

    return step, m


@healthy("GG804")
def a_clone_of_an_inference_tensor():
    m = two()

    def step():
        with torch.inference_mode():
            scale = torch.arange(4.0)
        return (m.encoder(X) * scale.clone()).mean() + m.head(X).mean()

    return step, m


@healthy("GG805")
def frozen_batchnorm_in_a_training_model():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    m[1].eval()
    return lambda: m(X).mean(), m


@healthy("GG805", "GG806")
def a_saliency_map_in_eval_mode():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)).eval()
    x = X.clone().requires_grad_()
    return lambda: m(x).mean(), m


@healthy("GG806")
def recalibrated_statistics():
    m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def step():
        torch.optim.swa_utils.update_bn([X, X], m)
        return m(X).mean()

    return step, m


def test_a_tensor_of_the_model_is_named():
    assert check_faulty("GG804", a_cache_from_before).title.startswith("`positions` was made in inference mode")


def test_a_step_that_starts_with_recording_off_says_so():
    m = two()
    torch.set_grad_enabled(False)
    try:
        diagnosis = gg.diagnose(lambda: loss_of(m), model=m)
    finally:
        torch.set_grad_enabled(True)
    assert diagnosis.findings[0].code == "GG801"
    assert diagnosis.findings[0].consequences[0].startswith("GG201: ")
    assert "off already when the step began" in str(diagnosis)
