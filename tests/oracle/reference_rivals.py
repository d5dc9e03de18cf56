"""The rival methods of all ranks simulated in one process, as plainly as `reference.simulate`.

Everything is per tensor, in dictionaries. A per-step method is one function of all workers'
weighted contributions, [{name: tensor}], and of a dictionary that it may remember things in; it
returns their sum as the workers receive it.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch
from places import DEVICE
from reference import (
    batch_loss,
    batchnorms,
    conv_shapes,
    decays,
    masked,
    parameters,
    project,
    sgd,
)

# What their authors have chosen, by method; tests on small networks choose otherwise.
CONSTANTS = {
    "dgc": {"SAMPLE": 0.01},
    "adacgd": {"LEVELS": (0.01, 0.03, 0.1), "ZETA": 0.4},
    "terngrad": {"CLIP_SIGMA": 2.5},
}


def workers_of(node_sizes, aggregation):
    """Return [(ranks that the worker speaks for, its weight)]."""
    total = sum(node_sizes)
    if aggregation == "flat":
        return [([rank], 1 / total) for rank in range(total)]
    starts = [sum(node_sizes[:i]) for i in range(len(node_sizes))]
    return [(list(range(s, s + p)), p / total) for s, p in zip(starts, node_sizes, strict=True)]


def average_batchnorm(models):
    """Give all models the statistics of the pooled data."""
    for n in batchnorms(models[0]):
        modules = [batchnorms(m)[n] for m in models]
        mean = sum(m.running_mean for m in modules) / len(modules)
        second = sum(m.running_var + m.running_mean**2 for m in modules) / len(modules)
        for m in modules:
            m.running_mean.copy_(mean)
            m.running_var.copy_(second - mean**2)


# --------------------------------------------------------------------------------------------------
# Methods that communicate at each step
# --------------------------------------------------------------------------------------------------


def dense(contributions, memory, s):
    return {n: sum(c[n] for c in contributions) for n in contributions[0]}


def topk(contributions, memory, s):
    """Keep the largest of each tensor, one by one; the rest waits for the next step."""
    residuals = memory.setdefault(
        "residuals",
        [{n: torch.zeros_like(x) for n, x in c.items()} for c in contributions],
    )
    total = {n: torch.zeros_like(x) for n, x in contributions[0].items()}
    for contribution, residual in zip(contributions, residuals, strict=True):
        for n, x in contribution.items():
            waiting = (residual[n] + x).reshape(-1)
            count = max(1, math.ceil(s.options.ratio * waiting.numel() - 1e-9))
            order = sorted(range(waiting.numel()), key=lambda i: -abs(float(waiting[i])))
            sent = torch.zeros_like(waiting)
            for i in order[:count]:
                sent[i] = waiting[i]
            total[n] += sent.view(x.shape)
            residual[n] = (waiting - sent).view(x.shape)
    return total


def pactrain(contributions, memory, s):
    """Add up what lies under the masks; without masks everything."""
    masks = memory.get("masks", {})
    return {n: x * masks[n] if n in masks else x for n, x in dense(contributions, {}, s).items()}


def prune_weights(models, optimizers, memory, s):
    """Keep the weights of largest magnitude of each tensor of two or more dimensions."""
    memory["masks"] = {}
    for n, weight in parameters(models[0]).items():
        if weight.dim() > 1:
            count = math.ceil(s.keep_ratio[0] * weight.numel() - 1e-9)
            least = sorted(weight.detach().abs().reshape(-1).tolist())[-count]
            memory["masks"][n] = weight.detach().abs() >= least
    for m, optimizer in zip(models, optimizers, strict=True):
        for n, p in parameters(m).items():
            if n in memory["masks"]:
                p.data *= memory["masks"][n]
                if p in optimizer.state:
                    optimizer.state[p]["momentum_buffer"] *= memory["masks"][n]


def zeros_for(contributions):
    return [{n: torch.zeros_like(x) for n, x in c.items()} for c in contributions]


def stride_of(numel, ratio, sample):
    """Return of how many elements one is drawn, in the words of the authors' initialize()."""
    share, least = math.ceil(numel * sample), math.ceil(2 / ratio)
    if sample == 1 or numel <= least:
        return 1
    stride = math.ceil(numel / max(share, least) / 32) * 32 + 1
    while numel // stride < max(share, least):
        stride -= 8
    return stride


