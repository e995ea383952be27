"""A sheet of pictures as a PNG: ``python -m hyptree.data.world sheet.png --size 128 --num-images 60``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from PIL import Image

from hyptree.data.world import World, contact_sheet


def main(arguments: list[str] | None = None) -> int:
    """Writes the sheet; 0, or 2 after a line about what was wrong."""
    parser = argparse.ArgumentParser(prog="python -m hyptree.data.world", description="A sheet of built-in pictures.")
    parser.add_argument("out", type=Path, help="PNG file to write")
    parser.add_argument("--split", default="train")
    parser.add_argument("--size", type=int, default=128, help="side of a picture in pixels")
    parser.add_argument("--num-images", type=int, default=60)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        world = World(args.split, num_images=args.num_images, size=args.size, seed=args.seed)
        Image.fromarray(contact_sheet(world, args.num_images, args.columns)).save(args.out)
    except (ValueError, OSError) as error:
        print(f"{args.out}: {error}".splitlines()[0], file=sys.stderr)
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
