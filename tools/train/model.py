"""gpt-oss in PyTorch for training: the same arithmetic as the engine's, over the vocabulary rows in use.

One extra row of the head stands for all unused ids at once: its logit counts as often as there are such ids,
so training itself makes them next to impossible. One extra row of the embedding is what unused ids look like.

Matrices pass through the number formats of the exported file (straight-through): experts MXFP4, the other
matrices MXINT8 (blocks of 32 with a power of two; each value is exact in BF16), everything else BF16.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, WINDOW, D, KV = 201088, 128, 64, 8


class Shape:
    def __init__(self, layers=4, hidden=192, heads=16, experts=8, intermediate=128):
        self.layers, self.hidden, self.heads, self.experts, self.inter = layers, hidden, heads, experts, intermediate


# ---- number formats ----

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EDGES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def blocks_of(w):
    return w.float().reshape(*w.shape[:-1], w.shape[-1] // 32, 32)


def exponent_of(b):
    """floor(log2) of the largest value of each block; a block of zeros gets -60."""
    top = b.abs().amax(-1, keepdim=True)
    return torch.where(top > 0, torch.floor(torch.log2(top.clamp_min(1e-30))), torch.full_like(top, -60.0))


def mxfp4_codes(w):
    """(codes 0..15 [..., K/32, 32], exponents [..., K/32]): of two scales the one with the smaller error."""
    b = blocks_of(w)
    edges = torch.tensor(EDGES, device=w.device)
    values = torch.tensor(E2M1, device=w.device)
    best = None
    for shift in (2, 1):
        e = exponent_of(b) - shift
        x = b / torch.exp2(e)
        code = torch.bucketize(x.abs(), edges)
        error = (values[code] - x.abs()).square().sum(-1, keepdim=True) * torch.exp2(2 * e)
        code = code + 8 * (x < 0)
        if best is None:
            best = [code, e, error]
        else:
            better = error < best[2]
            best = [torch.where(better, code, best[0]), torch.where(better, e, best[1]), None]
    return best[0], best[1].squeeze(-1)


def mxfp4(w):
    code, e = mxfp4_codes(w)
    values = torch.tensor(E2M1 + [-v for v in E2M1], device=w.device)
    return (values[code] * torch.exp2(e)[..., None]).reshape(w.shape)


def mxint8_codes(w):
    """(whole numbers -127..127 [..., K/32, 32], exponents [..., K/32])"""
    b = blocks_of(w)
    e = exponent_of(b) - 6
    return torch.round(b / torch.exp2(e)).clamp(-127, 127), e.squeeze(-1)


def mxint8(w):
    q, e = mxint8_codes(w)
    return (q * torch.exp2(e)[..., None]).reshape(w.shape)


def through(w, fmt):
    """The rounded value forward, the identity backward."""
    return w + (fmt(w.detach()) - w.detach())


def bf16(w):
    return w.to(torch.bfloat16).float()


# ---- pieces ----

def rope_table(n, device):
    half = D // 2
    freq = 150000.0 ** (torch.arange(half, dtype=torch.float64) * 2 / D)
    low = half * math.log(4096 / (32 * 2 * math.pi)) / math.log(150000)
    high = half * math.log(4096 / (2 * math.pi)) / math.log(150000)
    ramp = ((torch.arange(half, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    inv = (ramp / (32 * freq) + (1 - ramp) / freq).float()
    angle = torch.arange(n, dtype=torch.float32)[:, None] * inv[None]
    c = 0.1 * math.log(32) + 1
    return (angle.cos() * c).to(device), (angle.sin() * c).to(device)


def rms_norm(x, scale):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale


def rotate(x, cos, sin):
    """x [B,T,h,64]; the table [T,32]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def glu(h, w):
    """h [N,E,2I] (gate, linear alternating), w [N,E] -> [N,E*I], weighted."""
    a, u = h.float().unflatten(-1, (-1, 2)).unbind(-1)
    a, u = a.clamp(max=7.0), u.clamp(-7.0, 7.0)
    z = a * torch.sigmoid(1.702 * a) * (u + 1) * w[..., None]
    return z.flatten(1)


def pad8(x, *columns):
    """Eight more columns behind the last dimension, some of them given (index, value)."""
    x = F.pad(x, (0, 8))
    for i, value in columns:
        x[..., D + i] = value
    return x