def chosen_by_dgc(waiting, ratio, sample, step):
    """Return the positions that the authors' _sparsify() sends of a list of numbers."""
    stride = stride_of(len(waiting), ratio, sample)
    samples, selects = len(waiting) // stride, math.ceil(len(waiting) * ratio)
    drawn = sorted((abs(v) for v in waiting[step % stride :: stride]), reverse=True)
    threshold = drawn[math.ceil(samples * ratio) - 1]
    passing = [i for i, v in enumerate(waiting) if abs(v) >= threshold]
    for _ in range(10 if stride > 1 else 0):
        if len(passing) > 1.3 * selects:
            passing = sorted(passing, key=lambda i: -abs(waiting[i]))[:selects]
        elif len(passing) < 0.8 * selects:
            threshold *= 0.8
            passing = [i for i, v in enumerate(waiting) if abs(v) >= threshold]
    return passing[:selects]


def dgc(contributions, memory, s):
    """Do what the authors' code does: compressor, memory and optimizer.

    Kernels and matrices are compressed after momentum correction; all else is averaged and has
    momentum then. Weight decay has a momentum of its own. Samples begin at another place each step.
    """
    step, final, warmup = memory.setdefault("step", 0), s.options.ratio, s.options.warmup_epochs
    memory["step"] += 1
    ratio = final
    if step < warmup * s.steps_per_epoch:
        parts = max(4, math.ceil(warmup))
        falls = 1 + int(step / (warmup * s.steps_per_epoch) * parts)
        ratio = final ** (falls / (parts + 1))
    momenta = memory.setdefault("momenta", zeros_for(contributions))
    residuals = memory.setdefault("residuals", zeros_for(contributions))
    (common,) = memory.setdefault("common", zeros_for(contributions[:1]))
    (decayed,) = memory.setdefault("decayed", zeros_for(contributions[:1]))
    total = {n: torch.zeros_like(x) for n, x in contributions[0].items()}

    def corrected(momentum, n, g):
        """Update a momentum; return what of it the step takes."""
        momentum[n] = s.momentum * momentum[n] + g
        return momentum[n]

    for n in total:
        if total[n].dim() < 2:
            total[n] = corrected(common, n, sum(c[n] for c in contributions))
            continue
        for c, momentum, residual in zip(contributions, momenta, residuals, strict=True):
            residual[n] = residual[n] + corrected(momentum, n, c[n])
            waiting = residual[n].reshape(-1)
            for i in chosen_by_dgc(waiting.tolist(), ratio, CONSTANTS["dgc"]["SAMPLE"], step):
                total[n].reshape(-1)[i] += waiting[i]
                residual[n].reshape(-1)[i] = momentum[n].reshape(-1)[i] = 0
    for n, weights in memory["theta"].items():
        decay = s.weight_decay * decays(weights, s) * weights
        decayed[n] = s.momentum * decayed[n] + decay
        total[n] = total[n] + decayed[n]
    return total


