"""Streaming DiLoCo and streaming local SGD of all ranks, simulated in one process.

Algorithm 2 of Douillard et al. 2025, on flat vectors: after step t with t - t_p divisible by H a
fragment p of z - theta is sent; tau steps later the outer step has moved that fragment of z, and
the replicas go on from it. In the last outer iteration all fragments are sent at its end, and in
the one that prunes: from then on fragments are of what is kept.
"""

import copy
from types import SimpleNamespace

import torch
from reference import parameters, project_coupled, simulate
from reference_payload import coded_sum, expanded

BLOCK = 128


def fragments_of(kept, count):
    """Return slices of vectors with about as many `kept` elements each, in whole blocks of them."""
    places = kept.nonzero().view(-1).tolist()
    ends = [BLOCK * round(f * len(places) / count / BLOCK) for f in range(1, count)]
    ends = [(*places, len(kept))[min(end, len(places))] for end in ends] + [len(kept)]
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def flattened(tensors):
    return torch.cat([x.reshape(-1) for x in tensors.values()])


class Simulation:
    """What all replicas hold; `history` has z, theta and velocity after each outer iteration."""

    def __init__(self, model, streams, node_sizes, loss_fn, s):
        self.s, self.loss_fn, self.streams = s, loss_fn, streams
        self.models = [copy.deepcopy(model) for _ in streams]
        self.node_of = [i for i, size in enumerate(node_sizes) for _ in range(size)]
        self.sizes, self.total = node_sizes, sum(node_sizes)
        self.theta = [flat(model) for _ in streams]
        self.momentum = [torch.zeros_like(x) for x in self.theta]
        self.z, self.velocity = flat(model), torch.zeros_like(flat(model))
        self.rests = [torch.zeros_like(self.z) for _ in node_sizes]
        self.kept = torch.ones_like(self.z, dtype=torch.bool)
        self.history = []

    def node_means(self, vectors):
        found = []
        for i, size in enumerate(self.sizes):
            found.append(
                sum(v for v, n in zip(vectors, self.node_of, strict=True) if n == i) / size
            )
        return found

    def inner_step(self):
        gradients = []
        for model, theta, stream in zip(self.models, self.theta, self.streams, strict=True):
            torch.nn.utils.vector_to_parameters(theta, model.parameters())
            images, labels = stream.next()
            model.train()
            model.zero_grad()
            self.loss_fn(model(images), labels).backward()
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        if self.s.node_sync == "step":
            means = self.node_means(gradients)
            gradients = [means[i] for i in self.node_of]
        for r, gradient in enumerate(gradients):
            gradient = self.kept * (gradient + self.s.weight_decay * self.theta[r])
            self.momentum[r] = self.s.momentum * self.momentum[r] + gradient
            self.theta[r] = self.theta[r] - self.s.lr * self.momentum[r]

    def send(self, p):
        """Return what becomes of fragment p of z, and what the nodes held of it."""
        held = [x[p] for x in self.node_means(self.theta)]
        shares = [size / self.total for size in self.sizes]
        z = self.z[p]
        if self.s.payload == "fp32" or len(self.sizes) == 1:
            mean = sum(w * x for w, x in zip(shares, held, strict=True))
        else:
            offers = [
                w * (x - z) + rest[p] for w, x, rest in zip(shares, held, self.rests, strict=True)
            ]
            kept = self.kept[p]
            offers = [offer[kept] for offer in offers]
            total, left = coded_sum(offers, self.s.payload, self.s.bucket_bytes)
            for rest, vector in zip(self.rests, left, strict=True):
                rest[p] = expanded(vector, kept)
            mean = kept * z + expanded(total, kept)
        for r, momentum in enumerate(self.momentum):
            if self.s.inner_momentum == "reset":
                momentum[p] = 0
            self.theta[r][p] = held[self.node_of[r]]
        return p, mean, held

    def receive(self, sent, asynchronous):
        p, mean, held, k = sent
        if self.s.outer:
            lr, mu, rise = self.s.outer
            mu *= min(1, k / max(1, rise))
            gradient = self.z[p] - mean
            self.velocity[p] = mu * self.velocity[p] + gradient
            self.z[p] = self.z[p] - lr * (gradient + mu * self.velocity[p])
        else:
            self.z[p] = mean
        for r, theta in enumerate(self.theta):
            if not asynchronous:
                theta[p] = self.z[p]
            elif self.s.alpha is None:
                theta[p] = theta[p] + self.z[p] - held[self.node_of[r]]
            else:
                theta[p] = self.s.alpha * theta[p] + (1 - self.s.alpha) * self.z[p]

    def prune(self):
        """Choose by what the nodes hold together what is kept from now on."""
        like, s = dict(parameters(self.models[0])), self.s
        held = []
        for vector in self.node_means(self.theta):
            parts = torch.split(vector, [x.numel() for x in like.values()])
            held.append({n: v.view_as(x) for (n, x), v in zip(like.items(), parts, strict=True)})
        masks = project_coupled(held, s.sets, s.keep_ratio, self.sizes, s.score, like)
        self.keep(masks, like)
        self.theta = [self.kept * x for x in self.theta]
        self.momentum = [self.kept * x for x in self.momentum]

    def keep(self, masks, like):
        everything = {n: torch.ones_like(x, dtype=torch.bool) for n, x in like.items()}
        self.kept = flattened({**everything, **masks})

    def run(self, first=1):
        s, steps, now = self.s, self.s.steps, 0
        pending = None
        for k in range(first, s.outer_iterations + 1):
            last = k in (s.prune_iteration, s.outer_iterations)
            parts = fragments_of(self.kept, s.fragments)
            sends = {f * steps // s.fragments: p for f, p in enumerate(parts, 1)}
            for t in range(1, steps + 1):
                self.inner_step()
                now += 1
                if pending and now == pending[0] + s.overlap_steps:
                    self.receive(pending[1], True)
                    pending = None
                if t not in sends or last:
                    continue
                sent = *self.send(sends[t]), k
                if s.overlap_steps:
                    pending = now, sent
                else:
                    self.receive(sent, False)
            if k == s.prune_iteration:
                self.prune()
            if last:
                self.receive((*self.send(slice(0, self.z.numel())), k), False)
            self.history.append(
                SimpleNamespace(
                    z=self.z.clone(),
                    theta=[x.clone() for x in self.theta],
                    velocity=self.velocity.clone(),
                )
            )
        return self.history


def simulate_in_parts(model, streams, node_sizes, loss_fn, s):
    """Return the history of a method that exchanges in fragments.

    Where `s.freeze_iteration` is set, H-SADMM comes first, and it has nothing of those iterations.
    """
    if not s.freeze_iteration:
        return Simulation(model, streams, node_sizes, loss_fn, s).run()
    begin = SimpleNamespace(**{**vars(s), "outer_iterations": s.freeze_iteration})
    found = simulate(model, streams, node_sizes, loss_fn, begin)[-1]
    torch.nn.utils.vector_to_parameters(flattened(found.z), model.parameters())
    then = Simulation(model, streams, node_sizes, loss_fn, s)
    then.keep(found.mask, found.z)
    then.rests = [flattened(rest) for rest in found.rests] or then.rests
    for r, parts in enumerate(found.optimizers):
        then.momentum[r] = flattened({n: x["momentum_buffer"] for n, x in parts.items()})
    return [None] * s.freeze_iteration + then.run(s.freeze_iteration + 1)
