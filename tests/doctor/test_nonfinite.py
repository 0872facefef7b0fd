"""NaN and infinities: where they were produced, from what, in which samples, and whether they do harm."""

import torch
import torch.nn.functional as F
from torch import nn

import gradgate as gg
from tests.doctor.programs import X, faulty, healthy, two


@faulty("GG401")
def log_of_a_negative():
    m = two()

    def step():
        return torch.log(m.encoder(X) - 5).mean()  # HERE

    return step, nn.ModuleDict({"encoder": m.encoder})


@faulty("GG401")
def zero_by_zero_in_a_loop():
    m = two()
    zero = torch.zeros(4)

    def step():
        h = m.encoder(X)
        for divisor in (torch.ones(4), zero):
            h = (h * divisor) / divisor  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG401")
def divided_in_place():
    m = two()

    def step():
        h = m.encoder(X) * 0
        h /= torch.zeros(4)  # HERE
        return m.head(h).mean()

    return step, m


@faulty("GG401")
def a_fully_masked_row():
    m = two()
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[2] = True

    def step():
        h = m.encoder(X)
        scores = (h @ h.T).masked_fill(mask, float("-inf"))
        return m.head(scores.softmax(dim=-1) @ h).mean()  # HERE

    return step, m


@faulty("GG402")
def an_overflow():
    m = two()

    def step():
        return m.head(torch.exp(m.encoder(X) * 0 + 100)).mean()  # HERE

    return step, m


@faulty("GG402")
def division_by_zero():
    m = two()

    def step():
        return (m.head(m.encoder(X)).abs() + 1).div(torch.zeros(1)).mean()  # HERE

    return step, m


@faulty("GG402")
def half_precision():
    m = two()

    def step():
        return (m.head(m.encoder(X)).abs() + 7e4).half().float().mean()  # HERE

    return step, m


@faulty("GG403")
def sqrt_at_zero():
    m = two()

    def step():
        return (m.encoder(X) * 0).sqrt().mean()  # HERE

    return step, nn.ModuleDict({"encoder": m.encoder})


@faulty("GG403")
def a_handwritten_norm():
    m = two()
    nn.init.zeros_(m.encoder.weight)
    nn.init.zeros_(m.encoder.bias)

    def step():
        return m.encoder(X).pow(2).sum(dim=1).sqrt().mean()  # HERE

    return step, nn.ModuleDict({"encoder": m.encoder})


@faulty("GG403")
def a_power_in_a_module():
    class Root(nn.Module):
        def forward(self, x):
            return (x - x) ** 0.5  # HERE

    m = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Root(), nn.Linear(4, 1))
    return lambda: m(X).mean(), m


@faulty("GG404")
def a_sample_with_nan():
    m = two()
    x = X.clone()
    x[3, 1] = float("nan")

    def step():
        return m.head(m.encoder(x)).mean()  # HERE

    return step, m


@faulty("GG404")
def a_target_with_nan():
    m = two()
    target = torch.full((6, 1), 1.0)
    target[5] = float("nan")

    def step():
        return F.mse_loss(m.head(m.encoder(X)), target)  # HERE

    return step, m


@faulty("GG404")
def an_infinite_feature():
    m = two()
    x = X.clone()
    x[0] = float("inf")

    def step():
        return m.head(torch.tanh(m.encoder(x) - m.encoder(x).amax())).mean()  # HERE

    return step, m


@faulty("GG405")
def a_weight_that_is_nan():
    m = two()
    m.encoder.weight.data[0, 0] = float("nan")

    def step():
        return m.head(m.encoder(X)).mean()  # HERE

    return step, m


@faulty("GG405")
def a_bias_that_is_inf():
    m = two()
    m.head.bias.data.fill_(float("inf"))

    def step():
        return m.head(m.encoder(X)).mean()  # HERE

    return step, m


@faulty("GG405")
def a_scale_that_is_nan():
    m = two()
    m.register_parameter("scale", nn.Parameter(torch.tensor(float("nan"))))

    def step():
        return (m.head(m.encoder(X)) * m.scale).mean()  # HERE

    return step, m


@faulty("GG407")
def nan_masked_away():
    m = two()

    def step():
        with torch.no_grad():
            ratio = torch.log(X)  # HERE
        return m.head(m.encoder(torch.where(X > 0, ratio, X))).mean()

    return step, m


@faulty("GG407")
def nan_to_num_on_data():
    m = two()

    def step():
        x = (X / X.clamp(max=0)) * 0  # HERE
        return m.head(m.encoder(torch.nan_to_num(x))).mean()

    return step, m