def attend(q, k, v, sinks, windowed):
    """q [B,h,T,64], k and v [B,h,T,64] (repeated), sinks [h]. The sink is a key at the front, told from
    the others by a ninth column; `D + 1` is the column that hides keys before the start."""
    b, h, t, _ = q.shape
    sink = sinks.to(q.dtype).view(1, h, 1).expand(b, h, 1)
    if not windowed or t <= WINDOW:
        q1 = pad8(F.pad(q, (0, 0, 1, 0)), (0, 8.0))
        k1 = torch.cat([torch.cat([torch.zeros_like(k[:, :, :1]), sink[..., None],
                                   torch.zeros(b, h, 1, 7, dtype=q.dtype, device=q.device)], -1), pad8(k)], 2)
        v1 = F.pad(v, (0, 8, 1, 0))
        return F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, scale=0.125)[:, :, 1:, :D]
    n = -(-t // WINDOW)
    grow = n * WINDOW - t
    q1 = pad8(F.pad(q, (0, 0, 0, grow)), (0, 8.0), (1, 8.0)).view(b, h, n, WINDOW, D + 8)
    k1 = pad8(F.pad(k, (0, 0, 0, grow))).view(b, h, n, WINDOW, D + 8)
    v1 = F.pad(v, (0, 8, 0, grow)).view(b, h, n, WINDOW, D + 8)
    before = torch.zeros_like(k1[:, :, :1])
    before[..., D + 1] = -1e4
    sink_key = torch.cat([torch.zeros(b, h, n, 1, D, dtype=q.dtype, device=q.device),
                          sink[:, :, None, :, None].expand(b, h, n, 1, 1),
                          torch.zeros(b, h, n, 1, 7, dtype=q.dtype, device=q.device)], -1)
    fill = torch.zeros(b, h, n, 7, D + 8, dtype=q.dtype, device=q.device)
    keys = torch.cat([before, k1[:, :, :-1]], 2)
    keys = torch.cat([keys, k1, sink_key, fill], 3)
    values = torch.cat([F.pad(v1[:, :, :-1], (0, 0, 0, 0, 1, 0)), v1, torch.zeros_like(sink_key), fill], 3)
    i = torch.arange(WINDOW, device=q.device)[:, None]
    j = torch.arange(2 * WINDOW + 8, device=q.device)[None]
    seen = ((j > i) & (j <= i + WINDOW)) | (j == 2 * WINDOW)
    mask = torch.where(seen, 0.0, float("-inf")).to(q.dtype)

    def flat(x):
        return x.transpose(1, 2).reshape(b * n, h, x.shape[3], D + 8)

    y = F.scaled_dot_product_attention(flat(q1), flat(keys), flat(values), attn_mask=mask.expand(b * n, h, -1, -1),
                                       scale=0.125)
    return y.view(b, n, h, WINDOW, D + 8).transpose(1, 2).reshape(b, h, n * WINDOW, D + 8)[:, :, :t, :D]


class Layer(nn.Module):
    def __init__(self, s, index):
        super().__init__()
        self.s, self.windowed = s, index % 2 == 0
        h, q, kv, e, i = s.hidden, s.heads * D, KV * D, s.experts, s.inter

        def matrix(*dims, scale=1.0):
            return nn.Parameter(torch.randn(*dims) * scale / dims[-1] ** 0.5)

        def vector(*dims, fill=0.0):
            return nn.Parameter(torch.full(dims, fill))

        branch = 0.5 / s.layers ** 0.5
        self.norm1, self.norm2 = vector(h, fill=1.0), vector(h, fill=1.0)
        self.wq, self.wk, self.wv, self.wo = matrix(q, h), matrix(kv, h), matrix(kv, h), matrix(h, q, scale=branch)
        self.bq, self.bk, self.bv, self.bo = vector(q), vector(kv), vector(kv), vector(h)
        self.sinks = vector(s.heads)
        self.router, self.router_bias = matrix(e, h), vector(e)
        self.w1, self.b1 = matrix(e, 2 * i, h), vector(e, 2 * i)
        self.w2, self.b2 = matrix(e, h, i, scale=branch), vector(e, h)

    def rounded(self, quantise):
        """The weights as they will be stored, for one step."""
        r = {}
        for name, p in self.named_parameters(recurse=False):
            if not quantise:
                r[name] = p
            elif name in ("w1", "w2"):
                r[name] = through(p, mxfp4)
            elif name in ("wq", "wk", "wv", "wo"):
                r[name] = through(p, mxint8)
            else:
                r[name] = through(p, bf16)
        return r

    def forward(self, x, cos, sin, w, fast):
        s, (b, t, h) = self.s, x.shape
        y = fast["rms_norm"](x, w["norm1"])
        q = F.linear(y, w["wq"], w["bq"]).view(b, t, s.heads, D)
        k = F.linear(y, w["wk"], w["bk"]).view(b, t, KV, D)
        v = F.linear(y, w["wv"], w["bv"]).view(b, t, KV, D)
        q, k = fast["rotate"](q, cos, sin).to(v.dtype), fast["rotate"](k, cos, sin).to(v.dtype)
        group = s.heads // KV
        q, k, v = q.transpose(1, 2), k.repeat_interleave(group, 2).transpose(1, 2), \
            v.repeat_interleave(group, 2).transpose(1, 2)
        y = attend(q, k, v, w["sinks"], self.windowed).transpose(1, 2).reshape(b, t, s.heads * D)
        x = x + F.linear(y, w["wo"], w["bo"]).float()
        y = fast["rms_norm"](x, w["norm2"]).view(b * t, h)
        with torch.autocast(x.device.type, enabled=False):
            g = F.linear(y.float(), w["router"].float(), w["router_bias"].float())
        top = g.topk(4, -1)
        weight = torch.zeros_like(g).scatter(-1, top.indices, top.values.softmax(-1))
        load = (weight.detach() > 0).float().mean(0)
        balance = s.experts * (load / 4 * g.softmax(-1).mean(0)).sum()
        z = F.linear(y, w["w1"].flatten(0, 1), w["b1"].flatten()).view(b * t, s.experts, 2 * s.inter)
        z = fast["glu"](z, weight).to(v.dtype)
        y = F.linear(z, w["w2"].permute(1, 0, 2).reshape(h, s.experts * s.inter)).float() + weight @ w["b2"].float()
        return x + y.view(b, t, h), balance


class Model(nn.Module):
    def __init__(self, shape, n_used):
        super().__init__()
        self.s, self.n_used = shape, n_used
        self.embed = nn.Parameter(torch.randn(n_used + 1, shape.hidden) * 0.5)
        self.head = nn.Parameter(torch.randn(n_used + 1, shape.hidden) * 0.02)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.layers))
        self.fast = {"rms_norm": rms_norm, "rotate": rotate, "glu": glu}
        self.quantise = False
        self.table = None

    def compile_pieces(self):
        for name in self.fast:
            self.fast[name] = torch.compile(self.fast[name], dynamic=True)

    def hidden(self, ids):
        if self.table is None or self.table[0].shape[0] < ids.shape[1] or self.table[0].device != ids.device:
            self.table = rope_table(max(8192, ids.shape[1]), ids.device)
        cos, sin = (x[:ids.shape[1]] for x in self.table)
        embed = through(self.embed, mxint8) if self.quantise else self.embed
        x, balance = F.embedding(ids, embed).float(), 0.0
        for layer in self.layers:
            x, b = layer(x, cos, sin, layer.rounded(self.quantise), self.fast)
            balance = balance + b
        return self.fast["rms_norm"](x, through(self.norm, bf16) if self.quantise else self.norm), balance

    def logits(self, y):
        """y [n,H] -> fp32 [n, n_used + 1]; the last column is one unused id."""
        head = through(self.head, mxint8) if self.quantise else self.head
        return F.linear(y, head).float()

    def loss(self, ids, targets):
        y, balance = self.hidden(ids)
        at = targets.flatten() >= 0
        logits = self.logits(y.flatten(0, 1)[at])
        many = math.log(VOCAB - self.n_used)
        logits = torch.cat([logits[:, :-1], logits[:, -1:] + many], 1)
        return F.cross_entropy(logits, targets.flatten()[at]), balance


class Muon(torch.optim.Optimizer):
    """Momentum whose step is made orthogonal by Newton-Schulz steps; matrices may be stacked."""

    def __init__(self, params, lr, momentum=0.95, decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"].mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                g = p.grad.lerp(m, group["momentum"])
                x = g.to(torch.bfloat16 if p.is_cuda else torch.float32)
                tall = x.shape[-2] > x.shape[-1]
                x = x.mT if tall else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
                x = x.mT if tall else x
                scale = max(1, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(x.to(p.dtype), alpha=-group["lr"] * scale)
