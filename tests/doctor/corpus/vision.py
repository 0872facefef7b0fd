"""Healthy programs in the shapes of vision projects: classifiers, generators, self-supervision."""

PROGRAMS = {}

PROGRAMS["mnist_cnn"] = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(4 * 9, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)

def train(model, batches, optimizer, epoch):
    model.train()
    for index, (data, target) in enumerate(batches):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if index % 2 == 0:
            print("epoch", epoch, "loss", round(loss.item(), 3))

def test(model, batches):
    model.eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for data, target in batches:
            output = model(data)
            total += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
    print("test", total, correct)

batches = [(torch.randn(6, 1, 8, 8), torch.randint(0, 3, (6,))) for _ in range(3)]
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(2):
    train(model, batches, optimizer, epoch)
    test(model, batches)
    scheduler.step()
"""

PROGRAMS["resnet"] = """
import torch, torch.nn as nn
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(cin, cout, 1) if cin != cout else None

    def forward(self, x):
        identity = x if self.down is None else self.down(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)

class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layers = nn.ModuleList([Block(4, 4), Block(4, 8), Block(8, 8)])
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        x = x.mean(dim=(2, 3))
        return self.fc(x)

model = ResNet()
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
images, labels = torch.randn(8, 3, 6, 6), torch.randint(0, 3, (8,))
for epoch in range(2):
    model.train()
    running = 0.0
    for i in range(0, 8, 4):
        x, y = images[i : i + 4], labels[i : i + 4]
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        running += loss.item() * x.size(0)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        val = criterion(model(images), labels)
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(running / 8, val.item(), accuracy)
"""

PROGRAMS["dcgan"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 6), nn.Tanh())
netD = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
fixed_noise = torch.randn(5, 4)
for step in range(5):
    real = torch.randn(8, 6)
    netD.zero_grad()
    label = torch.full((8,), 1.0)
    output = netD(real).view(-1)
    errD_real = criterion(output, label)
    errD_real.backward()
    D_x = output.sigmoid().mean().item()
    noise = torch.randn(8, 4)
    fake = netG(noise)
    label.fill_(0.0)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    errD_fake.backward()
    errD = errD_real + errD_fake
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    errG.backward()
    optimizerG.step()
    print(step, errD.item(), errG.item(), D_x)
with torch.no_grad():
    images = netG(fixed_noise).detach().numpy()
print(images.shape)
"""

PROGRAMS["wgan_gp"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
G = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
D = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9))

def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = D(mixed)
    grads = torch.autograd.grad(
        outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True
    )[0]
    return ((grads.norm(2, dim=1) - 1) ** 2).mean()

for step in range(6):
    real = torch.randn(6, 4) + 2
    fake = G(torch.randn(6, 3)).detach()
    d_loss = D(fake).mean() - D(real).mean()
    penalty = gradient_penalty(real, fake)
    opt_d.zero_grad()
    (d_loss + 10 * penalty).backward()
    opt_d.step()
    if step % 2 == 1:
        g_loss = -D(G(torch.randn(6, 3))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        print(step, d_loss.item(), g_loss.item())
"""

PROGRAMS["wgan_clip"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
G = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
D = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt_g = torch.optim.RMSprop(G.parameters(), lr=5e-3)
opt_d = torch.optim.RMSprop(D.parameters(), lr=5e-3)

def set_requires_grad(net, flag):
    for p in net.parameters():
        p.requires_grad = flag

for step in range(4):
    set_requires_grad(D, True)
    for _ in range(2):
        real = torch.randn(6, 4) + 2
        with torch.no_grad():
            fake = G(torch.randn(6, 3))
        loss_d = D(fake).mean() - D(real).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        for p in D.parameters():
            p.data.clamp_(-0.5, 0.5)
    set_requires_grad(D, False)
    loss_g = -D(G(torch.randn(6, 3))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    print(step, loss_d.item(), loss_g.item())
"""

PROGRAMS["vae"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(12, 8)
        self.fc21 = nn.Linear(8, 2)
        self.fc22 = nn.Linear(8, 2)
        self.fc3 = nn.Linear(2, 8)
        self.fc4 = nn.Linear(8, 12)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 12))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar

def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 12), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld

model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
train_loss = 0
for step in range(4):
    data = torch.rand(5, 3, 4)
    optimizer.zero_grad()
    recon, mu, logvar = model(data)
    loss = loss_function(recon, data, mu, logvar)
    loss.backward()
    train_loss += loss.item()
    optimizer.step()
with torch.no_grad():
    sample = model.decode(torch.randn(4, 2)).cpu()
