"""Small classifiers whose channels meet in LayerNorm, grouped convolutions, attention and cuts."""

from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import VisionTransformer, convnext, regnet, resnet, swin_transformer

SIDE = 16


def resnext(num_classes: int, image_size: int) -> nn.Module:
    return resnet.ResNet(
        resnet.Bottleneck, [1, 1, 1, 1], groups=8, width_per_group=2, num_classes=num_classes
    )


def regnet_y(num_classes: int, image_size: int) -> nn.Module:
    sizes = regnet.BlockParams([1, 1], [24, 36], [4, 12], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return regnet.RegNet(sizes, num_classes=num_classes, stem_width=12)


def convnext_t(num_classes: int, image_size: int) -> nn.Module:
    stages = [convnext.CNBlockConfig(12, 24, 1), convnext.CNBlockConfig(24, None, 1)]
    return convnext.ConvNeXt(stages, num_classes=num_classes)


def _swin(num_classes: int, **options: object) -> nn.Module:
    # Three heads in the first stage: half of them is not half of the width.
    sizes = ([2, 2], 24, [2, 1], [3, 6], [4, 4])
    return swin_transformer.SwinTransformer(*sizes, num_classes=num_classes, **options)


def swin(num_classes: int, image_size: int) -> nn.Module:
    return _swin(num_classes)


def swin_v2(num_classes: int, image_size: int) -> nn.Module:
    return _swin(
        num_classes,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    )


def vit(num_classes: int, image_size: int) -> nn.Module:
    return VisionTransformer(image_size, 4, 2, 3, 24, 48, num_classes=num_classes)


def _timm() -> ModuleType:
    """Return timm's models: importing them takes a second, and few tests have them."""
    import timm

    return timm.models


def timm_vit(num_classes: int, image_size: int) -> nn.Module:
    sizes = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return _timm().VisionTransformer(image_size, num_classes=num_classes, **sizes)


def timm_vit_normed(num_classes: int, image_size: int) -> nn.Module:
    """Queries and keys go through a LayerNorm of the size of a head."""
    sizes = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    options = {"qk_norm": True, "init_values": 0.1, "global_pool": "avg"}
    return _timm().VisionTransformer(image_size, num_classes=num_classes, **sizes, **options)


def timm_swin(num_classes: int, image_size: int) -> nn.Module:
    sizes = {"patch_size": 2, "embed_dim": 24, "depths": (2, 1), "num_heads": (3, 6)}
    return _timm().SwinTransformer(image_size, num_classes=num_classes, window_size=4, **sizes)


def timm_convnext(num_classes: int, image_size: int) -> nn.Module:
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24), "patch_size": 1}
    return _timm().ConvNeXt(num_classes=num_classes, **sizes)


