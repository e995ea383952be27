"""The cost-volume head, windows over large pictures, the loss, the numbers, and the task that trains it all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyptree.config import load
from hyptree.data.sample import IGNORE
from hyptree.errors import UserError
from hyptree.evaluate.pictures.openvocab_scores import split_scores
from hyptree.runs import RunFolder
from hyptree.train import evaluate_run, fit, load_model
from hyptree.train.run.recipe import Recipe
from hyptree.train.tasks import build_task
from hyptree.vlm.openvocab.cost_volume import CostVolumeHead, linear_attention, pixel_loss
from hyptree.vlm.openvocab.segmenter import sliding_scores, window_starts
from hyptree.vlm.openvocab.settings import METHODS, OpenVocabSettings
from tests.vlm.small_models import save_dual

pytest.importorskip("transformers", reason="install hyptree[vlm]")

ROOT = Path(__file__).resolve().parents[3]
SMALL_HEAD = {"channels": 16, "guide": 8, "num_heads": 2, "window": 4, "decoder": [8, 8]}
ADAPTERS = {"scale": {"block_size": 8}, "lora": {"rank": 2}, "orthogonal": {"block_size": 8}}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dual(tmp_path_factory.mktemp("openvocab") / "clip", "clip")


def small_segmenter(folder: Path, **settings: Any) -> Any:
    from hyptree.vlm.encoders.encoder import load_encoder
    from hyptree.vlm.openvocab.segmenter import OpenVocabSegmenter

    chosen = OpenVocabSettings(**{"method": "frozen"} | settings)
    return OpenVocabSegmenter(load_encoder(f"hf:{folder}"), chosen, window=32, head=SMALL_HEAD)


def small_recipe(folder: Path, *overrides: str, name: str = "openvocab_world") -> Recipe:
    settings = (
        *("data.size=32", "data.num_train=8", "data.num_val=4", "data.batch_size=4", "run.device=cpu"),
        *("run.tensorboard=false", "run.log_steps=1", "data.cache=null", "schedule.epochs=2", "run.eval_every=0"),
        *(f"model.name=hf:{folder}", "run.ema=null", "model.args.eval_size=null", "model.args.adapter.block_size=8"),
        *(f"model.head.{name}={value}" for name, value in SMALL_HEAD.items()),
    )
    return load(Recipe, ROOT / "recipes" / f"{name}.yaml", [*settings, *overrides])


# ------------------------------------------------------------------------------------------------------------ the head


def small_head(**options: Any) -> CostVolumeHead:
    return CostVolumeHead(12, 20, **SMALL_HEAD | options).eval()


def head_input(num_classes: int = 5, size: tuple[int, int] = (6, 7)) -> tuple[Tensor, Tensor, list[Tensor]]:
    return torch.randn(2, 12, *size), torch.randn(num_classes, 12), [torch.randn(2, 20, *size) for _ in range(2)]


@torch.no_grad()
@pytest.mark.parametrize("size", [(6, 7), (3, 3), (8, 4), (9, 13)])
def test_head_gives_a_map_per_class_and_follows_their_order(size: tuple[int, int]) -> None:
    head = small_head()
    features, text, blocks = head_input(size=size)
    logits = head(features, text, blocks)
    assert logits.shape == (2, 5, 4 * size[0], 4 * size[1])
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(head(features, text[order], blocks), logits[:, order], atol=1e-5, rtol=1e-4)
    alone = head(features[1:], text, [block[1:] for block in blocks])  # a picture does not depend on its neighbours
    torch.testing.assert_close(alone, logits[1:], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_lengths_of_embeddings_change_nothing() -> None:
    head = small_head()
    features, text, blocks = head_input()
    torch.testing.assert_close(head(features * 3, text * 0.2, blocks), head(features, text, blocks), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_class_depends_on_the_others_by_the_aggregation_of_classes_alone() -> None:
    head = small_head(num_layers=1)
    features, text, blocks = head_input()
    other = torch.cat([text[:1], torch.randn(4, 12)])
    first, second = (head(features, words, blocks)[:, 0] for words in (text, other))
    assert (first - second).abs().max() > 1e-4
    torch.nn.init.zeros_(head.classes[0].out.weight)
    torch.testing.assert_close(head(features, text, blocks)[:, 0], head(features, other, blocks)[:, 0])


def test_half_precision_gives_nearly_the_same() -> None:
    head = small_head()
    features, text, blocks = head_input()
    with torch.no_grad():
        whole = head(features, text, blocks)
        with torch.autocast("cpu", torch.bfloat16):
            half = head(features, text, blocks)
    assert torch.isfinite(half).all()
    assert (half.float() - whole).abs().max() < 0.05 * whole.abs().max()


def test_every_weight_of_the_head_learns() -> None:
    head = small_head(pooling=1).train()
    head(*head_input()).square().mean().backward()
    dead = [name for name, p in head.named_parameters() if p.grad is None or float(p.grad.abs().max()) == 0]
    assert not dead, dead


def draw_maps(num_classes: int) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """What an ideal CLIP would give for new classes: patches are the text of their class, with as much noise on top."""
    text = torch.randn(num_classes, 12)
    truth = torch.randint(num_classes, (4, 3, 3)).repeat_interleave(2, 1).repeat_interleave(2, 2)
    features = text[truth].permute(0, 3, 1, 2) + torch.randn(4, 12, 6, 6)
    labels = truth.repeat_interleave(4, 1).repeat_interleave(4, 2)
    return features, text, [torch.randn(4, 20, 6, 6) for _ in range(2)], labels


def test_head_learns_on_some_classes_and_segments_others() -> None:
    head = small_head().train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(60):
        *inputs, truth = draw_maps(5)
        optimizer.zero_grad()
        pixel_loss(head(*inputs), truth).backward()
        optimizer.step()
    with torch.no_grad():  # eight classes nobody has seen, where five were learned from
        pairs = [(head(*inputs).argmax(1), truth) for *inputs, truth in (draw_maps(8) for _ in range(5))]
    right = torch.stack([(actual == truth).float().mean() for actual, truth in pairs])
    assert right.mean() > 0.8, right  # one in eight by chance


def test_fresh_head_expects_little() -> None:
    with torch.no_grad():
        head = small_head()
        logits = head(*head_input())
    assert head.out.bias.item() == pytest.approx(np.log(0.05 / 0.95))
    assert float(logits.sigmoid().mean()) < 0.2
    torch.manual_seed(3)
    plain = small_head()
    torch.manual_seed(3)
    torch.testing.assert_close(small_head(gain=7.0).embed.weight, 7 * plain.embed.weight)


def test_linear_attention_is_its_definition() -> None:
    query, key, value = (torch.randn(2, 3, 7, 4) for _ in range(3))
    weights = torch.einsum("abne,abme->abnm", F.elu(query) + 1, F.elu(key) + 1)
    expected = (weights / weights.sum(-1, keepdim=True)) @ value
    torch.testing.assert_close(linear_attention(query, key, value), expected)


def test_head_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="channels 10 must be a multiple of num_heads 4"):
        CostVolumeHead(12, 20, channels=10)
    features, text, blocks = head_input()
    with pytest.raises(ValueError, match="1 prompts per class, got 2"):
        small_head()(features, torch.randn(5, 2, 12), blocks)
    with pytest.raises(ValueError, match="features of 2 blocks, got 1"):
        small_head()(features, text, blocks[:1])


# ------------------------------------------------------------------------------------------------------------- windows


def test_windows_of_the_paper() -> None:
    assert window_starts(640, 384) == [0, 256]
    assert window_starts(384, 384) == [0]
    assert window_starts(700, 384) == [0, 158, 316]


@pytest.mark.parametrize(
    ("length", "window", "overlap"), [(100, 30, 1 / 3), (97, 32, 0.5), (50, 49, 0.0), (65, 8, 0.9)]
)
def test_windows_cover_the_axis_and_share_enough(length: int, window: int, overlap: float) -> None:
    starts = window_starts(length, window, overlap)
    assert starts[0] == 0 and starts[-1] == length - window
    steps = np.diff(starts)
    assert (steps >= 1).all() and steps.max() <= round(window * (1 - overlap)) + 1


def test_sliding_averages_probabilities_by_hand() -> None:
    """One class whose logit is the window's own mean: every average can be written down."""
    pictures = torch.randn(1, 3, 8, 14)

    def predict(views: Tensor) -> Tensor:
        return views.mean((1, 2, 3), keepdim=True).expand(-1, 1, 8, 8)

    actual = sliding_scores(predict, pictures, 8, 0.25, global_view=False)
    left, right = (pictures[0, :, :, x : x + 8].mean().sigmoid() for x in (0, 6))
    expected = torch.cat([left.expand(6), ((left + right) / 2).expand(2), right.expand(6)]).expand(1, 1, 8, 14)
    torch.testing.assert_close(actual, expected)
    whole = F.interpolate(pictures, size=(8, 8), mode="bilinear", antialias=True).mean().sigmoid()
    both = sliding_scores(predict, pictures, 8, 0.25, batch_size=2)
    torch.testing.assert_close(both, (expected + whole) / 2)


