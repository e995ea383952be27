"""Makes the figures of README.md and the guides: ``python docs/figures.py [names]`` writes docs/img.

Each figure is a function; its name is the file's. Everything is computed with hyptree, and seeded.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon

from hyptree.explore import draw_disk
from hyptree.explore.pages import tree_demo as demo
from hyptree.geometry import Lorentz, klein, lorentz, poincare

FOLDER = Path(__file__).parent / "img"
HIMAPPER_PICTURE = 7  # of the validation pictures
BLUE, ORANGE, GREEN, GREY, INK, LINE = "#3b6fb6", "#d9772b", "#2f9171", "#8a90a0", "#1c2030", "#c3c8d4"


def save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.png", dpi=110, facecolor="white", metadata={"Software": None})


def bare(ax: Axes, title: str) -> None:
    """A disk on an empty background."""
    ax.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
    ax.set_axis_off()
    ax.add_patch(Circle((0, 0), 1, facecolor="#f7f8fb", edgecolor=LINE, linewidth=1.2))
    ax.set_title(title, fontsize=11, color=INK)


def disk() -> None:
    """The tree of ``hyptree tree demo``, learned."""
    tree = demo.demo_tree()
    points = demo.fit(tree, Lorentz())
    points = lorentz.boost(-points[0], points)
    draw_disk(tree, lorentz.to_poincare(points).numpy(), FOLDER / "disk.png", dpi=110)


def models() -> None:
    """One triangle and its sides, prolonged, in three pictures of one space."""
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    sheet, ball, beltrami = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))

    x = torch.linspace(-2.6, 2.6, 201, dtype=torch.float64)[:, None]
    sheet.plot(x[:, 0], lorentz.time(x), color=INK, linewidth=2)
    sheet.plot([-2.6, 0, 2.6], [2.6, 0, 2.6], color=LINE, linewidth=1, linestyle="--")
    sheet.plot([-1, 1], [0, 0], color=BLUE, linewidth=4, solid_capstyle="butt", alpha=0.5)
    sheet.plot([-1, 1], [1, 1], color=ORANGE, linewidth=4, solid_capstyle="butt", alpha=0.5)
    for value in (0.7, 2.0):
        point = torch.tensor([value], dtype=torch.float64)
        t = float(lorentz.time(point))
        sheet.plot([0, value], [-1, t], color=BLUE, linewidth=1)
        sheet.plot([0, value], [0, t], color=ORANGE, linewidth=1)
        sheet.plot(float(lorentz.to_poincare(point)), 0, "o", color=BLUE, markersize=5)
        sheet.plot(float(lorentz.to_klein(point)), 1, "o", color=ORANGE, markersize=5)
        sheet.plot(value, t, "o", color=INK, markersize=6)
    sheet.text(-2.55, 2.75, "hyperboloid (Lorentz)", va="bottom", fontsize=9, color=INK)
    sheet.text(-1.5, 0.95, "Klein", ha="right", va="center", fontsize=9, color=ORANGE)
    sheet.text(-1.15, 0, "Poincaré", ha="right", va="center", fontsize=9, color=BLUE)
    sheet.set(xlim=(-2.7, 2.7), ylim=(-1.15, 3.05), aspect="equal")
    sheet.set_axis_off()
    sheet.set_title("Cross-section: time upwards, space sideways", fontsize=11, color=INK)

    angle = torch.tensor([0.3, 2.2, 4.5], dtype=torch.float64)
    corner = lorentz.expmap0(1.5 * torch.stack([angle.cos(), angle.sin()], -1))
    tau = torch.linspace(-6, 7, 400, dtype=torch.float64)[:, None]
    for ax, to_model, title in (
        (ball, poincare.from_lorentz, "Poincaré: true angles, bent lines"),
        (beltrami, klein.from_lorentz, "Klein: straight lines, false angles"),
    ):
        bare(ax, title)
        for k, color in enumerate((BLUE, ORANGE, GREEN)):
            a, b = corner[k], corner[(k + 1) % 3]
            whole = to_model(lorentz.geodesic(a, b, tau))
            ax.plot(whole[:, 0], whole[:, 1], color=color, linewidth=1, alpha=0.55)
            side = to_model(lorentz.geodesic(a, b, tau.clamp(0, 1)))
            ax.plot(side[:, 0], side[:, 1], color=color, linewidth=2.6, solid_capstyle="round")
        dots = to_model(corner)
        ax.plot(dots[:, 0], dots[:, 1], "o", color=INK, markersize=5)
    save(figure, "models")


def precision() -> None:
    """Why there is no acosh: relative error of float32 distances against float64, by separation and by depth."""
    generator = torch.Generator().manual_seed(0)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    eps = torch.finfo(torch.float32).eps

    def textbook(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.acosh(torch.clamp(-lorentz.minkowski(x, y), min=1.0))

    def errors(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        truth = lorentz.dist(x.double(), y.double())
        found = (textbook(x, y), lorentz.dist(x, y))
        return tuple(float(((d - truth).abs() / truth).median().clamp_min(eps / 8)) for d in found)  # type: ignore

    def directions(rows: int) -> torch.Tensor:
        v = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        return v / v.norm(dim=-1, keepdim=True)

    separation = np.logspace(-7, 0, 29)
    rows = []
    for gap in separation:
        x = lorentz.expmap0(2 * directions(400))
        y = lorentz.expmap(x, lorentz.transport_from_origin(x, float(gap) * directions(400)))
        rows.append(errors(x.float(), y.float()))
    left.loglog(separation, [r[0] for r in rows], color=ORANGE, label="acosh of the Minkowski product")
    left.loglog(separation, [r[1] for r in rows], color=BLUE, label="hyptree (radial frame)")
    left.set_xlabel("distance of the two points (both at radius 2)")

    radius, rows = np.linspace(0.5, 12, 24), []
    for r in radius:
        x = lorentz.expmap0(float(r) * directions(400))
        y = lorentz.expmap(x, lorentz.transport_from_origin(x, 0.5 * directions(400)))
        rows.append(errors(x.float(), y.float()))
    right.semilogy(radius, [r[0] for r in rows], color=ORANGE, label="acosh of the Minkowski product")
    right.semilogy(radius, [r[1] for r in rows], color=BLUE, label="hyptree (radial frame)")
    right.set_xlabel("distance from the origin (points half a unit apart)")
    for ax in (left, right):
        ax.axhline(eps, color=GREY, linewidth=1, linestyle=":")
        ax.set_ylabel("relative error in float32 (median)")
        ax.grid(color="#eceef3")
        ax.legend(frameon=False, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    left.text(separation[-1], eps * 1.25, "float32 eps", fontsize=8, color=GREY, ha="right")
    save(figure, "precision")


def cones() -> None:
    """Entailment cones of three points, one below the other, on the disk."""
    figure = Figure(figsize=(4.6, 4.6), layout="constrained")
    ax = figure.subplots()
    bare(ax, "Entailment cones: what lies inside is more specific")
    K = 0.25
    apex = [lorentz.expmap0(torch.tensor([0.55, -0.1], dtype=torch.float64))]
    for turn, length in ((0.5, 0.75), (-0.1, 0.8)):  # each inside the cone of the one before
        ahead = apex[-1] / apex[-1].norm()
        v = length * (math.cos(turn) * ahead + math.sin(turn) * torch.stack([-ahead[1], ahead[0]]))
        apex.append(lorentz.expmap(apex[-1], lorentz.transport_from_origin(apex[-1], v)))
    names = ("animal", "dog", "beagle")
    for k, color in enumerate((BLUE, ORANGE, GREEN)):
        x = apex[k]
        half = float(lorentz.half_aperture(x, K=K))
        outward = x / x.norm()
        across = torch.stack([-outward[1], outward[0]])
        # Rays of unit speed at x: a direction at the origin, carried there.
        rays = []
        for turn in np.linspace(-half, half, 41):
            v = lorentz.transport_from_origin(x, math.cos(turn) * outward + math.sin(turn) * across)
            rays.append(v)
        length = torch.linspace(0, 9, 120, dtype=torch.float64)[:, None]
        sides = [poincare.from_lorentz(lorentz.expmap(x, length * ray)) for ray in (rays[0], rays[-1])]
        rim = torch.stack([poincare.from_lorentz(lorentz.expmap(x, 9 * ray)) for ray in rays])
        outline = torch.cat([sides[0], rim, sides[1].flip(0)])
        ax.add_patch(Polygon(outline.numpy(), closed=True, facecolor=color, alpha=0.16, edgecolor="none"))
        for side in sides:
            ax.plot(side[:, 0], side[:, 1], color=color, linewidth=1.5)
        point = poincare.from_lorentz(x)
        ax.plot(point[0], point[1], "o", color=color, markersize=7, markeredgecolor="white")
        down = -0.11 if k == 2 else 0.05
        ax.text(float(point[0]) - 0.03, float(point[1]) + down, names[k], ha="center", fontsize=9, color=INK)
    ax.plot(0, 0, "+", color=GREY)
    save(figure, "cones")


def world() -> None:
    """Twenty pictures of the built-in world."""
    from PIL import Image

    from hyptree.data.world import World, contact_sheet

    sheet = contact_sheet(World("val", num_images=20, size=96), num_images=20)
    Image.fromarray(sheet).save(FOLDER / "world.png")


def tokens() -> None:
    """A picture of the built-in world and its patches as agglomerative clustering merges them, with fresh weights."""
    import timm

    from hyptree.data import World
    from hyptree.explore.draw.reduced_pictures import Drawing, Shown, strip
    from hyptree.tokens import patched

    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224").eval()
    image = World("val", num_images=2, size=224)[1].image
    with torch.no_grad(), patched(model, keep=0.5, trace=True) as handle:
        model((image[None] / 255 - 0.45) / 0.225)
    drawing = Drawing("atc average", 0.5, [source[0].numpy() for source in handle.sources])
    shown = Shown("world", image.permute(1, 2, 0).numpy(), (14, 14), handle.layers, [drawing])
    picture = strip(shown)
    picture.resize((picture.width * 2 // 3, picture.height * 2 // 3)).save(FOLDER / "tokens.png", optimize=True)


def himapper() -> None:
    """Where the nodes of a Hi-Mapper look: the run of recipes/himapper_demo.yaml, trained first if it is not there."""
    from PIL import Image

    from hyptree.config import load
    from hyptree.data import World
    from hyptree.explore.draw.himapper import plot_tree_maps
    from hyptree.explore.pages.himapper_page import find_himapper
    from hyptree.train import Recipe, fit
    from hyptree.train.explain import subject_of_run

    root = FOLDER.parents[1]
    run = root / "runs" / "himapper_demo"
    if not run.exists():
        fit(load(Recipe, root / "recipes" / "himapper_demo.yaml"), run)
    subject = subject_of_run(run)
    small, fine = (World("val", num_images=HIMAPPER_PICTURE + 1, size=size)[-1].image for size in (subject.size, 256))
    out = find_himapper(subject.model).inspect(subject.input([small.permute(1, 2, 0).numpy()]))
    figure = plot_tree_maps(fine, out)  # the same scene in more pixels, to be looked at
    figure.savefig(FOLDER / "himapper.png", dpi=84, metadata={"Software": None})
    # 64 steps of each colour cannot be told from 256, and take far fewer bytes. White stays white.
    pixels = np.asarray(Image.open(FOLDER / "himapper.png").convert("RGB"))
    coarse = np.where(pixels == 255, 255, pixels // 4 * 4 + 2).astype(np.uint8)
    Image.fromarray(coarse).save(FOLDER / "himapper.png", optimize=True)


def vlm() -> None:
    """Captions around the root of the run of recipes/clip_world_tiny.yaml, which is trained if need be."""
    from hyptree.config import load
    from hyptree.data.world import World
    from hyptree.explore.draw.radial import radial_picture, svg_radial
    from hyptree.train import Recipe, fit
    from hyptree.vlm.clip.world_text import captions_of
    from hyptree.vlm.encoders.encoder import load_encoder
    from hyptree.vlm.radial.suites import Texts

    root = FOLDER.parents[1]
    run = root / "runs" / "clip_world_tiny"
    if not run.exists():
        fit(load(Recipe, root / "recipes" / "clip_world_tiny.yaml"), run)
    encoder = load_encoder(f"hf:{run}")
    chains = [captions for captions, _ in captions_of(World("val", num_images=500))]
    (FOLDER / "vlm.svg").write_text(svg_radial(radial_picture(Texts(encoder.encode_text), chains)))


FIGURES = {
    "disk": disk,
    "models": models,
    "precision": precision,
    "cones": cones,
    "world": world,
    "tokens": tokens,
    "himapper": himapper,
    "vlm": vlm,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FIGURES:
        FIGURES[name]()
        print(f"{name} is drawn")
