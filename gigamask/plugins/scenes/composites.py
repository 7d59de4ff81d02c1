"""Synthetic scenes of things whose parts differ from each other, as those of people and cars do.

A species is a trunk with limbs, a head, insets and wheels, often mirrored, of a few materials. Its
things share their form, alone and in groups, and differ in color. About half of the masks are whole
things, with all their parts. The bytes of image N depend only on (seed, N).
"""

from dataclasses import dataclass

import numpy as np

from gigamask.plugins.scenes.clutter import ClutterCanvas, draw_radii, draw_sunlit_ground
from gigamask.plugins.scenes.dead_leaves import (
    draw_land,
    fractal_pattern,
    pick_colors,
    random_outline,
)
from gigamask.rng import make_rng
from gigamask.synthetic.scenes import (
    LONG_SIDE,
    SyntheticScene,
    photograph,
    visible_masks,
)
from gigamask.synthetic.shapes import Points, affine, circle, directions, placed, rasterize

DRAWN = (5, 24)
"""Range of the number of draws of a scene: a thing, a group of them, or one of clutter's."""
RADIUS_SHARE = (0.018, 0.5)
"""Range of half a thing's height, as a fraction of the long side."""
MATERIALS = (2, 6)
PART_SHARE = 0.35
"""Share of the parts that have masks."""
MAX_REGIONS = 160


@dataclass(frozen=True)
class CompositePart:
    """A part of a species.

    Attributes:
        outline: Its outline in the frame of the species, about [-1, 1] x [-1, 1], y down.
        parent: The part that it is attached to; the trunk is its own.
        material: Which of the species' materials it is of.
        is_behind: Whether its parent covers it.
    """

    outline: Points
    parent: int
    material: int
    is_behind: bool = False


@dataclass(kw_only=True)
class CompositeCanvas(ClutterCanvas):
    """A canvas for things of several materials."""

    min_shares = (0.0005, 0.0005)

    def draw_composite(self, species: list[CompositePart], center: Points, radius: float) -> None:
        """Draw a thing of a species.

        Args:
            species: Its parts, the trunk first, each after its parent.
            center: Its center.
            radius: Half of its height in pixels.
        """
        generator, numbers = self.generator, {}
        axes = radius * generator.uniform(0.75, 1.1, 2)
        axes[0] *= generator.choice([-1, 1])
        tilt = generator.choice([generator.normal(0, 0.12), generator.uniform(0, 7)], p=[0.8, 0.2])
        transform = affine(center, axes, tilt)
        row, column = np.clip(center[::-1].astype(int), 0, np.subtract(self.size, 1))
        ground = self.colors[self.owner[row, column]]
        materials = [pick_colors(generator, ground) for _ in range(MATERIALS[1])]
        for index, part in enumerate(species):
            window = rasterize([part.outline], transform, self.size)
            parent = numbers.get(part.parent, 0)
            if window is None or (index and not parent):
                continue
            if part.is_behind:
                window.pixels[self.owner[window.slices] == parent] = 0
            elif not index:
                self.cast(window, radius)
            pattern = fractal_pattern(generator, window.pixels.shape, 4 * int(radius) + 8)
            numbers[index] = self.paint(window, pattern, materials[part.material], parent)

    def draw_composites(self, species: list[CompositePart], center: Points, radius: float) -> None:
        """Draw a group of things of a species, such as a crowd, a herd or parked cars.

        Args:
            species: Its parts.
            center: The center of the group.
            radius: Half of their height in pixels.
        """
        generator = self.generator
        count = generator.integers(2, 8)
        radius = min(radius, 0.12 * max(self.size))
        spread = radius * generator.uniform(1, 3) * np.sqrt(count)
        spread = np.array([spread, spread * generator.uniform(0.1, 0.6)])
        centers = center + generator.normal(0, 1, (count, 2)) * spread
        for place in centers[np.argsort(centers[:, 1])]:  # who stands below stands in front
            if len(self.parents) + len(species) < MAX_REGIONS:
                self.draw_composite(species, place, radius * np.exp(generator.normal(0, 0.12)))


