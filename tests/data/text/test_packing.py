"""Blocks of tokens: nothing dropped, documents kept apart, the same after a resume and with any number of processes."""

from __future__ import annotations

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyptree.data.text import BlockBatches, TextBlocks, build_text_loader, in_memory
from hyptree.data.text.stream import BlockOrder
from hyptree.errors import UserError

DOCUMENTS = st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=40), min_size=1, max_size=12)
PAD = 99_999


def joined(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]


def random_documents(seed: int, count: int = 30, longest: int = 50) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(1, longest)).tolist() for _ in range(count)]


def naive_positions(documents: list[list[int]], begin: int, length: int, restart: bool) -> list[int]:
    """Token by token, of the documents repeated without end."""
    endless = [i for document in documents for i in range(len(document))]
    actual: list[int] = []
    for place in range(begin, begin + length):
        inside = endless[place % len(endless)]
        fresh = restart and place == begin
        shift = endless[begin % len(endless)] if restart and inside > place - begin else 0
        actual.append(0 if fresh else inside - shift)
    return actual


@given(DOCUMENTS, st.integers(2, 30))
def test_evaluation_blocks_are_the_text_and_padding(documents: list[list[int]], length: int) -> None:
    text = joined(documents)
    blocks = TextBlocks(in_memory(documents), length, train=False, pad_token_id=PAD)
    actual = torch.cat([block["input_ids"] for block in blocks]).tolist()
    labels = torch.cat([block["labels"] for block in blocks]).tolist()
    num_padding = -len(text) % length
    assert actual == text + [PAD] * num_padding
    assert labels == text + [-100] * num_padding
    assert blocks.num_tokens == len(text) and len(blocks) * length == len(actual)
    with pytest.raises(IndexError, match=f"block {len(blocks)} of {len(blocks)}"):
        blocks[len(blocks)]


@given(DOCUMENTS, st.integers(2, 30), st.integers(1, 5))
def test_training_blocks_are_the_text_again_and_again(documents: list[list[int]], length: int, passes: int) -> None:
    text = joined(documents)
    if len(text) < length:
        with pytest.raises(UserError, match=f"{len(text)} tokens, less than one block of {length}"):
            TextBlocks(in_memory(documents), length)
        return
    blocks = TextBlocks(in_memory(documents), length)
    count = passes * len(text) // length
    actual = torch.cat([blocks[i]["input_ids"] for i in range(count)]).tolist()
    assert actual == (text * passes)[: count * length]  # what is left over, less than a block, comes with the next pass
    assert len(text) * passes - len(actual) < length


@given(DOCUMENTS, st.integers(2, 20), st.sampled_from(["restart", "continue"]), st.booleans())
def test_positions_and_labels_keep_documents_apart(
    documents: list[list[int]], length: int, positions: str, train: bool
) -> None:
    text = joined(documents)
    if train and len(text) < length:
        return
    options = {"packing": "documents", "positions": positions, "train": train, "pad_token_id": PAD}
    blocks = TextBlocks(in_memory(documents), length, **options)
    is_first = [i == 0 for document in documents for i in range(len(document))]
    for i in range(2 * len(blocks) if train else len(blocks)):
        block = blocks[i]
        expected = naive_positions(documents, i * length, length, positions == "restart")
        labels = [-100 if is_first[k % len(text)] else text[k % len(text)] for k in range(i * length, (i + 1) * length)]
        if not train and (num_padding := (i + 1) * length - len(text)) > 0:
            expected[-num_padding:] = range(num_padding)
            labels[-num_padding:] = [-100] * num_padding
        assert block["position_ids"].tolist() == expected
        assert block["labels"].tolist() == labels


