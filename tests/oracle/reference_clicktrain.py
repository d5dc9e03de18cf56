"""ClickTrain of all ranks simulated in one process, as its authors' train() does it.

Kernels and patterns have masks of their own. Masks are per parameter, the penalty is part of the
loss, and pruned weights are multiplied by zero after each step; gradients are dense.
"""

import copy
from types import SimpleNamespace

import torch
from reference import batch_loss, parameters, sgd
from reference_rivals import average_batchnorm, statistics_of, workers_of

# In the order of gen_pattern_dic(4).
PATTERNS = (
    ((0, 0, 0), (0, 1, 1), (0, 1, 1)),
    ((0, 0, 0), (1, 1, 0), (1, 1, 0)),
    ((0, 1, 1), (0, 1, 1), (0, 0, 0)),
    ((1, 1, 0), (1, 1, 0), (0, 0, 0)),
)


def choose(weights, gradients, s):
    """Return the masks of kernels and those of patterns, {name: 0 or 1 per weight}."""
    kernels, patterns = {}, {}
    convolutions = [n for n, w in weights.items() if w.dim() == 4]
    # The first one is not in their lists.
    for n in convolutions[1:]:
        product = weights[n] * gradients[n]
        importance = product.pow(2).sum([2, 3]).reshape(-1)
        dropped = int((1 - s.keep_ratio[0]) * importance.numel())
        kernels[n] = torch.ones_like(weights[n])
        for k in torch.topk(importance, dropped, largest=False).indices.tolist():
            kernels[n][k // weights[n].shape[1], k % weights[n].shape[1]] = 0
        if weights[n].shape[2] < 3:
            continue
        each = [torch.tensor(p, dtype=product.dtype) for p in PATTERNS]
        best = torch.stack([(product * p).pow(2).sum([2, 3]) for p in each]).argmax(dim=0)
        patterns[n] = torch.stack(each)[best]
    return kernels, patterns


def penalty(weights, masks):
    """Add up the norms of the kernels' parts outside of the masks."""
    total = 0.0
    for every in masks:
        for n, mask in every.items():
            squares = (weights[n] * (1 - mask)).pow(2).sum([2, 3])
            total = total + squares.add(1.0e-8).sqrt().sum()
    return total


def simulate_clicktrain(model, streams, node_sizes, loss_fn, s):
    """Return one SimpleNamespace per outer iteration: z, masks, loss, statistics."""
    models = [copy.deepcopy(model) for _ in streams]
    optimizers = [sgd(m, s, s.momentum, s.weight_decay) for m in models]
    workers = workers_of(node_sizes, s.aggregation)
    masks, hard, history = ({}, {}), False, []

    def prune_():
        for m in models:
            for every in masks:
                for n, mask in every.items():
                    parameters(m)[n].data *= mask

    for k in range(1, s.outer_iterations + 1):
        losses = []
        for step in range(s.steps):
            gradients = []
            for m, stream, optimizer in zip(models, streams, optimizers, strict=True):
                number = (k - 1) * s.steps + step + 1
                loss = batch_loss(m, model, stream, optimizer, loss_fn, number)
                losses.append(float(loss.detach()))
                extra = 0.0 if hard else penalty(parameters(m), masks)
                (loss + s.options.lasso * extra).backward()
                gradients.append({n: p.grad.clone() for n, p in parameters(m).items()})
            mean = {
                n: sum(
                    weight * sum(gradients[r][n] for r in ranks) / len(ranks)
                    for ranks, weight in workers
                )
                for n in gradients[0]
            }
            if (k, step) == (s.options.choose_iteration + 1, 0):
                weights = {n: p.detach() for n, p in parameters(models[0]).items()}
                masks = choose(weights, mean, s)
            for m, optimizer in zip(models, optimizers, strict=True):
                for n, p in parameters(m).items():
                    p.grad.copy_(mean[n])
                optimizer.step()
            if hard:
                prune_()
        if k == s.options.prune_iteration:
            hard = True
            prune_()
        average_batchnorm(models)
        every = {n: x * masks[1].get(n, 1) for n, x in masks[0].items()}
        history.append(
            SimpleNamespace(
                z={n: p.detach().clone() for n, p in parameters(models[0]).items()},
                kept={n: x > 0 for n, x in every.items()},
                hard=hard,
                loss=sum(losses) / len(losses),
                statistics=statistics_of(models[0]),
            )
        )
    return history
