"""Training of a tiny text tower on chains: it learns, keeps, resumes bit for bit, and refuses what cannot be."""

import json
import os
import signal
import zlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyptree.data.hierarchies.hierarcaps import Chain, read_hierarcaps, without_images_of
from hyptree.errors import UserError
from hyptree.vlm.radial.loss import RadialLoss
from hyptree.vlm.radial.settings import RadialSettings
from hyptree.vlm.radial.trainer import CHECKPOINT, FIRST, METRICS, TRAINED, RadialTrainer, train


class TinyTower(nn.Module):
    """Words by hash, a recurrent layer, a projection: order of words counts, "" is the start token alone."""

    def __init__(self, seed: int = 0, width: int = 24):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.words = nn.Embedding(512, width)
            self.layer = nn.GRU(width, width, batch_first=True)
            self.out = nn.Linear(width, width)

    def encode(self, texts):
        rows = [[0] + [1 + zlib.crc32(word.encode()) % 511 for word in text.split()] for text in texts]
        length = max(map(len, rows))
        index = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        states = self.layer(self.words(index))[0]
        return self.out(states[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])])


def made_chains(n=24):
    kinds = ("dog", "cat", "car", "tree")
    return [
        Chain(
            (f"{kinds[i % 4]}", f"big {kinds[i % 4]}", f"big {kinds[i % 4]} {i}", f"a big {kinds[i % 4]} {i} outside"),
            (f"{kinds[(i + 1) % 4]}", f"small {kinds[i % 4]}", f"big {kinds[(i + 2) % 4]} {i}", f"no {i}"),
            f"{i}.jpg",
        )
        for i in range(n)
    ]


def make(tower, chains=None, **settings):
    settings = {"lr": 1e-3, "batch_size": 4, **settings}
    return RadialTrainer(
        tower.encode, dict(tower.named_parameters()), chains or made_chains(), RadialSettings(**settings)
    )


def test_the_loss_falls_on_real_chains_and_keep_starts_at_zero(shared_data):
    folder = shared_data / "hierarcaps"
    if not folder.is_dir():
        pytest.skip("no hierarcaps here")
    test = read_hierarcaps(folder, "test")
    chains = without_images_of(read_hierarcaps(folder, "expanded"), test)[:200]
    tower = TinyTower()
    trainer = make(tower, chains, batch_size=8, steps=50)
    trainer.remember()
    with torch.no_grad():
        before = trainer.terms(chains)
    for _ in range(50):
        trainer.advance()
    with torch.no_grad():
        after = trainer.terms(chains)
    assert trainer.is_done
    assert before.keep < 1e-12  # the texts were padded differently, no more
    assert after.entail < before.entail - 0.02 and after.keep > before.keep
    assert after.positive - after.negative == pytest.approx(after.entail.item(), abs=1e-5)


def test_first_step_has_no_keep_and_weights_matter(seed):
    numbers = make(TinyTower()).advance()
    assert numbers["keep"] < 1e-12 and numbers["total"] == pytest.approx(numbers["entail"] + numbers["hard"], abs=1e-6)
    without = make(TinyTower(), hard_weight=0.0, entail_weight=2.0).advance()
    assert without["hard"] == 0 and without["total"] == pytest.approx(2 * numbers["entail"], abs=1e-6)


def test_the_root_is_the_empty_text_of_this_step_and_learns(seed):
    places = {text: i for i, text in enumerate(["", "a", "b", "c", "d"])}
    table = nn.Embedding(5, 6)
    chains = [Chain(("a", "b"), ("c", "d"))]
    trainer = RadialTrainer(
        lambda texts: table(torch.tensor([places[text] for text in texts])), {"table": table.weight}, chains
    )
    for _ in range(2):
        rows = table.weight.detach()
        expected = RadialLoss()(rows[None, [1, 2]], rows[None, [3, 4]], rows[0])
        terms = trainer.terms(chains)
        assert terms.total.item() == pytest.approx(expected.total.item(), abs=1e-6)
        (gradient,) = torch.autograd.grad(terms.entail, table.weight)
        assert gradient[0].abs().max() > 1e-3
        with torch.no_grad():
            table.weight[0] += torch.randn(6)  # where the root is next time