def test_a_picture_of_one_window_is_looked_at_once() -> None:
    pictures = torch.randn(3, 3, 8, 8)
    calls = []

    def predict(views: Tensor) -> Tensor:
        calls.append(len(views))
        return views[:, :2]

    torch.testing.assert_close(sliding_scores(predict, pictures, 8), pictures[:, :2].sigmoid())
    assert calls == [3]


# ------------------------------------------------------------------------------------------------------- loss, numbers


def test_pixel_loss_by_hand() -> None:
    logits = torch.randn(2, 3, 4, 5, requires_grad=True)
    truth = torch.randint(0, 3, (2, 4, 5), dtype=torch.uint8)
    truth[0, :2] = IGNORE
    total, count = 0.0, 0
    for b, y, x in np.ndindex(2, 4, 5):
        if truth[b, y, x] != IGNORE:
            for k in range(3):
                sign = 1 if int(truth[b, y, x]) == k else -1
                total -= float(F.logsigmoid(sign * logits[b, k, y, x].detach().double()))
                count += 1
    loss = pixel_loss(logits, truth)
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-5)
    loss.backward()
    assert logits.grad is not None and float(logits.grad[0, :, :2].abs().max()) == 0
    halves = sum(pixel_loss(logits[i : i + 1], truth[i : i + 1], (truth != IGNORE).sum() / 2) for i in range(2)) / 2
    torch.testing.assert_close(halves, loss)
    nothing = pixel_loss(logits, torch.full((2, 4, 5), IGNORE))
    assert float(nothing.detach()) == 0


