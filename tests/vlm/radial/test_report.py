"""The hierarchy report: an encoder whose hierarchy is known must be read as such; baselines beside; mistakes."""

import dataclasses
import json
import math
import os
import zlib

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from hyptree.data.hierarchies.hierarcaps import Chain
from hyptree.data.hierarchies.hyperlex import WordPair
from hyptree.data.world import World
from hyptree.errors import UserError
from hyptree.geometry import lorentz
from hyptree.tree import Tree
from hyptree.vlm.radial.coarse import coarse_classes, coarse_recall, words_of
from hyptree.vlm.radial.hierarchy_report import TINY_IMAGENET_CUT, hierarchy_report, world_chains
from hyptree.vlm.radial.report_lines import report_lines
from hyptree.vlm.radial.retrieval import class_embeddings, image_text_recall, zero_shot_accuracy
from hyptree.vlm.radial.suites import Texts, chain_angles, chain_order, graded_entailment, picture_chains


def radial_encoder(directions, norm=3.0):
    """Each text is (arc from the root, turn); the root is the first axis."""

    def encode(texts):
        rows = []
        for text in texts:
            arc, turn = directions.get(text, (0.0, 0.0))
            rows.append([math.cos(arc), math.sin(arc) * math.cos(turn), math.sin(arc) * math.sin(turn)])
        return norm * torch.tensor(rows)

    return encode


CHAINS = [
    Chain(("dog", "wet dog", "a wet dog outside"), ("cat", "dry cat", "a car"), "1.jpg"),
    Chain(("cat", "dry cat", "a dry cat inside"), ("dog", "wet dog", "a bus"), "2.jpg"),
]
DIRECTIONS = {
    "dog": (0.3, 0),
    "wet dog": (0.6, 0),
    "a wet dog outside": (0.9, 0),
    "a car": (0.8, 2.5),
    "a bus": (0.8, 2),
}
DIRECTIONS |= {"cat": (0.35, 1.5), "dry cat": (0.65, 1.5), "a dry cat inside": (0.95, 1.5)}


def test_chains_without_contradictions_are_compared_with_other_chains():
    bare = [dataclasses.replace(chain, negatives=()) for chain in CHAINS]
    texts = Texts(radial_encoder(DIRECTIONS), "geodesic")
    angles, whole = chain_angles(texts, bare), chain_angles(texts, CHAINS)
    assert "negative" not in angles and angles["other"] == whole["other"]


def test_known_order_and_angles():
    texts = Texts(radial_encoder(DIRECTIONS), "geodesic")
    actual = chain_order(texts, [chain.captions for chain in CHAINS])
    assert actual["tau_d"]["tau_a"] == 1 and actual["tau_d"]["first_two"] == 1
    assert [level["distance"] for level in actual["levels"]] == pytest.approx([0.325, 0.625, 0.925], abs=1e-6)
    assert actual["levels"][0]["norm"] == pytest.approx(3) and actual["levels"][0]["radius"] == pytest.approx(6)
    assert actual["levels"][2]["words"] == 4 and actual["root_norm"] == pytest.approx(3)
    assert actual["baselines"]["words"]["tau_a"] == 1
    angles = chain_angles(texts, CHAINS)
    negative, other = angles["negative"], angles["other"]
    assert negative["angle_next"] == pytest.approx(0, abs=1e-6) and negative["accuracy"] == other["accuracy"] == 1
    assert negative["num_pairs"] == other["num_pairs"] == 4 and other["angle_next"] == negative["angle_next"]
    # The contradiction of the general caption itself; the next caption of the other chain.
    for actual, wrong in (
        (negative, [("dog", "cat"), ("wet dog", "dry cat"), ("cat", "dog"), ("dry cat", "wet dog")]),
        (
            other,
            [("dog", "dry cat"), ("wet dog", "a dry cat inside"), ("cat", "wet dog"), ("dry cat", "a wet dog outside")],
        ),
    ):
        expected = texts.angle(*(list(column) for column in zip(*wrong, strict=True))).mean().item()
        assert actual["angle_wrong"] == pytest.approx(expected, abs=1e-6)
    chord = Texts(radial_encoder(DIRECTIONS))
    assert chord.distance(["dog"]).item() == pytest.approx(2 * math.sin(0.15), abs=1e-6)
    expected = np.mean([(0.6) / 2, (0.9) / 2, 0.65 / 2, 0.95 / 2])
    assert chain_angles(chord, CHAINS)["negative"]["angle_next"] == pytest.approx(expected, abs=1e-6)


