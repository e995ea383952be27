"""The built-in world: scenes of objects made of parts, rendered on the spot, with everything known about them.

Thirty leaf classes in ten families in four groups. Nothing is downloaded, every picture follows from
(seed, split, index) and can be had at any size from 32 to 512 pixels.

    from hyptree.data.world import World
    world = World("train", num_images=12_000, size=64, cache=True)
    world[0].captions      # ('a vehicle', 'a road vehicle', 'a red truck', 'a red truck with three wheels ...')
"""

from hyptree.data.world.classes import CLASSES, FAMILIES, GROUPS, class_tree
from hyptree.data.world.dataset import World, contact_sheet
from hyptree.data.world.shape_builder import PARTS

__all__ = ["CLASSES", "FAMILIES", "GROUPS", "PARTS", "World", "class_tree", "contact_sheet"]
