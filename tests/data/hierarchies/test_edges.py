"""Reading edge lists, closures and cycles."""

import gzip
import itertools
import random
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from hyptree.data.hierarchies.edges import make_hierarchy, read_hierarchy, transitive_closure
from hyptree.errors import UserError

WORDNET = Path(__file__).parents[4] / "shared" / "data" / "wordnet"
EDGES = [("cat", "mammal"), ("dog", "mammal"), ("mammal", "animal"), ("bird", "animal")]
CLOSED = {*EDGES, ("cat", "animal"), ("dog", "animal")}


def named(hierarchy):
    return {(hierarchy.names[a], hierarchy.names[b]) for a, b in hierarchy.pairs}


def write(path, rows, separator="\t", header=None):
    text = "".join(separator.join(row) + "\n" for row in ([header] if header else []) + list(rows))
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def random_dag(n, p, seed):
    rng = np.random.default_rng(seed)
    child, parent = np.nonzero(np.triu(rng.random((n, n)) < p, 1))
    shuffle = rng.permutation(n)
    return np.stack([shuffle[child], shuffle[parent]], 1)


@pytest.mark.parametrize(
    ("name", "separator", "header"),
    [
        ("a.tsv", "\t", None),
        ("a.tsv", "\t", ["child", "parent"]),
        ("a.csv", ",", ["id1", "id2"]),
        ("a.txt", " ", None),
        ("a.txt", "\t", None),
        ("a.txt", ",", ["Child", "Ancestor"]),
        ("a.tsv.gz", "\t", ["child", "parent"]),
        ("a.csv.gz", ",", None),
    ],
)
def test_text_files_of_every_kind_give_the_same_hierarchy(tmp_path, name, separator, header):
    hierarchy = read_hierarchy(write(tmp_path / name, EDGES, separator, header))
    assert named(hierarchy) == CLOSED
    assert hierarchy.names == sorted(hierarchy.names)
    assert hierarchy.is_closed


def test_the_order_of_the_lines_does_not_matter(tmp_path):
    rows = [(f"n{i}", f"n{i // 2}") for i in range(1, 30)]
    first = read_hierarchy(write(tmp_path / "a.tsv", rows))
    random.Random(3).shuffle(rows)
    second = read_hierarchy(write(tmp_path / "b.tsv", rows))
    assert first.digest() == second.digest()
    assert first.digest() != read_hierarchy(write(tmp_path / "c.tsv", rows[1:])).digest()


def test_numbers_are_ordered_by_value_and_gaps_are_closed(tmp_path):
    hierarchy = read_hierarchy(write(tmp_path / "a.tsv", [("100", "9"), ("9", "2")], header=["node", "up"]))
    assert hierarchy.names == ["2", "9", "100"]
    assert hierarchy.pairs.tolist() == [[1, 0], [2, 0], [2, 1]]


def test_comments_blank_lines_quotes_bom_and_further_columns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        '\ufeffchild,parent,kind\n# a comment\n\n"cat, domestic",mammal,h\nmammal,animal,i\n', encoding="utf-8"
    )
    assert named(read_hierarchy(path, closure="given")) == {("cat, domestic", "mammal"), ("mammal", "animal")}


def test_a_name_that_looks_like_a_title_stays_a_name_when_it_is_used_again(tmp_path):
    path = write(tmp_path / "a.tsv", [("child", "parent"), ("baby", "child")])
    assert named(read_hierarchy(path, closure="given")) == {("child", "parent"), ("baby", "child")}
    assert named(read_hierarchy(write(tmp_path / "b.tsv", EDGES), header="yes", closure="given")) == set(EDGES[1:])


def test_npz_pairs_with_and_without_names(tmp_path):
    np.savez(tmp_path / "a.npz", pairs=np.array([[1, 0], [2, 1]], np.int32))
    assert read_hierarchy(tmp_path / "a.npz").pairs.tolist() == [[1, 0], [2, 0], [2, 1]]
    np.savez(tmp_path / "b.npz", pairs=np.array([[1, 0]]), names=np.array(["animal", "cat", "alone"]))
    assert named(read_hierarchy(tmp_path / "b.npz")) == {("cat", "animal")}


def test_repeats_and_loops_are_dropped_and_counted(tmp_path):
    hierarchy = read_hierarchy(write(tmp_path / "a.tsv", [*EDGES, EDGES[0], ("cat", "cat")]), closure="given")
    assert named(hierarchy) == set(EDGES)
    assert hierarchy.num_dropped == 2 and not hierarchy.is_closed


@pytest.mark.parametrize("seed", range(5))
def test_closure_agrees_with_networkx(seed):
    edges = random_dag(60, 0.05, seed)
    expected = sorted(nx.transitive_closure_dag(nx.DiGraph(edges.tolist())).edges)
    actual = transitive_closure(edges, 60)
    assert [tuple(pair) for pair in actual.tolist()] == expected
    assert np.array_equal(transitive_closure(actual, 60), actual)