def test_cosine_baseline_and_ties():
    texts = Texts(radial_encoder({"a": (0.5, 0), "b": (0.8, 0), "c": (0.8, 0)}))
    angles = chain_angles(texts, [Chain(("a", "b"), ("c", "b"))])
    assert angles["negative"]["accuracy"] == angles["negative"]["cosine_accuracy"] == 0.5  # b and c on the same spot
    assert angles["negative"]["cosine_next"] == pytest.approx(math.cos(0.3), abs=1e-6)
    assert "other" not in angles  # one chain has no other
    again = chain_angles(texts, [Chain(("a", "b"), ("c", "b")), Chain(("A", "c"), ("c", "b"))])
    assert "other" not in again  # the same start is no other


def test_texts_are_embedded_once_and_the_root_is_the_encoders_own(seed):
    seen = []

    def encode(texts):
        seen.extend(texts)
        return torch.tensor([[1.0 + len(text), 2.0, zlib.crc32(text.encode()) % 7] for text in texts])

    texts = Texts(encode, block=2)
    rows = texts.raw(["bb", "a", "bb", "ccc"])
    assert sorted(seen) == ["", "a", "bb", "ccc"] and torch.equal(rows[0], rows[2])
    assert torch.equal(texts.root, encode([""])[0])
    assert torch.allclose(texts.cosine(["a"], ["ccc"]), F.cosine_similarity(rows[1:2], rows[3:]))


def test_graded_entailment_both_directions_and_baselines():
    directions = {"animal": (0.3, 0), "dog": (0.7, 0), "car": (0.6, 2.0), "vehicle": (0.35, 2.0)}
    pairs = [
        WordPair("dog", "animal", "N", "hyp-1", 10.0),
        WordPair("car", "vehicle", "N", "hyp-1", 9.0),
        WordPair("animal", "dog", "N", "r-hyp-1", 3.0),
        WordPair("dog", "vehicle", "N", "no-rel", 0.0),
    ]
    actual = graded_entailment(Texts(radial_encoder(directions), "geodesic"), pairs)
    assert set(actual) == {"all", "nouns"} and actual["all"]["num_pairs"] == 4
    assert actual["all"]["angle"] > actual["all"]["reversed"]
    assert actual["all"]["distance"] == pytest.approx(0.4)  # 0.4, 0.25, -0.4, 0.35 against 10, 9, 3, 0: 1 - 6 * 6 / 60
    between = [
        math.acos(math.cos(a) * math.cos(b) + math.sin(a) * math.sin(b) * math.cos(s - t))  # on the sphere
        for (a, s), (b, t) in ((directions[pair.word], directions[pair.general]) for pair in pairs)
    ]
    people = [pair.score for pair in pairs]
    assert actual["all"]["cosine"] == pytest.approx(stats.spearmanr(np.cos(between), people).statistic)
    assert set(actual["nouns"]) == {"num_pairs", "angle", "reversed", "cosine", "distance", "characters"}


def test_lorentz_lifts_tangent_vectors():
    def encode(texts):
        return torch.tensor([[0.5 * len(text), 0.0] for text in texts])

    texts = Texts(encode, "lorentz", c=0.3)
    assert texts.distance(["aa", "aaaa"]).tolist() == pytest.approx([1.0, 2.0], abs=1e-5)
    assert texts.angle(["aa"], ["aaaa"]).item() == pytest.approx(0, abs=1e-5)
    actual = picture_chains(texts, encode(["aa", "aaa"]), [["a", "aa"], ["aaa", "aaaa"]])
    assert set(actual["retrieval"]) == {"chord", "one_minus_cos", "lorentz"}
    report = hierarchy_report(encode, ["world-text"], geometry="lorentz", curvature=0.3, limit=5)
    assert report["curvature"] == 0.3 and report["suites"]["world-text"]["by_norm"]["tau_a"] > 0