def make_species(generator: np.random.Generator) -> list[CompositePart]:
    """Return the parts of a random species, the trunk first.

    Args:
        generator: Random numbers.
    """
    materials = int(generator.integers(*MATERIALS))
    half = generator.uniform((0.2, 0.3), (0.7, 0.65))
    trunk = placed(random_outline(generator)[0], affine(axes=half))
    parts = [CompositePart(trunk, 0, 0)]

    def pick_material() -> int:
        return int(generator.integers(materials))

    def attach(outline: Points, parent: int, material: int) -> int:
        is_behind = not parent and generator.random() < 0.3
        parts.append(CompositePart(outline, parent, material, is_behind))
        return len(parts) - 1

    level = generator.uniform(-0.5, 0.6) * half[1]
    for _ in range(generator.integers(3)):  # trousers, a roof, a belly
        below = trunk[trunk[:, 1] > level]
        if len(below) > 2:
            parts.append(CompositePart(below, 0, pick_material()))
        level += generator.uniform(0.2, 0.6) * half[1]
    is_mirrored = generator.random() < 0.65
    for _ in range(generator.integers(4)):
        limb, material = _limb(generator, half), pick_material()
        for side in (1, -1)[: 1 + is_mirrored]:
            parent = 0
            for number, segment in enumerate(limb):
                own = pick_material() if number and generator.random() < 0.5 else material
                parent = attach(segment * (side, 1), parent, own)
    if generator.random() < 0.6:
        size = generator.uniform(0.14, 0.32) * np.array([generator.uniform(0.7, 1.2), 1])
        place = generator.normal(0, 0.15), -half[1] - 0.6 * size[1]
        head = placed(random_outline(generator)[0], affine(place, size))
        number = attach(head, 0, pick_material())
        hair = head[head[:, 1] < place[1] - generator.uniform(-0.3, 0.6) * size[1]]
        if len(hair) > 2:
            attach(hair, number, pick_material())
    if generator.random() < 0.4:  # windows, buttons, eyes, wheels
        rows, columns = generator.integers(1, 4, 2)
        area, corner = half * generator.uniform(0.3, 1.3, 2), generator.uniform(-0.4, 0.6) * half
        inset, material = random_outline(generator)[0], pick_material()
        scale = generator.uniform(0.25, 0.8) * area / (columns, rows)
        for place in np.ndindex(int(columns), int(rows)):
            center = corner + area * (np.add(place, 0.5) / (columns, rows) * 2 - 1)
            parts.append(CompositePart(placed(inset, affine(center, scale)), 0, material))
    return parts


def _limb(generator: np.random.Generator, half: Points) -> list[Points]:
    """Return the outlines of the segments of a limb that begins at the edge of the trunk."""
    angle = generator.uniform(0, 2 * np.pi)
    start = directions(np.array([angle]))[0] * half * 0.8
    angle += generator.normal(0, 0.5)
    length, width = generator.uniform(0.2, 0.6), generator.uniform(0.05, 0.2)
    segments = []
    for _ in range(generator.integers(1, 4)):
        along = directions(np.array([angle]))[0]
        outline = circle() if generator.random() < 0.7 else random_outline(generator)[0]
        transform = affine(start + along * length / 2, (0.62 * length, width), angle)
        segments.append(placed(outline, transform))
        start += along * length
        angle += generator.normal(0, 0.5)
        length, width = length * generator.uniform(0.5, 1), width * generator.uniform(0.6, 1.3)
    return segments


def compose_composites(
    seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE
) -> SyntheticScene:
    """Draw a scene.

    Args:
        seed: Random seed of the scenes.
        number: Number of the scene.
        long_side: Range of the longer side in pixels.
    """
    # The stream's name is that of the scenes that the starter was trained on.
    generator = make_rng(seed, "figures", number)
    canvas = draw_sunlit_ground(generator, long_side, CompositeCanvas)
    draw_land(generator, canvas)
    for share in draw_radii(generator, DRAWN, RADIUS_SHARE, 0.3):
        center = generator.random(2) * canvas.size[::-1]
        radius, species = share * max(canvas.size), make_species(generator)
        if len(canvas.parents) + len(species) < MAX_REGIONS:
            kind = generator.random()
            if kind < 0.3:
                canvas.draw_thing(center, radius)
            elif kind < 0.36:
                canvas.draw_thin(center, radius)
            else:
                draw = canvas.draw_composites if kind < 0.68 else canvas.draw_composite
                draw(species, center, radius)
    wholes = np.flatnonzero(np.array(canvas.parents) == 0)[1:]
    canvas.kinds.update(dict.fromkeys(wholes.tolist(), "thing"))
    masks, kinds = visible_masks(generator, canvas)
    kept = (np.array(kinds) == "thing") | (generator.random(len(kinds)) < PART_SHARE)
    return photograph(generator, canvas, masks[np.flatnonzero(kept)], (0.6, 1.25))
