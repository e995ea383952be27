"""COCO's format: ids with gaps, polygons, run lengths, crowds, pictures without annotations."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hyptree.data import build_dataset, build_loader, eval_transform, train_transform
from hyptree.data.pictures.coco import Coco
from hyptree.data.sample import BadSample
from hyptree.data.settings import AugmentSettings, DataSettings
from hyptree.errors import UserError
from tests.data.make import pixels, truncate, write_picture

pytest.importorskip("pycocotools")

HEIGHT, WIDTH = 30, 40


def rectangle(x, y, w, h):
    """A polygon and the mask that it means."""
    mask = np.zeros((HEIGHT, WIDTH), bool)
    mask[y : y + h, x : x + w] = True
    return [[x, y, x + w, y, x + w, y + h, x, y + h]], mask


def run_lengths(mask):
    """COCO's plain run lengths: column by column, beginning with the zeros."""
    flat = np.concatenate([[0], mask.T.flatten().astype(int), [1 - int(mask[-1, -1])]])
    ends = np.flatnonzero(np.diff(flat))
    return {"size": list(mask.shape), "counts": np.diff(np.concatenate([[0], ends])).tolist()}


@pytest.fixture
def data():
    """Picture 7 has a rectangle of category 90, an L of category 3 and a crowd; picture 4 has nothing."""
    polygon, rectangle_mask = rectangle(5, 6, 10, 8)
    (left, left_mask), (right, right_mask) = rectangle(20, 2, 4, 12), rectangle(24, 10, 6, 4)
    crowd_mask = np.zeros((HEIGHT, WIDTH), bool)
    crowd_mask[20:28, 3:33:2] = True
    masks = [rectangle_mask, left_mask | right_mask, crowd_mask]
    common = {"image_id": 7}
    annotations = [
        {**common, "id": 1, "category_id": 90, "bbox": [5, 6, 10, 8], "segmentation": polygon, "iscrowd": 0},
        {**common, "id": 2, "category_id": 3, "bbox": [20, 2, 10, 12], "segmentation": [*left, *right]},
        {
            **common, "id": 3, "category_id": 90, "bbox": [3, 20, 29, 8], "segmentation": run_lengths(crowd_mask),
            "iscrowd": 1,
        },
    ]  # fmt: skip
    for annotation, mask in zip(annotations, masks, strict=True):
        annotation["area"] = int(mask.sum())
    images = [
        {"id": 7, "file_name": "seven.jpg", "height": HEIGHT, "width": WIDTH},
        {"id": 4, "file_name": "four.jpg", "height": HEIGHT, "width": WIDTH},
    ]
    categories = [
        {"id": 90, "name": "toothbrush", "supercategory": "indoor"},
        {"id": 3, "name": "car", "supercategory": "vehicle"},
        {"id": 5, "name": "airplane", "supercategory": "vehicle"},
    ]
    return {"images": images, "annotations": annotations, "categories": categories}, masks


@pytest.fixture
def root(tmp_path, data, seed):
    rng = np.random.default_rng(seed)
    for name in ("seven", "four"):
        write_picture(tmp_path / "train2017" / f"{name}.jpg", pixels(rng, HEIGHT, WIDTH))
    write_json(tmp_path, data[0])
    return tmp_path


def write_json(root, content, name="instances_train2017.json"):
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_instances(root, data):
    dataset = build_dataset(DataSettings(name="coco", root=root, num_classes=3), "train")
    assert dataset.box_classes == ("car", "airplane", "toothbrush") and dataset.category_ids == (3, 5, 90)
    assert len(dataset) == 2 and dataset.image_ids == {"four.jpg": 4, "seven.jpg": 7}
    sample = dataset[1]
    assert sample.id == "seven.jpg" and sample.image.shape == (3, HEIGHT, WIDTH)
    assert sample.boxes.tolist() == [[5, 6, 15, 14], [20, 2, 30, 14], [3, 20, 32, 28]]
    assert sample.boxes.dtype == torch.float32
    assert sample.box_labels.tolist() == [3, 1, 3]
    assert [dataset.category_ids[k - 1] for k in sample.box_labels] == [90, 3, 90]
    assert sample.crowd.tolist() == [False, False, True]
    assert np.array_equal(sample.masks.numpy(), np.stack(data[1]))
    assert dataset.box_tree.label[dataset.box_tree.lca(0, 1)] == "vehicle"