print(train_loss, sample.shape)
"""

PROGRAMS["vqvae"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class Quantizer(nn.Module):
    def __init__(self, codes, dim, beta=0.25):
        super().__init__()
        self.embedding = nn.Embedding(codes, dim)
        self.embedding.weight.data.uniform_(-1 / codes, 1 / codes)
        self.beta = beta

    def forward(self, z):
        d = z.pow(2).sum(1, keepdim=True) + self.embedding.weight.pow(2).sum(1) - 2 * z @ self.embedding.weight.t()
        indices = torch.argmin(d, dim=1)
        z_q = self.embedding(indices)
        loss = F.mse_loss(z_q, z.detach()) + self.beta * F.mse_loss(z_q.detach(), z)
        z_q = z + (z_q - z).detach()
        one_hot = F.one_hot(indices, 6).float().mean(0)
        perplexity = torch.exp(-torch.sum(one_hot * torch.log(one_hot + 1e-10)))
        return z_q, loss, perplexity

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        self.quantizer = Quantizer(6, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x):
        z = self.encoder(x)
        z_q, vq_loss, perplexity = self.quantizer(z)
        return self.decoder(z_q), vq_loss, perplexity

model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(10, 5)
    recon, vq_loss, perplexity = model(x)
    loss = F.mse_loss(recon, x) + vq_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), perplexity.item())
"""

PROGRAMS["byol"] = """
import copy, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class BYOL(nn.Module):
    def __init__(self, tau=0.99):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online)
        self.predictor = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.tau = tau

    def forward(self, one, two):
        p1, p2 = self.predictor(self.online(one)), self.predictor(self.online(two))
        with torch.no_grad():
            z1, z2 = self.target(one), self.target(two)
        return loss_fn(p1, z2.detach()).mean() + loss_fn(p2, z1.detach()).mean()

    @torch.no_grad()
    def update(self):
        for a, b in zip(self.online.parameters(), self.target.parameters()):
            b.data = b.data * self.tau + a.data * (1 - self.tau)

def loss_fn(x, y):
    return 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)

model = BYOL()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(8, 5)
    loss = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.update()
    print(step, loss.item())
"""

PROGRAMS["simsiam"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 4))
predictor = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 4))
criterion = nn.CosineSimilarity(dim=1)
optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9)
for step in range(4):
    x = torch.randn(8, 5)
    z1, z2 = encoder(x + 0.1 * torch.randn_like(x)), encoder(x + 0.1 * torch.randn_like(x))
    p1, p2 = predictor(z1), predictor(z2)
    loss = -(criterion(p1, z2.detach()).mean() + criterion(p2, z1.detach()).mean()) * 0.5
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["dino"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class DINOLoss(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, dim))

    def forward(self, student, teacher):
        student = student / 0.1
        teacher = F.softmax((teacher - self.center) / 0.04, dim=-1).detach()
        loss = torch.sum(-teacher * F.log_softmax(student, dim=-1), dim=-1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher):
        self.center = self.center * 0.9 + teacher.mean(dim=0, keepdim=True) * 0.1

def backbone():
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6))

student, teacher = backbone(), backbone()
teacher.load_state_dict(student.state_dict())
for p in teacher.parameters():
    p.requires_grad = False
