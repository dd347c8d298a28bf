"""Trains the tiny model on one GPU and leaves the compact checkpoint and its evaluation.

    train.py --out DIR --minutes 9 [--from DIR]         README.md says how it was run

Data are made by worker processes while the GPU computes. The last part runs through the stored number
formats. DIR gets state-*.pt (fp32, to go on from), model.bin + model.json (export.py) and log.txt.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import export  # noqa: E402
import harmony  # noqa: E402
import tasks  # noqa: E402
import words  # noqa: E402
from model import Model, Muon, Shape  # noqa: E402

LENGTHS = [128, 192, 256, 320, 512]
LONG_LENGTHS = [640, 1408, 2816, 5248]


def words_of(value):
    if isinstance(value, str):
        return value.split()
    if isinstance(value, dict):
        return words_of(list(value.items()))
    return [w for v in value for w in words_of(v)] if isinstance(value, (list, tuple)) else []


def find_used():
    """The ids in use, sorted: of all words and numbers, and of many tasks."""
    r = harmony.Renderer()
    used = {harmony.START, harmony.END, harmony.MESSAGE, harmony.CHANNEL, harmony.CONSTRAIN, harmony.CALL,
            harmony.RETURN}
    texts = [str(i) for i in range(1000)] + [f"{i:02}" for i in range(100)]
    for name in dir(words):
        if name.isupper():
            for w in words_of(getattr(words, name)):
                texts += [w, " " + w]
    for t in texts:
        used.update(r.encode(t))
    m = tasks.Maker(4)
    for _ in range(6000):
        used.update(r.sample(m.short())[0])
    m = tasks.Maker(5, held=True)
    for make in tasks.SKILLS.values():
        for _ in range(100 if make is not tasks.SKILLS["recall_long"] else 2):
            used.update(r.sample(make(m))[0])
    return np.array(sorted(used), dtype=np.int64)


class Batches(torch.utils.data.IterableDataset):
    """Batches of about `tokens` tokens: [B,T] ids and targets of the compact vocabulary."""

    def __init__(self, used, tokens, long, seed):
        self.used, self.tokens, self.long, self.seed = used, tokens, long, seed

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        seed = self.seed * 1000 + (info.id if info else 0)
        maker, renderer, noise = tasks.Maker(seed), harmony.Renderer(), np.random.default_rng(seed)
        to_compact = np.full(harmony.CALL + 1, len(self.used), dtype=np.int64)
        to_compact[self.used] = np.arange(len(self.used))
        lengths = LONG_LENGTHS if self.long else LENGTHS
        waiting = {n: [] for n in lengths}
        while True:
            if self.long:
                fill = maker.rng.choice([400, 1000, 2200, 2200, 4500, 4500, 4500])
                task = maker.long(int(fill * maker.rng.uniform(0.5, 1.04)))
            else:
                task = maker.short()
            task["late"] = maker.rng.random() < 0.7
            ids, targets = renderer.sample(task)
            ids, targets = to_compact[ids], np.array(targets)
            targets = np.where(targets >= 0, to_compact[targets.clip(0)], -1)
            if maker.rng.random() < 0.1:  # words that the model does not know
                blank = (noise.random(len(ids)) < 0.03) & (targets < 0) & (ids < len(self.used) - 7)
                ids = np.where(blank, len(self.used), ids)
            fit = [n for n in lengths if n >= len(ids)]
            if not fit:
                continue
            n = fit[0]
            waiting[n].append((ids, targets))
            if len(waiting[n]) == max(1, self.tokens // n):
                x = np.zeros((len(waiting[n]), n), dtype=np.int32)
                y = np.full((len(waiting[n]), n), -1, dtype=np.int32)
                for i, (a, b) in enumerate(waiting[n]):
                    x[i, :len(a)], y[i, :len(b)] = a, b
                waiting[n] = []
                yield torch.from_numpy(x), torch.from_numpy(y)


def stream(used, tokens, long, seed, workers):
    data = Batches(used, tokens, long, seed)
    return iter(torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers,
                                            prefetch_factor=6 if workers else None))


@torch.no_grad()
def evaluate(model, used, device, n, skills=None, seed=77):
    """Per skill: of n unseen tasks, how many answers are right to the last token (what greedy decoding would
    write), and the largest and mean probability of all unused ids together at temperature 1."""
    maker, renderer = tasks.Maker(seed, held=True), harmony.Renderer()
    to_compact = np.full(harmony.CALL + 1, len(used), dtype=np.int64)
    to_compact[used] = np.arange(len(used))
    out, wrong = {}, []
    many = np.log(201088 - len(used))
    for skill, make in tasks.SKILLS.items():
        if skills and skill not in skills:
            continue
        count = max(4, n // 8) if skill == "recall_long" else n
        right, mass = 0, []
        made = [make(maker) for _ in range(count)]
        for at in range(0, count, 16):
            part = [renderer.sample(t) for t in made[at:at + 16]]
            length = max(len(ids) for ids, _ in part)
            x = torch.zeros(len(part), length, dtype=torch.long)
            for i, (ids, _) in enumerate(part):
                x[i, :len(ids)] = torch.from_numpy(to_compact[ids])
            with torch.autocast(device, torch.bfloat16):
                y, _ = model.hidden(x.to(device))
                for i, (ids, targets) in enumerate(part):
                    first = renderer.answer_start(targets)
                    logits = model.logits(y[i, first:len(ids) - 1])
                    p = logits.clone()
                    p[:, -1] += many
                    mass.append(p.softmax(-1)[:, -1])
                    want = to_compact[targets[first:len(ids) - 1]]
                    got = logits.argmax(-1).cpu().numpy()
                    if (got == want).all():
                        right += 1
                    elif len(wrong) < 300:
                        text = [renderer.encoder.decode([int(used[g])]) if g < len(used) and used[g] < 199998
                                else f"<{used[g] if g < len(used) else 'unused'}>" for g in got]
                        wrong.append((skill, made[at + i]["effort"], made[at + i]["messages"][-1].get("content", "")[-70:],
                                      "".join(text)[-150:]))
        mass = torch.cat(mass)
        out[skill] = {"n": count, "right": right, "unused_mean": mass.mean().item(), "unused_max": mass.max().item()}
    return out, wrong


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, type=pathlib.Path)
    p.add_argument("--start", type=pathlib.Path, help="folder with state-*.pt to go on from")
    p.add_argument("--minutes", type=float, default=8.5)
    p.add_argument("--tokens", type=int, default=49152, help="of a batch")
    p.add_argument("--long-tokens", type=int, default=42000)
    p.add_argument("--long-from", type=float, default=0.25, help="part of the time after which long rows come")
    p.add_argument("--long-share", type=float, default=0.15)
    p.add_argument("--quantise-from", type=float, default=0.6)
    p.add_argument("--fall-from", type=float, default=0.45, help="part of the time after which rates fall")
    p.add_argument("--muon", type=float, default=0.02, help="learning rate of matrices")
    p.add_argument("--adam", type=float, default=0.003, help="learning rate of the rest")
    p.add_argument("--hidden", type=int, default=192)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--intermediate", type=int, default=128)
    p.add_argument("--workers", type=int, default=13)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--eval", type=int, default=200)
    p.add_argument("--check", type=int, default=64, help="tasks a skill of the evaluations on the way; 0: none")
    p.add_argument("--no-compile", action="store_true")
    args = p.parse_args()
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    log = open(args.out / "log.txt", "w")

    def say(*text):
        print(*text, flush=True)
        print(*text, file=log, flush=True)

    used, state = find_used(), {}
    if args.start:
        for f in sorted(args.start.glob("state-*.pt")):
            state.update(torch.load(f))
        used = state.pop("used").numpy()
    shape = Shape(args.layers, args.hidden, args.heads, 8, args.intermediate)
    model = Model(shape, len(used))
    if args.start:
        model.load_state_dict(state)
    short = stream(used, args.tokens, False, args.seed, args.workers)
    long = stream(used, args.long_tokens, True, args.seed + 500, max(1, args.workers // 5) if args.workers else 0)
    model.to(device)
    if device == "cuda" and not args.no_compile:
        model.compile_pieces()
    matrices = [q for n, q in model.named_parameters() if q.dim() >= 2 and n.rsplit(".", 1)[-1] in
                ("wq", "wk", "wv", "wo", "w1", "w2")]
    rest = [q for q in model.parameters() if not any(q is m for m in matrices)]
    muon = Muon(matrices, lr=args.muon)
    adam = torch.optim.AdamW(rest, lr=args.adam, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda")
    say(f"used {len(used)} parameters {sum(q.numel() for q in model.parameters())} set-up {time.time() - began:.0f} s")
    start, limit, step, tokens, losses = time.time(), args.minutes * 60, 0, 0, []
    rng, last = np.random.default_rng(args.seed), 0
    while True:
        done = (time.time() - start) / limit
        if done >= 1:
            break
        warm = min(1.0, (step + 1) / 100)
        fall = min(1.0, (1 - done) / (1 - args.fall_from))
        for o, lr in ((muon, args.muon), (adam, args.adam)):
            for g in o.param_groups:
                g["lr"] = lr * warm * max(fall, 0.01)
        model.quantise = done >= args.quantise_from
        is_long = done >= args.long_from and rng.random() < args.long_share
        x, y = next(long if is_long else short)
        x, y = x.to(device, torch.long, non_blocking=True), y.to(device, torch.long, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss, balance = model.loss(x, y)
        (loss + 0.003 * balance).backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        step, tokens = step + 1, tokens + x.numel()
        losses.append(loss.detach())
        if step % 100 == 0 or step in (1, 10, 30):
            say(f"step {step} {time.time() - start:.0f} s, {tokens / 1e6:.1f} M tokens, loss "
                f"{torch.stack(losses[-100:]).mean():.4f} balance {balance.item() / shape.layers:.3f}"
                f"{' long' if is_long else ''}")
        if args.check and time.time() - last > 75:
            last = time.time()
            short_skills = [s for s in tasks.SKILLS if s != "recall_long" or done > args.long_from]
            got, _ = evaluate(model, used, device, args.check, short_skills)
            say(" ".join(f"{k}:{v['right']}/{v['n']}" for k, v in got.items()))
    model.quantise = True
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    state["used"] = torch.from_numpy(used)
    names, half, size, part = sorted(state), sum(v.numel() for v in state.values()) / 2, 0, [{}, {}]
    for n in names:
        part[int(size >= half)][n] = state[n]
        size += state[n].numel()
    for i in range(2):
        torch.save(part[i], args.out / f"state-{i}.pt")
    export.write(model, used, args.out)
    got, wrong = evaluate(model, used, device, args.eval)
    for k, v in got.items():
        say(json.dumps({"skill": k, **v}))
    with open(args.out / "wrong.txt", "w") as f:
        for w in wrong:
            print(*w, sep=" | ", file=f)
    say(f"steps {step} tokens {tokens / 1e6:.0f} M, all {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
