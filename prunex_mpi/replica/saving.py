"""What a rank of one's own loop keeps to go on bit for bit, and how it is put back."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.core.removal import fit_network, left_of
from prunex_mpi.core.state import RunContext, State, put_mask_back, put_position

FLAT = ("theta", "u", "v", "z_node", "z", "stats")


def contents(state: State, model: nn.Module) -> dict[str, Any]:
    """Return the state of this rank as tensors on the CPU, numbers and text."""
    tensors = {name: getattr(state, name) for name in FLAT} | {
        "mask": torch.from_numpy(state.mask),
        "rho1": torch.from_numpy(state.rho1),
        "rho2": torch.from_numpy(state.rho2),
        "payload": state.payload,
    }
    fixed = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    return {
        "tensors": _copies(tensors),
        "memory": _copies(state.memory),
        "model": _copies(dict(model.named_buffers()) | fixed),
        "optimizer": _copies(state.optimizer.optimizer.state_dict()),
        "scaler": state.scaler.state_dict(),
        "position": asdict(state.position) | losses_of(state),
        "stage": [state.frozen, state.consensus_sgd],
        "left": left_of(state),
    }


def losses_of(state: State) -> dict[str, float]:
    """Return sum and count of the losses of the outer iteration under way."""
    if state.position.step == 0:
        return {}
    return dict(zip(("loss_sum", "loss_count"), state.losses.tolist(), strict=True))


def _copies(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", copy=True)
    if isinstance(values, dict):
        return {key: _copies(value) for key, value in values.items()}
    return [_copies(value) for value in values] if isinstance(values, list) else values


def check(saved: dict[str, Any], ranks: list[int], settings: str, state: State) -> None:
    """Raise UserError unless `saved` is of this rank, of as many, with the same settings."""
    kinds = {"ranks": list, "settings": str, "tensors": dict, "memory": dict, "stage": list}
    if any(not isinstance(saved.get(key), kind) for key, kind in kinds.items()):
        raise UserError("this is no state_dict of a replica", UNREADABLE)
    if saved["ranks"] != ranks:
        rank, *nodes = saved["ranks"]
        raise UserError(
            f"the state is of rank {rank} on nodes of {nodes} ranks, and this is rank {ranks[0]} "
            f"on {ranks[1:]}; each rank goes on from its own state, on the same nodes",
            UNREADABLE,
        )
    if saved["settings"] != settings:
        raise UserError("the state is of a run with other settings of replicate", UNREADABLE)
    if saved["memory"].keys() != state.memory.keys() or (
        not saved["left"] and saved["tensors"]["theta"].shape != state.theta.shape
    ):
        raise UserError("the state is of another model", UNREADABLE)


def put_back(saved: dict[str, Any], context: RunContext) -> None:
    """Restore this rank from what `contents` returned. Does not communicate."""
    state, model = context.state, context.problem.model
    if reason := fit_network(saved["left"], context):
        raise UserError(f"the state does not fit the model: {reason}", UNREADABLE)
    tensors = saved["tensors"]
    put_mask_back(state, tensors["mask"].numpy().astype(bool), *saved["stage"])
    for name in FLAT:
        getattr(state, name).copy_(tensors[name])
    state.payload.copy_(tensors["payload"])
    for name, array in (("rho1", state.rho1), ("rho2", state.rho2)):
        np.copyto(array, tensors[name].numpy())
    for name, tensor in saved["memory"].items():
        state.memory[name].copy_(tensor)
    with torch.no_grad():
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if name in saved["model"]:
                tensor.copy_(saved["model"][name])
    state.optimizer.optimizer.load_state_dict(saved["optimizer"])
    state.optimizer.see_again_()
    if state.scaler.is_enabled():
        state.scaler.load_state_dict(saved["scaler"])
    put_position(state.position, saved["position"])
    state.grad.zero_()
