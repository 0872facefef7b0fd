"""Healthy programs in the shapes of language, sequence and reinforcement projects."""

PROGRAMS = {}

PROGRAMS["gpt"] = """
import math, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class CausalSelfAttention(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.c_attn = nn.Linear(n, 3 * n)
        self.c_proj = nn.Linear(n, n)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, 2, C // 2).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        y = self.resid_dropout(self.c_proj(y))
        return y

class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n), CausalSelfAttention(n)
        self.ln_2, self.mlp = nn.LayerNorm(n), nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x

class GPT(nn.Module):
    def __init__(self, vocab=11, n=8):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n), nn.Embedding(8, n)
        self.h = nn.ModuleList([Block(n) for _ in range(2)])
        self.ln_f = nn.LayerNorm(n)
        self.lm_head = nn.Linear(n, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1))
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
rest = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
data = torch.randint(0, 11, (60,))

def get_batch():
    ix = torch.randint(50, (4,))
    return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])

@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(2)
    for k in range(2):
        X, Y = get_batch()
        _, loss = model(X, Y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()

for it in range(5):
    if it % 2 == 0:
        print("val", estimate_loss().item())
    for micro in range(2):
        X, Y = get_batch()
        logits, loss = model(X, Y)
        loss = loss / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""

PROGRAMS["makemore"] = """
import torch, torch.nn.functional as F
g = torch.Generator().manual_seed(0)
X, Y = torch.randint(0, 9, (40, 3), generator=g), torch.randint(0, 9, (40,), generator=g)
C = torch.randn((9, 4), generator=g)
W1 = torch.randn((12, 16), generator=g) * 0.2
b1 = torch.randn(16, generator=g) * 0.01
W2 = torch.randn((16, 9), generator=g) * 0.1
b2 = torch.zeros(9)
parameters = [C, W1, b1, W2, b2]
for p in parameters:
    p.requires_grad = True
lossi = []
for i in range(6):
    ix = torch.randint(0, X.shape[0], (8,), generator=g)
    emb = C[X[ix]]
    h = torch.tanh(emb.view(-1, 12) @ W1 + b1)
    logits = h @ W2 + b2
    loss = F.cross_entropy(logits, Y[ix])
    for p in parameters:
        p.grad = None
    loss.backward()
    lr = 0.1 if i < 4 else 0.01
    for p in parameters:
        p.data += -lr * p.grad
    lossi.append(loss.log10().item())

@torch.no_grad()
def split_loss(x, y):
    emb = C[x]
    h = torch.tanh(emb.view(-1, 12) @ W1 + b1)
    logits = h @ W2 + b2
    loss = F.cross_entropy(logits, y)
    print(loss.item())

split_loss(X, Y)
"""

PROGRAMS["manual_module_update"] = """
import torch, torch.nn as nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
loss_fn = nn.MSELoss(reduction="sum")
x, y = torch.randn(20, 3), torch.randn(20, 1)
for t in range(6):
    model.train()
    y_pred = model(x)
    loss = loss_fn(y_pred, y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 1e-3 * param.grad
    model.eval()
    with torch.no_grad():
        val = loss_fn(model(x), y)
        print(t, loss.item(), val.item())
"""

PROGRAMS["raw_regression"] = """
import torch
torch.manual_seed(0)
w = torch.randn(2, 1, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
features = torch.randn(30, 2)
labels = features @ torch.tensor([[2.0], [-3.4]]) + 4.2

def sgd(params, lr, batch_size):
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad.zero_()

for epoch in range(3):
    for i in range(0, 30, 10):
        X, y = features[i : i + 10], labels[i : i + 10]
        l = (X @ w + b - y) ** 2 / 2
        l.sum().backward()
        sgd([w, b], 0.03, 10)
    with torch.no_grad():
        train_l = (features @ w + b - labels).pow(2).mean()
        print(epoch, float(train_l))
"""

PROGRAMS["lstm_lm"] = """
import torch, torch.nn as nn
torch.manual_seed(0)

class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(10, 6)
        self.rnn = nn.LSTM(6, 6, 2, dropout=0.2)
        self.decoder = nn.Linear(6, 10)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, hidden):
        emb = self.drop(self.encoder(x))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output)
        return decoded.view(-1, 10), hidden

