"""Train a ResNet on small images by the field's plain recipe, on one device, in plain PyTorch.

    python batch/plain_recipe.py --data-dir CIFAR10 --epochs 16

What these images can give, beside `dense` at as many epochs (batch/plan_gpu_dense.toml): crops of
images padded by reflection, flips, SGD with Nesterov momentum, one cycle of the rate up and down
linearly, label smoothing of 0.2, bf16, channels last. Network, images and those held out are the
package's. Prints one line: the accuracy of the last weights on images held out, and on those to
test on, which nothing is chosen by.
"""

import argparse
import os
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from prunex_mpi.data.batches import Shard, channel_moments, normalisation
from prunex_mpi.data.datasets import load
from prunex_mpi.data.request import Part, Request
from prunex_mpi.models.build import build_model
from prunex_mpi.models.inputs import Images

VAL_SPLIT, SMOOTHING, MOMENTUM, WEIGHT_DECAY = 0.1, 0.2, 0.9, 5e-4
# Of the steps, until the rate is highest.
RISING = 0.2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", required=True)
    add("--dataset", default="imagefolder")
    add("--model", default="resnet18")
    add("--epochs", type=int, default=16)
    add("--batch-size", type=int, default=512)
    add("--lr", type=float, default=0.4, help="highest rate")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def normalised(shard: Shard, moments: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, Tensor]:
    """Return images, bf16 [n, 3, H, W], and labels, int64 [n], on the device."""
    mean, std = (values.to(device)[:, None, None] for values in moments)
    images = [
        ((part.to(device) / 255 - mean) / std).bfloat16() for part in shard.images.split(4096)
    ]
    return torch.cat(images), shard.labels.to(device)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images, in percent, that `model` gives the right class."""
    model.eval()
    right = 0
    with torch.autocast(images.device.type, torch.bfloat16):
        for x, y in zip(images.split(2000), labels.split(2000), strict=True):
            outputs = model(x.contiguous(memory_format=torch.channels_last))
            right += int((outputs.argmax(1) == y).sum())
    return 100 * right / len(labels)


def train(
    model: nn.Module, images: Tensor, labels: Tensor, pad: int, args: argparse.Namespace
) -> None:
    """Train on images, bf16 [n, 3, H, W], moved by up to `pad` pixels."""
    batch, side = min(args.batch_size, len(labels)), images.shape[-1]
    # All crops of each image, [n, 3, places down, places across, H, W]: views of one tensor.
    crops = F.pad(images, (pad,) * 4, mode="reflect").unfold(2, side, 1).unfold(3, side, 1)
    rates = {"lr": args.lr, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
    optimizer = torch.optim.SGD(model.parameters(), nesterov=True, **rates)
    steps = args.epochs * (len(labels) // batch)
    shape = {"pct_start": RISING, "anneal_strategy": "linear", "cycle_momentum": False}
    schedule = OneCycleLR(optimizer, args.lr, total_steps=steps, **shape)
    model.train()
    for _ in range(args.epochs):
        order = torch.randperm(len(labels), device=images.device)
        for chosen in order[: len(labels) // batch * batch].split(batch):
            down, across = torch.randint(2 * pad + 1, (2, batch), device=images.device)
            x = crops[chosen, :, down, across]
            mirrored = torch.rand(batch, device=images.device) < 0.5
            x = torch.where(mirrored[:, None, None, None], x.flip(3), x)
            with torch.autocast(images.device.type, torch.bfloat16):
                outputs = model(x.contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(outputs, labels[chosen], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    request = Request(dataset=args.dataset, data_dir=args.data_dir, val_split=VAL_SPLIT)
    data = load(request, Part(0, 1, threads=len(os.sched_getaffinity(0))))
    moments = normalisation(channel_moments(data.train, len(data.train)))
    shards = (data.train, data.val, data.test)
    trained, held_out, tested = (normalised(shard, moments, args.device) for shard in shards)
    model = build_model(args.model, Images(data.image_size, data.num_classes))
    model = model.to(args.device, memory_format=torch.channels_last)
    began = perf_counter()
    train(model, *trained, data.pad, args)
    found = accuracy(model, *held_out)
    seconds = perf_counter() - began
    print(
        f"plain recipe, {args.model}, {args.epochs} epochs of {len(trained[1]):,} images, "
        f"rate {args.lr}, seed {args.seed}: {found:.2f} % held out, "
        f"{accuracy(model, *tested):.2f} % on test images, {seconds:.1f} s on {args.device}"
    )


if __name__ == "__main__":
    main()