def powersgd(contributions, memory, s):
    """Project each large matrix of the sum on the space of M Q; the rest of each worker stays."""
    rank, shapes = s.options.rank, {}
    for n, x in contributions[0].items():
        rows, columns = len(x), x.numel() // len(x)
        if x.dim() > 1 and rank * (rows + columns) < rows * columns:
            shapes[n] = rows, columns
    if "right" not in memory:
        generator = torch.Generator().manual_seed(s.seed)
        count = rank * sum(columns for _, columns in shapes.values())
        draws = torch.randn(count, generator=generator, dtype=x.dtype).split(
            [rank * columns for _, columns in shapes.values()]
        )
        memory["right"] = {n: q.view(-1, rank) for n, q in zip(shapes, draws, strict=True)}
        memory["residuals"] = [
            {n: torch.zeros_like(x) for n, x in c.items()} for c in contributions
        ]
    total = dense(contributions, {}, s)
    for n, shape in shapes.items():
        waiting = [
            (residual[n] + c[n]).view(shape)
            for residual, c in zip(memory["residuals"], contributions, strict=True)
        ]
        left = torch.linalg.qr(sum(waiting) @ memory["right"][n]).Q
        memory["right"][n] = sum(waiting).T @ left
        total[n] = (left @ left.T @ sum(waiting)).view(total[n].shape)
        for residual, m in zip(memory["residuals"], waiting, strict=True):
            residual[n] = (m - left @ left.T @ m).view(total[n].shape)
    return total


def dion(contributions, memory, s):
    """Send the momentum of hidden matrices by one power iteration; its update is their sum."""
    *hidden, _ = [n for n, x in contributions[0].items() if x.dim() > 1]
    shapes = {n: (len(x), x[0].numel()) for n, x in contributions[0].items() if n in hidden}
    ranks = {n: max(1, int(s.options.rank_ratio * min(shape))) for n, shape in shapes.items()}
    if "right" not in memory:
        generator = torch.Generator().manual_seed(s.seed)
        counts = [ranks[n] * columns for n, (_, columns) in shapes.items()]
        dtype = contributions[0][hidden[0]].dtype
        draws = torch.randn(sum(counts), generator=generator, dtype=dtype).split(counts)
        memory["right"] = {n: q.view(-1, ranks[n]) for n, q in zip(shapes, draws, strict=True)}
        memory["momenta"] = [
            {n: torch.zeros(shapes[n], dtype=dtype) for n in hidden} for _ in contributions
        ]
    total = dense(contributions, {}, s)
    for n in hidden:
        momenta = [
            momentum[n] + c[n].view(shapes[n])
            for momentum, c in zip(memory["momenta"], contributions, strict=True)
        ]
        left = torch.linalg.qr(sum(momenta) @ memory["right"][n]).Q
        right = sum(momenta).T @ left
        memory["right"][n] = right / right.norm(dim=0)
        total[n] = (left @ memory["right"][n].T).view(total[n].shape)
        for momentum, m in zip(memory["momenta"], momenta, strict=True):
            momentum[n] = m - (1 - s.momentum) * left @ left.T @ m
    return total


def dion_steps(model, s):
    """Return what steps along updates of hidden matrices, as far as Muon, and else by AdamW."""
    *hidden, _ = [p for p in parameters(model).values() if p.dim() > 1]
    sizes = [0.2 * math.sqrt(max(len(p), p[0].numel())) for p in hidden]
    # The decay is that of the rate alone.
    plain = [
        {"params": [p], "lr": s.lr * size, "weight_decay": s.weight_decay / size}
        for p, size in zip(hidden, sizes, strict=True)
    ]
    rest = [p for p in parameters(model).values() if all(p is not other for other in hidden)]
    groups = [{"params": [p], "weight_decay": s.weight_decay * decays(p, s)} for p in rest]
    betas = s.momentum, s.beta2
    both = torch.optim.SGD(plain), torch.optim.AdamW(groups, lr=s.lr, betas=betas)
    return SimpleNamespace(
        step=lambda: [optimizer.step() for optimizer in both],
        zero_grad=lambda: [optimizer.zero_grad() for optimizer in both],
    )


