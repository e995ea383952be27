"""The contenders of ``hyptree bench tokens``: ours on every backend, rivals, and the model that is to be sped up."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import launches
from benchmarks.harness import Built, Contender, Run, Skipped, cpu_sample, wall_sample
from benchmarks.options import Mode
from benchmarks.tokens.options import Table, TokensOptions
from hyptree.errors import UserError

COARSE = 4
"""Side of the squares of tokens over which the smooth part of the features changes."""
NOISE = 0.2
"""Size of the part of the features that differs from token to token."""
HEAD_DIM = 64
PIXELS = 16
"""Side of a patch."""
MOST_DISTANCES = 100_000_000
"""Entries of all distance matrices together that a CPU is asked for; average linkage holds several copies of them."""
TIES = 0.02
"""Share of images in which a library may give another partition: among equal distances it makes choices of its own."""

Asked = dict[str, launches.Launches]
"""What a model asks of the host and the memory of a GPU, by the name of the contender."""

RIVALS = {"scipy": "scipy", "fastcluster": "fastcluster", "sklearn": "sklearn"}
"""Contender and the package that must be there."""


def smooth_features(batch: int, tokens: int, generator: torch.Generator) -> Tensor:
    """(B, N, 64) features that are alike for neighbours, as the keys of a ViT are.

    Gaussian noise on a grid that is four times coarser than that of the tokens, interpolated bilinearly, plus a fifth
    of Gaussian noise for every token by itself.
    """
    side = math.isqrt(tokens)
    coarse = -(-side // COARSE) + 1
    noise = torch.randn(batch, HEAD_DIM, coarse, coarse, generator=generator)
    smooth = F.interpolate(noise, size=(side, side), mode="bilinear", align_corners=True)
    features = smooth.flatten(2).mT  # (B, N, 64)
    return (features + NOISE * torch.randn(features.shape, generator=generator)).contiguous()


def smooth_pictures(batch: int, tokens: int, generator: torch.Generator) -> Tensor:
    """(B, 3, S, S) normalised pictures of so many patches, made in the same way; from 16 on they come again."""
    num, pixels = min(batch, 16), PIXELS * math.isqrt(tokens)
    coarse = pixels // (COARSE * PIXELS) + 2
    noise = torch.randn(num, 3, coarse, coarse, generator=generator)
    smooth = F.interpolate(noise, size=(pixels, pixels), mode="bilinear", align_corners=True)
    pictures = smooth + NOISE * torch.randn(smooth.shape, generator=generator)
    return pictures.repeat(-(-batch // num), 1, 1, 1)[:batch]


def num_kept(tokens: int, keep: float) -> int:
    """Tokens that are left."""
    return max(1, int(tokens * keep + 1e-9))


class WholeCall:
    """A run whose time on the clock counts, with what the host needs to launch it.

    A model is called several times in a row: while the device works the host launches the next call, as in use.
    """

    def __init__(self, run: Run, in_a_row: int = 1):
        self.run, self.in_a_row = run, in_a_row

    def __call__(self) -> object:
        return self.run()


def too_slow(run_one: Run, batch: int, options: TokensOptions, longest: float) -> None:
    """Raises ``Skipped`` when one image, times the batch, takes longer than may be."""
    if batch == 1:
        return
    sample = cpu_sample if options.clock == "cpu" else wall_sample
    run_one()
    about = min(sample(run_one, 1) for _ in range(3)) * batch
    if about > longest:
        raise Skipped("skipped", f"about {about:.3g} s a call, judged by one image")


# ---------------------------------------------------------------------------------------------------------- clustering


def clustering_contenders(options: TokensOptions, batch: int, tokens: int, seed: int) -> list[Contender]:
    """Everything that is timed in the same rounds for one batch of one size; see ``cluster_name`` for the names."""
    from hyptree.cluster import bipartite_match, cosine_distance

    generator = torch.Generator().manual_seed(seed)
    features = smooth_features(batch, tokens, generator).to(options.device)
    distance = cosine_distance(features)
    contenders = _model_parts(options, batch, tokens, seed)
    for keep in options.keeps:
        k = num_kept(tokens, keep)
        contenders.append(Contender(f"tome {keep:g}", _matching(bipartite_match, features, k)))
        for linkage in options.linkages:
            common = (options, features, distance, k, linkage)
            for backend in ("torch", "triton"):
                for start in ("D", "features"):
                    name = cluster_name(linkage, keep, backend, start)
                    contenders.append(Contender(name, _ours(*common, backend, start)))
            for rival in RIVALS:
                contenders.append(Contender(cluster_name(linkage, keep, rival, "D"), _library(*common, rival)))
    return contenders


def cluster_name(linkage: str, keep: float, who: str, start: str) -> str:
    """Name of a contender: who clusters, from distances (D) or from features."""
    return f"{linkage} {keep:g} {who} {start}"


def _ours(
    options: TokensOptions,
    features: Tensor,
    distance: Tensor,
    k: int,
    linkage: str,
    backend: str,
    start: str,
) -> Callable[[], Built]:
    from hyptree.cluster import cosine_distance

    def labels(features: Tensor, distance: Tensor) -> Tensor:
        if start == "features":
            distance = cosine_distance(features)
        return agglomerated(distance, k, linkage, backend)

    def build() -> Built:
        if backend == "triton" and not features.is_cuda:
            raise Skipped("absent", "needs CUDA")
        if not features.is_cuda:  # a GPU takes about as long for many images as for one
            too_slow(lambda: labels(features[:1], distance[:1]), len(features), options, options.longest("clustering"))
        # Distances of another product may differ in their last bits, so each is held against its own.
        own = cosine_distance(features) if start == "features" else distance
        expected = agglomerated(own, k, linkage, "torch")
        error = differing(labels(features, distance), expected)
        return Built(lambda: labels(features, distance), error)

    return build


def _library(
    options: TokensOptions, features: Tensor, distance: Tensor, k: int, linkage: str, library: str
) -> Callable[[], Built]:
    def labels(distance: Tensor) -> Tensor:
        if library == "sklearn":
            return sklearn_loop(distance, k, linkage)
        return agglomerated(distance, k, linkage, library)

    def build() -> Built:
        if find_spec(RIVALS[library]) is None:
            raise Skipped("absent", f"{library} is not installed")
        too_slow(lambda: labels(distance[:1]), len(distance), options, options.longest("clustering"))
        share = differing(labels(distance), agglomerated(distance, k, linkage, "torch"))
        by_ties = max(TIES, 1 / len(distance)) if len(distance) > 8 else 0.0
        return Built(WholeCall(lambda: labels(distance)), 0.0 if share <= by_ties else share)

    return build


def agglomerated(distance: Tensor, k: int, linkage: str, backend: str) -> Tensor:
    """Labels by one of our backends: (B, N, N) -> (B, N)."""
    from hyptree import cluster

    labels = cluster.agglomerate(distance, k, linkage=linkage, backend=backend, check=False)
    assert isinstance(labels, Tensor)
    return labels


def sklearn_loop(distance: Tensor, k: int, linkage: str) -> Tensor:
    """Labels image by image on the CPU, as the method's authors do it: (B, N, N) -> (B, N)."""
    from sklearn.cluster import AgglomerativeClustering

    labels = [
        torch.from_numpy(AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage=linkage).fit_predict(one))
        for one in distance.cpu().numpy()
    ]
    return torch.stack(labels).to(distance.device)


