"""Why channels stay, in a few words, and what to write so that they need not.

Each remedy has been tried on a network: with it the channels can go (`test_hints`).
"""

# Instead of what mixes channels with others. With plain rules none of the first is followed.
INSTEAD = {
    "einsum": "matmul or a product",
    "rms_norm": "nn.LayerNorm",
}
INSTEAD_ANYWHERE = {
    "local_response_norm": "nn.BatchNorm2d",
    "lp_pool2d": "nn.AvgPool2d",
    "__pow__": "a product",
    "conv_transpose2d": "nn.Upsample and nn.Conv2d",
}
SIZED = ("view", "reshape", "expand", "unflatten")
CUTTING = ("chunk", "split", "tensor_split", "__getitem__", "narrow")
NUMBER = "where a number does, write -1 or x.shape[1]"


def mixes(name: str, *, plain: bool) -> str:
    """Say that an operation makes one channel of several."""
    instead = INSTEAD_ANYWHERE.get(name, "" if plain else INSTEAD.get(name, ""))
    return f"{name} mixes it with others" + (f"; take {instead} instead" if instead else "")


def counts(name: str, *, plain: bool) -> str:
    """Say that an operation needs all channels that there were."""
    remedy = NUMBER if name in SIZED else ""
    if name in CUTTING and not plain:
        remedy = "cut it into equal pieces, as chunk does"
    return f"{name} counts its channels" + (f"; {remedy}" if remedy else "")
