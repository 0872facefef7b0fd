"""Healthy programs in the shapes of research code and training techniques."""

PROGRAMS = {}

PROGRAMS["diffusion"] = """
import copy, math, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
T = 10
betas = torch.linspace(1e-4, 0.2, T)
alphas_cumprod = torch.cumprod(1 - betas, dim=0)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8))
        self.inp = nn.Linear(3, 8)
        self.mid = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.out = nn.Linear(8, 3)
        nn.init.zeros_(self.out.weight)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(100.0) * torch.arange(2) / 2)
        args = t[:, None].float() * freqs[None]
        temb = self.time(torch.cat([args.cos(), args.sin()], dim=-1))
        h = self.inp(x)
        for layer in self.mid:
            h = h + F.silu(layer(h + temb))
        return self.out(h)

model = Denoiser()
ema = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

@torch.no_grad()
def sample(net, n):
    x = torch.randn(n, 3)
    for i in reversed(range(T)):
        t = torch.full((n,), i)
        x = (x - betas[i] / (1 - alphas_cumprod[i]).sqrt() * net(x, t)) / (1 - betas[i]).sqrt()
        if i > 0:
            x = x + betas[i].sqrt() * torch.randn_like(x)
    return x

for step in range(5):
    x0 = torch.randn(6, 3)
    t = torch.randint(0, T, (6,))
    noise = torch.randn_like(x0)
    a = alphas_cumprod[t][:, None]
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
    loss = F.mse_loss(model(x_t, t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.lerp_(p, 0.05)
    if step % 2 == 0:
        print(step, loss.item(), sample(ema, 2).abs().mean().item())
"""

PROGRAMS["amp_scaler"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(5):
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
        loss = F.cross_entropy(output.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
"""

PROGRAMS["checkpointing"] = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        )
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        x = checkpoint_sequential(self.tail, 2, x, use_reentrant=True)
        return self.head(x)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 2, (6,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["compiled"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
raw = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2))
model = torch.compile(raw, backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 2, (6,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["lbfgs_fit"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
x = torch.linspace(-1, 1, 20)[:, None]
y = torch.sin(3 * x)
model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
x, y = x.double(), y.double()
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4)
for i in range(4):
    def closure():
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        return loss
    loss = optimizer.step(closure)
    with torch.no_grad():
        pred = model(x)
        print(i, loss.item(), criterion(pred, y).item())
"""

PROGRAMS["swa"] = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, SWALR, update_bn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa_scheduler = SWALR(optimizer, swa_lr=0.05)
loader = [(torch.randn(6, 5), torch.randint(0, 2, (6,))) for _ in range(3)]
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if epoch >= 1:
        swa_model.update_parameters(model)
        swa_scheduler.step()
update_bn(loader, swa_model)
swa_model.eval()
with torch.no_grad():
    print(sum(F.cross_entropy(swa_model(x), y).item() for x, y in loader))
"""

PROGRAMS["lora"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class LoRALinear(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + (x @ self.A.t() @ self.B.t()) * self.scale

model = nn.Sequential(LoRALinear(nn.Linear(5, 8)), nn.ReLU(), LoRALinear(nn.Linear(8, 2)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 2, (6,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["maml"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
weights = {
    "w1": nn.Parameter(torch.randn(8, 1) * 0.5), "b1": nn.Parameter(torch.zeros(8)),
    "w2": nn.Parameter(torch.randn(1, 8) * 0.5), "b2": nn.Parameter(torch.zeros(1)),
}
meta = torch.optim.Adam(weights.values(), lr=1e-3)

def net(x, w):
    return F.linear(torch.tanh(F.linear(x, w["w1"], w["b1"])), w["w2"], w["b2"])

for it in range(4):
    outer = 0.0
    for task in range(2):
        amplitude = torch.rand(1) + 0.5
        xs, xq = torch.rand(5, 1), torch.rand(5, 1)
        fast = dict(weights)
        for _ in range(2):
            inner = F.mse_loss(net(xs, fast), amplitude * xs.sin())
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {k: w - 0.01 * g for (k, w), g in zip(fast.items(), grads)}
        outer = outer + F.mse_loss(net(xq, fast), amplitude * xq.sin())
    meta.zero_grad()
    outer.backward()
    meta.step()
    print(it, outer.item())
"""

PROGRAMS["gumbel"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(5, 12), nn.Linear(12, 5)

    def forward(self, x, tau):
        logits = self.enc(x).view(-1, 3, 4)
        z = F.gumbel_softmax(logits, tau=tau, hard=True)
        return self.dec(z.view(-1, 12)), logits

model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
tau = 1.0
for step in range(4):
    x = torch.randn(6, 5)
    out, logits = model(x, tau)
    q = logits.softmax(-1)
    loss = F.mse_loss(out, x) + 0.01 * (q * (q.clamp_min(1e-10).log() + 1.386)).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tau = max(0.5, tau * 0.9)
    print(step, loss.item())
"""

PROGRAMS["realnvp"] = """
import torch, torch.nn as nn
torch.manual_seed(0)

class Coupling(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.s = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 2), nn.Tanh())
        self.t = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 2))

    def forward(self, x):
        x_ = x * self.mask
        s = self.s(x_) * (1 - self.mask)
        t = self.t(x_) * (1 - self.mask)
        return x_ + (1 - self.mask) * (x - t) * torch.exp(-s), -s.sum(dim=1)