def omnireduce(contributions, memory, s):
    """Send whole blocks of the largest norm of all tensors in one row; the others wait."""
    if s.options.block_ratio == 1:
        # Blocks of zeros need not travel to be added up.
        return dense(contributions, memory, s)
    rows = [torch.cat([x.reshape(-1) for x in c.values()]) for c in contributions]
    waiting = memory.setdefault("waiting", [torch.zeros_like(row) for row in rows])
    total = torch.zeros_like(rows[0])
    for row, kept in zip(rows, waiting, strict=True):
        kept += row
        starts = range(0, len(row), s.options.block_size)
        norms = {i: float((kept[i : i + s.options.block_size] ** 2).sum()) for i in starts}
        count = math.ceil(s.options.block_ratio * len(norms) - 1e-9)
        for i in sorted(norms, key=lambda i: -norms[i])[:count]:
            total[i : i + s.options.block_size] += kept[i : i + s.options.block_size]
            kept[i : i + s.options.block_size] = 0
    pieces = total.split([x.numel() for x in contributions[0].values()])
    return {n: p.view(x.shape) for p, (n, x) in zip(pieces, contributions[0].items(), strict=True)}


def spardl_rounds(workers):
    """Return (gap, blocks) of each round, in the words of the authors' init_send_info()."""
    count = math.ceil(math.log2(workers)) if workers > 1 else 0
    sizes = [2**i for i in range(count - 1)]
    sizes += [workers - 2 ** (count - 1)] if count else []
    sizes = sizes[::-1]
    gap, schedule = workers - sizes[0] if sizes else 0, []
    for size in sizes:
        schedule.append((gap, size))
        gap //= 2
    return schedule


def largest(numbers, count):
    """Return the places of the largest magnitudes."""
    return sorted(range(len(numbers)), key=lambda i: -abs(numbers[i]))[:count]


def spardl(contributions, memory, s):
    """Send block by block, as the authors' run() does; the residual is global."""
    rows = [torch.cat([x.reshape(-1) for x in c.values()]).tolist() for c in contributions]
    workers, numel = len(rows), len(rows[0])
    size = math.ceil(numel / workers)
    count = max(1, math.ceil(s.options.ratio * size - 1e-9))
    waiting = memory.setdefault("residuals", [[0.0] * numel for _ in rows])
    held = [[r + g for r, g in zip(*pair, strict=True)] for pair in zip(waiting, rows, strict=True)]
    starts = [block * size for block in range(workers)]
    split = [[row[i : i + size] + [0.0] * (i + size - numel) for i in starts] for row in held]
    left = [[list(block) for block in row] for row in split]

    def choose(worker, block):
        """Take the largest of a block as it is; all else of it is left out."""
        picked = largest(split[worker][block], count)
        left[worker][block] = list(split[worker][block])
        for i in picked:
            left[worker][block][i] = 0.0
        return {i: split[worker][block][i] for i in picked}

    for gap, many in spardl_rounds(workers):
        mail = [
            ((worker + gap) % workers, block, choose(worker, block))
            for worker in range(workers)
            for block in ((worker + gap + b) % workers for b in range(many))
        ]
        for receiver, block, sent in mail:
            for i, value in sent.items():
                split[receiver][block][i] += value
    total, arrived = [0.0] * (size * workers), set()
    for block in range(workers):
        for i, value in choose(block, block).items():
            total[block * size + i] = value
            arrived.add(block * size + i)
    for block in range(workers):
        for i in range(min(size, numel - block * size)):
            place = block * size + i
            for worker in range(workers):
                chosen = place in arrived
                waiting[worker][place] = left[worker][block][i] if chosen else held[worker][place]
    like = list(contributions[0].values())
    pieces = torch.tensor(total[:numel], dtype=like[0].dtype).split([x.numel() for x in like])
    names = contributions[0].items()
    return {n: p.view(x.shape).to(x.device) for p, (n, x) in zip(pieces, names, strict=True)}


