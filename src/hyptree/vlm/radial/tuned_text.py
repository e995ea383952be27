"""The text encoder of a radial training run: what is trained of it, and how a run is loaded as an encoder."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from hyptree.config import build
from hyptree.errors import UserError
from hyptree.runs import RunFolder, best_weights
from hyptree.vlm.encoders.encoder import Encoder, load_encoder
from hyptree.vlm.encoders.tuned import TunedEncoder, attach_method
from hyptree.vlm.radial.settings import RadialSettings


class TunedText(TunedEncoder):
    """Embeddings of tokens by an encoder whose text tower, or an adapter on it, is trained.

    Shape:
        tokens of ``encoder.tokenize`` for n texts -> (n, d), not normalised
    """

    def __init__(self, encoder: Encoder, settings: RadialSettings):
        super().__init__(encoder)
        if settings.method == "tower":
            for parameter in encoder.text_parameters():
                parameter.requires_grad_(True)
        else:
            self.handle = attach_method(encoder, settings.method, settings.adapter, "radial.adapter", towers=("text",))
        for parameter in self.tuned_parameters():
            parameter._no_weight_decay = False  # type: ignore[attr-defined]  # the paper's AdamW decays vectors too
        self.save_trained_alone()

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        return self.encoder.encode_tokens(tokens)


def load_run(run: Path | str, *, random_init: bool = False, seed: int = 0) -> Encoder:
    """The encoder of a run of the task radial with its best weights; an adapter is merged into it.

    With ``random_init`` it is the encoder that the run started from, with random weights.
    """
    folder = RunFolder(run)
    recipe = folder.settings()
    source = f"{folder.path / 'recipe.yaml'}"
    try:
        settings = build(RadialSettings, recipe["radial"], "radial", source)
        name, own_seed = str(recipe["model"]["name"]), int(recipe["run"]["seed"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{source} is not a recipe of radial: {error}") from error
    if random_init:
        return load_encoder(name, random_init=True, seed=seed)
    model = TunedText(load_encoder(name, random_init=settings.random_init, seed=own_seed), settings)
    model.load_trained(best_weights(run), str(run))
    if model.handle is not None:
        model.handle.merge_and_unload()
    encoder: Encoder = model.encoder
    encoder.name = f"hf:{run}"
    encoder.model.requires_grad_(True)
    return encoder
