"""The shape of one input, and what convolutional models ask of it."""

from __future__ import annotations

from fedsim.errors import UsageError

Shape = tuple[int, ...]


def image(name: str, shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    """`shape` as (channels, height, width); UsageError naming the model if it is not an image."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise UsageError(
            f"model {name!r} cannot take inputs of shape {shape}: it needs (channels, height, "
            f"width) with height and width of at least {smallest}; choose a dense model such as "
            "'mlp' or another dataset"
        )
    return shape[0], shape[1], shape[2]