class Encoder(nn.Module):
    """Patches through nn.TransformerEncoder."""

    def __init__(self, num_classes: int, image_size: int, **options: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 24, 4, 4)
        self.place = nn.Parameter(0.1 * torch.randn(1, (image_size // 4) ** 2, 24))
        layer = nn.TransformerEncoderLayer(24, 3, 48, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, num_classes)
        self.batch_first = layer.self_attn.batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        if self.batch_first:
            return self.head(self.encoder(x).mean(1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(0))


class OwnAttention(nn.Module):
    """What most people write: the size of a head is the width over the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.scale = heads, (width // heads) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        n, s, c = x.shape
        qkv = self.qkv(x).reshape(n, s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attention = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(n, s, c))


class DroppingAttention(nn.Module):
    """The same with dropout of what softmax gives and of the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.proj_drop, self.attn_drop = nn.Dropout(0.2), nn.Dropout(0.3)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        n, s, c = x.shape
        qkv = self.qkv(x).reshape(n, s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attention = (q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5).softmax(dim=-1)
        y = self.attn_drop(attention) @ v
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(n, s, c)))


class ApartAttention(nn.Module):
    """Three layers for queries, keys and values, and numbers that the module keeps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.size = heads, width // heads

    def forward(self, x: Tensor) -> Tensor:
        n, s, _ = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(n, s, self.heads, self.size).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(y.reshape(n, s, self.heads * self.size))


class ChunkedAttention(nn.Module):
    """With a norm of its own, queries, keys and values by chunk, and heads by unflatten(-1)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 48 * heads, bias=False), nn.Linear(16 * heads, width)
        self.norm, self.heads = nn.LayerNorm(width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k))
        v = v.unflatten(dim=-1, sizes=(self.heads, -1)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OwnTransformer(nn.Module):
    """A class token, embeddings and two residual blocks around an attention of a user's."""

    def __init__(self, attention: type[nn.Module], num_classes: int, image_size: int) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 24, 4, 4), nn.Parameter(torch.zeros(1, 1, 24))
        self.place = nn.Parameter(0.1 * torch.randn(1, (image_size // 4) ** 2 + 1, 24))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))
        self.attentions = nn.ModuleList(attention(24, 3) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24))
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        for norm, attention in zip(self.norms, self.attentions, strict=False):
            x = x + attention(norm(x))
        return self.head((x + self.mlp(self.norms[2](x)))[:, 0])


class Placed(OwnTransformer):
    """Embeddings of places that are cut apart, registers, and the mean of all other tokens."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__(OwnAttention, num_classes, image_size)
        self.places = nn.Parameter(0.1 * torch.randn(1, 90, 24))
        self.registers = nn.Parameter(0.1 * torch.randn(1, 4, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.place[:, 1:] + self.places[:, 3 : x.shape[1] + 3]
        first, _ = self.places.split([1, 89], dim=1)
        extra = [(self.token + first).repeat(len(x), 1, 1), self.registers.expand(len(x), -1, -1)]
        x = torch.cat([*extra, x], dim=1)
        for norm, attention in zip(self.norms, self.attentions, strict=False):
            x = x + attention(norm(x))
        return self.head((x + self.mlp(self.norms[2](x)))[:, 5:].mean(dim=1))


class Gated(nn.Module):
    """Half of what one convolution makes gates the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(24, 48, 1), nn.Conv2d(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.up(x).chunk(2, dim=1)
        return x + self.down(values * torch.sigmoid(gates))


class Parts(nn.Module):
    """Pieces of sizes that the module keeps, by split and by slices, put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.sizes, self.first = nn.Conv2d(24, 30, 1), [6, 24], 10
        self.small, self.large = nn.Conv2d(6, 12, 1), nn.Conv2d(24, 12, 3, padding=1)
        self.some, self.others = nn.Conv2d(10, 24, 1), nn.Conv2d(14, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        small, large = torch.split(F.relu(self.up(x)), self.sizes, dim=1)
        y = F.relu(torch.cat([self.small(small), self.large(large)], dim=1))
        return self.some(y[:, : self.first]) + self.others(y[:, self.first :])


class Chosen(nn.Module):
    """A convolution of some channels, by a forward pass that is chosen when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(24, 36, 1), nn.Conv2d(36, 24, 1)
        self.some, self.forward = nn.Conv2d(9, 9, 3, 1, 1), self.cut_and_join

    def cut_and_join(self, x: Tensor) -> Tensor:
        first, others = torch.split(F.relu(self.up(x)), [9, 27], dim=1)
        return x + self.down(torch.cat([self.some(first), others], dim=1))


class Shuffled(nn.Module):
    """Grouped convolutions of few groups around a shuffle of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(24, 24, 3, padding=1, groups=2) for _ in range(2))
        self.norm, self.groups = nn.BatchNorm2d(24), 2

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        n, c, h, w = x.shape
        x = x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.last(x)


class Normed(nn.Module):
    """Norms of groups, and slopes of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(24, 24, 1) for _ in range(3))
        self.groups, self.slopes = nn.GroupNorm(6, 24), nn.PReLU(24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(self.slopes(self.groups(self.first(x))))
        return F.relu(self.third(F.relu(x)))


class Around(nn.Module):
    """A stem of 24 channels, `middle` and a classifier."""

    def __init__(self, middle: type[nn.Module], num_classes: int, image_size: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.middle, self.fc = middle(), nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.middle(self.stem(x)).mean(dim=(2, 3)))


class ResponseNorm(nn.Module):
    """Lengths over positions, relative to their mean over channels, as in ConvNeXt V2."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(24, 48, 1), nn.Conv2d(48, 24, 1)
        self.gamma, self.beta = (nn.Parameter(torch.randn(48)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x)).permute(0, 2, 3, 1)
        length = y.norm(p=2, dim=(1, 2), keepdim=True)
        share = length / (length.mean(dim=-1, keepdim=True) + 1e-6)
        y = y + torch.addcmul(self.beta, self.gamma, y * share)
        return x + self.down(y.permute(0, 3, 1, 2))


class OneGroup(nn.Module):
    """A norm over all channels and positions, and a gate of channels by their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = (
            nn.GroupNorm(1, 24),
            *(nn.Conv2d(24, 24, 3, padding=1) for _ in range(2)),
        )
        self.gate = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(self.norm(x)))
        gate = self.gate(y.mean((2, 3)).view(len(y), 1, -1)).sigmoid().view(len(y), -1, 1, 1)
        return x + self.last(y * gate.expand_as(y))


class SpatialGate(nn.Module):
    """Half of the channels gate the others after a layer over positions, as in gMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(24, 24)
        self.inner, self.over = nn.LayerNorm(24), nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, SIDE // 4)
        y = x.flatten(2).transpose(1, 2)
        u, v = F.gelu(self.up(self.norm(y))).chunk(2, dim=-1)
        v = self.over(self.inner(v).transpose(-1, -2)).transpose(-1, -2)
        return x + self.down(u * v).transpose(1, 2).reshape(x.shape)


class SplitAttention(nn.Module):
    """Two copies of each channel, weighed by a softmax over both, as in ResNeSt."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(24, 48, 3, padding=1, groups=2), nn.BatchNorm2d(48)
        self.down, self.up, self.last = (
            nn.Conv2d(24, 12, 1),
            nn.Conv2d(12, 48, 1),
            nn.Conv2d(24, 24, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        both = F.relu(self.norm(self.first(x))).reshape(n, 2, 24, h, w)
        share = self.up(F.relu(self.down(both.sum(dim=1).mean((2, 3), keepdim=True))))
        share = share.view(n, 1, 2, -1).transpose(1, 2).softmax(dim=1).reshape(n, 2, 24, 1, 1)
        return x + self.last((both * share).sum(dim=1))


class Context(nn.Module):
    """The sum of all positions, weighed; and a single head of attention over them."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh, self.add = nn.Conv2d(24, 1, 1), nn.Conv2d(24, 24, 1)
        self.qkv, self.out = nn.Conv2d(24, 16 + 16 + 24, 1), nn.Conv2d(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        share = self.weigh(x).reshape(n, 1, h * w).softmax(-1)
        found = x.reshape(n, c, h * w).unsqueeze(1) @ share.unsqueeze(3)
        x = x + self.add(found.view(n, c, 1, 1))
        q, k, v = (y.flatten(2) for y in self.qkv(x).split([16, 16, 24], dim=1))
        scores = (q.transpose(-2, -1) @ k * 16**-0.5).softmax(dim=-1)
        return x + self.out((v @ scores.transpose(-2, -1)).reshape(n, 24, h, w))


class ScaledConv(nn.Conv2d):
    """A weight without mean and of unit variance in each output, times a gain."""

    def __init__(self, *sizes: int, **options: int) -> None:
        super().__init__(*sizes, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))
        self.scale = self.weight[0].numel() ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1),
            None,
            None,
            weight=(self.gain * self.scale).view(-1),
            training=True,
            momentum=0.0,
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, 1, self.groups)


class Scaled(nn.Module):
    """Standardised convolutions of one group, of several and of one for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(ScaledConv(24, 24, 3, padding=1), nn.ReLU(), ScaledConv(24, 24, 1, groups=2)),
            *(nn.ReLU(), ScaledConv(24, 24, 3, padding=1, groups=24), nn.ReLU()),
            ScaledConv(24, 24, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return 0.2 * self.layers(x * 1.1) + x


class HalfBiased(nn.Module):
    """A bias of which a part is a buffer of zeros, and numbers that are divided by others."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(24)) for _ in range(2))
        self.register_buffer("k_bias", torch.zeros(24), persistent=False)
        self.table = nn.Parameter(torch.randn(9, 3))
        places = torch.arange(SIDE**2)[:, None] * torch.arange(SIDE**2)
        self.register_buffer("places", places % 9, persistent=False)
        # One for all heads.
        self.relative = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        qkv = F.linear(x.flatten(2).transpose(1, 2), self.qkv.weight, bias)
        q, k, v = qkv.reshape(n, h * w, 3, 3, c // 3).permute(2, 0, 3, 1, 4).unbind(0)
        table = self.table[self.places.view(-1)].view(h * w, h * w, -1).permute(2, 0, 1)
        scores = q * (c // 3) ** -0.5 @ k.transpose(-2, -1) + table.unsqueeze(0)
        over = q.reshape(n * 3, h * w, -1) @ self.relative.transpose(-1, -2)
        scores = scores + over.reshape(n, 3, h * w, 1)
        found = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(n, h * w, c)
        return x + self.out(found).transpose(1, 2).reshape(n, c, h, w)


class Keywords(nn.Module):
    """Operands by keyword, and numpy's word for a dimension."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.third, self.last = nn.Conv2d(16, 8, 1), nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(input=self.first(x))
        y = F.conv2d(input=x, weight=self.second.weight, bias=self.second.bias, padding=1)
        x = torch.add(input=x, other=torch.tanh(input=y))
        x = torch.cat(tensors=[x, self.third(x)], axis=1)
        return self.last(torch.mean(input=x, dim=(2, 3)))


# The functions that make them, by the names that --model takes.
encoder, placed, keywords = Encoder, Placed, Keywords
encoder_batch_first = partial(Encoder, batch_first=True)
encoder_norm_first = partial(Encoder, batch_first=True, norm_first=True)
own_attention = partial(OwnTransformer, OwnAttention)
dropping_attention = partial(OwnTransformer, DroppingAttention)
apart_attention = partial(OwnTransformer, ApartAttention)
chunked_attention = partial(OwnTransformer, ChunkedAttention)
gated = partial(Around, Gated)
parts = partial(Around, Parts)
chosen = partial(Around, Chosen)
shuffled = partial(Around, Shuffled)
normed = partial(Around, Normed)
response_norm = partial(Around, ResponseNorm)
one_group = partial(Around, OneGroup)
spatial_gate = partial(Around, SpatialGate)
split_attention = partial(Around, SplitAttention)
context = partial(Around, Context)
scaled = partial(Around, Scaled)
half_biased = partial(Around, HalfBiased)

# With the share of all elements that half of the groups leave: small layers are hard to halve.
SHARES = {
    0.27: "resnext",
    0.31: "parts shuffled one_group",
    0.32: "regnet_y",
    0.33: "swin swin_v2 timm_swin",
    0.35: (
        "vit timm_vit timm_vit_normed encoder encoder_batch_first encoder_norm_first "
        "own_attention dropping_attention apart_attention chunked_attention "
        "gated normed chosen response_norm context scaled"
    ),
    0.36: "convnext_t timm_convnext",
    0.37: "placed split_attention",
    0.4: "half_biased",
    0.42: "spatial_gate",
    0.45: "keywords",
}
NETWORKS = {name: share for share, names in SHARES.items() for name in names.split()}