def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)

model = RNNModel()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = torch.randint(0, 10, (25, 4))
hidden = (torch.zeros(2, 4, 6), torch.zeros(2, 4, 6))
total_loss = 0.0
for i in range(0, 20, 5):
    seq, targets = data[i : i + 5], data[i + 1 : i + 6].reshape(-1)
    optimizer.zero_grad()
    hidden = repackage_hidden(hidden)
    output, hidden = model(seq, hidden)
    loss = criterion(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    total_loss += loss.item()
print(total_loss)
"""

PROGRAMS["char_rnn"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class RNN(nn.Module):
    def __init__(self, inp, hid, out):
        super().__init__()
        self.hid = hid
        self.i2h = nn.Linear(inp, hid)
        self.h2h = nn.Linear(hid, hid)
        self.h2o = nn.Linear(hid, out)

    def forward(self, line, hidden):
        hidden = torch.tanh(self.i2h(line) + self.h2h(hidden))
        output = self.h2o(hidden)
        return F.log_softmax(output, dim=1), hidden

rnn = RNN(5, 6, 3)
criterion = nn.NLLLoss()
learning_rate = 0.05
for it in range(6):
    line = F.one_hot(torch.randint(0, 5, (4,)), 5).float()[:, None]
    category = torch.randint(0, 3, (1,))
    hidden = torch.zeros(1, rnn.hid)
    rnn.zero_grad()
    for i in range(line.size(0)):
        output, hidden = rnn(line[i], hidden)
    loss = criterion(output, category)
    loss.backward()
    for p in rnn.parameters():
        p.data.add_(p.grad.data, alpha=-learning_rate)
    guess = output.topk(1)[1][0].item()
    print(it, loss.item(), guess)
"""

PROGRAMS["seq2seq_warmup"] = """
import torch, torch.nn as nn
torch.manual_seed(0)

class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(9, 8, padding_idx=0), nn.Embedding(9, 8, padding_idx=0)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(8, 9)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        out = self.transformer(
            self.src(src), self.tgt(tgt), tgt_mask=mask, src_key_padding_mask=(src == 0).float() * -1e9
        )
        return self.generator(out)

model = Seq2Seq()
criterion = nn.CrossEntropyLoss(ignore_index=0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
for step in range(5):
    src, tgt = torch.randint(1, 9, (4, 6)), torch.randint(1, 9, (4, 5))
    src[:, 4:] = 0
    logits = model(src, tgt[:, :-1])
    loss = criterion(logits.reshape(-1, 9), tgt[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, loss.item(), scheduler.get_last_lr()[0])
"""

PROGRAMS["moe"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class MoE(nn.Module):
    def __init__(self, dim, experts, k=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)]
        )
        self.k = k

    def forward(self, x):
        probs = self.gate(x).softmax(dim=-1)
        weights, selected = torch.topk(probs, self.k)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch, nth = torch.where(selected == i)
            if batch.numel() == 0:
                continue
            out[batch] += weights[batch, nth, None] * expert(x[batch])
        load = F.one_hot(selected, len(self.experts)).float().mean((0, 1))
        return out, len(self.experts) * (load * probs.mean(0)).sum()

model = nn.ModuleDict({"inp": nn.Linear(5, 6), "moe": MoE(6, 8), "head": nn.Linear(6, 2)})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(3, 5), torch.randint(0, 2, (3,))
    h = model["inp"](x)
    out, aux = model["moe"](h)
    loss = F.cross_entropy(model["head"](h + out), y) + 0.01 * aux
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["switch_moe"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class Switch(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(experts)])

    def forward(self, x):
        gate, index = self.router(x).softmax(-1).max(dim=-1)
        out = x.new_zeros(x.shape)
        for i, expert in enumerate(self.experts):
            rows = (index == i).nonzero(as_tuple=True)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out * gate[:, None]