def test_keep_holds_embeddings_back(seed):
    moved = []
    for weight in (0.0, 100.0):
        tower = TinyTower()
        trainer = make(tower, keep_weight=weight, steps=20)
        while not trainer.is_done:
            trainer.advance()
        with torch.no_grad():
            moved.append(trainer.terms(trainer.chains).keep.item())
    assert moved[1] < moved[0] / 3


@pytest.mark.parametrize("settings", [{"geometry": "geodesic"}, {"geometry": "lorentz"}, {"objective": "cones"}])
def test_other_geometries_and_cones_learn(seed, settings):
    trainer = make(TinyTower(), steps=40, **settings)
    trainer.remember()
    with torch.no_grad():
        before = trainer.terms(trainer.chains)
    while not trainer.is_done:
        trainer.advance()
    with torch.no_grad():
        after = trainer.terms(trainer.chains)
    assert after.entail < before.entail - 0.01


def test_every_chain_once_per_epoch_in_an_order_of_its_own():
    trainer = make(TinyTower(), made_chains(10), epochs=2)
    assert trainer.num_steps == 6
    epochs = [[chain.image for step in range(3 * e, 3 * e + 3) for chain in trainer.batch(step)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(chain.image for chain in trainer.chains)
    assert epochs[0] != epochs[1] and len(trainer.batch(2)) == 2
    short = make(TinyTower(), made_chains(10), steps=1)
    assert set(short.texts()) == {text for chain in short.batch(0) for text in chain.texts}


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path):
    whole, halves = TinyTower(), TinyTower()
    train(make(whole, steps=12), tmp_path / "whole", log_every=3)
    train(make(halves, steps=5), tmp_path / "halves", log_every=3)
    again = TinyTower()
    resumed = make(again, steps=12)
    train(resumed, tmp_path / "halves", resume=True, log_every=3)
    assert resumed.step == 12
    for name, value in whole.named_parameters():
        assert torch.equal(value, dict(again.named_parameters())[name])
    lines = [json.loads(line) for line in (tmp_path / "halves" / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 5, 6, 9, 12]
    assert (tmp_path / "halves" / TRAINED).is_file()


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path):
    def interrupt(step, note):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(make(TinyTower(), steps=6), tmp_path / "cut", show=interrupt)
    assert not (tmp_path / "cut" / TRAINED).exists()
    tower, straight = TinyTower(), TinyTower()
    resumed = make(tower, steps=6)
    train(resumed, tmp_path / "cut", resume=True)
    train(make(straight, steps=6), tmp_path / "straight")
    assert all(torch.equal(a, b) for a, b in zip(tower.parameters(), straight.parameters(), strict=True))


def test_first_embeddings_are_taken_from_the_file_unless_it_is_of_another_encoder(tmp_path):
    tower = TinyTower()
    trainer = make(tower)
    message = []
    trainer.remember(tmp_path / FIRST, block=10, show=message.append)
    assert sum(message) == 1 + len(trainer.texts()) and max(message) == 10
    first = trainer.first.clone()
    calls = []
    counting = make(tower)
    counting.encode = lambda texts: calls.append(len(texts)) or tower.encode(texts)
    counting.remember(tmp_path / FIRST)
    assert calls == [1] and torch.equal(counting.first, first)
    other = make(TinyTower(seed=1))
    other.remember(tmp_path / FIRST)
    assert not torch.allclose(other.first, first)
    texts = trainer.texts()
    with torch.no_grad():
        expected = tower.encode(texts)
    assert torch.allclose(first, expected, atol=1e-6)


def test_another_encoder_does_not_go_on_with_a_run(tmp_path):
    train(make(TinyTower(), steps=2), tmp_path)
    with pytest.raises(UserError, match="made from an encoder of other weights"):
        train(make(TinyTower(seed=1), steps=4), tmp_path, resume=True)
    train(make(TinyTower(), steps=4), tmp_path, resume=True)


def test_progress_is_told(tmp_path):
    seen = []
    last = train(make(TinyTower(), steps=4), tmp_path, log_every=2, show=lambda *told: seen.append(told))
    assert [step for step, _ in seen] == [1, 2, 3, 4] and set(last) >= {"total", "entail", "hard", "keep"}
    assert seen[-1][1].startswith(f"total {last['total']:.4f}  entail {last['entail']:.4f}")
    assert seen[-1][1].endswith(" texts/s")


def test_frozen_parts_stay(seed):
    tower = TinyTower()
    parameters = {name: value for name, value in tower.named_parameters() if name.startswith("out")}
    before = tower.words.weight.detach().clone(), tower.out.weight.detach().clone()
    trainer = RadialTrainer(tower.encode, parameters, made_chains(), RadialSettings(lr=1e-3, steps=2))
    trainer.advance()
    assert torch.equal(tower.words.weight, before[0]) and not torch.equal(tower.out.weight, before[1])


def test_mistakes_are_one_line(tmp_path):
    tower = TinyTower()
    chains = made_chains(3)
    for bad, message in (
        ([], "no chains to train on"),
        ([Chain(chains[0].captions)], "chain 0 has 0 negatives, expected 4"),
        ([*chains, Chain(("a", "b"), ("c", "d"))], "chain 3 has 2 captions; expected 4 in every chain"),
        ([Chain(("a", " "), ("c", "d"))], "chain 0 has an empty caption"),
    ):
        with pytest.raises(UserError, match=message):
            RadialTrainer(tower.encode, dict(tower.named_parameters()), bad, RadialSettings())
    with pytest.raises(UserError, match="nothing to train"):
        RadialTrainer(tower.encode, {}, chains)
    for settings, message in (
        ({"lr": 0.0}, "lr must be positive"),
        ({"batch_size": 0}, "must be 1 or more"),
        ({"objective": "cone"}, "objective must be one of radial, cones, got 'cone'; did you mean 'cones'"),
        ({"geometry": "cord"}, "geometry must be one of chord"),
        ({"curvature": -1.0}, "curvature must be positive"),
    ):
        with pytest.raises(UserError, match=message):
            make(tower, **settings)
    train(make(tower, steps=1), tmp_path)
    with pytest.raises(UserError, match=r"it was made with lr = 0\.001, now it is 0\.1"):
        make(tower, lr=0.1).load(tmp_path / CHECKPOINT)
    with pytest.raises(UserError, match="other chains"):
        make(tower, made_chains(5)).load(tmp_path / CHECKPOINT)
    with pytest.raises(UserError, match=r"it has no words\.weight of this shape; it was made with another model"):
        make(TinyTower(width=12)).load(tmp_path / CHECKPOINT)
    other = make(TinyTower(width=12))
    other.remember(tmp_path / FIRST)  # of another width: made anew
    assert other.first.shape[1] == 12
    with pytest.raises(UserError, match="no such file"):
        train(make(tower), tmp_path / "none", resume=True)


def test_a_loss_that_is_not_finite_is_one_line(seed):
    tower = TinyTower()
    trainer = make(tower)
    trainer.remember()
    with torch.no_grad():
        tower.out.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="the loss is nan in step 1; lower --lr"):
        trainer.advance()
    with pytest.raises(UserError, match="not finite for"):
        make(tower).remember()


def test_equal_texts_are_encoded_once_per_step(seed):
    tower, seen = TinyTower(), []
    chains = [Chain(("a", "b"), ("c", "a"))] * 3
    trainer = RadialTrainer(
        lambda texts: seen.append(texts) or tower.encode(texts), dict(tower.named_parameters()), chains
    )
    terms = trainer.terms(chains)
    assert seen == [["", "a", "b", "c"]] and F.relu(terms.keep) == 0
