"""``hyptree bench vlm``: what an attached adapter adds to a training step of CLIP, and a few-shot head to inference.

A CLIP of transformers (ViT-B/16 by default, random weights) is trained on random pictures and words with the
contrastive loss: forward, backward, AdamW. The steps that are compared, in the same rounds:

* ``trained``: every weight of CLIP; the training step that overheads are a share of.
* ``frozen``: none, but gradients pass through to pictures and words, as they do below an adapter: the
  least that a step costs.
* ``q,k,v``: the matrices that the scale adapter goes on, trained themselves without one.
* ``scale``, ``diagonal``, ``lora``: adapters on these matrices; lora with as many parameters as scale.
* ``lora, layers``: the same LoRA as layers beside each projection, which is how others add it.
* ``merged``: scale after merging, frozen.

The table ``inference`` classifies pictures by the cosines of CLIP and by LatHAdapter's head, image tower included.

Before the clock starts a fresh adapter must leave the embeddings as they are and a merged one must give those of the
attached one. This module imports
torch only when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from benchmarks.options import ClockOptions
from benchmarks.session import Emit, session
from hyptree.errors import UserError, require
from hyptree.tables import markdown_head, markdown_row

if TYPE_CHECKING:
    import torch

    from benchmarks.harness import Built, Result

LIMIT = 1.03
"""What a step with the scale adapter may cost as a multiple of ``trained``, and a merged one of ``frozen``; on CUDA."""

TOLERANCE = 1e-5
"""Largest difference of normalised embeddings that must agree."""

TABLES = ("steps", "inference")
STEPS = ("trained", "frozen", "q,k,v", "scale", "diagonal", "lora", "lora, layers", "merged")


@dataclass
class VlmOptions(ClockOptions):
    QUICK: ClassVar[Mapping[str, Any]] = {"size": "tiny", "classes": 10, "batch": 2, "compile": False, "repeats": 2}

    size: Literal["tiny", "base"] = "base"
    """base is CLIP ViT-B/16; tiny shows that everything works, its times mean little."""
    tables: tuple[str, ...] = TABLES
    """What to measure: steps of training, inference with a few-shot head."""
    classes: int = 100
    """Among which pictures are classified, in the table of inference."""
    steps: tuple[str, ...] = STEPS
    """What to time; see above."""
    batch: int = 0
    """Pictures, and as many texts, per step; 0 for 128 on cuda and 2 on cpu."""
    block_size: int = 128
    """Of the scale adapter."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16 means autocast."""
    compile: bool = False
    """Run the models through torch.compile."""
    repeats: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, chosen, known in (("steps", self.steps, STEPS), ("tables", self.tables, TABLES)):
            if unknown := [word for word in chosen if word not in known]:
                raise UserError(f"{name} are {'; '.join(known)}, got {unknown[0]!r}")
        if self.classes < 1:
            raise UserError(f"classes must be 1 or more, got {self.classes}")


def run(options: VlmOptions, stream: TextIO | None = None) -> int:
    """Run the benchmark and print it; gives 1 if an answer is wrong or, on CUDA, a limit is missed."""
    require("transformers", "vlm")
    from benchmarks import harness
    from hyptree import machine

    with session(options, stream) as emit:
        head = machine.header(options.device, ("hyptree", "torch", "transformers", "triton"))
        where = ", ".join(f"{key} {value}" for key, value in head["machine"].items() if key != "threads")
        versions = ", ".join(f"{key} {value}" for key, value in head["versions"].items() if value)
        batch = options.batch or (128 if options.device == "cuda" else 2)
        way = "compiled" if options.compile else "eager"
        about = f"CLIP {options.size}, batch {batch}, {options.dtype}, {way}, {options.repeats} rounds"
        emit(
            {"kind": "header", **head, **options.settings(), "batch": batch},
            [f"machine   {where}", f"versions  {versions}, commit {head['commit']}", f"measured  {about}"],
        )
        clocks: dict[str, harness.Sample] = {"cpu": harness.cpu_sample, "wall": harness.wall_sample}
        sample = harness.synced_sample if options.device == "cuda" else clocks[options.clock]
        bench, code = _Bench(options, batch), 0
        if "steps" in options.tables:
            steps = [harness.Contender(step, bench.builder(step)) for step in options.steps]
            results = {result.name: result for result in harness.compare(steps, sample, options.repeats, TOLERANCE)}
            _table(results, bench, emit)
            code |= _verdict(results, options, emit)
        if "inference" in options.tables:
            from benchmarks.vlm import head as vlm_head

            ways = vlm_head.contenders(bench.model(), bench.pixels, options.classes, options.dtype, options.compile)
            binding = options.device == "cuda" and options.size == "base"
            code |= vlm_head.inference(ways, sample, options.repeats, binding, emit)
        return code


