"""Pictures of all modes: each becomes the numbers that it shows, or is refused by its mode."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fedsim.data.arrays import Array
from fedsim.data.readers.images import pixels
from fedsim.errors import DataError

Image = pytest.importorskip("PIL.Image")
GREY = np.arange(16, dtype=np.uint8).reshape(4, 4) * 16
RGB = np.stack([GREY, 255 - GREY, GREY // 2], axis=2)
OPAQUE, SEEN_THROUGH = np.full((4, 4, 1), 255, np.uint8), np.full((4, 4, 1), 254, np.uint8)


def read(*images: Any) -> tuple[Array, float]:
    return pixels([(f"image {i}", lambda image=image: image) for i, image in enumerate(images)], "data")


def saved(image: Any, format: str = "PNG", **options: Any) -> Any:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    buffer.seek(0)
    return Image.open(buffer)


def palette(colours: Sequence[int]) -> Any:
    image = Image.fromarray((GREY // 16 % 2).astype(np.uint8)).convert("P")
    image.putdata([int(v) for v in (GREY // 16 % 2).ravel()])
    image.putpalette([*colours, *[0] * (768 - len(colours))])
    return image


def shown(array: Array) -> Array:
    """(n, height, width, channels) of one picture."""
    return array[0].transpose(1, 2, 0)


@pytest.mark.parametrize("packed", [False, True])
def test_grey_and_colours_of_eight_bits_are_kept(packed: bool) -> None:
    for values in (GREY, RGB):
        image = Image.fromarray(values)
        array, white = read(saved(image) if packed else image)
        assert (array.dtype, white) == (np.uint8, 255.0)
        np.testing.assert_array_equal(shown(array).reshape(values.shape), values)


def test_black_and_white_are_0_and_255() -> None:
    array, white = read(saved(Image.fromarray(GREY > 100)))
    assert white == 255.0
    np.testing.assert_array_equal(shown(array)[:, :, 0], np.where(GREY > 100, 255, 0))


def test_a_palette_gives_its_colours() -> None:
    array, white = read(saved(palette([10, 20, 30, 250, 0, 99])))
    expected = np.array([[10, 20, 30], [250, 0, 99]])[GREY // 16 % 2]
    assert white == 255.0
    np.testing.assert_array_equal(shown(array), expected)


@pytest.mark.parametrize("order", ["<u2", ">u2"])
@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_grey_of_sixteen_bits_keeps_all_of_them(order: str, format: str) -> None:
    values = (np.arange(16).reshape(4, 4) * 4369).astype(order)  # up to 65535
    array, white = read(
        saved(Image.fromarray(values), format)
        if format == "TIFF" or order == "<u2"
        else Image.fromarray(values)
    )
    assert (array.dtype, white, array.shape) == (np.float32, 65535.0, (1, 1, 4, 4))
    np.testing.assert_array_equal(array[0, 0], values)


def test_png_of_sixteen_bits_as_older_versions_of_pillow_open_it() -> None:
    image = Image.fromarray(np.full((2, 2), 40_000, np.int32))
    assert image.mode == "I"
    image.format = "PNG"
    array, white = read(image)
    assert (array.max(), white) == (40_000, 65535.0)


@pytest.mark.parametrize("values", [GREY[:, :, None], RGB])
def test_an_opaque_alpha_is_left_out_and_another_refused(values: Array) -> None:
    array, _ = read(saved(Image.fromarray(np.concatenate([values, OPAQUE], axis=2))))
    np.testing.assert_array_equal(shown(array), values)
    with pytest.raises(DataError, match=r"image 0 is transparent in parts \(mode (LA|RGBA)\)"):
        read(saved(Image.fromarray(np.concatenate([values, SEEN_THROUGH], axis=2))))


def test_a_palette_with_transparency_counts_where_it_is_seen() -> None:
    colours = [10, 20, 30, 250, 0, 99, 1, 2, 3]
    with pytest.raises(DataError, match=r"transparent in parts \(mode P\)"):
        read(saved(palette(colours), transparency=1))
    array, _ = read(saved(palette(colours), "GIF", transparency=2))  # which no pixel has
    np.testing.assert_array_equal(shown(array), np.array([[10, 20, 30], [250, 0, 99]])[GREY // 16 % 2])
    with pytest.raises(DataError, match=r"transparent in parts \(mode PA\)"):
        read(Image.fromarray(RGB).convert("RGBA").convert("LA").convert("PA").copy().point(lambda v: v // 2))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB", "HSV", "I", "F", "La", "RGBa", "RGBX"])
def test_other_modes_are_refused_by_name(mode: str) -> None:
    with pytest.raises(
        DataError, match=f"data: image 0 has the mode {mode}, which is not supported. Convert it first"
    ):
        read(Image.new(mode, (4, 4)))


def test_several_frames_are_no_example() -> None:
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    for format in ("GIF", "TIFF", "PNG"):
        with pytest.raises(DataError, match="image 0 has 2 frames; an example is one picture"):
            read(saved(frames[0], format, save_all=True, append_images=frames[1:]))
    array, _ = read(saved(Image.fromarray(RGB), "MPO", save_all=True, append_images=[Image.fromarray(RGB)]))
    assert array.shape == (1, 3, 4, 4)


def test_several_sizes_and_modes_are_counted() -> None:
    wide = Image.fromarray(np.zeros((4, 8), np.uint8))
    sixteen = Image.fromarray(GREY.astype(np.uint16))
    with pytest.raises(DataError) as caught:
        read(Image.fromarray(GREY), Image.fromarray(GREY), wide, Image.fromarray(RGB), sixteen)
    for words in (
        "several sizes or modes: 2 of 4x4 with 1 channel of 8 bits (such as image 0)",
        "1 of 8x4 with 1 channel of 8 bits (such as image 2)",
        "1 of 4x4 with 3 channels of 8 bits (such as image 3)",
        "1 of 4x4 with 1 channel of 16 bits (such as image 4)",
    ):
        assert words in str(caught.value)
    array, _ = read(palette([0, 0, 0, 9, 9, 9]), Image.fromarray(RGB))  # both are colours
    assert array.shape == (2, 3, 4, 4)


def test_an_image_that_is_missing_or_cannot_be_read_is_named() -> None:
    def broken() -> Any:
        raise OSError("image file is truncated")

    with pytest.raises(DataError, match="data: image 7 cannot be read: OSError: image file is truncated"):
        pixels([("image 7", broken)], "data")
    with pytest.raises(DataError, match="data: image 0 is missing"):
        read(None)