def test_a_picture_without_annotations(root):
    sample = Coco(root)[0]
    assert sample.id == "four.jpg" and sample.boxes.shape == (0, 4) and sample.masks.shape == (0, HEIGHT, WIDTH)
    assert sample.box_labels.shape == (0,) and sample.box_labels.dtype == torch.int64 and sample.crowd.shape == (0,)


def test_compressed_run_lengths(root, data):
    from pycocotools import mask

    content, masks = data
    for annotation, pixels_ in zip(content["annotations"], masks, strict=True):
        runs = mask.encode(np.asfortranarray(pixels_.astype(np.uint8)))
        annotation["segmentation"] = {"size": runs["size"], "counts": runs["counts"].decode()}
    write_json(root, content)
    assert np.array_equal(Coco(root)[1].masks.numpy(), np.stack(masks))


def test_boxes_alone(root, data):
    content, _ = data
    del content["annotations"][1]["segmentation"]
    content["annotations"].append({"image_id": 4, "category_id": 5, "bbox": [1, 1, 0, 5]})  # no area: left out
    write_json(root, content)
    dataset = Coco(root)
    assert dataset[1].masks is None and len(dataset[1].boxes) == 3 and len(dataset[0].boxes) == 0


@pytest.mark.parametrize("place", ["images/val2014", "val2014"])
def test_other_layouts(root, data, place, seed):
    rng = np.random.default_rng(seed)
    for name in ("seven", "four"):
        write_picture(root / place / f"{name}.jpg", pixels(rng, HEIGHT, WIDTH))
        write_picture(root / "test" / f"{name}.jpg", pixels(rng, HEIGHT, WIDTH))
    write_json(root, data[0], "instances_val2014.json")
    (root / "test" / "_annotations.coco.json").write_text(json.dumps(data[0]))
    assert len(Coco(root, "val")[1].boxes) == 3
    test = Coco(root, "test")
    assert test.annotation_file == root / "test" / "_annotations.coco.json" and len(test[1].boxes) == 3


