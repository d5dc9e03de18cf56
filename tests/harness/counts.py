"""Elements and statistics of ResNets, counted by hand: whole, and with half of the channels."""


def resnet18_elements(divisor: int) -> int:
    """Count ResNet-18 with the CIFAR stem and 10 classes, 1/divisor of the input channels kept."""
    d = divisor
    elements = 64 * 3 * 3 * 3 + 2 * 64  # stem: its input channels are the image's
    elements += 2 * (2 * 64 * (64 // d) * 9 + 2 * (64 + 64))  # layer1: two blocks, no projection
    for c in (128, 256, 512):
        elements += c * (c // 2 // d) * 9 + c * (c // d) * 9 + 2 * (c + c)  # first block
        elements += c * (c // 2 // d) + 2 * c  # its 1x1 projection
        elements += 2 * c * (c // d) * 9 + 2 * (c + c)  # second block
    return elements + 512 * 10 + 10


def bottleneck_elements(blocks: tuple[int, ...], widening: int, divisor: int) -> int:
    """Count a ResNet of bottlenecks with the ImageNet stem and 10 classes, likewise."""
    d = divisor
    elements = 64 * 3 * 7 * 7 + 2 * 64
    before = 64
    for count, base in zip(blocks, (64, 128, 256, 512), strict=True):
        w, out = widening * base, 4 * base
        norms = 2 * (w + w + out)
        inner = w * (w // d) * 9 + out * (w // d)  # 3x3 and the last 1x1
        elements += w * (before // d) + inner + norms  # first block
        elements += out * (before // d) + 2 * out  # its projection
        elements += (count - 1) * (w * (out // d) + inner + norms)
        before = out
    return elements + 2048 * 10 + 10


def basic_statistics() -> int:
    """Count mean and second moment of ResNet-18's BatchNorm channels."""
    return 2 * (64 + 4 * 64 + (4 + 1) * (128 + 256 + 512))


def bottleneck_statistics(blocks: tuple[int, ...], widening: int) -> int:
    channels = 64
    for count, base in zip(blocks, (64, 128, 256, 512), strict=True):
        channels += count * (2 * widening * base + 4 * base) + 4 * base
    return 2 * channels


R152, WRN50 = (3, 8, 36, 3), (3, 4, 6, 3)

BY_HAND = {
    "resnet18": (resnet18_elements(1), resnet18_elements(2), basic_statistics()),
    "resnet152": (
        bottleneck_elements(R152, 1, 1),
        bottleneck_elements(R152, 1, 2),
        bottleneck_statistics(R152, 1),
    ),
    "wide_resnet50_2": (
        bottleneck_elements(WRN50, 2, 1),
        bottleneck_elements(WRN50, 2, 2),
        bottleneck_statistics(WRN50, 2),
    ),
}