def test_split_scores_by_hand() -> None:
    #                 predicted sky dog cat
    matrix = torch.tensor([[6, 2, 0], [0, 4, 4], [2, 0, 8]])
    actual = split_scores(matrix, ["sky", "dog", "cat"], ["cat"])
    sky, dog, cat = 6 / 10, 4 / 10, 8 / 14
    assert actual["miou_seen"] == pytest.approx((sky + dog) / 2)
    assert actual["miou_unseen"] == pytest.approx(cat)
    assert actual["miou"] == pytest.approx((sky + dog + cat) / 3)
    assert actual["miou_harmonic"] == pytest.approx(2 * 0.5 * cat / (0.5 + cat))
    assert actual["iou/cat"] == pytest.approx(cat)
    closed = split_scores(matrix, ["sky", "dog", "cat"], [])
    assert closed["miou_harmonic"] == closed["miou"] and "miou_unseen" not in closed


# ------------------------------------------------------------------------------------------------------------ settings


def test_settings_split_classes() -> None:
    settings = OpenVocabSettings(unseen=("cat", "tree"), rename={"sky": "blue sky"}, template="a {}.")
    classes = ("sky", "cat", "road_sign", "tree")
    assert settings.split(classes) == (("sky", "road_sign"), ("cat", "tree"))
    assert settings.prompts(classes[:3]) == ["a blue sky.", "a cat.", "a road sign."]
    with pytest.raises(UserError, match="'sky' and 'blue_sky' have one sentence"):
        settings.prompts(("cat", "sky", "blue_sky"))


@pytest.mark.parametrize(
    ("settings", "classes", "message"),
    [
        ({"unseen": ("cats",)}, ("sky", "cat"), "no class 'cats'; did you mean 'cat'"),
        ({"rename": {"moon": "sun"}}, ("sky", "cat"), "model.args.rename: there is no class 'moon'"),
        ({"unseen": ("sky", "cat")}, ("sky", "cat"), "names all classes"),
        ({}, ("sky", "cat", "sky"), "the class 'sky' is in the list twice"),
    ],
)
def test_wrong_class_lists_are_one_line(settings: dict[str, Any], classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OpenVocabSettings(**settings).split(classes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metod": "lora"}, "unknown key 'metod'; did you mean 'method'"),
        ({"method": "prefix"}, "method must be one of frozen, scale"),
        ({"template": "a photo"}, r"template must hold \{\}"),
        ({"overlap": 1.0}, "overlap must be from 0 to below 1"),
        ({"blocks": [1]}, "blocks must be two numbers"),
        ({"unseen": ["cat", "dog", "cat"]}, "unseen names the class 'cat' twice"),
        ({"method": "frozen", "adapter": {"rank": 2}}, "frozen takes no adapter options"),
    ],
)
def test_wrong_settings_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OpenVocabSettings.read(options)


