"""H-SADMM of all ranks simulated in one process, without MPI and without the package's mathematics.

Everything is per tensor, in dictionaries, with loops: slow and plain, so that it can be compared
with algorithm and equations line by line. It shares with the package only the data a rank sees.
"""

import copy
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import torch
from reference_payload import CodedMeans
from torch import nn


def conv_shapes(model):
    """Return {weight name: (conv groups, is first conv, is last without Linear)} of all convs."""
    convs = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    has_linear = any(isinstance(m, nn.Linear) for m in model.modules())
    return {
        f"{n}.weight": (m.groups, i == 0, i == len(convs) - 1 and not has_linear)
        for i, (n, m) in enumerate(convs)
    }


def marked(weight, *places):
    """Return the element mask of these places."""
    mask = torch.zeros_like(weight, dtype=torch.bool)
    for place in places:
        mask[place] = True
    return mask


# ClickTrain's patterns of 3x3 kernels: places (row, column) that a kernel keeps. Of equals the
# first one counts.
PATTERNS = tuple(
    tuple((y, x) for y in rows for x in columns)
    for rows, columns in (((1, 2), (1, 2)), ((1, 2), (0, 1)), ((0, 1), (1, 2)), ((0, 1), (0, 1)))
)


def groups_of(weight, kind, conv_groups):
    """Yield lists of element masks: one list per selection, one mask per group."""
    outputs, inputs = weight.shape[:2]
    kernels = [(o, c) for o in range(outputs) for c in range(inputs)]
    if kind == "filter":
        yield [marked(weight, o) for o in range(outputs)]
    elif kind == "kernel":
        yield [marked(weight, kernel) for kernel in kernels]
    elif kind == "pattern":
        for o, c in kernels:
            yield [marked(weight, *((o, c, y, x) for y, x in places)) for places in PATTERNS]
    else:
        inside = list(product(*map(range, weight.shape[2:]))) if kind == "shape" else [()]
        for q in range(conv_groups):
            rows = slice(q * outputs // conv_groups, (q + 1) * outputs // conv_groups)
            yield [marked(weight, (rows, c, *place)) for c in range(inputs) for place in inside]


def is_prunable(weight, kind, info):
    _, first, classifier = info
    if kind == "pattern":
        return not first and weight.shape[2:] == (3, 3)
    if kind == "kernel":
        return not first
    if kind == "filter":
        return not classifier
    count = weight.shape[1] * (1 if kind == "channel" else weight.shape[2] * weight.shape[3])
    return not first and count > 1


def keep_of(count, ratio):
    alpha = int(ratio * count)
    if alpha < ratio * count - 1e-9:
        alpha += 1
    return max(alpha, 1)


def project(candidates, infos, kinds, ratio, node_weights):
    """Return {name: element mask} of the support shared by `candidates`, a list of {name: tensor}.

    With one candidate this is its own projection; with several, their weighted energies are added.
    Kinds are applied one after the other, each to what the one before left.
    """
    masks = {}
    for name, info in infos.items():
        weights = [c[name] for c in candidates]
        support = torch.ones_like(weights[0], dtype=torch.bool)
        for kind in kinds:
            if not is_prunable(weights[0], kind, info):
                continue
            kept = torch.zeros_like(support)
            for groups in groups_of(weights[0], kind, info[0]):
                squared_norms = [
                    sum(
                        p * float(((w * support)[g].double() ** 2).sum())
                        for p, w in zip(node_weights, weights, strict=True)
                    )
                    for g in groups
                ]
                order = sorted(range(len(groups)), key=lambda i: (-squared_norms[i], i))
                for i in order[: keep_of(len(groups), ratio)]:
                    kept |= groups[i]
            support &= kept
        masks[name] = support
    return masks


def gates_of(weights, sets):
    """Return of each set, per channel, the sum of G W over what reads it: members along axis 1."""
    found = []
    for count, members in sets:
        total = torch.zeros(count, dtype=torch.float64)
        for member in members.split():
            name, axis = member.split("/")
            if axis == "1":
                products = weights[name].grad.double() * weights[name].data.double()
                total += products.transpose(0, 1).flatten(1).sum(1)
        found.append(total)
    return found


def project_coupled(candidates, sets, ratio, node_weights, score, like):
    """Return {name: element mask} of the channels kept, as `project` does.

    A set is (count, members): a member NAME/AXIS has the slices of the set's channels along an axis
    of a parameter, in order. Biases do not score. What the loss would feel is added up as it is; of
    gates the candidates are the scores, per set. Parameters are of the shapes of `like`.
    """
    masks = {}
    for number, (count, members) in enumerate(sets):
        places = [(m.split("/")[0], int(m.split("/")[1])) for m in members.split()]
        scoring = [(name, axis) for name, axis in places if not name.endswith("bias")]
        scores = [0.0] * count
        for p, candidate in zip(node_weights, candidates, strict=True):
            if score == "gates":
                scores = [s + p * float(x) for s, x in zip(scores, candidate[number], strict=True)]
                continue
            for name, axis in scoring:
                squares = candidate[name].double() ** 2
                magnitude = score == "magnitude"
                unit = float(squares.sum()) * len(scoring) / count if magnitude else 1.0
                for g in range(count):
                    scores[g] += p * float(squares.select(axis, g).sum()) / unit
        order = sorted(range(count), key=lambda g: (-scores[g], g))
        for name, axis in places:
            everything = torch.ones_like(like[name], dtype=torch.bool)
            mask = masks.setdefault(name, everything)
            for g in order[keep_of(count, ratio) :]:
                mask.select(axis, g).zero_()
    return masks


@dataclass
class Rank:
    model: nn.Module
    stream: object
    optimizer: object
    u: dict = field(default_factory=dict)


def parameters(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def decays(p, s):
    """Return whether the weight decay shrinks a parameter."""
    return s.weight_decay_on == "all" or p.dim() > 1


def sgd(model, s, momentum, decay):
    """Return an optimizer that shrinks by `decay` what is to be shrunk."""
    groups = [{"params": [p], "weight_decay": decay * decays(p, s)} for p in model.parameters()]
    return torch.optim.SGD(groups, lr=s.lr, momentum=momentum)


def batchnorms(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}


def warm_up_(model, fresh, step):
    """Set the momentum of step `step` (from 1) of statistics that began with the network `fresh`.

    The first steps have the plain mean of all so far.
    """
    for name, module in batchnorms(model).items():
        module.momentum = max(batchnorms(fresh)[name].momentum, 1 / step)


def batch_loss(model, start, stream, optimizer, loss_fn, number):
    """Return the loss of the next batch, training step `number`, with gradients at zero."""
    images, labels = stream.next()
    model.train()
    optimizer.zero_grad()
    warm_up_(model, start, number)
    return loss_fn(model(images), labels)


def clip_(model, limit, mask):
    """Scale the gradient that is left on the mask down to the norm `limit`, if it is longer."""
    for n, p in parameters(model).items():
        if n in mask:
            p.grad *= mask[n]
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def moments(module):
    """Return the running mean and second moment [2, channels]."""
    mean = module.running_mean
    return torch.stack([mean, module.running_var + mean**2])


def set_moments_(module, pair):
    module.running_mean.copy_(pair[0])
    module.running_var.copy_((pair[1] - pair[0] ** 2).clamp(min=0))


def masked(values, masks):
    return {n: v * masks[n].to(v.dtype) if n in masks else v for n, v in values.items()}


def simulate(model, streams, node_sizes, loss_fn, s: SimpleNamespace):
    """Run `s.outer_iterations` outer iterations; return one SimpleNamespace per iteration.

    `s` has the fields of the package's settings that matter here, `steps` local steps, and where
    `payload` is not fp32 the `bucket_bytes`.
    """
    names = list(parameters(model))
    if s.groups == ("coupled",):
        infos = {m.split("/")[0]: None for _, members in s.sets for m in members.split()}
    else:
        infos = conv_shapes(model)

    def support(candidates, ratio, node_weights):
        if s.groups == ("coupled",):
            return project_coupled(candidates, s.sets, ratio, node_weights, s.score, start)
        return project(candidates, infos, s.groups, ratio, node_weights)

    total_ranks, nodes = sum(node_sizes), len(node_sizes)
    node_of = [i for i, size in enumerate(node_sizes) for _ in range(size)]
    start = {n: p.detach().clone() for n, p in parameters(model).items()}
    ranks = []
    for stream in streams:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=s.lr, momentum=s.momentum)
        if s.optimizer == "adamw":
            betas = s.momentum, 0.999
            optimizer = torch.optim.Adam(mine.parameters(), lr=s.lr, betas=betas, foreach=False)
        zero = {n: torch.zeros_like(v) for n, v in start.items()}
        ranks.append(Rank(mine, stream, optimizer, zero))
    members = [
        [r for r, node in zip(ranks, node_of, strict=True) if node == i] for i in range(nodes)
    ]
    z = {n: v.clone() for n, v in start.items()}
    z_node = [{n: v.clone() for n, v in start.items()} for _ in range(nodes)]
    v = [{n: torch.zeros_like(x) for n, x in start.items()} for _ in range(nodes)]
    rho1 = dict.fromkeys(names, s.rho1)
    rho2 = dict.fromkeys(names, s.rho2)
    mask = {n: torch.ones_like(start[n], dtype=torch.bool) for n in infos}
    frozen = sgd_only = False
    history = []
    coded = None
    if s.payload != "fp32" and nodes > 1:
        each = int(s.rack_of or 1)
        racks = [range(nodes)[first : first + each] for first in range(0, nodes, each)]
        if len(racks) == 1:
            racks = [[node] for node in range(nodes)]
        coded = CodedMeans(start, node_sizes, s.payload, s.bucket_bytes, racks)
    pending = None

    def arrive():
        """Take over what was exchanged while the nodes went on from their own z_i."""
        new, statistics, node_statistics = pending
        for j, r in enumerate(ranks):
            i = node_of[j]
            for n, p in parameters(r.model).items() if s.theta_start == "z" or sgd_only else ():
                p.data += new[n] - z_node[i][n]
            for m, now, then, g in zip(
                batchnorms(r.model).values(),
                statistics,
                node_statistics[i],
                gone(mask),
                strict=True,
            ):
                mine = moments(m) + now - then
                mine[:, g] = now[:, g]
                set_moments_(m, mine)
        if not sgd_only:
            for i in range(nodes):
                v[i] = {n: v[i][n] + z_node[i][n] - new[n] for n in names}
        return new

    def gone(mask):
        """Return of each BatchNorm the channels that are removed as a whole."""
        return [
            ~mask.get(f"{n}.weight", torch.ones(m.num_features, dtype=torch.bool))
            for n, m in batchnorms(model).items()
        ]

    for k in range(1, s.outer_iterations + 1):
        past = k - s.warmup_iterations
        if past <= 0:
            strict = 0.0
        elif past >= max(1, s.keep_ramp_iterations):
            strict = 1.0
        else:
            strict = 1 - (1 - past / s.keep_ramp_iterations) ** 3
        ratio = 1 - strict * (1 - s.keep_ratio)

        # Phase 1
        for r in ranks:
            if s.theta_start == "z" or sgd_only:
                source = z_node[node_of[ranks.index(r)]] if pending else z
                for n, p in parameters(r.model).items():
                    p.data.copy_(source[n])
        losses = [0.0] * total_ranks
        gates = [[0.0] * len(s.sets) for _ in ranks] if s.score == "gates" else []
        for step in range(s.steps):
            if pending and step == s.overlap_steps:
                z, pending = arrive(), None
            for j, r in enumerate(ranks):
                number = (k - 1) * s.steps + step + 1
                loss = batch_loss(r.model, model, r.stream, r.optimizer, loss_fn, number)
                loss.backward()
                losses[j] += float(loss.detach()) / s.steps
            if s.node_sync == "step":
                for mine in members:
                    for n in names:
                        grads = [parameters(r.model)[n].grad for r in mine]
                        mean = sum(grads) / len(grads)
                        for g in grads:
                            g.copy_(mean)
            for mine, r in zip(gates, ranks, strict=False):
                found = gates_of(parameters(r.model), s.sets)
                mine[:] = [m + g**2 for m, g in zip(mine, found, strict=True)]
            for j, r in enumerate(ranks):
                if s.clip_grad:
                    clip_(r.model, s.clip_grad, mask if frozen else {})
                for n, p in parameters(r.model).items():
                    shrinks = (s.weight_decay_in == "theta" or sgd_only) and decays(p, s)
                    if shrinks and s.optimizer == "sgd":
                        p.grad += s.weight_decay * p.data
                    if not sgd_only:
                        p.grad += rho1[n] * (p.data - z_node[node_of[j]][n] + r.u[n])
                    if frozen and n in mask:
                        p.grad *= mask[n]
                    if shrinks and s.optimizer == "adamw":
                        # Decoupled: the proximal term is part of what is minimised, decay is not.
                        p.data *= 1 - s.lr * s.weight_decay
                r.optimizer.step()
        if pending:
            z, pending = arrive(), None
        theta = [{n: p.detach().clone() for n, p in parameters(r.model).items()} for r in ranks]

        # Phase 2
        decay = s.weight_decay if s.weight_decay_in == "z" else 0.0
        candidate = []
        for i in range(nodes):
            mine = [j for j in range(total_ranks) if node_of[j] == i]
            c = {}
            for n in names:
                a = sum(theta[j][n] + ranks[j].u[n] for j in mine) / len(mine)
                gamma = decay * decays(a, s) + rho1[n] + rho2[n]
                c[n] = a if sgd_only else (rho1[n] * a + rho2[n] * (z[n] - v[i][n])) / gamma
            candidate.append(c)

        # Phase 3 and the masks of phase 4
        freeze_now = not frozen and k == s.freeze_iteration
        vote = s.mask_agreement == "vote" or freeze_now or k == s.outer_iterations
        node_masks = [mask] * nodes
        weighed = candidate
        if s.score == "gates":
            # Gradients averaged at each step are all alike in a node.
            mine = [
                [f for f, of in zip(gates, node_of, strict=True) if of == i] for i in range(nodes)
            ]
            mine = [some[:1] if s.node_sync == "step" else some for some in mine]
            sets = range(len(s.sets))
            weighed = [[sum(f[g] for f in some) / len(some) for g in sets] for some in mine]
        if not frozen:
            if vote:
                mask = support(weighed, ratio, node_sizes)
                node_masks = [mask] * nodes
            else:
                node_masks = [support([c], ratio, [1]) for c in weighed]
                mask = {n: sum(m[n].int() for m in node_masks) > 0 for n in infos}
                # What travels is rows times columns of the union, which holds every support.
                for n in infos if s.groups != ("pattern",) else ():
                    mask[n] = rows_times_columns(mask[n], infos[n][0] if infos[n] else 1)
        if freeze_now:
            frozen, sgd_only = True, s.after_freeze == "local-sgd"
            for j, r in enumerate(ranks):
                theta[j] = masked(theta[j], mask)
                r.u = masked(r.u, mask)
                for n, p in parameters(r.model).items():
                    p.data.copy_(theta[j][n])
                    first = "exp_avg" if s.optimizer == "adamw" else "momentum_buffer"
                    buffer = r.optimizer.state[p].get(first)
                    if n in mask and buffer is not None:
                        buffer *= mask[n]
            v = [masked(x, mask) for x in v]
            if sgd_only:
                for r in ranks:
                    r.u = {n: torch.zeros_like(x) for n, x in r.u.items()}
                v = [{n: torch.zeros_like(x) for n, x in y.items()} for y in v]
        old_z_node, old_z = z_node, z
        z_node = [masked(c, m) for c, m in zip(candidate, node_masks, strict=True)]

        # Phase 4
        asynchronous = s.overlap_steps > 0 and not freeze_now and k < s.outer_iterations
        plain = {}
        for n in names:
            weighted = [p * (z_node[i][n] + v[i][n]) for i, p in enumerate(node_sizes)]
            plain[n] = sum(weighted) / total_ranks
        outside = max(
            (float(plain[n][~mask[n]].abs().max()) for n in mask if not mask[n].all()), default=0.0
        )
        node_statistics = []
        for mine in members:
            each = zip(*(batchnorms(r.model).values() for r in mine), strict=True)
            node_statistics.append([sum(map(moments, ms)) / len(ms) for ms in each])
        if coded:
            coded.refer_to(
                [torch.stack((m.running_mean, m.running_var)) for m in batchnorms(r.model).values()]
                for r in ranks
            )
        if coded:
            values = [{n: z_node[i][n] + v[i][n] for n in names} for i in range(nodes)]
            new_z = coded.mean_(values, z, mask)
            statistics = coded.statistics_(node_statistics, gone(mask))
        else:
            new_z = masked(plain, mask)
            statistics = []
            for number, g in enumerate(gone(mask)):
                parts = zip(node_sizes, node_statistics, strict=True)
                mean = sum(p * x[number] for p, x in parts) / total_ranks
                # Those of a channel removed as a whole do not travel.
                mean[:, g] = torch.tensor([[0.0], [1.0]], dtype=mean.dtype)
                statistics.append(mean)
        if asynchronous:
            pending = new_z, statistics, node_statistics
        else:
            z = new_z
            for r in ranks:
                for m, pair in zip(batchnorms(r.model).values(), statistics, strict=True):
                    set_moments_(m, pair)

        # Phase 5
        residuals = {}
        for n in names:
            pri1 = sum(
                float(((theta[j][n] - z_node[node_of[j]][n]) ** 2).sum())
                for j in range(total_ranks)
            )
            pri2 = sum(
                p * float(((z_node[i][n] - z[n]) ** 2).sum()) for i, p in enumerate(node_sizes)
            )
            dual1 = sum(
                p * float(((z_node[i][n] - old_z_node[i][n]) ** 2).sum())
                for i, p in enumerate(node_sizes)
            )
            dual2 = total_ranks * float(((z[n] - old_z[n]) ** 2).sum())
            residuals[n] = (
                pri1**0.5,
                rho1[n] * dual1**0.5,
                pri2**0.5,
                rho2[n] * dual2**0.5,
            )
        if not sgd_only:
            for j, r in enumerate(ranks):
                r.u = {n: r.u[n] + theta[j][n] - z_node[node_of[j]][n] for n in names}
            if not asynchronous:
                v = [{n: v[i][n] + z_node[i][n] - z[n] for n in names} for i in range(nodes)]
        for n in names if not sgd_only and s.penalty == "balance" else ():
            for rho, duals, primal, dual in (
                (rho1, [r.u for r in ranks], residuals[n][0], residuals[n][1]),
                (rho2, v, residuals[n][2], residuals[n][3]),
            ):
                new = rho[n]
                if primal > 10 * dual:
                    new = min(rho[n] * 2.0, 10.0)
                elif dual > 10 * primal:
                    new = max(rho[n] / 2.0, 1e-6)
                for x in duals:
                    x[n] = x[n] * (rho[n] / new)
                rho[n] = new
        history.append(
            SimpleNamespace(
                theta=theta,
                u=[dict(r.u) for r in ranks],
                v=[dict(x) for x in v],
                z_node=z_node,
                z=z,
                mask=mask,
                residuals=residuals,
                loss=sum(losses) / total_ranks,
                outside=outside,
                statistics=[
                    {
                        n: (m.running_mean.clone(), m.running_var.clone())
                        for n, m in batchnorms(r.model).items()
                    }
                    for r in ranks
                ],
                rests=[dict(x) for x in coded.rests] if coded else [],
                optimizers=[copy.deepcopy(r.optimizer.state_dict()["state"]) for r in ranks],
            )
        )
    return history


def rows_times_columns(mask, conv_groups):
    """Return the smallest product of kept rows and kept columns (per conv group) holding `mask`."""
    blocks = mask.view(conv_groups, mask.shape[0] // conv_groups, -1)
    rows = blocks.any(dim=2, keepdim=True)
    columns = blocks.any(dim=1, keepdim=True)
    return (rows & columns).view(mask.shape)
