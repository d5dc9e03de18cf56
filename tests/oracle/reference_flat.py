"""Flat consensus of all ranks simulated in one process, as plainly as `reference.simulate`.

Global variable consensus with a term on z (Boyd et al. 2011, section 7.1.1): minimise over x_i and
z the sum of f_i(x_i), of lambda/2 |z|^2 per rank, and of "z is sparse", so that x_i = z.
"""

import copy
from types import SimpleNamespace

import torch
from reference import (
    batch_loss,
    conv_shapes,
    decays,
    masked,
    moments,
    parameters,
    project,
    set_moments_,
    sgd,
)
from reference import batchnorms as norms_of


def simulate_flat(model, streams, loss_fn, s):
    """Run `s.outer_iterations` outer iterations of `s.steps` steps; return one namespace each."""
    names, infos, count = list(parameters(model)), conv_shapes(model), len(streams)
    models = [copy.deepcopy(model) for _ in streams]
    optimizers = [sgd(m, s, s.momentum, 0.0) for m in models]
    z = {n: p.detach().clone() for n, p in parameters(model).items()}
    duals = [{n: torch.zeros_like(x) for n, x in z.items()} for _ in streams]
    rho, mask, frozen, retired, history = dict.fromkeys(names, s.rho1), {}, False, False, []
    for k in range(1, s.outer_iterations + 1):
        past = k - s.warmup_iterations
        ramp = max(1, s.keep_ramp_iterations)
        strict = 0.0 if past <= 0 else 1.0 if past >= ramp else 1 - (1 - past / ramp) ** 3
        losses = []
        for m in models if s.theta_start == "z" or retired else ():
            for n, p in parameters(m).items():
                p.data.copy_(z[n])
        for m, stream, optimizer, u in zip(models, streams, optimizers, duals, strict=True):
            for step in range(s.steps):
                number = (k - 1) * s.steps + step + 1
                loss = batch_loss(m, model, stream, optimizer, loss_fn, number)
                loss.backward()
                losses.append(float(loss.detach()))
                for n, p in parameters(m).items():
                    if (s.weight_decay_in == "theta" or retired) and decays(p, s):
                        p.grad += s.weight_decay * p.data
                    if not retired:
                        p.grad += rho[n] * (p.data - z[n] + u[n])
                    if frozen and n in mask:
                        p.grad *= mask[n]
                optimizer.step()
        # The minimum over z of the augmented Lagrangian, then the projection.
        old, new = z, {}
        for n in names:
            xs = [parameters(m)[n].detach() for m in models]
            new[n] = sum(x + u[n] for x, u in zip(xs, duals, strict=True)) / count
            if s.weight_decay_in == "z" and not retired and decays(xs[0], s):
                new[n] = rho[n] * new[n] / (s.weight_decay + rho[n])
        if strict and not frozen:
            ratio = 1 - strict * (1 - s.keep_ratio[0])
            mask = project([new], infos, s.groups, ratio, [1])
        z = masked(new, mask)
        if k == s.freeze_iteration:
            frozen, retired = True, s.after_freeze == "local-sgd"
            for i, (m, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                duals[i] = {n: x * (not retired) for n, x in masked(duals[i], mask).items()}
                for n, p in parameters(m).items():
                    if n in mask:
                        p.data *= mask[n]
                        optimizer.state[p]["momentum_buffer"] *= mask[n]
        thetas = [{n: p.detach().clone() for n, p in parameters(m).items()} for m in models]
        residuals = {}
        for n in names:
            primal = sum(float(((t[n] - z[n]) ** 2).sum()) for t in thetas) ** 0.5
            dual = rho[n] * (count * float(((z[n] - old[n]) ** 2).sum())) ** 0.5
            residuals[n] = primal, dual
        for u, theta in zip(duals, thetas, strict=True) if not retired else ():
            for n in names:
                u[n] = u[n] + theta[n] - z[n]
        for n in names if s.penalty == "balance" and not retired else ():
            primal, dual = residuals[n]
            factor = 2.0 if primal > 10 * dual else 1.0
            factor = 1 / 2.0 if dual > 10 * primal else factor
            after = min(max(rho[n] * factor, 1e-6), 10.0)
            for u in duals:
                u[n] = u[n] * rho[n] / after
            rho[n] = after
        for modules in zip(*(norms_of(m).values() for m in models), strict=True):
            pair = sum(map(moments, modules)) / count
            for module in modules:
                set_moments_(module, pair)
        history.append(
            SimpleNamespace(
                z=z,
                theta=thetas,
                u=[dict(u) for u in duals],
                mask=dict(mask),
                residuals=residuals,
                loss=sum(losses) / len(losses),
            )
        )
    return history