def test_picture_chains(seed):
    texts = Texts(radial_encoder(DIRECTIONS))
    images = texts.raw(["a wet dog outside", "a dry cat inside"])
    actual = picture_chains(texts, images, [chain.captions for chain in CHAINS])
    assert actual["retention"]["text R@1"] == actual["retention"]["image R@1"] == 1
    assert actual["retrieval"]["chord"]["recall"] == 1  # the cat's chain begins with the dog, which is nearest the root
    assert actual["retrieval"]["chord"]["precision"] == pytest.approx((1 + 3 / 4) / 2)
    with pytest.raises(UserError, match="a picture for each of the 2 chains, got 1"):
        picture_chains(texts, images[:1], [chain.captions for chain in CHAINS])
    with pytest.raises(UserError, match="pictures have 2 features and texts 3"):
        picture_chains(texts, images[:, :2], [chain.captions for chain in CHAINS])


def test_a_hyperbolic_encoder_is_compared_by_distance(seed):
    """On the hyperboloid the nearest text is not the one with the largest cosine: lengths count."""
    embedded = {"": [0.0, 0.01], "thing": [0.3, 0.0], "dog": [1.0, 0.1], "far dog": [9.0, 0.0]}
    encode = lambda texts: torch.tensor([embedded[text] for text in texts])  # noqa: E731
    picture = torch.tensor([[1.2, 0.0]])
    chain = [["thing", "dog", "far dog"]]
    curved = picture_chains(Texts(encode, "lorentz", 1.0, own_c=1.0), picture, chain)
    assert curved["retrieval"]["lorentz"]["recall"] == pytest.approx(2 / 3)  # thing, dog; the far dog is too far
    points = lorentz.expmap0(encode(["thing", "dog", "far dog"]), 1.0)
    assert zero_shot_accuracy(lorentz.expmap0(picture, 1.0), points, [1], ks=(1,), c=1.0) == {"top-1": 1.0}
    assert zero_shot_accuracy(picture, encode(["thing", "dog", "far dog"]), [1], ks=(1,)) == {"top-1": 0.0}


def test_coarse_recall_of_a_hyperbolic_encoder():
    arcs = {"animal": (0.3, 0.0), "food": (0.4, 2.0), "car": (0.5, 4.0)}
    arcs |= {"dog": (2.0, 0.1), "cat": (2.0, -0.1), "red wine": (2.0, 2.0)}
    encode = lambda texts: torch.tensor(  # noqa: E731
        [[r * math.cos(turn), r * math.sin(turn)] for r, turn in (arcs.get(text, (0.0, 0.0)) for text in texts)]
    )
    classes = coarse_classes(family_tree(), 4, 1)
    images = 1.1 * encode(["dog", "cat", "red wine", "car"])
    actual = coarse_recall(images, [0, 1, 2, 3], classes, encode, template="{}", ks=(1,), c=1.0)
    assert actual["names"]["R@1"] == actual["leaves"]["R@1"] == 1
    assert actual["radial"]["R@1"] == 0.5  # every chain begins with "animal", which has the least radius


def test_world_chains_are_the_captions_of_the_pictures():
    chains, world = world_chains("val", 6), World("val", num_images=6, size=64)
    assert [chain.captions for chain in chains] == [world[i].captions for i in range(6)]
    assert [chain.negatives for chain in chains] == [world[i].contradictions for i in range(6)]


WORDS = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))


def hashed(texts):
    """Any text as a vector that depends on its words."""
    rows = [[zlib.crc32(word.encode()) % 4096 for word in ["<s>", *text.split()]] for text in texts]
    return torch.stack([WORDS[row].sum(0) for row in rows])