def test_the_official_evaluation_reads_the_same_truth(root, data, capsys):
    """Our boxes and masks, handed back under the file's own ids as a perfect guess, score an AP of 1."""
    from pycocotools import mask
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    data[0]["annotations"][1]["iscrowd"] = 0  # we can do without, the official code cannot
    write_json(root, data[0])
    dataset = Coco(root)
    guesses = []
    for i in range(len(dataset)):
        sample = dataset[i]
        for k in range(len(sample.boxes)):
            runs = mask.encode(np.asfortranarray(sample.masks[k].numpy().astype(np.uint8)))
            x1, y1, x2, y2 = sample.boxes[k].tolist()
            guesses.append(
                {
                    "image_id": dataset.image_ids[sample.id],
                    "category_id": dataset.category_ids[int(sample.box_labels[k]) - 1],
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "segmentation": {"size": runs["size"], "counts": runs["counts"].decode()},
                    "score": 1.0,
                }
            )
    truth = COCO(str(dataset.annotation_file))
    actual = truth.loadRes(guesses)
    for kind in ("bbox", "segm"):
        evaluation = COCOeval(truth, actual, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert evaluation.stats[0] == pytest.approx(1.0)
    capsys.readouterr()


def test_batches_move_boxes_and_masks_together(root):
    transform = train_transform(AugmentSettings(scale_jitter=(0.6, 1.6)), 48, "detect")
    loader = build_loader(Coco(root), list, batch_size=2, seed=1, train=True, transform=transform, workers=1)
    seen = 0
    for epoch in range(4):
        loader.set_epoch(epoch)
        for sample in next(iter(loader)):
            assert sample.image.shape == (3, 48, 48) and sample.masks.shape == (len(sample.boxes), 48, 48)
            for box, mask in zip(sample.boxes, sample.masks, strict=True):
                rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
                assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                seen += 1
    assert seen >= 6
    loader.close()


def test_bad_pictures_are_named(root, data):
    truncate(root / "train2017" / "four.jpg")
    dataset = Coco(root)
    with pytest.raises(BadSample, match=r"four\.jpg: .*truncated"):
        dataset[0]
    content, _ = data
    content["images"][0]["width"] = 41
    content["images"][1]["file_name"] = "gone.jpg"
    write_json(root, content)
    dataset = Coco(root)
    with pytest.raises(BadSample, match=r"gone\.jpg: no such file"):
        dataset[0]
    with pytest.raises(BadSample, match=r"seven\.jpg: picture of 40x30 pixels, annotated as 41x30"):
        dataset[1]
    content["images"][0]["width"] = 40
    content["annotations"][0]["segmentation"] = {"size": [30, 40]}
    write_json(root, content)
    with pytest.raises(BadSample, match="cannot read the segmentation of annotation 1"):
        Coco(root)[1]
    for polygon in ([2, 3, 20, 20], [2, 3, 20, 20, 8]):  # pycocotools would take the first for a box
        content["annotations"][0]["segmentation"] = [polygon]
        write_json(root, content)
        with pytest.raises(BadSample, match="annotation 1: a polygon is x and y of three points or more"):
            Coco(root)[1]
    loader = build_loader(Coco(root), list, batch_size=1, seed=0, train=False, transform=eval_transform(32, "detect"))
    with pytest.raises(UserError, match="2 of the first 2 pictures cannot be read"):
        list(loader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "expected lists images, annotations and categories; categories is missing"),
        (lambda c: c["images"][1].pop("width"), r"images\[1\] has no width"),
        (lambda c: c["annotations"][2].pop("bbox"), r"annotations\[2\] has no bbox"),
        (lambda c: c["annotations"][0].update(image_id=99), r"annotations\[0\] is for picture 99, which is not listed"),
        (lambda c: c["annotations"][1].update(category_id=8), r"has category 8, which is not one of the 3 categories"),
        (lambda c: c["annotations"][1].update(bbox=[1, 2]), "has a bbox of 2 numbers, expected 4"),
        (lambda c: c["categories"][0].update(id=3), "two categories have the same id"),
        (lambda c: c["images"][0].update(id=4), "two pictures have the same id"),
        (lambda c: c["images"][0].update(file_name="four.jpg"), "two pictures have the same file name"),
    ],
)
def test_wrong_annotations_are_one_clear_line(root, data, change, message):
    content, _ = data
    change(content)
    write_json(root, content)
    with pytest.raises(UserError, match=message) as caught:
        Coco(root)
    assert "\n" not in str(caught.value) and "instances_train2017.json" in str(caught.value)


def test_wrong_folders_are_one_clear_line(root, tmp_path):
    with pytest.raises(
        UserError, match=r"there is no folder .*nowhere; expected annotations/instances_train2017\.json"
    ):
        Coco(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no annotations for val; expected .*, found annotations, train2017"):
        Coco(root, "val")
    write_json(root, "{", "instances_val2017.json")
    with pytest.raises(UserError, match=r"there is no folder .*val2017 with the pictures of instances_val2017\.json"):
        Coco(root, "val")
    (root / "val2017").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*instances_val2017\.json: Expecting"):
        Coco(root, "val")
    write_json(root, "{", "instances_val2014.json")
    with pytest.raises(UserError, match=r"several files for val: instances_val2014\.json, instances_val2017\.json"):
        Coco(root, "val")


@pytest.mark.parametrize("name", ["../outside.jpg", "a/../../outside.jpg", "{absolute}", "C:/outside.jpg"])
def test_a_picture_outside_its_folder_is_refused(root, data, seed, name):
    write_picture(root / "outside.jpg", pixels(np.random.default_rng(seed), HEIGHT, WIDTH))
    content = data[0]
    content["images"][0]["file_name"] = name.replace("{absolute}", str(root / "outside.jpg"))
    write_json(root, content)
    with pytest.raises(UserError, match=r"2017\.json: file_name: '.*outside\.jpg' is not .* below .*train2017: mend"):
        Coco(root)


def test_a_picture_in_a_folder_of_its_own_and_with_a_colon_is_read(root, data, seed):
    write_picture(root / "train2017" / "day 1" / "12:30.jpg", pixels(np.random.default_rng(seed), HEIGHT, WIDTH))
    data[0]["images"][0]["file_name"] = "./day 1/12:30.jpg"
    write_json(root, data[0])
    assert Coco(root)[1].image.shape == (3, HEIGHT, WIDTH)
