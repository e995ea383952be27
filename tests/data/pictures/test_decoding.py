"""What PIL would read wrongly without a word: turned pictures, 16 and 32 bits per pixel, run lengths that end early."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyptree.data.pictures.coco import _check_runs, _unpacked
from hyptree.data.pictures.decoding import decode_image, decode_labels
from hyptree.data.pictures.single import read_picture
from hyptree.data.sample import BadSample
from hyptree.errors import UserError
from hyptree.tokens.draw import draw as draw_clusters
from hyptree.vlm.encoders.pixels import as_bytes

ORIENTATION = 0x0112
TURNS = {  # how a picture that is stored like this is to be seen, by EXIF's definition of the first row and column
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x.swapaxes(0, 1), 2),
    8: np.rot90,
}


def stored(values: np.ndarray, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG", exif=exif)
    return out.getvalue()


def draw(seed: int, height: int = 5, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("orientation", TURNS)
def test_pictures_are_upright(seed: int, tmp_path: Path, orientation: int) -> None:
    values, path = draw(seed), tmp_path / "phone.png"
    path.write_bytes(stored(values, orientation))
    expected = TURNS[orientation](values)
    assert np.array_equal(decode_image(path, "phone").permute(1, 2, 0).numpy(), expected)
    assert np.array_equal(read_picture(path), expected)
    with Image.open(path) as picture:
        assert np.array_equal(as_bytes(picture).permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("orientation", TURNS)
def test_labels_of_pixels_tell_which_way_a_picture_is_meant(seed: int, orientation: int) -> None:
    values = draw(seed)
    data, upright = stored(values, orientation), TURNS[orientation](values)
    if orientation in (2, 3, 4):
        with pytest.raises(BadSample, match=rf"turned or not \(EXIF {orientation}\); save it upright"):
            decode_image(data, "phone", (5, 8))
        return
    as_stored = decode_image(data, "phone", (5, 8)).permute(1, 2, 0).numpy()
    assert np.array_equal(as_stored, values)
    if orientation > 4:
        assert np.array_equal(decode_image(data, "phone", (8, 5)).permute(1, 2, 0).numpy(), upright)
        with pytest.raises(BadSample, match="save it upright"):
            decode_image(stored(draw(seed, 6, 6), orientation), "phone", (6, 6))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_of_grey_become_eight(seed: int, tmp_path: Path, kind: str) -> None:
    grey = np.random.default_rng(seed).integers(0, 65536, (6, 7)).astype(np.uint16)
    grey[0, :3] = 0, 65535, 257 * 100
    path = tmp_path / f"deep.{kind.lower()}"
    Image.fromarray(grey).save(path)
    expected = np.round(grey / 65535 * 255).astype(np.uint8)
    decoded = decode_image(path, "deep").numpy()
    assert all(np.array_equal(channel, expected) for channel in decoded)
    assert np.array_equal(read_picture(path)[..., 1], expected)
    assert decoded[0, 0, :3].tolist() == [0, 255, 100]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_an_agreed_range_are_refused(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "deep.tiff"
    Image.fromarray(np.full((4, 4), 0.5).astype(dtype)).save(path)
    with pytest.raises(BadSample, match="32 bits per pixel have no agreed range"):
        decode_image(path, "deep")
    with pytest.raises(UserError, match=r"deep\.tiff: 32 bits per pixel have no agreed range; save it with 8"):
        read_picture(path)
    with Image.open(path) as picture:
        with pytest.raises(UserError, match="32 bits per pixel"):
            as_bytes(picture)
        with pytest.raises(ValueError, match="32 bits per pixel"):
            draw_clusters(picture, np.zeros(4, np.int64), (2, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_run_lengths_cover_the_picture_or_are_refused(seed: int, packed: bool) -> None:
    mask = pytest.importorskip("pycocotools.mask")
    on = np.asfortranarray(np.random.default_rng(seed).random((9, 11)) < 0.3, np.uint8)
    whole = mask.encode(on)
    runs = _unpacked(whole["counts"])
    flat = on.T.reshape(-1)
    assert runs == np.diff([0, *np.flatnonzero(np.diff([0, *flat])), len(flat)]).tolist()
    _check_runs({"size": [9, 11], "counts": whole["counts"] if packed else runs}, 9, 11)
    cut = runs[:-1]
    short = mask.frPyObjects({"size": [9, 11], "counts": cut}, 9, 11)["counts"] if packed else cut
    with pytest.raises(ValueError, match=rf"its run lengths cover {sum(cut)} pixels, the picture has 99"):
        _check_runs({"size": [9, 11], "counts": short}, 9, 11)
    with pytest.raises(ValueError, match=r"are for \(height, width\) \[11, 9\], the picture has \[9, 11\]"):
        _check_runs({"size": [11, 9], "counts": runs}, 9, 11)
    with pytest.raises(ValueError, match="break off"):
        _check_runs({"size": [9, 11], "counts": b"Q"}, 9, 11)


def test_a_picture_of_colours_is_what_it_was(seed: int) -> None:
    values = draw(seed, 12, 7)
    assert torch.equal(decode_image(stored(values), "x").permute(1, 2, 0), torch.from_numpy(values))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "animated"])
def test_pictures_of_every_mode_are_their_colours(seed: int, mode: str, tmp_path: Path) -> None:
    """Transparency is left out, as everywhere in the field; of a picture that moves the first frame is read."""
    picture = Image.fromarray(draw(seed, 16, 24))
    path = tmp_path / {"CMYK": "x.tif", "animated": "x.gif"}.get(mode, "x.png")
    if mode == "animated":
        still = picture.convert("P")
        still.save(path, save_all=True, append_images=[picture.rotate(180).convert("P")], optimize=False)
        expected = np.asarray(still.convert("RGB"))
    else:
        changed = picture.convert("P", palette=Image.Palette.ADAPTIVE) if mode == "P" else picture.convert(mode)
        expected = np.asarray(changed.convert("RGB"))
        if mode in ("LA", "RGBA"):
            changed.putalpha(7)
        changed.save(path, **({"transparency": 3} if mode == "P" else {}))
    decoded = decode_image(path, mode).permute(1, 2, 0).numpy()
    assert np.array_equal(decoded, read_picture(path))
    assert np.array_equal(decoded, expected)


def test_label_maps_in_jpeg_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((16, 16), 3, np.uint8)).save(tmp_path / "x.jpg")
    with pytest.raises(BadSample, match="JPEG changes the numbers of a label map"):
        decode_labels(tmp_path / "x.jpg", "x")


def tiff(values: np.ndarray, bits: int, photometric: int = 1, orientation: int = 1, signed: bool = False) -> bytes:
    """A TIFF of grey, written by hand: PIL writes no 4 or 12 bits, no signed bytes and none whose 0 is white."""
    height, width = values.shape
    flat = "".join(f"{value:0{bits}b}" for row in values for value in row)
    data = values.tobytes() if bits % 8 == 0 else int(flat, 2).to_bytes(len(flat) // 8, "big")
    shorts = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 274: orientation, 277: 1, 278: height}
    tags = [(number, 3, value) for number, value in shorts.items()]
    tags += [(273, 4, 14 + 12 * 11), (279, 4, len(data)), (339, 3, 1 + signed)]
    entries = b"".join(struct.pack("<HHII", number, kind, 1, value) for number, kind, value in sorted(tags))
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def png(values: np.ndarray, bits: int) -> bytes:
    """A PNG of grey with few bits, which PIL does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = values.shape
    rows = [int("".join(f"{value:0{bits}b}" for value in row), 2).to_bytes(width * bits // 8, "big") for row in values]
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("photometric", [0, 1])
def test_grey_of_a_tiff_is_what_its_tags_say(seed: int, bits: int, photometric: int) -> None:
    grey = np.random.default_rng(seed).integers(0, 2**bits, (6, 8)).astype(np.uint8 if bits == 8 else np.uint16)
    grey[0, :2] = 0, 2**bits - 1
    data = tiff(grey, bits, photometric)
    if (bits, photometric) == (12, 0):  # PIL's own answer
        with pytest.raises(BadSample, match="not a picture that can be read"):
            decode_image(data, "x")
        return
    share = grey / (2**bits - 1)
    expected = np.round(255 * (share if photometric else 1 - share))
    assert all(np.array_equal(channel, expected) for channel in decode_image(data, "x").numpy())


def test_grey_of_a_netpbm_file(seed: int) -> None:
    grey = np.random.default_rng(seed).integers(0, 4096, (6, 8)).astype(">u2")
    decoded = decode_image(b"P5 8 6 4095\n" + grey.tobytes(), "x").numpy()
    assert np.abs(decoded[0] - grey / 4095 * 255).max() < 0.51  # rounded twice: to 16 bits, then to 8


def test_numbers_with_a_sign_are_refused() -> None:
    with pytest.raises(BadSample, match="signed numbers have no agreed range"):
        decode_image(tiff(np.arange(48, dtype=np.uint8).reshape(6, 8), 8, signed=True), "x")


@pytest.mark.parametrize("orientation", [6, 8])
def test_labels_of_a_turned_tiff(seed: int, orientation: int) -> None:
    grey = np.random.default_rng(seed).integers(0, 256, (6, 8), np.uint8)
    data = tiff(grey, 8, orientation=orientation)
    assert np.array_equal(decode_image(data, "x", (6, 8))[0].numpy(), grey)
    assert np.array_equal(decode_image(data, "x", (8, 6))[0].numpy(), TURNS[orientation](grey))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_label_maps_are_the_numbers_that_were_written(seed: int, bits: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (6, 8)).astype(np.uint8)
    for data in (tiff(values, bits), png(values, bits)):
        if bits in (2, 4):
            with pytest.raises(BadSample, match="2 or 4 bits of grey, and 0 for white, are read as other numbers"):
                decode_labels(data, "x")
        else:
            assert np.array_equal(decode_labels(data, "x").numpy(), values)
    palette = Image.fromarray(values).convert("P")
    palette.putdata(values.reshape(-1).tolist())
    file = io.BytesIO()
    palette.save(file, "PNG", bits=bits)
    assert np.array_equal(decode_labels(file.getvalue(), "x").numpy(), values)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (tiff(np.eye(8, dtype=np.uint8), 8, 0), "0 for white"),
        (b"P5 8 1 20\n" + bytes(range(8)), "read as other numbers"),
        (b"P4 8 1\n\x0f", "0 for white"),
        (tiff(np.eye(8, dtype=np.uint8), 8, orientation=3), "marked as turned"),
        (stored(np.eye(8, dtype=np.uint8), 6), "marked as turned"),
        (tiff(np.array([[0, 1, -1, 3]], np.int32), 32, signed=True), "numbers from 0 to 255, found -1 to 3"),
        (tiff(np.array([[0, 1, 256, 3]], np.uint16), 16), "numbers from 0 to 255, found 0 to 256"),
    ],
)
def test_label_maps_that_would_be_read_wrongly_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadSample, match=why):
        decode_labels(data, "x")


@pytest.mark.parametrize("content", [b"", b"text", b"\x89PNG\r\n\x1a\n\0", stored(draw(0))[:-40]])
def test_a_damaged_picture_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.png: [a-zA-Z]"):
        read_picture(tmp_path / "x.png")