# ----------------------------------------------------------------------------------------------------------- the model


@torch.no_grad()
def test_segmenter_answers_for_any_classes_and_sizes(clip_folder: Path) -> None:
    model = small_segmenter(clip_folder).eval()
    pixels = torch.randn(2, 3, 32, 48)
    logits = model(pixels, classes=["truck", "grass", "animal"])
    assert logits.shape == (2, 3, 32, 48)
    words = model.text_features(["truck", "grass", "animal"])
    torch.testing.assert_close(model(pixels, text=words), logits)
    large = model.scores(torch.randn(1, 3, 56, 64), classes=["truck", "grass"])
    assert large.shape == (1, 2, 56, 64) and float(large.min()) > 0 and float(large.max()) < 1
    with pytest.raises(UserError, match="list of classes is empty"):
        model.text_features([])
    with pytest.raises(UserError, match="needs classes"):
        model(pixels)
    with pytest.raises(UserError, match="empty name"):
        model.text_features(["truck", " "])
    with pytest.raises(UserError, match="the class 'truck' is in the list twice"):
        model(pixels, classes=["truck", "grass", "truck"])
    assert model.double().text_features(["truck"]).dtype == torch.float64
    assert model(pixels.double(), classes=["truck", "grass", "animal"]).shape == (2, 3, 32, 48)


@torch.no_grad()
def test_texts_are_those_of_the_frozen_tower_as_it_is(clip_folder: Path) -> None:
    model, pixels = small_segmenter(clip_folder).eval(), torch.randn(1, 3, 32, 32)
    before, words = model(pixels, classes=["truck"]), model.text_features(["truck"])
    model.clip.text_projection.weight.data.neg_()
    torch.testing.assert_close(model.text_features(["truck"]), -words)
    assert not torch.equal(model(pixels, classes=["truck"]), before)


@torch.no_grad()
def test_zero_shot_is_the_cosine_of_patches(clip_folder: Path) -> None:
    model = small_segmenter(clip_folder)
    pixels = torch.randn(1, 3, 32, 32)
    text = model.encoder.encode_text(["A photo of a truck in the scene", "A photo of a road in the scene"])
    cosines = F.cosine_similarity(model.tower(pixels).features[0, :, None], text.T[:, :, None, None], dim=0)
    expected = F.interpolate(cosines[None], size=(32, 32), mode="bilinear")  # from (1, 2, 4, 4)
    torch.testing.assert_close(model.zero_shot(pixels, model.text_features(["truck", "road"])), expected)


def test_only_what_is_trained_is_saved(clip_folder: Path) -> None:
    frozen = small_segmenter(clip_folder)
    assert all(name == "base" or name.startswith("head.") for name in frozen.state_dict())
    assert not any(p.requires_grad for p in frozen.clip.parameters())
    assert {"base"} | {f"head.{name}" for name in frozen.head.state_dict()} == set(frozen.state_dict())