def differing(labels: Tensor, expected: Tensor) -> float:
    """Share of images whose partition is not the expected one, whatever the numbers of its clusters."""
    from hyptree.cluster.labels import number_by_first_member

    if labels.shape != expected.shape:
        return 1.0
    count = int(torch.maximum(labels.max(), expected.max())) + 1
    numbered = [number_by_first_member(one.long(), count) for one in (labels, expected)]
    return float((numbered[0] != numbered[1]).any(1).double().mean())


def _matching(match: Callable[[Tensor, int], Tensor], features: Tensor, k: int) -> Callable[[], Built]:
    def build() -> Built:
        labels = match(features, k)
        counts = torch.zeros(len(labels), k, device=labels.device).scatter_add_(
            1, labels, torch.ones_like(labels.float())
        )
        return Built(lambda: match(features, k), float((counts == 0).any(1).double().mean()))

    return build


# -------------------------------------------------------------------------------------------------------------- models


def create_vit(options: TokensOptions, tokens: int, seed: int) -> nn.Module:
    """The timm model with fresh weights, for pictures of so many patches."""
    from hyptree.train.model import create_model
    from hyptree.train.run.recipe import ModelSettings

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = create_model(ModelSettings(options.model, args={"img_size": PIXELS * math.isqrt(tokens)}))
    if not hasattr(model, "blocks") or getattr(model.patch_embed, "num_patches", None) != tokens:
        raise UserError(f"{options.model} is no ViT with patches of {PIXELS} pixels; give another --model")
    ready: nn.Module = model.eval().to(options.device, dtype_of(options))
    return ready


def dtype_of(options: TokensOptions) -> torch.dtype:
    """Of weights and pictures."""
    return torch.bfloat16 if options.device == "cuda" and options.precision == "bf16" else torch.float32