layer, head = Switch(6, 6), nn.Linear(6, 1)
optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
for step in range(4):
    x = torch.randn(3, 6)
    loss = F.mse_loss(head(x + layer(x)), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""

PROGRAMS["dqn"] = """
import random, torch, torch.nn as nn, torch.nn.functional as F
from collections import deque
torch.manual_seed(0)
random.seed(0)

class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(4, 16)
        self.layer2 = nn.Linear(16, 2)

    def forward(self, x):
        x = F.relu(self.layer1(x))
        return self.layer2(x)

policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)
memory = deque(maxlen=100)

def select_action(state):
    if random.random() > 0.3:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]])

def optimize_model():
    if len(memory) < 6:
        return
    batch = random.sample(memory, 6)
    state, action, nxt, reward = (torch.cat(x) for x in zip(*batch))
    values = policy_net(state).gather(1, action)
    with torch.no_grad():
        next_values = target_net(nxt).max(1).values
    expected = next_values * 0.99 + reward
    loss = F.smooth_l1_loss(values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()

state = torch.randn(1, 4)
for t in range(14):
    action = select_action(state)
    nxt = torch.randn(1, 4)
    memory.append((state, action, nxt, torch.tensor([1.0])))
    state = nxt
    optimize_model()
    weights, target = policy_net.state_dict(), target_net.state_dict()
    for key in weights:
        target[key] = weights[key] * 0.005 + target[key] * 0.995
    target_net.load_state_dict(target)
"""

PROGRAMS["reinforce"] = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.distributions import Categorical
torch.manual_seed(0)

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=1)

policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
eps = 1e-8

def select_action(state):
    probs = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()

def finish_episode():
    R, policy_loss, returns = 0, [], []
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:], policy.saved_log_probs[:]

for episode in range(4):
    for t in range(5):
        action = select_action(torch.randn(1, 4))
        policy.rewards.append(1.0 if action else 0.3)
    finish_episode()
"""

PROGRAMS["ppo"] = """
import torch, torch.nn as nn
from torch.distributions import Normal
torch.manual_seed(0)

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor_mean = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 2))

    def get_action_and_value(self, x, action=None):
        mean = self.actor_mean(x)
        probs = Normal(mean, torch.exp(self.actor_logstd.expand_as(mean)))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)

agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
for update in range(2):
    obs = torch.randn(12, 3)
    with torch.no_grad():
        actions, logprobs, _, values = agent.get_action_and_value(obs)
        returns = torch.randn(12)
        advantages = returns - values.view(-1)
    for epoch in range(2):
        for index in torch.randperm(12).split(6):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs[index], actions[index])
            logratio = newlogprob - logprobs[index]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfrac = ((ratio - 1.0).abs() > 0.2).float().mean().item()
            adv = advantages[index]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - returns[index]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(update, loss.item(), approx_kl.item(), clipfrac)
"""

PROGRAMS["sac"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 8), nn.ReLU(), nn.Linear(8, b))

actor, q1, q2, q1_target, q2_target = mlp(3, 2), mlp(4, 1), mlp(4, 1), mlp(4, 1), mlp(4, 1)
q1_target.load_state_dict(q1.state_dict())
q2_target.load_state_dict(q2.state_dict())
log_alpha = torch.zeros(1, requires_grad=True)
q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
a_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)

def sample(obs):
    mean, log_std = actor(obs).chunk(2, dim=-1)
    log_std = torch.tanh(log_std)
    normal = torch.distributions.Normal(mean, log_std.exp())
    x = normal.rsample()
    y = torch.tanh(x)
    return y, normal.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)

for step in range(4):
    obs, act, nxt, rew = torch.randn(6, 3), torch.rand(6, 1) * 2 - 1, torch.randn(6, 3), torch.randn(6, 1)
    alpha = log_alpha.exp().item()
    with torch.no_grad():
        na, logp = sample(nxt)
        target = torch.min(q1_target(torch.cat([nxt, na], 1)), q2_target(torch.cat([nxt, na], 1))) - alpha * logp
        y = rew + 0.99 * target
    sa = torch.cat([obs, act], 1)
    q_loss = F.mse_loss(q1(sa), y) + F.mse_loss(q2(sa), y)
    q_optimizer.zero_grad()
    q_loss.backward()
    q_optimizer.step()
    pi, logp = sample(obs)
    sp = torch.cat([obs, pi], 1)
    actor_loss = (alpha * logp - torch.min(q1(sp), q2(sp))).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    with torch.no_grad():
        _, logp = sample(obs)
    alpha_loss = (-log_alpha.exp() * (logp - 1.0)).mean()
    a_optimizer.zero_grad()
    alpha_loss.backward()
    a_optimizer.step()
    for net, target_net in ((q1, q1_target), (q2, q2_target)):
        for param, target_param in zip(net.parameters(), target_net.parameters()):
            target_param.data.copy_(0.005 * param.data + 0.995 * target_param.data)
    print(step, q_loss.item(), actor_loss.item(), alpha)
"""