def adacgd(contributions, memory, s):
    """Mend each worker's estimate by the coarsest level that the last change of its gradient asks.

    The first gradients are the first estimates.
    """
    rows = [torch.cat([x.reshape(-1) for x in c.values()]) for c in contributions]
    if "estimates" not in memory:
        memory["estimates"], memory["before"] = [r.clone() for r in rows], [r.clone() for r in rows]
        memory["levels"] = set()
        return dense(contributions, memory, s)
    for h, g, y in zip(memory["estimates"], rows, memory["before"], strict=True):
        # EF21-SGDM compresses an average of the gradients; 1 is the gradient itself.
        x = y + s.options.average * (g - y)
        bound = CONSTANTS["adacgd"]["ZETA"] * float(((x - y) ** 2).sum())
        order = sorted(range(len(x)), key=lambda i: -abs(float(x[i] - h[i])))
        for level in (0, *CONSTANTS["adacgd"]["LEVELS"]):
            tried = h.clone()
            for i in order[: math.ceil(level * len(x) - 1e-9)]:
                tried[i] = x[i]
            if float(((x - tried) ** 2).sum()) <= bound:
                break
        memory["levels"].add(level)
        h.copy_(tried)
        y.copy_(x)
    pieces = sum(memory["estimates"]).split([x.numel() for x in contributions[0].values()])
    return {n: p.view(x.shape) for p, (n, x) in zip(pieces, contributions[0].items(), strict=True)}


def rounded(dtype):
    """Return the exchange of PyTorch's hooks: rounded, added up in float32, rounded."""

    def exchange(contributions, memory, s):
        total = {}
        for n, x in contributions[0].items():
            sums = sum(c[n].to(dtype).float() for c in contributions)
            total[n] = sums.to(dtype).to(x.dtype)
        return total

    return exchange


