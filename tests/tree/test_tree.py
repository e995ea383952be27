"""Structure, queries, cuts and formats of the Tree, against definitions, scipy and networkx."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyptree.tree import Tree

WORDNET = Path(__file__).parents[3] / "shared" / "data" / "wordnet"
quick = settings(deadline=None, max_examples=60)  # no deadline: the machine may be busy with something else
needs_wordnet = pytest.mark.skipif(not WORDNET.exists(), reason="WordNet files are not here")


@st.composite
def parents(draw, max_size=25, forest=True):
    """Any parent array: a random recursive forest whose nodes are shuffled."""
    n = draw(st.integers(1, max_size))
    low = -1 if forest else 0
    above = [-1] + [draw(st.integers(low, i - 1)) for i in range(1, n)]
    name = draw(st.permutations(range(n)))
    parent = [0] * n
    for i, p in enumerate(above):
        parent[name[i]] = -1 if p < 0 else name[p]
    return parent


@st.composite
def monotone_trees(draw, forest=False):
    """A tree whose heights grow towards the root, often with ties and often without."""
    tree = Tree(draw(parents(forest=forest)))
    step = draw(st.lists(st.integers(0, 3), min_size=tree.num_nodes, max_size=tree.num_nodes))
    height = np.zeros(tree.num_nodes)
    for v in tree.order("postorder"):
        if not tree.is_leaf[v]:
            height[v] = max(height[c] for c in tree.children(v)) + step[v] / 4
    return Tree(tree.parent, height)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=6)


def naive_ancestors(parent, i):
    actual = []
    while parent[i] >= 0:
        i = parent[i]
        actual.append(i)
    return actual


def naive_lca(parent, i, j):
    mine = [i, *naive_ancestors(parent, i)]
    for v in [j, *naive_ancestors(parent, j)]:
        if v in mine:
            return v
    return -1


def partition(labels):
    groups: dict = {}
    for leaf, label in enumerate(labels):
        groups.setdefault(label, set()).add(leaf)
    return {frozenset(g) for g in groups.values()}


def random_linkage(rng, n, method="average"):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    return hierarchy.linkage(rng.normal(size=(n, 3)), method)


# ---------------------------------------------------------------------- structure
@quick
@given(parents())
def test_every_query_agrees_with_its_definition(parent):
    tree = Tree(parent)
    n = len(parent)
    above = [naive_ancestors(parent, i) for i in range(n)]
    below = [[v for v in range(n) if v == i or i in above[v]] for i in range(n)]
    assert tree.depth.tolist() == [len(a) for a in above]
    assert all(parent[([i] + above[i])[-1]] == -1 for i in range(n))  # everyone reaches a root
    assert tree.roots.tolist() == [i for i in range(n) if parent[i] == -1]
    assert tree.subtree_sizes.tolist() == [len(b) for b in below]
    for i in range(n):
        assert tree.children(i).tolist() == [v for v in range(n) if parent[v] == i]
        assert tree.ancestors(i).tolist() == above[i]
        assert tree.descendants(i).tolist() == below[i]
        leaves = [v for v in below[i] if v not in parent]
        assert tree.leaves(i).tolist() == leaves
        assert tree.num_leaves_below[i] == len(leaves)
        assert tree.height[i] == max(tree.depth[v] for v in leaves) - tree.depth[i]
    i, j = np.divmod(np.arange(n * n), n)
    lca = tree.lca(i, j)
    assert lca.tolist() == [naive_lca(parent, a, b) for a, b in zip(i, j, strict=True)]
    edges = tree.distance(i, j)
    for a, b, top, d in zip(i, j, lca, edges, strict=True):
        if top < 0:
            assert d == np.inf
            continue
        path = tree.path(a, b)
        assert path[0] == a and path[-1] == b and len(path) == d + 1 == len(set(path))
        assert all(parent[x] == y or parent[y] == x for x, y in pairwise(path))


@quick
@given(parents())
def test_orders_list_every_node_in_the_promised_order(parent):
    tree = Tree(parent)
    n = len(parent)
    for kind in ("preorder", "level", "postorder"):
        order = tree.order(kind)
        assert sorted(order) == list(range(n))
        place = np.argsort(order)
        for v in range(n):
            if parent[v] >= 0:
                assert (place[v] < place[parent[v]]) == (kind == "postorder")
        if kind != "level":  # subtrees stay together
            for v in range(n):
                assert np.ptp(place[tree.descendants(v)]) == tree.subtree_sizes[v] - 1
    assert (np.diff(tree.depth[tree.order("level")]) >= 0).all()

    def tour(v):
        return [v, *(x for c in tree.children(v) for x in tour(c)), v]

    assert tree.order("euler").tolist() == [x for root in tree.roots for x in tour(root)]


def test_lca_keeps_shapes_and_broadcasts():
    tree = Tree([-1, 0, 0, 1, 1])
    assert tree.lca(3, 4) == 1 and isinstance(tree.lca(3, 4), int)
    assert tree.distance(3, 2) == 3.0 and isinstance(tree.distance(3, 2), float)
    assert tree.lca(np.arange(5)[:, None], [3, 4]).tolist() == [[0, 0], [1, 1], [0, 0], [3, 1], [1, 4]]
    assert tree.lca([], []).shape == (0,)


def test_lca_and_distance_agree_with_networkx():
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(5)
    tree = Tree([-1, *[int(rng.integers(i)) for i in range(1, 60)]], rng.random(60))
    graph = tree.to_networkx()
    pairs = [(int(a), int(b)) for a, b in rng.integers(60, size=(80, 2))]
    i, j = np.array(pairs).T
    theirs = dict(networkx.tree_all_pairs_lowest_common_ancestor(graph, root=0, pairs=pairs))
    ours = tree.lca(i, j)
    assert all(theirs.get((a, b), theirs.get((b, a))) == top for (a, b), top in zip(pairs, ours, strict=True))
    for u, v in graph.edges:
        graph.edges[u, v]["far"] = abs(graph.edges[u, v]["length"])
    plain = graph.to_undirected()
    for (a, b), edges, far in zip(pairs, tree.distance(i, j), tree.distance(i, j, "height"), strict=True):
        assert networkx.shortest_path_length(plain, a, b) == edges
        assert networkx.shortest_path_length(plain, a, b, weight="far") == pytest.approx(far, abs=1e-12)


def test_arrays_are_copies_and_read_only():
    parent, height = np.array([-1, 0, 0]), np.array([1.0, 0, 0])
    tree = Tree(parent, height)
    parent[1], height[0] = 2, 9
    assert tree.parent.tolist() == [-1, 0, 0] and tree.height[0] == 1
    for array in (tree.parent, tree.height, tree.depth, tree.subtree_sizes, tree.leaves()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_torch_tensors_are_welcome():
    torch = pytest.importorskip("torch")
    points = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    tree = Tree(torch.tensor([-1, 0, 0]), torch.tensor([2.0, 0, 1]), embedding=points)
    assert tree.height.tolist() == [2, 0, 1]
    assert np.array_equal(tree.embedding, points.detach().float().numpy())


def test_copies_and_comparison():
    tree = Tree([-1, 0, 0], label=["a", "b", "c"], embedding=np.eye(3))
    assert pickle.loads(pickle.dumps(tree)) == tree == copy.deepcopy(tree)
    assert tree != Tree([-1, 0, 0]) and tree != tree.relabel({"b": "x"}) and tree != "tree"
    assert "3 nodes, 2 leaves" in repr(tree) and len(tree) == 3


@quick
@given(parents(), st.data())
def test_take_hangs_nodes_under_their_nearest_kept_ancestor(parent, data):
    tree = Tree(parent, label=[str(i) for i in range(len(parent))])
    keep = sorted(data.draw(st.sets(st.sampled_from(range(len(parent))), min_size=1)))
    small = tree.take(keep)
    assert small.label == [str(i) for i in keep]
    for new, old in enumerate(keep):
        expected = next((a for a in naive_ancestors(parent, old) if a in keep), -1)
        assert (keep[small.parent[new]] if small.parent[new] >= 0 else -1) == expected
    node = data.draw(st.sampled_from(range(len(parent))))
    assert tree.subtree(node).label == [str(v) for v in tree.descendants(node)]


def test_prune_conditions():
    #      0
    #    1   2
    #   3 4  5
    #        6 7
    tree = Tree([-1, 0, 0, 1, 1, 2, 5, 5], label=list("abcdefgh"))
    assert tree.prune(max_depth=1).label == list("abc")
    assert tree.prune(min_leaves=2).label == list("abcf")
    assert tree.prune(leaves=[3, 7]).label == list("abcdfh")
    assert tree.prune(leaves=[3, 7], unary=True).label == list("adh")
    assert tree.prune(unary=True).parent.tolist() == [-1, 0, 1, 1, 0, 4, 4]
    with pytest.raises(ValueError, match="node 1 is not a leaf"):
        tree.prune(leaves=[1])


def test_find_and_relabel():
    tree = Tree([-1, 0, 0], label=["animal", "cat", "dog"])
    assert tree.find("dog") == 2
    assert tree.relabel(lambda i: f"n{i}").label == ["n0", "n1", "n2"]
    assert tree.relabel({"dog": "hound"}).label == ["animal", "cat", "hound"]
    assert tree.relabel(["x", "y", "z"]).label == ["x", "y", "z"]
    with pytest.raises(ValueError, match="did you mean 'dog'"):
        tree.find("dogg")


# ---------------------------------------------------------------------- cuts
@quick
@given(monotone_trees(forest=True))
def test_cut_gives_exactly_k_nested_clusters_of_contiguous_height(tree):
    low, high = len(tree.roots), tree.num_leaves
    previous = None
    for k in range(low, high + 1):
        labels = tree.cut(k)
        groups = partition(labels)
        assert labels.shape == (high,) and len(groups) == k
        first_seen = list(dict.fromkeys(labels.tolist()))
        assert first_seen == list(range(k))
        if previous is not None:  # each cluster lies in one of the coarser ones
            assert all(any(g <= old for old in previous) for g in groups)
        previous = groups
    assert partition(tree.cut(high)) == {frozenset([i]) for i in range(high)}


@quick
@given(monotone_trees(forest=True), st.integers(-1, 40))
def test_cut_by_height_joins_what_meets_below(tree, quarter):
    height = quarter / 4
    labels = tree.cut(height=height)
    leaves = tree.leaves()
    for a in range(len(leaves)):
        for b in range(a):
            top = tree.lca(leaves[a], leaves[b])
            assert (labels[a] == labels[b]) == (top >= 0 and tree.height[top] <= height)


@pytest.mark.parametrize("method", ["average", "complete", "single", "centroid"])
def test_cut_agrees_with_scipy(method):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    Z = random_linkage(np.random.default_rng(), 40, method)
    tree = Tree.from_linkage(Z)
    if method == "centroid":  # may have inversions, where scipy's k counts differ; heights do not
        ks = []
    else:
        assert len(set(Z[:, 2])) == len(Z)
        ks = range(1, 41)
    for k in ks:
        assert partition(tree.cut(k)) == partition(hierarchy.fcluster(Z, k, "maxclust"))
    for t in np.linspace(0, Z[:, 2].max() * 1.1, 30):
        assert partition(tree.cut(height=t)) == partition(hierarchy.fcluster(Z, t, "distance"))


def test_inexact_cut_agrees_with_scipy_at_ties():
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    points = np.random.default_rng().integers(4, size=(30, 2)).astype(float)
    Z = hierarchy.linkage(points, "single")
    tree = Tree.from_linkage(Z)
    for k in range(1, 31):
        assert partition(tree.cut(k, exact=False)) == partition(hierarchy.fcluster(Z, k, "maxclust"))
        group = {i: {i} for i in range(30)}  # the first 30 - k merges of the linkage, one after the other
        for row, (a, b) in enumerate(Z[: 30 - k, :2].astype(int)):
            group[30 + row] = group.pop(a) | group.pop(b)
        assert partition(tree.cut(k)) == {frozenset(g) for g in group.values()}


def test_cut_of_a_wide_node():
    tree = Tree([-1, 0, 0, 0, 0, 1, 1])  # leaves 2 3 4 5 6
    assert tree.cut(2).tolist() == [0, 0, 1, 0, 0]  # the last child goes first
    assert tree.cut(3).tolist() == [0, 1, 2, 0, 0]
    assert tree.cut(4).tolist() == [0, 1, 2, 3, 3]
    assert tree.cut(3, exact=False).tolist() == [0, 0, 0, 0, 0]
    assert tree.cut(4, exact=False).tolist() == [0, 1, 2, 3, 3]


# ---------------------------------------------------------------------- linkage
@pytest.mark.parametrize("method", ["average", "complete", "single", "ward"])
def test_linkage_round_trip_is_the_identity(method):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    Z = random_linkage(np.random.default_rng(), 50, method)
    tree = Tree.from_linkage(Z)
    back = tree.to_linkage()
    assert np.array_equal(back, Z)
    assert hierarchy.is_valid_linkage(back)
    i, j = np.triu_indices(50, 1)
    assert np.array_equal(tree.height[tree.lca(i, j)], hierarchy.cophenet(Z))


@quick
@given(monotone_trees())
def test_linkage_of_any_tree_keeps_where_leaves_meet(tree):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    Z = tree.to_linkage()
    assert Z.shape == (tree.num_leaves - 1, 4)
    if not len(Z):
        return
    assert hierarchy.is_valid_linkage(Z)
    leaves = tree.leaves()
    i, j = np.triu_indices(len(leaves), 1)
    assert np.array_equal(tree.height[tree.lca(leaves[i], leaves[j])], hierarchy.cophenet(Z))
    again = Tree.from_linkage(Z)
    assert again.is_binary and np.array_equal(again.to_linkage(), Z)
    branching = tree.prune(unary=True)  # a leaf that moves up a chain may change its place among its new siblings
    for k in range(1, tree.num_leaves + 1):
        assert partition(again.cut(k)) == partition(branching.cut(k))


def test_linkage_labels():
    Z = np.array([[0, 1, 0.5, 2], [2, 3, 1.5, 3]])
    assert Tree.from_linkage(Z, ["a", "b", "c"]).label == ["a", "b", "c", "", ""]
    assert Tree.from_linkage(Z[:, :3]).height.tolist() == [0, 0, 0, 0.5, 1.5]


# ---------------------------------------------------------------------- assignments and edges
def test_assignments_nest():
    tree = Tree.from_assignments([[0, 0, 1, 2, 2], [0, 1, 1]])
    assert tree.parent.tolist() == [5, 5, 6, 7, 7, 8, 9, 9, -1, -1]
    assert tree.height.tolist() == [0] * 5 + [1] * 3 + [2] * 2
    assert tree.cut(2).tolist() == [0, 0, 1, 1, 1]
    joined = Tree.from_assignments([[0, 0, 1, 2, 2], [0, 1, 1]], root=True)
    assert len(joined.roots) == 1 and joined.height[joined.roots[0]] == 3


def test_soft_assignments_count_by_argmax_and_empty_clusters_vanish():
    soft = np.array([[0.1, 0.2, 0.7], [0.1, 0.6, 0.3], [0.0, 0.1, 0.9]])
    tree = Tree.from_assignments([soft, [1, 0, 1]])  # cluster 0 is empty
    assert tree.parent.tolist() == [4, 3, 4, 5, 6, -1, -1]
    assert tree.leaves().tolist() == [0, 1, 2]
    whole = Tree.from_assignments([soft, [1, 0, 1]], keep_empty=True)
    assert whole.leaves().tolist() == [0, 1, 2, 3]
    noise = Tree.from_assignments([[0, -1, 0]])
    assert noise.roots.tolist() == [1, 3]


@quick
@given(parents(forest=False))
def test_edges_give_the_tree_back_also_from_its_closure(parent):
    if len(parent) == 1:
        return
    edges = [(i, p) for i, p in enumerate(parent) if p >= 0]
    assert Tree.from_edges(edges).parent.tolist() == parent
    assert Tree.from_edges(np.array(edges)).parent.tolist() == parent
    closure = [(i, a) for i in range(len(parent)) for a in naive_ancestors(parent, i)]
    tree = Tree.from_edges(closure)
    assert tree.parent.tolist() == parent
    assert tree.num_dropped_edges == len(closure) - len(edges)


def test_edges_of_a_dag_choose_the_parent_as_told():
    edges = [("d", "a"), ("b", "a"), ("c", "b"), ("d", "c"), ("d", "a")]
    longest = Tree.from_edges(edges)
    assert longest.label == ["d", "a", "b", "c"]
    assert longest.parent.tolist() == [3, -1, 1, 2] and longest.num_dropped_edges == 1
    assert Tree.from_edges(edges, keep="shortest").parent.tolist() == [1, -1, 1, 2]
    assert Tree.from_edges(edges, keep="first").parent.tolist() == [1, -1, 1, 2]
    assert Tree.from_edges([(10, 7), (3, 7)]).label == ["3", "7", "10"]


@needs_wordnet
def test_wordnet_mammals():
    tree = Tree.load(WORDNET / "mammal_tree.tsv.gz")
    assert tree.num_nodes == 1170 and tree.num_dropped_edges == 1
    assert tree.label[tree.roots[0]] == "mammal.n.01" and len(tree.roots) == 1
    assert "dog.n.01" in [tree.label[a] for a in tree.ancestors(tree.find("corgi.n.01"))]
    top = tree.lca(tree.find("tiger.n.02"), tree.find("corgi.n.01"))
    assert tree.label[top] == "carnivore.n.01"
    back = Tree.from_newick(tree.to_newick())
    assert back.label[back.lca(back.find("tiger.n.02"), back.find("corgi.n.01"))] == "carnivore.n.01"


@needs_wordnet
def test_wordnet_nouns_are_a_dag_with_some_edges_too_many():
    tree = Tree.load(WORDNET / "noun_hypernyms.tsv.gz")
    assert tree.num_nodes == 82115 and len(tree.roots) == 1
    assert tree.num_nodes - 1 + tree.num_dropped_edges == 84427
    with gzip.open(WORDNET / "noun_hypernyms.tsv.gz", "rt") as file:
        edges = [line.split("\t")[:2] for line in file][1:]
    shortest = Tree.from_edges(edges, keep="shortest")
    assert shortest.label == tree.label and shortest.num_dropped_edges == tree.num_dropped_edges
    assert (shortest.depth <= tree.depth).all() and shortest.depth.sum() < tree.depth.sum()


# ---------------------------------------------------------------------- text formats
@quick
@given(parents(), st.data())
def test_json_round_trip_is_exact(parent, data):
    n = len(parent)
    number = st.floats(allow_nan=False, allow_infinity=False)
    tree = Tree(
        parent,
        data.draw(st.lists(number, min_size=n, max_size=n)),
        embedding=np.random.default_rng(0).random((n, 3)).astype(np.float32),
        manifold="Lorentz(c=0.5)",
        support=np.random.default_rng(1).random((n, 2, 2)),
        label=data.draw(st.lists(NAMES, min_size=n, max_size=n)),
    )
    back = Tree.from_json(tree.to_json())
    assert back == tree and back.manifold == tree.manifold
    assert back.embedding.dtype == np.float32


@quick
@given(parents(), st.data())
def test_newick_round_trip_keeps_shape_names_and_lengths(parent, data):
    n = len(parent)
    label = data.draw(st.none() | st.lists(NAMES, min_size=n, max_size=n))
    tree = Tree(parent, label=label)
    tree = tree.replace(height=tree.height + np.random.default_rng(0).random(n))
    back = Tree.from_newick(tree.to_newick())
    order = tree.order("preorder")
    place = np.argsort(order)
    expected = [-1 if parent[v] < 0 else place[parent[v]] for v in order]
    assert back.parent.tolist() == expected
    assert back.label == (None if label is None else [label[v] for v in order])
    assert back.length == pytest.approx(tree.length[order], abs=1e-12)
    assert Tree.from_newick(tree.to_newick(lengths=False)).parent.tolist() == expected


def test_newick_of_default_heights_gives_the_same_heights():
    tree = Tree([-1, 0, 1, 1, 0, 4])
    assert Tree.from_newick(tree.to_newick()) == tree


def test_newick_dialects():
    tree = Tree.from_newick("((a:1,'b''s [x]':2)ab:0.5, c_d:3 [note])'the root':9;")
    assert tree.label == ["the root", "ab", "a", "b's [x]", "c_d"]
    assert tree.parent.tolist() == [-1, 0, 1, 1, 0]
    assert tree.height.tolist() == [3, 2.5, 1.5, 0.5, 0]
    assert Tree.from_newick(";").num_nodes == 1
    assert Tree.from_newick("(,(,));").parent.tolist() == [-1, 0, 0, 2, 2]
    assert Tree.from_newick("a;(b,c);").parent.tolist() == [-1, -1, 1, 1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("(a,b)", "ends without ';'"),
        ("", "ends without ';'"),
        ("((a,b);", "1 open"),
        ("(a,b));", "without '\\('"),
        ("(a:x,b);", "branch length, got 'x'"),
        ("(a b,c);", "did not expect the name 'b'"),
        ("(a,'b);", "character 3"),
        ("(a,b)c(d);", "before the name"),
        ("(a:1:2,b);", "two branch lengths"),
    ],
)
def test_newick_mistakes_are_named(text, problem):
    with pytest.raises(ValueError, match=problem):
        Tree.from_newick(text)


@quick
@given(parents())
def test_networkx_round_trip(parent):
    pytest.importorskip("networkx")
    tree = Tree(parent, label=[f"n{i}" for i in range(len(parent))])
    assert Tree.from_networkx(tree.to_networkx()) == tree
    bare = Tree(parent)
    assert Tree.from_networkx(bare.to_networkx()) == bare


def test_networkx_graphs_of_others():
    networkx = pytest.importorskip("networkx")
    graph = networkx.Graph([("b", "a"), ("c", "b"), ("d", "b")])
    tree = Tree.from_networkx(graph, root="b")
    assert tree.label[tree.roots[0]] == "b" and sorted(tree.label[v] for v in tree.leaves()) == ["a", "c", "d"]
    with pytest.raises(ValueError, match="pass root="):
        Tree.from_networkx(graph)
    with pytest.raises(ValueError, match="several parents"):
        Tree.from_networkx(networkx.DiGraph([(0, 2), (1, 2)]))


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.nwk", "t.tsv", "t.tsv.gz"])
def test_files_round_trip(tmp_path, name):
    tree = Tree([-1, 0, 0, 2, 2], label=["r", "a", "b", "c", "d"])
    path = tree.save(tmp_path / name)
    back = Tree.load(path)
    assert {back.label[v]: back.label[p] for v, p in enumerate(back.parent) if p >= 0} == {
        "a": "r",
        "b": "r",
        "c": "b",
        "d": "b",
    }
    assert [p.name for p in tmp_path.iterdir()] == [name]
    if "json" in name:
        assert back == tree
    bare = Tree([-1, 0, 0, 2, 2])
    bare.save(path)
    assert Tree.load(path).parent.tolist() == [-1, 0, 0, 2, 2]


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Tree([]), "at least one node"),
        (lambda: Tree([[-1]]), r"shape \(1, 1\)"),
        (lambda: Tree([-1.0, 0.0]), "integers .* got float64"),
        (lambda: Tree([-1, 5]), "parent of node 1 is 5"),
        (lambda: Tree([-1, -2]), "parent of node 1 is -2"),
        (lambda: Tree([0]), "node 0 is its own ancestor"),
        (lambda: Tree([-1, 3, 1, 2, 0]), "node 1 is its own ancestor"),
        (lambda: Tree([-1, 0], [1.0]), r"height has shape \(1,\), expected \(2,\)"),
        (lambda: Tree([-1, 0], [1.0, np.nan]), "height of node 1 is nan"),
        (lambda: Tree([-1, 0], label=["a"]), "label has 1 names"),
        (lambda: Tree([-1, 0], embedding=np.ones((3, 2))), r"embedding has shape \(3, 2\)"),
        (lambda: Tree([-1, 0], support=np.ones(2)), r"support has shape \(2,\)"),
        (lambda: Tree([-1, 0]).lca(0, 2), "node 2 does not exist"),
        (lambda: Tree([-1, 0]).lca(0, -1), "node -1 does not exist"),
        (lambda: Tree([-1, 0]).lca(0, 0.5), "integer index, got float64"),
        (lambda: Tree([-1, -1]).path(0, 1), "different trees"),
        (lambda: Tree([-1, 0]).distance(0, 1, "miles"), "metric must be"),
        (lambda: Tree([-1, 0]).order("random"), "kind must be"),
        (lambda: Tree([-1, 0, 0]).cut(), "k or height"),
        (lambda: Tree([-1, 0, 0]).cut(2, height=1), "k or height"),
        (lambda: Tree([-1, 0, 0]).cut(3), r"from 1 \(roots\) to 2 \(leaves\), got 3"),
        (lambda: Tree([-1, -1]).cut(1), "from 2"),
        (lambda: Tree([-1, -1]).to_linkage(), "this forest has 2"),
        (lambda: Tree([-1, 0, 1, 1], [0.0, 1, 0, 0]).to_linkage(), "node 1 sits above its parent"),
        (lambda: Tree([-1, 0]).take([]), "keep at least one"),
        (lambda: Tree([-1, 0]).replace(parent=[0]), "no field 'parent'"),
        (lambda: Tree.from_linkage(np.ones((2, 2))), "shape"),
        (lambda: Tree.from_linkage([[0, 5, 1.0, 2]]), "merge 0 .* expected clusters 0 to 1"),
        (lambda: Tree.from_linkage([[0, 1, 1.0, 2], [0, 2, 2.0, 3]]), "merges cluster 0 more than once"),
        (lambda: Tree.from_assignments([]), "levels is empty"),
        (lambda: Tree.from_assignments([[0, 1, 2], [0, 0]]), "level 0 has 3 clusters, but level 1 assigns 2"),
        (lambda: Tree.from_assignments([[0.5, 1.0]]), "level 0 has shape"),
        (lambda: Tree.from_edges([]), "no edges"),
        (lambda: Tree.from_edges([("a",)]), "edge 0 is"),
        (lambda: Tree.from_edges([("a", "a")]), "node a is its own parent"),
        (lambda: Tree.from_edges([("r", "a"), ("a", "b"), ("b", "c"), ("c", "a")]), "node [abc] is its own ancestor"),
        (lambda: Tree.from_edges([("a", "b")], keep="best"), "keep must be"),
        (lambda: Tree.from_json("[1, 2"), "not JSON"),
        (lambda: Tree.from_json("[1, 2]"), "no tree"),
        (lambda: Tree.from_json('{"format": "hyptree.tree", "version": 7, "parent": [-1]}'), "version 7"),
        (lambda: Tree([-1, 0], embedding=[[0.0], [np.inf]]).to_json(), "embedding of node 1 is not finite"),
        (lambda: Tree([-1, 0]).save("tree.xyz"), "cannot tell a format"),
        (lambda: Tree.load("tree.xyz"), "cannot tell a format"),
    ],
)
def test_bad_input_gets_one_clear_line(make, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_import_needs_numpy_alone(run_python):
    code = (
        "import sys, hyptree.tree; print([m for m in ('torch', 'scipy', 'networkx', 'matplotlib') if m in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install hyptree\[plot\]"):
        Tree([-1, 0]).draw("x.png")


# ---------------------------------------------------------------------- size
@pytest.mark.parametrize("shape", ["random", "path"])
def test_a_hundred_thousand_nodes_take_seconds(shape):
    import time

    n = 100_000
    rng = np.random.default_rng(0)
    above = np.arange(-1, n - 1)
    if shape == "random":
        above[1:] = rng.integers(np.arange(1, n))
    name = rng.permutation(n)
    parent = np.empty(n, np.int64)
    parent[name] = np.where(above < 0, -1, name[above])
    begin = time.process_time()
    tree = Tree(parent)
    i, j = rng.integers(n, size=(2, n))
    lca = tree.lca(i, j)
    assert (tree.depth[lca] <= np.minimum(tree.depth[i], tree.depth[j])).all()
    assert tree.subtree_sizes[tree.roots[0]] == n
    assert tree.cut(min(50, tree.num_leaves)).max() == min(50, tree.num_leaves) - 1
    assert Tree.from_json(tree.to_json()) == tree
    back = Tree.from_newick(tree.to_newick())
    assert np.array_equal(np.sort(back.depth), np.sort(tree.depth))
    edges = rng.integers(tree.num_leaves, size=(2, n))
    assert tree.dasgupta_cost((edges[0], edges[1])) >= 0
    assert Tree.from_edges(np.stack([np.arange(n), parent], 1)[parent >= 0]) == tree
    assert len(tree.to_linkage()) == tree.num_leaves - 1
    assert np.linalg.norm(tree.sarkar(), axis=1).max() < 1
    assert len(tree.text()) < 10_000
    if shape == "path":
        assert np.array_equal(tree.depth[name], np.arange(n))
        assert np.array_equal(lca, np.where(tree.depth[i] < tree.depth[j], i, j))
    assert time.process_time() - begin < 10


def test_json_is_plain():
    content = json.loads(Tree([-1, 0], label=["r", "é"]).to_json())
    assert content["parent"] == [-1, 0] and content["label"] == ["r", "é"]
