"""Looking at hierarchies: pictures of the Poincaré disk, one self-contained page, the demo.

Needs numpy alone; torch and matplotlib are imported inside the functions that use them.
"""

from hyptree.explore.draw.disk import branch_colors, draw_disk, svg_disk
from hyptree.explore.pages.page import Section, page

__all__ = ["Section", "branch_colors", "draw_disk", "page", "svg_disk"]