def terngrad(contributions, memory, s):
    """Draw -1, 0 or 1 for each element of each worker; everyone's scale is the largest."""
    step = memory.setdefault("step", 0)
    memory["step"] += 1
    scales = {}
    for n in contributions[0]:
        mine = []
        for c in contributions:
            values = c[n].reshape(-1).tolist()
            mean = sum(values) / len(values)
            sigma = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
            largest = max(abs(v) for v in values)
            mine.append(
                min(CONSTANTS["terngrad"]["CLIP_SIGMA"] * sigma, largest) if sigma else largest
            )
        scales[n] = max(mine)
    total = {n: torch.zeros_like(x) for n, x in contributions[0].items()}
    for rank, c in enumerate(contributions):
        seed = np.random.SeedSequence([s.seed, step, rank]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(DEVICE).manual_seed(int(seed) // 2)
        for n, x in c.items():
            # A GPU draws other numbers than a CPU.
            draws = torch.rand(x.numel(), generator=generator, dtype=x.dtype, device=DEVICE)
            draws = draws.to(x.device) * scales[n]
            signs = torch.where(x.reshape(-1).abs() > draws, x.reshape(-1).sign(), 0.0)
            total[n] += scales[n] * signs.view(x.shape)
    return total


def lion(contributions, memory, s):
    """Take the sign of the sum of the signs of all workers' Lion updates."""
    momenta = memory.setdefault("momenta", zeros_for(contributions))
    votes = {n: torch.zeros_like(x) for n, x in contributions[0].items()}
    for c, share, momentum in zip(contributions, memory["shares"], momenta, strict=True):
        for n, x in c.items():
            gradient = x / share
            update = 0.9 * momentum[n] + (1 - 0.9) * gradient
            momentum[n] = 0.99 * momentum[n] + (1 - 0.99) * gradient
            assert update.all()
            votes[n] += update.sign()
    return {n: v.sign() for n, v in votes.items()}


PER_STEP = {
    "dense": dense,
    "parallax": dense,
    "embrace": dense,
    "terngrad": terngrad,
    "lion": lion,
    "adacgd": adacgd,
    "fp16": rounded(torch.float16),
    "bf16": rounded(torch.bfloat16),
    "topk": topk,
    "dgc": dgc,
    "powersgd": powersgd,
    "dion": dion,
    "omnireduce": omnireduce,
    "spardl": spardl,
    "pactrain": pactrain,
}


def simulate_per_step(model, streams, node_sizes, loss_fn, s):
    """Run `s.outer_iterations` times `s.steps` steps; return one SimpleNamespace per iteration."""
    exchange, memory = PER_STEP[s.method.name], {}
    workers = workers_of(node_sizes, s.aggregation)
    models = [copy.deepcopy(model) for _ in streams]
    memory["shares"] = [weight for _, weight in workers]
    # DGC has momentum and weight decay of its own, Lion momentum.
    momentum = 0 if s.method.name in ("dgc", "lion") else s.momentum
    decay = 0 if s.method.name == "dgc" else s.weight_decay
    optimizers = [sgd(m, s, momentum, decay) for m in models]
    if s.method.name == "dion":
        optimizers = [dion_steps(m, s) for m in models]
    history = []
    if s.method.name == "pactrain" and s.options.prune_iteration == 0:
        prune_weights(models, optimizers, memory, s)
    for k in range(1, s.outer_iterations + 1):
        losses = []
        for step in range(s.steps):
            gradients = []
            for m, stream, optimizer in zip(models, streams, optimizers, strict=True):
                number = (k - 1) * s.steps + step + 1
                loss = batch_loss(m, model, stream, optimizer, loss_fn, number)
                loss.backward()
                losses.append(float(loss.detach()))
                gradients.append({n: p.grad.clone() for n, p in parameters(m).items()})
            contributions = [
                {n: weight * sum(gradients[r][n] for r in ranks) / len(ranks) for n in gradients[0]}
                for ranks, weight in workers
            ]
            memory["theta"] = {n: p.detach() for n, p in parameters(models[0]).items()}
            mean = exchange(contributions, memory, s)
            for m, optimizer in zip(models, optimizers, strict=True):
                for n, p in parameters(m).items():
                    p.grad.copy_(mean[n])
                optimizer.step()
        if s.method.name == "pactrain" and s.options.prune_iteration == k:
            prune_weights(models, optimizers, memory, s)
        average_batchnorm(models)
        history.append(
            SimpleNamespace(
                z={n: p.detach().clone() for n, p in parameters(models[0]).items()},
                memory=copy.deepcopy(memory),
                loss=sum(losses) / len(losses),
                statistics=statistics_of(models[0]),
            )
        )
    return history


def partners(size, seed):
    """Yield, step after step, {node: the one it receives from}, as gossip_grad.py has it.

    What torchdistx draws with `random` is drawn with NumPy here; the first shuffle comes first.
    """
    generator = np.random.default_rng([seed, size])
    shuffles = [list(generator.permutation(size)) for _ in range(size)]
    period, step = max(1, math.ceil(math.log(size, 2))), 0
    while True:
        circle = shuffles[step // period % size]
        power = step % period
        yield {
            int(node): int(circle[(place - 2**power + size) % size])
            for place, node in enumerate(circle)
        }
        step += 1


def simulate_gossip(model, streams, node_sizes, loss_fn, s):
    """Train one model per node; return one SimpleNamespace per outer iteration."""
    total = sum(node_sizes)
    nodes = [ranks for ranks, _ in workers_of(node_sizes, "hierarchical")]
    models = [copy.deepcopy(model) for _ in streams]
    optimizers = [sgd(m, s, s.momentum, s.weight_decay) for m in models]
    history, meetings = [], partners(len(nodes), s.seed)
    for k in range(1, s.outer_iterations + 1):
        losses = []
        for step in range(s.steps):
            for m, stream, optimizer in zip(models, streams, optimizers, strict=True):
                number = (k - 1) * s.steps + step + 1
                loss = batch_loss(m, model, stream, optimizer, loss_fn, number)
                loss.backward()
                losses.append(float(loss.detach()))
            means = [
                {
                    n: sum(parameters(models[r])[n].grad for r in ranks) / len(ranks)
                    for n in parameters(model)
                }
                for ranks in nodes
            ]
            sources = next(meetings)
            for node, ranks in enumerate(nodes):
                other = means[sources[node]]
                for rank in ranks:
                    for n, p in parameters(models[rank]).items():
                        p.grad.copy_((means[node][n] + other[n]) / 2)
                    optimizers[rank].step()
        average_batchnorm(models)
        thetas = [{n: p.detach().clone() for n, p in parameters(m).items()} for m in models]
        z = {n: sum(t[n] for t in thetas) / total for n in thetas[0]}
        apart = sum(float(((t[n] - z[n]) ** 2).sum()) for t in thetas for n in z) / total
        size = sum(float((x**2).sum()) for x in z.values())
        history.append(
            SimpleNamespace(
                z=z,
                thetas=thetas,
                distance=(apart / size) ** 0.5,
                loss=sum(losses) / len(losses),
                statistics=statistics_of(models[0]),
            )
        )
    return history


def statistics_of(model):
    return [(m.running_mean.clone(), m.running_var.clone()) for m in batchnorms(model).values()]


# --------------------------------------------------------------------------------------------------
# Methods that average parameters once per outer iteration
# --------------------------------------------------------------------------------------------------


def new_optimizer(model, s):
    """Return the inner optimizer as torch has it, one tensor after the other."""
    if s.optimizer == "adamw":
        groups = [
            {"params": [p], "weight_decay": s.weight_decay * decays(p, s)}
            for p in model.parameters()
        ]
        betas = s.momentum, 0.999
        return torch.optim.AdamW(groups, lr=s.lr, betas=betas, eps=1e-8, foreach=False)
    return sgd(model, s, s.momentum, s.weight_decay)


def rate_at(step, total, s):
    """Return the learning rate of a step: a line up, then level or along a cosine."""
    warm = round(s.warmup_ratio * total)
    if step < warm:
        return s.lr * (step + 1) / warm
    if s.lr_schedule == "constant":
        return s.lr
    low, part = s.lr * s.min_lr_ratio, (step - warm) / (total - warm)
    return low + 0.5 * (s.lr - low) * (1 + math.cos(math.pi * part))


def interval(done, total, s):
    """Return the steps of a round, as the code of Gu et al. 2024 has it (LocalOptimizer)."""
    if s.method.name != "qsr" or done < round(s.warmup_ratio * total):
        return s.steps
    wanted = int((s.options.alpha / rate_at(done, total, s)) ** 2)
    return max(min(max(wanted, s.steps), total - done), 1)


def quantised(values):
    """Return each number's bin mean: four bins, 1.5 standard deviations each, about the mean."""
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    width = 6 * variance**0.5 / 4 or 1.0
    bins = [min(3, max(0, round((v - mean) / width + 2))) for v in values]
    means = {
        b: sum(v for v, o in zip(values, bins, strict=True) if o == b) / bins.count(b)
        for b in set(bins)
    }
    return [means[b] for b in bins]


def sparse(left, s):
    """Return what of {name: tensor} is sent: of each chunk the largest, in four levels."""
    sent = {}
    for n, tensor in left.items():
        numbers = tensor.reshape(-1).tolist()
        places = []
        for start in range(0, len(numbers), s.chunk):
            chunk = range(start, min(start + s.chunk, len(numbers)))
            count = math.ceil(s.options.ratio * s.chunk)
            places += sorted(chunk, key=lambda i: -abs(numbers[i]))[:count]
        out = [0.0] * len(numbers)
        for i, level in zip(places, quantised([numbers[i] for i in places]), strict=True):
            out[i] = level
        sent[n] = torch.tensor(out, dtype=tensor.dtype).view(tensor.shape)
    return sent


def simulate_local(model, streams, node_sizes, loss_fn, s):
    """Run local-sgd, qsr, diloco, sparseloco or one-shot.

    Returns one SimpleNamespace per outer iteration.
    """
    names, infos = list(parameters(model)), conv_shapes(model)
    total = sum(node_sizes)
    models = [copy.deepcopy(model) for _ in streams]
    nodes = [[models[r] for r in ranks] for ranks, _ in workers_of(node_sizes, "hierarchical")]
    optimizers = [new_optimizer(m, s) for m in models]
    z = {n: p.detach().clone() for n, p in parameters(model).items()}
    velocity = {n: torch.zeros_like(x) for n, x in z.items()}
    left = [{n: torch.zeros_like(x) for n, x in z.items()} for _ in node_sizes]
    mask, history = {}, []
    k = done = 0
    while done < s.outer_iterations * s.steps:
        k += 1
        losses = []
        for m, optimizer in zip(models, optimizers, strict=True):
            for n, p in parameters(m).items():
                p.data.copy_(z[n])
            for kept in optimizer.state.values():
                if s.inner_momentum == "reset":
                    kept["exp_avg" if "exp_avg" in kept else "momentum_buffer"].zero_()
        for _ in range(interval(done, s.outer_iterations * s.steps, s)):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(done, s.outer_iterations * s.steps, s)
            done += 1
            for m, stream, optimizer in zip(models, streams, optimizers, strict=True):
                loss = batch_loss(m, model, stream, optimizer, loss_fn, done)
                loss.backward()
                losses.append(float(loss.detach()))
            for mine in nodes if s.node_sync == "step" else ():
                for n in names:
                    mean = sum(parameters(m)[n].grad for m in mine) / len(mine)
                    for m in mine:
                        parameters(m)[n].grad.copy_(mean)
            for m, optimizer in zip(models, optimizers, strict=True):
                for n, p in parameters(m).items():
                    if n in mask:
                        p.grad *= mask[n]
                optimizer.step()
        mean = {n: sum(parameters(m)[n].detach() for m in models) / total for n in names}
        if s.method.name == "one-shot" and k == s.options.prune_iteration:
            by_node = [
                {n: sum(parameters(m)[n].detach() for m in mine) / len(mine) for n in names}
                for mine in nodes
            ]
            mask = project(by_node, infos, s.groups, s.keep_ratio, node_sizes)
            for m, optimizer in zip(models, optimizers, strict=True):
                for n, p in parameters(m).items():
                    if n in mask:
                        kept = optimizer.state[p]
                        kept["exp_avg" if "exp_avg" in kept else "momentum_buffer"] *= mask[n]
        mean = masked(mean, mask)
        if s.method.name == "diloco":
            mu = s.options.outer_momentum * min(1, k / max(1, s.options.outer_warmup))
            for n in names:
                displacement = z[n] - mean[n]
                velocity[n] = mu * velocity[n] + displacement
                z[n] = z[n] - s.options.outer_lr * (displacement + mu * velocity[n])
        elif s.method.name == "sparseloco":
            total_sent = {n: torch.zeros_like(x) for n, x in z.items()}
            for i, size in enumerate(node_sizes):
                for n in names:
                    drift = z[n] - sum(parameters(m)[n].detach() for m in nodes[i]) / size
                    left[i][n] = 0.95 * left[i][n] + drift
                sent = sparse(left[i], s)
                for n in names:
                    left[i][n] = left[i][n] - sent[n]
                    total_sent[n] += size / total * sent[n]
            z = {n: x - s.options.outer_lr * total_sent[n] for n, x in z.items()}
        else:
            z = mean
        average_batchnorm(models)
        history.append(
            SimpleNamespace(
                z={n: x.clone() for n, x in z.items()},
                velocity={n: x.clone() for n, x in velocity.items()},
                mask=dict(mask),
                loss=sum(losses) / len(losses),
                statistics=statistics_of(models[0]),
            )
        )
    return history