def autocast(options: TokensOptions) -> torch.autocast:
    """bfloat16 on CUDA if asked for, nothing on a CPU."""
    enabled = options.device == "cuda" and options.precision == "autocast"
    # Without a cache of weights: a CUDA graph must not use one that was filled outside of it.
    return torch.autocast(options.device, dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


def inference(module: Callable[[Tensor], Tensor], x: Tensor, options: TokensOptions) -> Callable[[], Tensor]:
    """A call of the module without gradients, in the precision of the device."""

    def call() -> Tensor:
        with torch.inference_mode(), autocast(options):
            return module(x)

    return call


def _model_parts(options: TokensOptions, batch: int, tokens: int, seed: int) -> list[Contender]:
    """One block and the whole model on the same number of tokens."""
    model: Any = create_vit(options, tokens, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens + model.num_prefix_tokens, model.embed_dim, generator=generator)
    x = x.to(options.device, dtype_of(options))
    pictures = smooth_pictures(batch, tokens, generator).to(x)

    def block() -> Built:
        _affordable(model.blocks[0], x, options, "clustering")
        return _finite(inference(model.blocks[0], x, options))

    def forward() -> Built:
        _affordable(model, pictures, options, "models")
        return _finite(inference(model, pictures, options), whole=True)

    return [Contender("block", block), Contender("forward", forward)]


def _finite(call: Callable[[], Tensor], whole: bool = False) -> Built:
    error = 0.0 if bool(torch.isfinite(call()).all()) else math.inf
    return Built(WholeCall(call, in_a_row=4) if whole else call, error)


def _affordable(module: nn.Module, x: Tensor, options: TokensOptions, table: Table) -> None:
    if options.device == "cpu":
        too_slow(inference(module, x[:1], options), len(x), options, options.longest(table))


def model_contenders(
    options: TokensOptions, batch: int, tokens: int, seed: int, counts: Sequence[int], layers: Sequence[int]
) -> tuple[list[Contender], Asked]:
    """The plain model and the reduced ones in each mode, with the same weights on the same pictures.

    Args:
        counts: patch tokens that are left after each of the layers.

    Returns:
        The contenders, and what they ask for, which is known of each once it is built.
    """
    model = create_vit(options, tokens, seed)
    generator = torch.Generator().manual_seed(seed)
    pictures = smooth_pictures(batch, tokens, generator).to(options.device, dtype_of(options))
    reductions: dict[str, dict[str, Any]] = {"plain": {}}
    reductions |= {f"atc {linkage}": {"method": "atc", "linkage": linkage} for linkage in options.linkages}
    reductions["tome"] = {"method": "tome"}
    models: dict[str, nn.Module] = {}
    torch.compiler.reset()  # what was compiled for other sizes would make these dynamic
    asked: Asked = {}
    contenders = []
    for mode in modes_of(options):
        for name, reduction in reductions.items():
            common = options, models, name, pictures, mode, asked
            build = _reduced(*common, model, reduction, counts, layers) if mode == "eager" else _compiled(*common)
            contenders.append(Contender(f"{name}, {mode}", build))
    return contenders, asked


def modes_of(options: TokensOptions) -> tuple[Mode, ...]:
    """Eager always comes first: a patch throws away what was compiled before it."""
    return "eager", *(mode for mode in options.modes if mode != "eager")


def _reduced(
    options: TokensOptions,
    models: dict[str, nn.Module],
    name: str,
    pictures: Tensor,
    mode: Mode,
    asked: Asked,
    plain: nn.Module,
    reduction: dict[str, Any],
    counts: Sequence[int],
    layers: Sequence[int],
) -> Callable[[], Built]:
    """Builds the model with fewer tokens, checks how many it has, and leaves it in ``models``."""

    def build() -> Built:
        from hyptree.tokens.patch import patch

        _affordable(plain, pictures, options, "models")
        model: nn.Module = copy.deepcopy(plain)
        if reduction:
            handle = patch(model, counts=tuple(counts), layers=tuple(layers), **reduction)
            inference(model, pictures[:1], options)()
            if list(handle.num_tokens) != list(counts):
                raise RuntimeError(f"expected {list(counts)} tokens after the layers, got {list(handle.num_tokens)}")
        models[name] = model
        return _asked(options, models, name, pictures, mode, asked)

    return build


def _compiled(
    options: TokensOptions, models: dict[str, nn.Module], name: str, pictures: Tensor, mode: Mode, asked: Asked
) -> Callable[[], Built]:
    def build() -> Built:
        if name not in models:
            raise Skipped("absent", "there is no eager one")
        return _asked(options, models, name, pictures, mode, asked)

    return build


def _asked(
    options: TokensOptions, models: dict[str, nn.Module], name: str, pictures: Tensor, mode: Mode, asked: Asked
) -> Built:
    """The model in one mode; also sees what a call of it asks of the host and of the memory of a GPU."""
    module = launches.in_mode(models[name], mode)
    call: Any = launches.marked(inference(module, pictures, options), mode)
    peak = launches.peak_bytes(call, models[name], mode) if options.device == "cuda" else None
    asked[f"{name}, {mode}"] = launches.measure(call, options.device, peak)
    return _finite(call, whole=True)