class _Bench:
    """Models, inputs and training steps."""

    def __init__(self, options: VlmOptions, batch: int):
        import torch

        self.options = options
        generator = torch.Generator().manual_seed(0)
        side, length, words = (224, 77, 49408) if options.size == "base" else (32, 8, 64)
        self.pixels = torch.randn(batch, 3, side, side, generator=generator).to(options.device)
        self.words = torch.randint(3, words - 1, (batch, length), generator=generator)
        self.words[:, -1] = words - 1  # the end of text
        self.words = self.words.to(options.device)
        self.block_size = options.block_size if options.size == "base" else 16
        self.trained: dict[str, int] = {}
        self.memory: dict[str, int] = {}

    def model(self) -> torch.nn.Module:
        """CLIP with random weights, always the same ones."""
        import torch
        from transformers import CLIPConfig, CLIPModel

        ends = {"bos_token_id": 1, "eos_token_id": 49407 if self.options.size == "base" else 63, "pad_token_id": 0}
        if self.options.size == "base":
            config = CLIPConfig(
                text_config={**ends, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8},
                vision_config={
                    "hidden_size": 768,
                    "num_hidden_layers": 12,
                    "num_attention_heads": 12,
                    "patch_size": 16,
                },
                projection_dim=512,
            )
        else:
            tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
            config = CLIPConfig(
                text_config={**tiny, **ends, "vocab_size": 64, "max_position_embeddings": 8},
                vision_config={**tiny, "image_size": 32, "patch_size": 16},
                projection_dim=16,
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: torch.nn.Module = CLIPModel(config)
        return model.to(self.options.device).train()

    def builder(self, step: str) -> Callable[[], Built]:
        """What prepares a step: the model, its optimizer, and the error of what it computes."""
        return lambda: self._build(step)

    def _build(self, step: str) -> Built:
        import torch

        from benchmarks.harness import Built

        model = self.model()
        error = self._change(model, step)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.trained[step] = sum(parameter.numel() for parameter in trained)
        fused = self.options.device == "cuda" or None
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=fused) if trained else None
        # Gradients must pass through the towers even where none of their weights is trained.
        embedding = model.text_model.embeddings.token_embedding  # type: ignore[union-attr]
        embedding.register_forward_hook(_require_gradient)  # type: ignore[union-attr]
        pixels = self.pixels.clone().requires_grad_()
        forward: Any = torch.compile(model) if self.options.compile else model
        autocast = self.options.dtype == "bfloat16"

        def run() -> object:
            with torch.autocast(self.options.device, dtype=torch.bfloat16, enabled=autocast):
                loss = forward(input_ids=self.words, pixel_values=pixels, return_loss=True).loss
            loss.backward()
            pixels.grad = None
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        if self.options.device == "cuda":
            run()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            self.memory[step] = torch.cuda.max_memory_allocated() - before
        return Built(run, error)

    def _change(self, model: torch.nn.Module, step: str) -> float | None:
        """Make the model what a step trains; gives the largest difference of embeddings that must agree."""
        import torch

        from hyptree.vlm import DiagonalConfig, LoraConfig, ScaleAdapterConfig, attach, attachment_points

        if step == "trained":
            return None
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if step == "frozen":
            return None
        n = self.block_size
        rank, targets = max(1, n // 2), ("q", "k", "v")
        if step == "q,k,v":
            for site in attachment_points(model, targets):
                site.base.requires_grad_(True)
            return None
        if step == "lora, layers":
            _add_lora_layers(model, rank)
            return None
        configs = {"diagonal": DiagonalConfig(), "lora": LoraConfig(rank, targets=targets)}
        before = self._embed(model)
        handle = attach(model, configs.get(step, ScaleAdapterConfig(n)))
        error = float((self._embed(model) - before).abs().max())
        if step == "merged":
            generator = torch.Generator().manual_seed(1)
            for parameter in handle.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(noise.to(parameter) * 0.01)
            attached = self._embed(model)
            handle.merge_and_unload()
            error = max(error, float((self._embed(model) - attached).abs().max()))
            for parameter in model.parameters():
                parameter.requires_grad_(False)
        return error

    def _embed(self, model: Any) -> torch.Tensor:
        """Embeddings of two texts and two pictures, without autocast."""
        import torch

        with torch.no_grad():
            output = model(input_ids=self.words[:2], pixel_values=self.pixels[:2])
        return torch.cat([output.text_embeds, output.image_embeds])


def _require_gradient(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad else output.requires_grad_()


def _add_lora_layers(model: torch.nn.Module, rank: int) -> None:
    """LoRA as two small layers beside each projection, added to what it gives."""
    import torch
    from torch import nn

    from hyptree.vlm import attachment_points

    def add(linear: Any) -> None:
        down = nn.Linear(linear.in_features, rank, bias=False, device=linear.weight.device)
        up = nn.Linear(rank, linear.out_features, bias=False, device=linear.weight.device)
        torch.nn.init.zeros_(up.weight)
        linear.lora = nn.Sequential(down, up)
        linear.register_forward_hook(lambda module, args, output: output + 2.0 * module.lora(args[0]))

    for site in attachment_points(model, ("q", "k", "v")):
        add(site.module)


def _table(results: dict[str, Result], bench: _Bench, emit: Emit) -> None:
    from benchmarks.harness import ratio

    columns = ["step", "ms", "of trained", "of frozen", "of q,k,v", "trained parameters"]
    columns += ["MiB in a step"] if bench.memory else []
    emit({"kind": "table", "name": "steps"}, ["", *markdown_head(columns)])
    for name, result in results.items():
        line: dict[str, Any] = {"kind": "step", "step": name, "status": result.status, "note": result.note}
        line |= {"seconds": result.median if result.seconds else None, "error": result.error}
        cells = [name, f"{1e3 * result.median:.2f}" if result.seconds else f"{result.status}: {result.note}"]
        for other in ("trained", "frozen", "q,k,v"):
            share = ratio(result, results[other]) if other in results else None
            key = f"of_{other.replace(',', '')}"
            line |= {key: share and share.value, f"{key}_quartiles": share and [share.low, share.high]}
            cells.append(f"{share.value:.3f}" if share else "-")
        line |= {"parameters": bench.trained.get(name), "peak_bytes": bench.memory.get(name)}
        cells.append(f"{bench.trained.get(name, 0):,}")
        cells += [f"{bench.memory[name] / 2**20:.0f}" if name in bench.memory else "-"] if bench.memory else []
        emit(line, [markdown_row(cells)])


def _verdict(results: dict[str, Result], options: VlmOptions, emit: Emit) -> int:
    from benchmarks.harness import ratio

    code = int(any(result.status in ("wrong", "failed") for result in results.values()))
    for name, other in (("scale", "trained"), ("merged", "frozen")):
        share = ratio(results[name], results[other]) if name in results and other in results else None
        if share is None:
            continue
        met = share.value <= LIMIT
        binding = options.device == "cuda" and options.size == "base"
        word = ("met" if met else "MISSED") if binding else "binding on cuda with --size base"
        emit(
            {"kind": "verdict", "step": name, "of": other, "ratio": share.value, "limit": LIMIT, "met": met}
            | {"binding": binding},
            [f"{name} takes {share.value:.3f} of {other}, limit {LIMIT}: {word}"],
        )
        code |= int(binding and not met)
    return code