def test_ancestors_and_descendants_of_a_closure():
    hierarchy = make_hierarchy([str(i) for i in range(60)], random_dag(60, 0.05, 9))
    for u in range(60):
        rows = hierarchy.pairs[hierarchy.offsets[u] : hierarchy.offsets[u + 1]]
        assert (rows[:, 0] == u).all() and len(rows) == hierarchy.num_ancestors[u]
        assert hierarchy.num_descendants[u] == (hierarchy.pairs[:, 1] == u).sum()


def test_a_closure_that_would_not_fit_is_refused():
    chain = np.stack([np.arange(1, 400), np.arange(399)], 1)
    assert len(transitive_closure(chain, 400)) == 400 * 399 // 2
    with pytest.raises(UserError, match=r"more than 1,000 pairs.*closure: given"):
        transitive_closure(chain, 400, max_pairs=1000)


def test_a_cycle_is_spelled_out(tmp_path):
    path = write(tmp_path / "a.tsv", [*EDGES, ("animal", "thing"), ("thing", "cat"), ("x", "cat")])
    with pytest.raises(UserError, match="cycle") as caught:
        read_hierarchy(path)
    around = str(caught.value).split("cycle: ")[1].split(";")[0].split(" -> ")
    assert around[0] == around[-1] and set(around) == {"cat", "mammal", "animal", "thing"}
    edges = {*EDGES, ("animal", "thing"), ("thing", "cat")}
    assert all(step in edges for step in itertools.pairwise(around))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "", "no edges"),
        ("a.tsv", "# nothing\n\n", "no edges"),
        ("a.tsv", "child\tparent\n", "no edges"),
        (
            "a.tsv",
            "cat\tmammal\ndog mammal\n",
            "line 2: expected a child and its parent separated by a tab, got 'dog mammal'",
        ),
        ("a.csv", "cat\ndog\n", "line 1: expected a child and its parent separated by a comma"),
        ("a.tsv", "cat\tmammal\n\ndog\t\n", "line 3: the parent has no name"),
        ("a.tsv", "\tmammal\n", "line 1: the child has no name"),
        ("a.tsv", "1\t2\n3\tnan\n", "line 2: expected whole numbers as in the other lines, got 'nan'"),
        ("a.tsv", "cat\tcat\n", "from a node to itself"),
        ("a.json", "{}", "unknown kind of file '.json'"),
    ],
)
def test_bad_text_is_one_clear_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_hierarchy(tmp_path / name)
    assert message in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"edges": np.zeros((2, 2), int)}, "no array 'pairs' in it, found edges"),
        ({"pairs": np.zeros(4, int)}, r"shape \(E, 2\), got \(4,\)"),
        ({"pairs": np.array([[0.0, 1.0], [2.0, np.nan]])}, "row 1 of 'pairs' is .* expected whole numbers"),
        ({"pairs": np.array([["a", "b"]])}, "must hold whole numbers"),
        ({"pairs": np.array([[0, 3]]), "names": np.array(["a", "b"])}, "must index the 2 'names', got 0 to 3"),
        ({"pairs": np.array([[{}, 1]], object)}, "cannot read"),
    ],
)
def test_bad_npz_is_one_clear_line(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=message):
        read_hierarchy(tmp_path / "a.npz")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_hierarchy(tmp_path / "missing.tsv")
    with pytest.raises(UserError, match="is a folder"):
        read_hierarchy(tmp_path)
    (tmp_path / "a.tsv.gz").write_bytes(b"plain text")
    (tmp_path / "a.npz").write_bytes(b"plain text")
    (tmp_path / "latin.tsv").write_bytes("caf\xe9\tdrink\n".encode("latin-1"))
    for name, why in (("a.tsv.gz", r"a\.tsv\.gz is not a whole \.gz file: "), ("a.npz", r"cannot read .*a\.npz: ")):
        with pytest.raises(UserError, match=why):
            read_hierarchy(tmp_path / name)
    with pytest.raises(UserError, match="UTF-8"):
        read_hierarchy(tmp_path / "latin.tsv")


@pytest.mark.skipif(not WORDNET.is_dir(), reason="needs the WordNet files in ../shared/data")
def test_wordnet_mammals_from_edges_and_from_the_closure():
    tree = read_hierarchy(WORDNET / "mammal_tree.tsv.gz")
    closure = read_hierarchy(WORDNET / "mammal_closure.tsv.gz", closure="given")
    assert closure.is_closed and closure.num_nodes == 1170 and len(closure.pairs) == 6448
    assert tree.digest() == closure.digest()
