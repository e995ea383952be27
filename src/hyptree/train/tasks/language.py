"""Language models on text: HELM of ``hyptree.lm``, or its Euclidean twin of the same shape."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyptree.errors import UserError, as_user_error, require
from hyptree.evaluate.text.perplexity import as_score, batch_sums, byte_lengths
from hyptree.evaluate.text.residual_stream import stream_statistics
from hyptree.train.run.recipe import Recipe
from hyptree.train.task import Gather, Task

Batch = dict[str, Tensor]
TWIN = "twin:"


class Language(Task):
    """Next-token cross entropy; perplexity per token and bits per byte, block by block.

    A sample is a block of ``text.block_length`` tokens; ``data.batch_size`` counts blocks.
    """

    metric = "log_likelihood"
    unit = "tok"
    probes = True

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        require("transformers", "lm")
        self.units_per_sample = recipe.text.block_length
        self._token_bytes: Tensor | None = None
        text = recipe.text
        self._masks = text.packing == "documents" if text.mask_boundaries is None else text.mask_boundaries

    def build_dataset(self, split: str) -> Any:
        from hyptree.data.text import build_text

        return build_text(self.recipe.text, split)

    def describe(self, dataset: Any) -> dict[str, Any]:
        """The size of the vocabulary and the tokenizer, whole: a run can be used where neither text nor cache is."""
        from hyptree.data.text import pack_tokenizer
        from hyptree.data.text.tokenizer import vocabulary_size

        tokenizer = dataset.tokenizer
        return {
            "vocab_size": vocabulary_size(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "token_bytes": byte_lengths(tokenizer).tolist(),
            "tokenizer": pack_tokenizer(tokenizer),
        }

    def build_model(self, data: dict[str, Any]) -> nn.Module:
        self._token_bytes = torch.tensor(data["token_bytes"])
        return build_language_model(self.recipe, data)

    def transform(self, train: bool) -> None:
        return None

    def collate(self, samples: Sequence[Batch], train: bool) -> Batch:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def build_loader(
        self, dataset: Any, train: bool, *, rank: int = 0, world_size: int = 1, skipped: dict[str, str] | None = None
    ) -> Any:
        """Batches of blocks, resumable at the exact block; text cannot have samples that are skipped."""
        from hyptree.data.text import build_text_loader

        run = self.recipe.run
        if dataset.train and not train:  # numbers on the training text: every block once
            dataset = copy.copy(dataset)
            dataset.train = False
        return build_text_loader(
            dataset,
            batch_size=self.batch_size(train),
            seed=run.seed,
            rank=rank,
            world_size=world_size,
            accumulate=run.accumulate if train else 1,
            pin_memory=self.on_gpu,
        )

    def count(self, batch: Batch) -> Tensor | None:
        """Blocks have equally many targets unless the first token of each document is none."""
        return (batch["labels"][:, 1:] != -100).sum() if self._masks else None

    def training_loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        count = batch.pop("count", None)
        output = model(**batch, num_items_in_batch=count, use_cache=False)
        aux = getattr(output, "aux_loss", None)
        return output.loss, {} if aux is None else {"aux_loss": aux.detach()}

    def after_step(self, model: nn.Module) -> None:
        """Balance the experts: their gates' biases move by the counts of this step."""
        post_step = getattr(model, "post_step", None)
        if post_step is not None:
            post_step()

    def probe(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Length of the stream after each layer, share of numbers at a bound, load and curvature of experts."""
        return stream_statistics(model, batch)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], gather: Gather) -> dict[str, float]:
        assert self._token_bytes is not None
        sums = []
        for batch in batches:
            self._token_bytes = self._token_bytes.to(batch["labels"].device)
            sums.append(batch_sums(model, batch, self._token_bytes, use_cache=False, logits_to_keep=1))
        device = next(model.parameters()).device
        mine = torch.stack(sums) if sums else torch.zeros(0, 3, dtype=torch.float64, device=device)
        score = as_score(gather(mine).sum(0))
        return {
            "log_likelihood": -score.loss,
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
        }


def build_language_model(recipe: Recipe, data: dict[str, Any]) -> nn.Module:
    """The preset that the recipe names, or its twin, for the vocabulary of the data, with fresh weights.

    Raises:
        UserError: unknown preset or option, or a vocabulary or context that the text does not fit into.
    """
    from hyptree.lm.presets import preset

    settings = recipe.model
    if settings.pretrained:
        raise UserError("model.pretrained: there are no weights to download; model.weights starts from a run")
    vocab_size = data["vocab_size"]
    options = {"vocab_size": vocab_size} | {
        key: data[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if data[key] is not None
    }
    with as_user_error(f"model {settings.name}"):
        config = preset(settings.name.removeprefix(TWIN), **options | settings.args)
    if config.vocab_size < vocab_size:
        raise UserError(
            f"model.args.vocab_size is {config.vocab_size}, the tokenizer has {vocab_size} tokens; leave it out"
        )
    if recipe.text.block_length > config.max_position_embeddings:
        raise UserError(
            f"text.block_length {recipe.text.block_length} is longer than the context of {settings.name}, "
            f"{config.max_position_embeddings}; choose shorter blocks or set model.args.max_position_embeddings"
        )
    if settings.name.startswith(TWIN):
        from hyptree.lm.twins import euclidean_twin

        with as_user_error(f"model {settings.name}"):
            return euclidean_twin(config)
    from hyptree.lm.modeling import HelmForCausalLM

    return HelmForCausalLM(config)