@pytest.mark.parametrize("method", [name for name in METHODS if name != "frozen"])
def test_methods_train_the_adapter_and_nothing_else(clip_folder: Path, method: str) -> None:
    options = ADAPTERS.get(method, {})
    model = small_segmenter(clip_folder, method=method, adapter=options)
    pixels = torch.randn(2, 3, 32, 32)
    classes = ["truck", "grass"]
    with torch.no_grad():
        plain = small_segmenter(clip_folder)
        plain.head.load_state_dict(model.head.state_dict())
        torch.testing.assert_close(model(pixels, classes), plain(pixels, classes), atol=1e-5, rtol=1e-4)
    trained = {name for name, p in model.clip.named_parameters() if p.requires_grad}
    assert trained and {f"clip.{name}" for name in trained} <= set(model.state_dict())
    assert len(model.state_dict()) < len(plain.clip.state_dict()) + len(model.head.state_dict())
    base = {name: p.detach().clone() for name, p in model.clip.named_parameters() if not p.requires_grad}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.startswith("clip.") and p.requires_grad], "lr": 0.1},
        {"params": list(model.head.parameters()), "lr": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    pixel_loss(model(pixels, classes), torch.randint(0, 2, (2, 32, 32))).backward()
    assert all(p.grad is not None for group in groups for p in group["params"])
    optimizer.step()
    with torch.no_grad():
        assert (model(pixels, classes) - plain(pixels, classes)).abs().max() > 1e-4
    assert all(torch.equal(p, base[name]) for name, p in model.clip.named_parameters() if name in base)
    assert all(p._lr_scale == 0.075 for p in model.clip.parameters() if p.requires_grad)


def test_open_clip_is_tuned_as_well(tmp_path: Path) -> None:
    """On pictures of another size than the pretraining one."""
    pytest.importorskip("open_clip", reason="install hyptree[vlm]")
    from hyptree.vlm.encoders.encoder import load_encoder
    from hyptree.vlm.openvocab.segmenter import OpenVocabSegmenter
    from tests.vlm.small_models import register_open_clip

    name = f"open_clip:{register_open_clip(tmp_path, 'hyptree-test-openvocab')}"
    models = [
        OpenVocabSegmenter(load_encoder(name, random_init=True), settings, window=32, head=SMALL_HEAD)
        for settings in (
            OpenVocabSettings(method="scale", adapter={"block_size": 8}),
            OpenVocabSettings(method="frozen"),
        )
    ]
    tuned, plain = models
    plain.head.load_state_dict(tuned.head.state_dict())
    pixels, classes = torch.randn(2, 3, 40, 48), ["truck", "grass"]
    with torch.no_grad():
        before = plain(pixels, classes)
        torch.testing.assert_close(tuned(pixels, classes), before, atol=1e-4, rtol=1e-3)
    pixel_loss(tuned(pixels, classes), torch.randint(0, 2, (2, 40, 48))).backward()
    assert tuned.handle.num_parameters() == 2 * 3 * 2 * 32 * 8
    gradients = [p.grad for p in tuned.handle.parameters()]
    assert all(grad is not None and float(grad.abs().max()) > 0 for grad in gradients)
    torch.optim.AdamW(tuned.handle.parameters(), lr=0.1).step()
    with torch.no_grad():
        assert (tuned(pixels, classes) - before).abs().max() > 1e-4


def test_adapter_options_are_checked(clip_folder: Path) -> None:
    with pytest.raises(UserError, match=r"model.args.adapter of method scale has no setting 'blok_size'; did you mean"):
        small_segmenter(clip_folder, method="scale", adapter={"blok_size": 8})
    with pytest.raises(UserError, match=r"window 30 must be a multiple of the patch of hf:.*, 8"):
        small_segmenter(clip_folder, window=30)


# ------------------------------------------------------------------------------------------------------------ the task


def test_recipe_trains_resumes_and_is_used_again(clip_folder: Path, tmp_path: Path) -> None:
    recipe = small_recipe(clip_folder)
    whole = fit(recipe, tmp_path / "whole", quiet=True)
    assert whole.step == 4
    for name in ("miou_seen", "miou_unseen", "cosine", "cosine_seen", "cosine_unseen", "cosine_harmonic"):
        assert 0 <= whole.numbers[name] <= 1, name
    assert whole.numbers["text_radius_before"] != whole.numbers["text_radius"]

    halves = tmp_path / "halves"
    task = build_task(recipe)
    calls = []

    class Stop(Exception):
        pass

    original = type(task).training_loss

    def stops(self: Any, model: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise Stop
        return original(self, model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(task), "training_loss", stops)
        with pytest.raises(Stop):
            fit(small_recipe(clip_folder, "run.save_steps=1"), halves, quiet=True)
    again = fit(small_recipe(clip_folder, "run.save_steps=1"), halves, resume=True, quiet=True)
    assert again.numbers == whole.numbers

    model, _ = load_model(tmp_path / "whole")
    model.check_base()
    assert evaluate_run(tmp_path / "whole")["miou_seen"] == pytest.approx(whole.best)
    saved = RunFolder(tmp_path / "whole").read_metrics()
    assert saved[-1]["split"] == "val"


def test_a_clip_takes_no_plugin(clip_folder: Path) -> None:
    with pytest.raises(UserError, match=r"the task openvocab takes no model\.plugin, got himapper; leave it out"):
        build_task(small_recipe(clip_folder, "model.plugin.name=himapper"))


def test_unseen_classes_teach_nothing(clip_folder: Path) -> None:
    task = build_task(small_recipe(clip_folder, "model.args.unseen=[car, pine]"))
    model = task.build_model(task.describe(task.build_dataset("train")))
    asked: list[Any] = []

    class Watch(torch.nn.Module):
        module = model

        def forward(self, image: Tensor, classes: Any) -> Tensor:
            asked.append(classes)
            return model(image, classes=classes)

    from hyptree.data.world.classes import CLASSES

    car = CLASSES.index("car") + 1
    image = torch.randn(1, 3, 32, 32)
    loss, _ = task.training_loss(Watch(), {"image": image, "semantic": torch.full((1, 32, 32), car)})
    assert float(loss.detach()) == 0
    assert len(asked[0]) == 29 and not {"car", "pine"} & set(asked[0])
    truck = CLASSES.index("truck") + 1
    loss, _ = task.training_loss(Watch(), {"image": image, "semantic": torch.full((1, 32, 32), truck)})
    with torch.no_grad():
        logits = model(image, classes=asked[0])
    expected = pixel_loss(logits, torch.full((1, 32, 32), asked[0].index("truck")))
    assert float(loss.detach()) == pytest.approx(float(expected))


def test_another_clip_is_refused(clip_folder: Path, tmp_path: Path) -> None:
    recipe = small_recipe(clip_folder, "schedule.epochs=0.5", "model.args.method=frozen", "model.args.adapter={}")
    fit(recipe, tmp_path / "run", quiet=True)
    other = save_dual(tmp_path / "other", "clip", seed=1)
    moved = small_recipe(other, "model.args.method=frozen", "model.args.adapter={}")
    with pytest.raises(UserError, match="trained on another encoder than hf:"):
        evaluate_run(tmp_path / "run", recipe=moved)


@pytest.mark.parametrize(
    ("name", "file", "num_classes"),
    [
        ("openvocab_camvid", "camvid/camvid_240x180.npz", 11),
        ("openvocab_pets", "oxford-pets/oxford_pets_128.npz", 3),
    ],
)
def test_recipes_run_on_real_pictures(
    shared_data: Path, clip_folder: Path, tmp_path: Path, name: str, file: str, num_classes: int
) -> None:
    if not (root := shared_data / file).exists():
        pytest.skip(f"no {root}")
    quick = (f"data.root={root}", "schedule.steps=1", "data.num_val=2", "model.args.eval_size=48", "run.precision=fp32")
    result = fit(small_recipe(clip_folder, *quick, name=name), tmp_path / "run", quiet=True)
    assert 0 <= result.numbers["miou_unseen"] <= 1 and result.numbers["pixel_accuracy"] > 0
    model, recipe = load_model(tmp_path / "run")
    task = build_task(recipe)
    classes = task.build_dataset("val").semantic_classes
    assert len(classes) == num_classes and set(recipe.model.args["unseen"]) < set(classes)
    with torch.no_grad():
        assert model(torch.randn(1, 3, 32, 32), classes=classes).shape == (1, num_classes, 32, 32)


def test_folders_in_the_layout_of_coco_stuff(clip_folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for kind in ("images", "labels"):
            (tmp_path / "data" / kind / split).mkdir(parents=True)
        for i in range(count):
            image = rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "data" / "images" / split / f"{i}.jpg")
            labels = rng.choice(np.array([0, 1, 2, 255], np.uint8), (40, 56))
            Image.fromarray(labels).save(tmp_path / "data" / "labels" / split / f"{i}.png")
    (tmp_path / "data" / "classes.txt").write_text("truck\ngrass\nroad\n")
    quick = (f"data.root={tmp_path / 'data'}", "schedule.steps=1", "run.precision=fp32", "data.workers=0")
    recipe = small_recipe(clip_folder, *quick, "model.args.unseen=[road]", name="openvocab_coco_stuff")
    numbers = fit(recipe, tmp_path / "run", quiet=True).numbers
    assert {"iou/truck", "iou/grass", "iou/road"} <= set(numbers)