class TwoTowers:
    """Text by words; a picture as the mean of its pixels, somewhere."""

    name, width, curvature = "two towers", 16, None

    def encode_text(self, texts, normalize=False):
        return hashed(texts)

    def encode_images(self, pictures, normalize=False):
        pixels = torch.stack([torch.as_tensor(np.asarray(picture)).float().flatten() for picture in pictures])
        return torch.stack([pixels.mean(1) * k + pixels.std(1) * (16 - k) for k in range(16)], 1)


def test_report_of_the_world_goes_through_json_and_the_table():
    report = hierarchy_report(TwoTowers(), ["world-text", "world-images"], limit=40)
    assert json.loads(json.dumps(report)) == report
    actual = report["suites"]["world-images"]
    assert set(actual["coarse"]) == {"groups", "families"} and set(actual["zero_shot"]) == {"top-1", "top-5"}
    assert actual["coarse"]["groups"]["chance"]["R@1"] == 1 / 4 and actual["coarse"]["families"]["chance"]["R@5"] == 0.5
    text = "\n".join(report_lines(report))
    for piece in ("two towers: width 16", "tau_d", "baseline: words", "levels 1-2", "by cosine (baseline)", "2 norm"):
        assert piece in text
    assert "precision" in text and "text R@5" in text and "coarse classes: families" in text


def test_report_on_the_real_files(shared_data):
    if not (shared_data / "hierarcaps").is_dir() or not (shared_data / "hyperlex").is_dir():
        pytest.skip("no hierarcaps or hyperlex here")
    images = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    report = hierarchy_report(hashed, images=images, data=shared_data)
    actual = report["suites"]
    assert list(actual) == ["hierarcaps-text", "hyperlex", "hierarcaps-images"]
    words = actual["hierarcaps-text"]["baselines"]["words"]
    assert [words["tau_a"], words["tau_b"], words["first_two"]] == pytest.approx([0.890, 0.913, 0.346], abs=1e-3)
    assert actual["hierarcaps-text"]["angles"]["num_chains"] == 1000
    assert [actual["hyperlex"][kind]["num_pairs"] for kind in ("all", "nouns", "verbs")] == [2616, 2163, 453]
    assert actual["hierarcaps-images"]["retrieval"]["chord"]["num_images"] == 1000
    assert actual["hierarcaps-images"]["retention"]["text R@10"] < 0.05  # random pictures
    text = "\n".join(report_lines(report))
    assert "HyperLex, rho" in text and "reversed" in text


def test_pictures_of_the_real_files_are_read(shared_data):
    if not (shared_data / "hierarcaps").is_dir():
        pytest.skip("no hierarcaps here")
    report = hierarchy_report(TwoTowers(), ["hierarcaps-images"], data=shared_data, limit=12)
    assert report["suites"]["hierarcaps-images"]["retrieval"]["one_minus_cos"]["num_images"] == 12


def test_tiny_imagenet(shared_data):
    if not (shared_data / "tiny-imagenet-wordnet").is_dir():
        pytest.skip("no tiny-imagenet here")
    report = hierarchy_report(TwoTowers(), ["tiny-imagenet"], data=shared_data, limit=60)
    ((cut, ways),) = report["suites"]["tiny-imagenet"]["coarse"].items()
    paths = [
        entry["path_names"] for entry in json.loads((shared_data / "tiny-imagenet-wordnet/classes.json").read_text())
    ]
    covered = [path for path in paths if not set(TINY_IMAGENET_CUT).isdisjoint(path)]
    assert cut == f"14 above {len(covered)}" and len(covered) == 176
    assert ways["chance"]["R@5"] == pytest.approx(5 / 14)


def test_cifar10(shared_data):
    if not (shared_data / "cifar10").is_dir():
        pytest.skip("no cifar10 here")
    report = hierarchy_report(TwoTowers(), ["cifar10"], data=shared_data, limit=50)
    actual = report["suites"]["cifar10"]
    assert set(actual["zero_shot"]) == {"top-1", "top-5"} and actual["zero_shot"]["top-1"] < 0.5
    assert actual["coarse"]["2 above 10"]["chance"] == {"R@1": 0.5, "R@5": 1.0}