def test_masks_of_transformers_are_block_diagonal(seed: int) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    documents = random_documents(seed, count=20, longest=12)
    length = 32
    for positions in ("restart", "continue"):
        blocks = TextBlocks(in_memory(documents), length, packing="documents", positions=positions)
        batch = blocks.batch([0, 1, 2])
        owner = np.concatenate([np.full(len(document), i) for i, document in enumerate(documents)])[: 3 * length]
        owner = torch.from_numpy(owner).view(3, length)
        expected = (owner[:, :, None] == owner[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
        config = LlamaConfig(attn_implementation="sdpa")
        embeddings = torch.zeros(3, length, 4)
        options = {"attention_mask": None, "past_key_values": None, "position_ids": batch["position_ids"]}
        mask = create_causal_mask(config, embeddings, **options)
        assert mask.dtype == torch.bool
        torch.testing.assert_close(mask[:, 0], expected)


def test_stream_has_no_positions_and_boundaries_can_be_masked_in_both(seed: int) -> None:
    documents = random_documents(seed)
    tokens = in_memory(documents)
    plain = TextBlocks(tokens, 16)
    assert set(plain[3]) == {"input_ids", "labels"} and torch.equal(plain[3]["labels"], plain[3]["input_ids"])
    masked = TextBlocks(tokens, 16, mask_boundaries=True)
    labels = torch.cat([block["labels"] for block in masked])
    starts = [start for start in tokens.starts.tolist() if start < len(labels)]
    assert (labels == -100).nonzero().flatten().tolist() == starts
    kept = TextBlocks(tokens, 16, packing="documents", mask_boundaries=False)[2]
    assert torch.equal(kept["labels"], kept["input_ids"])
    assert all(value.dtype == torch.int64 for value in kept.values())


@given(st.integers(2, 200), st.integers(2, 50), st.integers(0, 5))
def test_order_gives_every_block_of_a_pass_once(num_tokens: int, length: int, seed: int) -> None:
    if num_tokens < length:
        return
    order = BlockOrder(num_tokens, length, seed)
    for epoch in range(4):
        begin, end = order.first(epoch), order.first(epoch + 1)
        assert [order.epoch_of(place) for place in (begin, end - 1, end)] == [epoch, epoch, epoch + 1]
        assert sorted(order.blocks(begin, end - begin).tolist()) == list(range(begin, end))
    assert order.blocks(0, order.first(4)).tolist() == [int(order.blocks(i, 1)[0]) for i in range(order.first(4))]


def test_passes_are_shuffled_anew_by_the_seed() -> None:
    order, other = BlockOrder(10_000, 10, 0), BlockOrder(10_000, 10, 1)
    first, second = order.blocks(0, 1000), order.blocks(1000, 1000) - 1000
    assert not np.array_equal(first, np.arange(1000)) and not np.array_equal(first, second)
    assert not np.array_equal(first, other.blocks(0, 1000))
    assert np.array_equal(BlockOrder(10_000, 10, 0, shuffle=False).blocks(5, 9), np.arange(5, 14))


@given(st.integers(0, 40), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_resumed_anywhere_equals_uninterrupted(stop: int, factor: int, world_before: int, world_after: int) -> None:
    """Also with another number of processes and another batch size: the row of blocks just goes on."""
    blocks = TextBlocks(in_memory(random_documents(7)), 8)

    def sampler(world: int, rank: int, size: int) -> BlockBatches:
        return BlockBatches(blocks, batch_size=size, seed=3, rank=rank, world_size=world)

    def take(samplers: list[BlockBatches], count: int) -> list[int]:
        """The blocks of ``count`` batches of all processes, in order."""
        endless = [itertools.chain.from_iterable(itertools.repeat(one)) for one in samplers]
        return [block for _ in range(count) for one in endless for block in next(one)]

    size = 4 * factor
    whole = take([sampler(1, 0, 4)], (stop + 30) * factor)
    before = [sampler(world_before, rank, size) for rank in range(world_before)]
    seen = take(before, stop)
    states = [json.loads(json.dumps(one.state_dict())) for one in before]
    assert all(state == states[0] for state in states)
    after = [sampler(world_after, rank, 4) for rank in range(world_after)]
    for one in after:
        one.load_state_dict(states[0])
    seen += take(after, 30 * factor)
    assert seen == whole


def test_state_is_epoch_and_next_block_and_refuses_another_text(seed: int) -> None:
    documents = random_documents(seed, count=40)
    blocks = TextBlocks(in_memory(documents), 8)
    loader = build_text_loader(blocks, batch_size=4, seed=1)
    num_blocks = len(blocks)
    for _ in range(2):
        for _ in loader:
            pass
    state = loader.state_dict()
    done = 2 * (num_blocks // 4) * 4
    assert state["epoch"] * blocks.num_tokens // 8 + state["next_block"] == done
    other = build_text_loader(TextBlocks(in_memory(documents, "other"), 8), batch_size=4, seed=1)
    with pytest.raises(UserError, match=r"cannot resume the text: fingerprint was 'memory' and is 'other' now"):
        other.load_state_dict(state)
    with pytest.raises(UserError, match="seed was 1 and is 2 now"):
        build_text_loader(blocks, batch_size=4, seed=2).load_state_dict(state)


def test_loader_of_the_training_loop_leaves_no_block_out(seed: int) -> None:
    """As ``hyptree.train.loop`` asks: epochs of equal length, some resumed in the middle, accumulated batches."""
    documents = random_documents(seed, count=60)
    blocks = TextBlocks(in_memory(documents), 8)
    accumulate, size = 3, 2
    loader = build_text_loader(blocks, batch_size=size, seed=5, accumulate=accumulate)
    assert len(loader) % accumulate == 0 and len(loader) == len(blocks) // (size * accumulate) * accumulate
    row = blocks.batch(BlockOrder(blocks.num_tokens, 8, 5).blocks(0, 4 * len(loader) * size))["input_ids"]
    given_out = []
    for epoch in range(4):
        start = 0
        if epoch == 2:  # killed in the middle of it, and resumed by a new loader
            loader.set_epoch(epoch, 0)
            given_out += [batch["input_ids"] for batch, _ in zip(loader, range(accumulate), strict=False)]
            loader = build_text_loader(blocks, batch_size=size, seed=5, accumulate=accumulate)
            start = accumulate
        loader.set_epoch(epoch, start)
        given_out += [batch["input_ids"] for batch in loader]
    loader.close()
    assert torch.equal(torch.cat(given_out), row)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_share_evaluation_blocks(seed: int, world_size: int) -> None:
    blocks = TextBlocks(in_memory(random_documents(seed)), 8, train=False)
    shares = []
    for rank in range(world_size):
        loader = build_text_loader(blocks, batch_size=5, rank=rank, world_size=world_size)
        shares.append(torch.cat([batch["input_ids"] for batch in loader]))
        again = torch.cat([batch["input_ids"] for batch in loader])
        assert torch.equal(shares[-1], again), "evaluating again gives the same"
    actual = sorted(torch.cat(shares).tolist())
    assert actual == sorted(block["input_ids"].tolist() for block in blocks)


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_never_train_on_the_same_block(seed: int, world_size: int) -> None:
    blocks = TextBlocks(in_memory(random_documents(seed, count=100)), 4)
    order = BlockOrder(blocks.num_tokens, 4, seed)
    taken: list[int] = []
    counts = []
    for rank in range(world_size):
        share = BlockBatches(blocks, batch_size=8, seed=seed, rank=rank, world_size=world_size)
        mine = [block for _ in range(3) for batch in share for block in batch]
        counts.append(len(mine))
        taken += mine
    assert len(set(taken)) == len(taken) and len(set(counts)) == 1
    whole = 2 * (order.first(1) // 8) * 8  # two passes, but for what comes in the last, incomplete, batch
    assert set(order.blocks(0, whole).tolist()) <= set(taken)


def test_torch_loader_gives_the_same(seed: int) -> None:
    blocks = TextBlocks(in_memory(random_documents(seed)), 8, packing="documents")
    ours = list(build_text_loader(blocks, batch_size=4, seed=2))
    theirs = list(torch.utils.data.DataLoader(blocks, batch_sampler=BlockBatches(blocks, batch_size=4, seed=2)))
    assert len(ours) == len(theirs) > 3
    for one, two in zip(ours, theirs, strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    copy = pickle.loads(pickle.dumps(blocks))
    assert torch.equal(copy[1]["input_ids"], blocks[1]["input_ids"])


def test_wrong_sizes_are_one_line() -> None:
    tokens = in_memory([[1, 2, 3], [4, 5, 6, 7]])
    with pytest.raises(
        UserError, match=r"^block_length must be at least 2 \(a token and the one it predicts\), got 1$"
    ):
        TextBlocks(tokens, 1)
    with pytest.raises(UserError, match="has 3 blocks of 2 tokens, less than one step of 4; choose a smaller batch"):
        BlockBatches(TextBlocks(tokens, 2), batch_size=2, accumulate=2)
    with pytest.raises(UserError, match="batch_size 3 cannot be shared evenly by 2 processes; choose a multiple of 2"):
        BlockBatches(TextBlocks(tokens, 2), batch_size=3, world_size=2)
    with pytest.raises(ValueError, match="start_batch must be from 0 to 3"):
        BlockBatches(TextBlocks(tokens, 2), batch_size=1).set_epoch(0, 4)
    with pytest.raises(UserError, match="no tokens: every document is empty"):
        in_memory([[], []])
