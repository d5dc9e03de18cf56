"""PruneTrain of all ranks simulated in one process: the network keeps its size, with zeros in it.

`s.sets` names the coupled slices by hand: per set the number of channels and PARAMETER/AXIS pairs.
"""

import copy
from types import SimpleNamespace

import torch
from reference import batch_loss, parameters, sgd
from reference_rivals import average_batchnorm, statistics_of


def places_of(sets):
    """Yield (set, channel, [(parameter, axis)]) of every group."""
    for number, (count, text) in enumerate(sets):
        places = [(p.split("/")[0], int(p.split("/")[1])) for p in text.split()]
        for channel in range(count):
            yield number, channel, places


def slices(tensors, places, channel):
    """Return the group's slices of weights, not of vectors."""
    return [tensors[n].select(axis, channel) for n, axis in places if tensors[n].dim() > 1]


def penalty(tensors, sets):
    """Add up the norms of all groups: each weight's slices apart, 1e-8 added to a sum of squares.

    Depthwise convolutions are left out.
    """
    total = 0.0
    for _, channel, places in places_of(sets):
        wide = [
            (n, axis)
            for n, axis in places
            if tensors[n].dim() == 2 or tensors[n].shape[1:2] != (1,)
        ]
        for x in slices(tensors, wide, channel):
            total = total + torch.sqrt((x**2).sum() + 1e-8)
    return total


def simulate_prunetrain(model, streams, loss_fn, s):
    """Return one SimpleNamespace per outer iteration: z, momentum, dead, loss, statistics."""
    models = [copy.deepcopy(model) for _ in streams]
    optimizers = [sgd(m, s, s.momentum, s.weight_decay) for m in models]
    dead, coefficient, history = set(), None, []

    def empty(tensors):
        for number, channel, places in places_of(s.sets):
            if (number, channel) in dead:
                for n, axis in places:
                    tensors[n].select(axis, channel).zero_()

    for k in range(1, s.outer_iterations + 1):
        losses = []
        for step in range(s.steps):
            gradients = []
            for m, stream, optimizer in zip(models, streams, optimizers, strict=True):
                number = (k - 1) * s.steps + step + 1
                loss = batch_loss(m, model, stream, optimizer, loss_fn, number)
                extra = penalty(parameters(m), s.sets)
                if coefficient is None:
                    # extra * coefficient / (loss + extra * coefficient) is the share.
                    share = s.options.lasso_ratio
                    coefficient = share * loss.item() / ((1 - share) * extra.item())
                (loss + coefficient * extra).backward()
                losses.append(float(loss.detach()))
                gradients.append({n: p.grad.clone() for n, p in parameters(m).items()})
            for m, optimizer in zip(models, optimizers, strict=True):
                for n, p in parameters(m).items():
                    p.grad.copy_(sum(g[n] for g in gradients) / len(gradients))
                empty({n: p.grad for n, p in parameters(m).items()})
                optimizer.step()
        average_batchnorm(models)
        weights = {n: p.detach() for n, p in parameters(models[0]).items()}
        if k % s.options.reconfigure_every == 0:
            largest = {
                (number, channel): max(float(x.abs().max()) for x in slices(weights, p, channel))
                for number, channel, p in places_of(s.sets)
            }
            for number, (count, _) in enumerate(s.sets):
                left = [c for c in range(count) if (number, c) not in dead]
                going = [c for c in left if largest[number, c] < s.options.threshold]
                if going == left:
                    going.remove(max(left, key=lambda c: largest[number, c]))
                dead |= {(number, c) for c in going}
            for m, optimizer in zip(models, optimizers, strict=True):
                empty({n: p.data for n, p in parameters(m).items()})
                empty({n: optimizer.state[p]["momentum_buffer"] for n, p in parameters(m).items()})
        momenta = {
            n: optimizers[0].state[p]["momentum_buffer"] for n, p in parameters(models[0]).items()
        }
        history.append(
            SimpleNamespace(
                z={n: x.clone() for n, x in weights.items()},
                momentum={n: x.clone() for n, x in momenta.items()},
                dead=set(dead),
                loss=sum(losses) / len(losses),
                statistics=statistics_of(models[0]),
                coefficient=coefficient,
            )
        )
    return history


def without_dead(tensors, sets, dead):
    """Return the tensors without the slices of dead groups."""
    result = dict(tensors)
    gone = {}
    for number, channel, places in places_of(sets):
        for place in places:
            if (number, channel) in dead:
                gone.setdefault(place, set()).add(channel)
    for (n, axis), channels in gone.items():
        kept = [c for c in range(tensors[n].shape[axis]) if c not in channels]
        result[n] = result[n].index_select(axis, torch.tensor(kept))
    return result