def test_mistakes_of_the_report_are_one_line(tmp_path):
    for options, message in (
        ({"suite": ["hyperlx"]}, "suite must be one of .* got 'hyperlx'; did you mean 'hyperlex'"),
        ({}, "hierarcaps needs its files: give the folder"),
        ({"data": tmp_path / "none"}, "there is no folder"),
        ({"data": tmp_path}, r"has no hierarcaps_test\.csv"),
        ({"suite": "hyperlex", "data": tmp_path}, r"has no hyperlex-all\.txt"),
        ({"suite": "world-images", "limit": 4}, "reads text alone"),
        ({"suite": "world-text", "geometry": "flat"}, "geometry must be one of"),
        ({"suite": "world-text", "limit": 0}, "limit must be 1 or more, got 0"),
        ({"suite": "world-text", "curvature": -1.0}, "curvature must be positive"),
    ):
        with pytest.raises(UserError, match=message):
            hierarchy_report(hashed, **options)
    with pytest.raises(UserError, match="not finite for ''"):
        hierarchy_report(lambda texts: hashed(texts) * float("nan"), "world-text", limit=3)


def test_a_collapsed_encoder_has_no_order_and_one_chain_no_spread():
    report = hierarchy_report(lambda texts: torch.ones(len(texts), 4), "world-text", limit=3)
    actual = report["suites"]["world-text"]
    assert actual["tau_d"]["tau_b"] is None and actual["tau_d"]["num_undefined"] == 3
    assert actual["angles"]["negative"]["accuracy"] == 0.5 and "NaN" not in json.dumps(report)
    line = next(line for line in report_lines(report) if "tau_d" in line)
    assert line.split()[-4:] == ["-", "-", "0.000", "3"]
    alone = hierarchy_report(hashed, "world-text", limit=1)["suites"]["world-text"]
    assert alone["levels"][0]["distance_sd"] == 0 and alone["tau_d"]["error"] is None


def test_real_sentence_encoder(shared_data):
    folder = os.environ.get("HYPTREE_MINILM")
    if not folder:
        pytest.skip("set HYPTREE_MINILM to the folder of a MiniLM sentence encoder")
    from hyptree.vlm.encoders.encoder import load_encoder

    report = hierarchy_report(load_encoder(f"hf:{folder}"), "hierarcaps-text", data=shared_data, limit=100)
    actual = report["suites"]["hierarcaps-text"]
    assert actual["tau_d"]["tau_a"] < actual["baselines"]["words"]["tau_a"]
    assert actual["angles"]["other"]["accuracy"] > 0.85


# ------------------------------------------------------------------------------------------- classes, retention


def family_tree():
    names = ["dog.n.01", "cat.n.01", "red_wine.n.01", "car.n.01", "animal.n.01", "food.n.01", "thing.n.01", "pet.n.01"]
    return Tree([7, 7, 5, 6, 6, 6, -1, 4], label=names)


def test_cuts_through_a_tree():
    by_depth = coarse_classes(family_tree(), 4, 1)
    assert by_depth.coarse == ("animal", "food", "car") and by_depth.coarse_of.tolist() == [0, 0, 1, 2]
    assert by_depth.fine == ("dog", "cat", "red wine", "car")
    named = coarse_classes(family_tree(), 4, ["animal.n.01", "pet.n.01", "food.n.01"])
    assert named.coarse == ("pet", "food") and named.kept.tolist() == [0, 1, 2]  # the nearest; the car has none
    with pytest.raises(UserError, match="leaves 1 coarse classes"):
        coarse_classes(family_tree(), 4, ["thing.n.01"])
    with pytest.raises(UserError, match="leaves 1 coarse classes"):
        coarse_classes(family_tree(), 4, 1, min_fine=2)
    with pytest.raises(ValueError, match="no node is called"):
        coarse_classes(family_tree(), 4, ["anima.n.01"])
    assert words_of("guinea_pig.n.02") == "guinea pig" and words_of("St. Bernard") == "St. Bernard"