dino_loss = DINOLoss(6)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(8, 5)
    loss = dino_loss(student(x + 0.1 * torch.randn_like(x)), teacher(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for q, k in zip(student.parameters(), teacher.parameters()):
            k.data.mul_(0.99).add_((1 - 0.99) * q.detach().data)
    print(step, loss.item())
"""

PROGRAMS["simclr"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)

def nt_xent(features, temperature=0.07):
    cos = F.cosine_similarity(features[:, None, :], features[None, :, :], dim=-1)
    self_mask = torch.eye(cos.shape[0], dtype=torch.bool)
    cos.masked_fill_(self_mask, -9e15)
    positive = self_mask.roll(shifts=cos.shape[0] // 2, dims=0)
    cos = cos / temperature
    nll = -cos[positive] + torch.logsumexp(cos, dim=-1)
    comb = torch.cat([cos[positive][:, None], cos.masked_fill(positive, -9e15)], dim=-1)
    top1 = (comb.argsort(dim=-1, descending=True).argmin(dim=-1) == 0).float().mean()
    return nll.mean(), top1

for step in range(4):
    x = torch.randn(6, 5)
    features = encoder(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)]))
    loss, top1 = nt_xent(features)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), top1.item())
"""

PROGRAMS["clip"] = """
import math, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Linear(5, 4)
        self.text = nn.Embedding(10, 4)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text).mean(dim=1), dim=-1)
        logits = self.logit_scale.exp() * image_features @ text_features.t()
        return logits, logits.t()

model = CLIP()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
for step in range(4):
    a, b = model(torch.randn(6, 5), torch.randint(0, 10, (6, 3)))
    labels = torch.arange(6)
    loss = (F.cross_entropy(a, labels) + F.cross_entropy(b, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    print(step, loss.item(), model.logit_scale.exp().item())
"""

PROGRAMS["segmentation"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.final = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = torch.cat([self.up(b), a], dim=1)
        return self.final(c)

def dice(probs, target):
    inter = (probs * target).sum()
    return 1 - (2 * inter + 1) / (probs.sum() + target.sum() + 1)

model = UNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
images = torch.randn(4, 1, 8, 8)
masks = torch.randint(0, 3, (4, 8, 8))
masks[:, :2] = 255
for epoch in range(4):
    model.train()
    out = model(images)
    loss = F.cross_entropy(out, masks, ignore_index=255)
    valid = masks != 255
    onehot = F.one_hot(masks * valid, 3).permute(0, 3, 1, 2).float()
    loss = loss + dice(out.softmax(dim=1) * valid[:, None], onehot * valid[:, None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        pred = model(images).argmax(dim=1)
        iou = ((pred == masks) & valid).sum().item() / valid.sum().item()
    print(epoch, loss.item(), iou)
"""

PROGRAMS["finetune_frozen_backbone"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
head = nn.Linear(8, 2)
for p in backbone.parameters():
    p.requires_grad = False
backbone.eval()
optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, [*backbone.parameters(), *head.parameters()]), lr=0.1)
for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 2, (6,))
    logits = head(backbone(x))
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
"""

PROGRAMS["distillation"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
student = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))
teacher.eval()
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
T, alpha = 4.0, 0.7
for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    with torch.no_grad():
        t = teacher(x)
    s = student(x)
    soft = F.kl_div(F.log_softmax(s / T, dim=1), F.softmax(t / T, dim=1), reduction="batchmean") * T * T
    loss = alpha * soft + (1 - alpha) * F.cross_entropy(s, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["adversarial"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def pgd(x, y, eps=0.1, steps=2):
    model.eval()
    adv = x.detach() + torch.empty_like(x).uniform_(-eps, eps)
    for _ in range(steps):
        adv.requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(model(adv), y)
        grad = torch.autograd.grad(loss, [adv])[0]
        adv = adv.detach() + 0.05 * torch.sign(grad.detach())
        adv = torch.min(torch.max(adv, x - eps), x + eps)
    model.train()
    return adv

for step in range(4):
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    adv = pgd(x, y)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(adv), y)
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["style_transfer"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
vgg = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()).eval()
content, style = torch.rand(1, 3, 6, 6), torch.rand(1, 3, 6, 6)

def gram(x):
    b, c, h, w = x.shape
    f = x.view(b * c, h * w)
    return f @ f.t() / (b * c * h * w)

target_content = vgg(content).detach()
target_style = gram(vgg(style)).detach()
image = content.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([image], max_iter=3)
run = [0]
while run[0] < 8:
    def closure():
        with torch.no_grad():
            image.clamp_(0, 1)
        optimizer.zero_grad()
        features = vgg(image)
        loss = F.mse_loss(features, target_content) + 100 * F.mse_loss(gram(features), target_style)
        loss.backward()
        run[0] += 1
        return loss
    optimizer.step(closure)
with torch.no_grad():
    image.clamp_(0, 1)
print(run[0], image.mean().item())
"""

PROGRAMS["spectral_gan"] = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm
torch.manual_seed(0)
D = nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(8, 1)))
G = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
optim_d = torch.optim.Adam(filter(lambda p: p.requires_grad, D.parameters()), lr=2e-3, betas=(0.0, 0.9))
optim_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.9))
for step in range(4):
    real = torch.randn(6, 4)
    optim_d.zero_grad()
    optim_g.zero_grad()
    disc_loss = F.relu(1.0 - D(real)).mean() + F.relu(1.0 + D(G(torch.randn(6, 3)))).mean()
    disc_loss.backward()
    optim_d.step()
    optim_d.zero_grad()
    optim_g.zero_grad()
    gen_loss = -D(G(torch.randn(6, 3))).mean()
    gen_loss.backward()
    optim_g.step()
    print(step, disc_loss.item(), gen_loss.item())
"""

PROGRAMS["cyclegan"] = """
import itertools, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

def net(a, b):
    return nn.Sequential(nn.Linear(a, 8), nn.LayerNorm(8), nn.LeakyReLU(0.2), nn.Linear(8, b))

G_A, G_B, D_A, D_B = net(4, 4), net(4, 4), net(4, 1), net(4, 1)
optimizer_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), lr=2e-3)
optimizer_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=2e-3)

def set_requires_grad(nets, requires_grad=False):
    for net in nets:
        for param in net.parameters():
            param.requires_grad = requires_grad

def gan(prediction, real):
    return F.mse_loss(prediction, torch.tensor(1.0 if real else 0.0).expand_as(prediction))

for step in range(4):
    real_A, real_B = torch.randn(5, 4), torch.randn(5, 4) + 1
    fake_B, fake_A = G_A(real_A), G_B(real_B)
    rec_A, rec_B = G_B(fake_B), G_A(fake_A)
    set_requires_grad([D_A, D_B], False)
    optimizer_G.zero_grad()
    loss_G = gan(D_A(fake_B), True) + gan(D_B(fake_A), True) + F.l1_loss(rec_A, real_A) + F.l1_loss(rec_B, real_B)
    loss_G.backward()
    optimizer_G.step()
    set_requires_grad([D_A, D_B], True)
    optimizer_D.zero_grad()
    for D, real, fake in ((D_A, real_B, fake_B), (D_B, real_A, fake_A)):
        loss_D = (gan(D(real), True) + gan(D(fake.detach()), False)) * 0.5
        loss_D.backward()
    optimizer_D.step()
    print(step, loss_G.item(), loss_D.item())
"""