masks = [torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])] * 2
flow = nn.ModuleList([Coupling(m) for m in masks])
prior = torch.distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
optimizer = torch.optim.Adam([p for p in flow.parameters() if p.requires_grad], lr=1e-3)
for step in range(4):
    z, log_det = torch.randn(16, 2) * 0.5 + 1, 0.0
    for layer in flow:
        z, ld = layer(z)
        log_det = log_det + ld
    loss = -(prior.log_prob(z) + log_det).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["stochastic_depth"] = """
import random, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
random.seed(3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training and random.random() < 0.5:
                continue
            x = x + block(x)
        return self.head(x)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x, y = torch.randn(6, 5), torch.randint(0, 2, (6,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

PROGRAMS["pinn"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(5):
    t = torch.rand(12, 1, requires_grad=True)
    u = net(t)
    du = torch.autograd.grad(u, t, grad_outputs=torch.ones_like(u), create_graph=True)[0]
    d2u = torch.autograd.grad(du, t, grad_outputs=torch.ones_like(du), create_graph=True)[0]
    residual = ((d2u + 4 * u) ** 2).mean()
    boundary = torch.zeros(1, 1, requires_grad=True)
    u0 = net(boundary)
    v0 = torch.autograd.grad(u0, boundary, torch.ones_like(u0), create_graph=True)[0]
    loss = residual + (u0 - 1).pow(2).mean() + v0.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["multitask"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(8, 3)})
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.shared(x)
        return {name: head(h) for name, head in self.heads.items()}

model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    x = torch.randn(6, 5)
    out = model(x)
    losses = torch.stack([F.mse_loss(out["a"], x[:, :1]), F.cross_entropy(out["b"], torch.randint(0, 3, (6,)))])
    loss = (torch.exp(-model.log_vars) * losses + model.log_vars).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), [round(v, 3) for v in losses.tolist()])
"""

PROGRAMS["custom_function"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class BinarizeSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1).float()

class BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(BinarizeSTE.apply(x), BinarizeSTE.apply(self.weight), self.bias)

model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Hardtanh(), BinaryLinear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for p in model.parameters():
        p.data.clamp_(-1, 1)
    print(step, loss.item())
"""

PROGRAMS["quantization_aware"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class QLinear(nn.Linear):
    def forward(self, x):
        scale = self.weight.detach().abs().max() / 7
        q = torch.clamp(torch.round(self.weight / scale), -8, 7) * scale
        w = self.weight + (q - self.weight).detach()
        return F.linear(x, w, self.bias)

model = nn.Sequential(QLinear(5, 8), nn.ReLU(), QLinear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 2, (6,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["dropped_heads"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.a(x)
        h = h * (torch.rand_like(h) > 0.3)
        h = h + torch.zeros_like(h)
        h = h * h.new_ones(h.shape)
        h = h * (h > 0)
        return self.b(h)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    x = torch.randn(6, 5)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["focal_hard_mining"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

def focal(logits, target, gamma=2.0):
    ce = F.cross_entropy(logits, target, reduction="none")
    pt = torch.exp(-ce)
    return (1 - pt) ** gamma * ce

best = float("inf")
for step in range(5):
    x, y = torch.randn(12, 5), torch.randint(0, 4, (12,))
    per_sample = focal(model(x), y)
    hard = per_sample.topk(6).indices
    loss = per_sample[hard].mean()
    if torch.isnan(loss):
        raise ValueError("loss is NaN")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < best:
        best = loss.item()
        state = {k: v.detach().clone() for k, v in model.state_dict().items()}
print(best, len(state))
"""

PROGRAMS["clones"] = """
import copy, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1)
        for module in self.layers:
            x = module(x)
        return self.head(x[:, 0])

model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(4, 5, 8), torch.randint(0, 3, (4,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["dataloader"] = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)

class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        x = torch.full((3,), float(i)) / 12
        return x, x.sum()

class Early:
    def __init__(self):
        self.best, self.count = None, 0

    def __call__(self, loss):
        if self.best is None or loss < self.best:
            self.best, self.count = loss, 0
        else:
            self.count += 1
        return self.count > 3

def main():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
    stop = Early()
    for epoch in range(3):
        for x, y in DataLoader(Data(), batch_size=4, shuffle=True):
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.inference_mode():
            val = sum(nn.functional.mse_loss(model(x).squeeze(1), y).item() for x, y in DataLoader(Data(), 4))
        scheduler.step(val)
        if stop(val):
            break

if __name__ == "__main__":
    main()
"""