def test_coarse_recall_by_hand():
    """Coarse names lie near the root, fine ones behind them, pictures behind the fine ones."""
    directions = {"animal": (0.3, 0.0), "food": (0.31, 2.0), "car": (0.32, 4.0)}
    directions |= {"dog": (0.9, 0.1), "cat": (0.9, -0.1), "red wine": (0.9, 2.0)}
    encode = radial_encoder(directions)
    classes = coarse_classes(family_tree(), 4, 1)
    images = encode(["dog", "cat", "red wine", "car", "red wine"])
    actual = coarse_recall(images, [0, 1, 2, 3, 0], classes, encode, template="{}", ks=(1, 2))
    assert actual["names"]["R@1"] == 0.8
    assert actual["leaves"]["R@1"] == 0.8  # the last picture looks like wine and is called a dog
    assert actual["pool"]["R@1"] == pytest.approx(
        1 / 5
    )  # fine names win but for the car, which is its own coarse class
    assert actual["pool"]["R@2"] == pytest.approx(2 / 5)  # and "food" behind "red wine"; two fine ones precede "animal"
    # Every chain begins with "animal", nearest the root; wine goes on with "food", the car with "food", "car".
    assert actual["radial"] == {"R@1": pytest.approx(3 / 5), "R@2": pytest.approx(4 / 5)}
    assert actual["chance"] == {"R@1": 1 / 3, "R@2": 2 / 3}
    # The best leaf counts, not their mean: cats on the far side take nothing from a dog.
    apart = radial_encoder(directions | {"dog": (0.9, 0.0), "cat": (0.9, math.pi), "red wine": (0.9, 0.8)})
    actual = coarse_recall(apart(["dog"]), [0], classes, apart, template="{}", ks=(1,))
    assert actual["leaves"]["R@1"] == 1
    with pytest.raises(UserError, match="no picture belongs"):
        coarse_recall(images[:1], [3], coarse_classes(family_tree(), 4, ["animal.n.01", "food.n.01"]), encode)


def test_image_text_recall_by_hand():
    images = torch.eye(3)
    texts = torch.tensor([[1.0, 0.1, 0.0], [0.9, 1.0, 0.0], [1.0, 0.0, 0.5], [0.0, 1.0, 0.2]])
    actual = image_text_recall(images, texts, [0, 1, 2, 2], ks=(1, 2))
    # Pictures: 0 finds text 0, 1 finds text 3 (of picture 2) and then its own, 2 finds its text 2.
    assert actual["text R@1"] == pytest.approx(2 / 3) and actual["text R@2"] == 1
    # Texts: 0 and 1 find their pictures, 2 finds picture 0 and then 2, 3 finds picture 1 and then 2.
    assert actual["image R@1"] == pytest.approx(2 / 4) and actual["image R@2"] == 1
    alone = image_text_recall(images, texts[:2], ks=(1,))
    assert alone["text R@1"] == 1  # the third picture has no text and is not asked for one
    with pytest.raises(ValueError, match="one of the 3 pictures"):
        image_text_recall(images, texts, [0, 1, 2, 3])


def test_zero_shot_and_class_names():
    classes = class_embeddings(hashed, ["dog", "cat"], ("a {}", "the {}"))
    expected = F.normalize(F.normalize(hashed(["a cat"]), dim=-1) + F.normalize(hashed(["the cat"]), dim=-1), dim=-1)
    assert torch.allclose(classes[1:], expected, atol=1e-6)
    images = torch.stack([classes[0], classes[1], classes[0]])
    assert zero_shot_accuracy(images, classes, [0, 1, 1], ks=(1, 2)) == {"top-1": pytest.approx(2 / 3), "top-2": 1.0}
    for names, message in ((["dog", "dog"], "the class list has 'dog' twice"), (["dog", " "], "has an empty name")):
        with pytest.raises(UserError, match=message):
            class_embeddings(hashed, names)
    with pytest.raises(UserError, match="a template holds "):
        class_embeddings(hashed, ["dog"], ("a photo",))
    with pytest.raises(ValueError, match="one of the 2 classes"):
        zero_shot_accuracy(images, classes, [0, 1, 2])