PROGRAMS["tied_autoencoder"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.decoder = nn.Linear(3, 6)

    def tie(self):
        self.decoder.weight = nn.Parameter(self.encoder.weight.t().clone())
        self.encoder.weight = self.encoder.weight

    def forward(self, x):
        h = torch.sigmoid(self.encoder(x))
        return F.linear(h, self.encoder.weight.t(), self.decoder.bias)

class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)

    def forward(self, idx):
        return self.out(self.emb(idx))

lm = LM()
optimizer = torch.optim.Adam(lm.parameters(), lr=1e-2)
lm.out.weight = lm.emb.weight
for step in range(4):
    idx = torch.randint(0, 7, (5,))
    loss = F.cross_entropy(lm(idx), idx.roll(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["word2vec_sparse"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.u = nn.Embedding(20, 4, sparse=True)
        self.v = nn.Embedding(20, 4, sparse=True)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u, emb_v, emb_n = self.u(pos_u), self.v(pos_v), self.v(neg_v)
        score = -F.logsigmoid(torch.clamp((emb_u * emb_v).sum(1), max=10, min=-10))
        neg = torch.clamp(torch.bmm(emb_n, emb_u.unsqueeze(2)).squeeze(2), max=10, min=-10)
        neg = -F.logsigmoid(-neg).sum(1)
        return (score + neg).mean()

model = SkipGram()
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-2)
for step in range(4):
    loss = model(torch.randint(0, 20, (6,)), torch.randint(0, 20, (6,)), torch.randint(0, 20, (6, 3)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""

PROGRAMS["gcn_sparse"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class GraphConvolution(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(a, b))
        self.bias = nn.Parameter(torch.zeros(b))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adj):
        return torch.sparse.mm(adj, x @ self.weight) + self.bias

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(5, 8), GraphConvolution(8, 3)

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, 0.5, training=self.training)
        x = self.gc2(x, adj)
        return F.log_softmax(x, dim=1)

edges = torch.randint(0, 10, (2, 30))
adj = torch.sparse_coo_tensor(edges, torch.ones(30), (10, 10)).coalesce()
degree = torch.sparse.sum(adj, dim=1).to_dense() + 1
adj = torch.sparse_coo_tensor(adj.indices(), adj.values() / degree[adj.indices()[0]], (10, 10)).coalesce()
csr = adj.to_sparse_csr()
features, labels = torch.randn(10, 5), torch.randint(0, 3, (10,))
model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(4):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj if epoch % 2 else csr)
    loss = F.nll_loss(output[:6], labels[:6])
    loss.backward()
    optimizer.step()
    model.eval()
    output = model(features, adj)
    acc = output[6:].max(1)[1].eq(labels[6:]).double().sum() / 4
    print(epoch, loss.item(), acc.item())
"""

PROGRAMS["message_passing"] = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)

class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin, self.att = nn.Linear(d, d), nn.Linear(2 * d, 1)

    def forward(self, x, src, dst):
        h = self.lin(x)
        e = F.leaky_relu(self.att(torch.cat([h[src], h[dst]], 1))).squeeze(1)
        top = torch.full((x.size(0),), -1e9).scatter_reduce(0, dst, e, "amax")
        w = (e - top[dst]).exp()
        z = torch.zeros(x.size(0)).index_add(0, dst, w) + 1e-16
        return torch.zeros_like(h).index_add_(0, dst, h[src] * (w / z[dst])[:, None])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(5), Layer(5)])
        self.out = nn.Linear(5, 2)

    def forward(self, x, src, dst):
        for layer in self.layers:
            x = F.elu(layer(x, src, dst)) + x
        return self.out(x.mean(0, keepdim=True))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    src, dst = torch.randint(0, 8, (20,)), torch.randint(0, 8, (20,))
    loss = F.cross_entropy(model(torch.randn(8, 5), src, dst), torch.tensor([1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
"""