@faulty("GG407")
def nan_in_a_log():
    m = two()

    def step():
        print_only = torch.zeros(1) / torch.zeros(1)  # HERE
        assert print_only.isnan()
        return m.head(m.encoder(X)).mean()

    return step, m


@healthy("GG401", "GG402", "GG404", "GG407")
def an_attention_mask():
    m = two()
    mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)

    def step():
        h = m.encoder(X)
        scores = (h @ h.T).masked_fill(mask, float("-inf")) + torch.triu(torch.full((6, 6), float("-inf")), 1)
        return m.head(scores.softmax(dim=-1) @ h).mean()

    return step, m


@healthy("GG402", "GG403")
def infinity_as_a_start_value():
    m = two()

    def step():
        best = torch.full((6, 1), float("-inf"))
        for _ in range(2):
            best = torch.maximum(best, m.head(m.encoder(X)))
        return best.mean()

    return step, m


@healthy("GG403", "GG405")
def norm_at_zero():
    m = two()
    return lambda: m.head((m.encoder(X) * 0).norm(dim=1, keepdim=True).expand(6, 4) + m.encoder(X)).mean(), m


@healthy("GG401", "GG404")
def missing_values_taken_out_first():
    m = two()
    x = X.clone()
    x[2] = float("nan")
    return lambda: m.head(m.encoder(x[x.isfinite().all(dim=1)])).mean(), m


@healthy("GG405")
def an_infinite_buffer():
    m = two()
    m.register_buffer("lowest", torch.tensor(float("inf")))
    return lambda: m.head(torch.minimum(m.encoder(X), m.lowest)).mean(), m


@healthy("GG407")
def infinity_is_not_worth_a_note():
    m = two()
    return lambda: m.head(m.encoder(torch.exp(-1 / X.abs().clamp(min=0) ** 2))).mean(), m


def test_the_samples_and_the_values_are_named():
    layer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.ones(5, 4)
    x[1], x[3] = -1, -2

    finding = gg.diagnose(lambda: torch.log(layer(x)).sum(), model=layer).findings[0]
    assert (finding.code, finding.severity, finding.samples) == ("GG401", "warning", (1, 3))
    assert finding.title == "NaN produced in `torch.log(layer(x))`"
    assert "There it read -4 at [1, 0]." in finding.reason
    assert finding.fix.startswith("masked.safe_log(x)")


def test_the_samples_of_a_bad_gradient_are_named():
    layer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.ones(5, 4)
    x[2] = 0
    finding = gg.diagnose(lambda: layer(x).sqrt().sum(), model=layer).findings[0]
    assert (finding.code, finding.samples) == ("GG403", (2,))


def test_a_nan_loss_with_finite_gradients_is_a_warning():
    layer = nn.Linear(4, 3)
    labels = torch.full((6,), -100)

    def step():
        ignored = F.cross_entropy(layer(X), labels)
        return layer(X).pow(2).mean() + ignored

    diagnosis = gg.diagnose(step, model=layer)
    assert [(f.code, f.severity) for f in diagnosis.findings] == [("GG401", "warning")]
    assert "every gradient is finite" in diagnosis.findings[0].reason


def test_a_nan_behind_batchnorm_is_found_where_it_was_born():
    m = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.BatchNorm1d(4), nn.Linear(4, 1))
    m[1].register_forward_hook(lambda module, inputs, output: output / (X[:, :1] * 0 + (torch.arange(6)[:, None] != 2)))
    finding = gg.diagnose(lambda: m(X).pow(2).mean(), model=m).findings[0]
    assert finding.code in ("GG401", "GG402")
    assert finding.samples == (2,)


def test_under_a_scaler_an_overflow_is_a_note():
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (layer(X) * 100).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    diagnosis = gg.diagnose(step, model=layer)
    assert all(f.severity == "info" for f in diagnosis.findings), str(diagnosis)


@faulty("GG402")
def several_tensors_written_at_once():
    m = two()

    def step():
        small, large = torch.ones(4), torch.full((4,), 1e30)
        torch._foreach_mul_([small, large], 1e30)  # HERE
        return (m.encoder(X) * large).mean()

    return step, m


@faulty("GG404")
def a_bad_input_and_a_given_output():
    m, x, out = two(), X.clone(), torch.empty(6, 4)
    x[2, 1] = float("nan")

    def step():
        torch.sub(x, X, out=out)  # HERE
        return m.encoder(out).mean()

    return step, m


def test_it_is_the_input_that_is_bad_not_the_output():
    finding = gg.diagnose(a_bad_input_and_a_given_output()[0]).findings[0]
    assert finding.title.startswith("the tensor x holds NaN before")
    assert finding.samples == (2,)
