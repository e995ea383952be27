"""Caption hierarchies: noun phrases and a small WordNet, parts in place of the defaults, models of the right shape."""

import gzip
from dataclasses import replace

import pytest
import torch

from hyptree.cli import main
from hyptree.data.hierarchies.caption_chains import (
    Parts,
    SisterContradictor,
    build_chain,
    default_parts,
    first_phrase,
    write_chains,
)
from hyptree.data.hierarchies.caption_models import InferenceEntailment, TextContradictor, TextGenerator
from hyptree.data.hierarchies.hierarcaps import Chain, read_hierarcaps
from hyptree.data.hierarchies.wordnet import Nouns
from hyptree.errors import UserError

SYNSETS = """\
n01 entity.n.01 entity
n02 object.n.01 object,physical_object
n03 abstraction.n.06 abstraction
n04 animal.n.01 animal,beast
n05 bird.n.01 bird
n06 dog.n.01 dog,domestic_dog
n07 puppy.n.01 puppy
n08 cat.n.01 cat
n09 furniture.n.01 furniture
n10 table.n.02 table
n11 table.n.01 table,tabular_array
n12 chair.n.01 chair
n13 dining_table.n.01 dining_table
n14 person.n.01 person,someone
n15 man.n.01 man,adult_male
n16 surfer.n.01 surfer
n17 old.n.01 old
n18 vehicle.n.01 vehicle
n19 bus.n.01 bus
n20 horse.n.01 horse
n21 woman.n.01 woman
n22 airplane.n.01 airplane,plane
n23 plane.n.02 plane
n24 elephant.n.01 elephant
"""
PARENTS = {
    "n02": "n01",
    "n03": "n01",
    "n04": "n02",
    "n05": "n04",
    "n06": "n04",
    "n07": "n06",
    "n08": "n04",
    "n09": "n02",
}
PARENTS |= {
    "n10": "n09",
    "n11": "n03",
    "n12": "n09",
    "n13": "n10",
    "n14": "n02",
    "n15": "n14",
    "n16": "n14",
    "n17": "n03",
}
PARENTS |= {"n18": "n02", "n19": "n18", "n20": "n04", "n21": "n14", "n22": "n18", "n23": "n03", "n24": "n04"}


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordnet")
    rows = [line.split() for line in SYNSETS.splitlines()]
    with gzip.open(folder / "noun_synsets.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("wnid\tname\tlemmas\tgloss\n" + "".join("\t".join([*row, 'a "gloss"']) + "\n" for row in rows))
    with gzip.open(folder / "noun_hypernyms.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("child\tparent\tkind\n" + "".join(f"{child}\t{parent}\th\n" for child, parent in PARENTS.items()))
    return folder


@pytest.fixture(scope="module")
def nouns(wordnet):
    return Nouns.read(wordnet)


def test_words_and_their_meanings(nouns):
    assert len(nouns) == 24
    assert nouns.lemma("Dogs") == "dog" and nouns.lemma("puppies") == "puppy" and nouns.lemma("buses") == "bus"
    assert nouns.lemma("men") == "man" and nouns.lemma("Dining tables") == "dining_table" and nouns.lemma("xyz") is None
    assert nouns.names[nouns.synset("table")] == "table.n.02"  # the first sense is no thing
    assert nouns.names[nouns.synset("plane")] == "airplane.n.01"  # listed under another word, in the gap before n.02
    assert nouns.names[nouns.synset("old")] == "old.n.01"
    assert [nouns.names[i] for i in nouns.ancestors(nouns.find("puppy.n.01"))] == [
        "dog.n.01",
        "animal.n.01",
        "object.n.01",
        "entity.n.01",
    ]
    assert nouns.is_a("puppies", "animal") and nouns.is_a("dog", "dog") and not nouns.is_a("animal", "dog")
    assert not nouns.is_a("xyz", "dog")
    assert {nouns.names[i] for i in nouns.sisters(nouns.find("table.n.02"))} == {"chair.n.01"}
    with pytest.raises(UserError, match=r"no noun synset 'dog\.n\.07'"):
        nouns.find("dog.n.07")


@pytest.mark.parametrize(
    ("caption", "head", "noun_phrase", "longer"),
    [
        ("A dog", "dog", "dog", "dog"),
        ("Two old dogs sitting on the table", "dogs", "old dogs", "old dogs sitting on the table"),
        ("a big, dirty dining table with a cat", "dining table", "dirty dining table", "dirty dining table with a cat"),
        ("there are some men near a bus.", "men", "men", "men near a bus"),
        ("An old with a bird", "bird", "bird", "bird"),
    ],
)
def test_first_noun_phrase(nouns, caption, head, noun_phrase, longer):
    phrase = first_phrase(caption, nouns)
    assert (phrase.head, phrase.noun_phrase, phrase.longer) == (head, noun_phrase, longer)
    assert caption[phrase.start : phrase.stop] == head


def test_a_caption_without_a_known_noun_has_no_phrase(nouns):
    assert first_phrase("Running very quickly", nouns) is None
    assert build_chain("Running very quickly", default_parts(nouns)) is None


def test_chain_by_hand(nouns):
    chain = build_chain("A small  dog on a table near a bus", default_parts(nouns), image="1.jpg")
    assert chain.captions == ("animal", "dog", "small dog on a table", "A small dog on a table near a bus")
    assert chain.image == "1.jpg" and len(chain.negatives) == 4
    assert chain.negatives[0] not in ("animal", "") and not nouns.is_a("dog", chain.negatives[0])
    for level in (1, 2, 3):
        # Another animal stands where the dog stood, and nothing else changed; the article follows it.
        wrong, right = chain.negatives[level], chain.captions[level]
        word = next(w for w in ("bird", "cat", "horse", "elephant") if w in wrong)
        assert wrong == right.replace("dog", word)
    again = build_chain("A small  dog on a table near a bus", default_parts(nouns), image="1.jpg")
    assert again == chain
    others = {build_chain("A dog on a table near a bus", default_parts(nouns, seed)).negatives for seed in range(6)}
    assert len(others) > 1


def test_people_are_contradicted_by_what_excludes_them(nouns):
    contradict = SisterContradictor(nouns)
    assert contradict("A man on a bus", "") == ["A woman on a bus"]
    assert contradict("two men on a bus", "") == ["two women on a bus"]
    assert "An elephant on a bus" in contradict("A surfer on a bus", "")
    assert set(contradict("person", "")) <= {"animal", "vehicle", "furniture"}


def test_entailment_by_words(nouns):
    follows = default_parts(nouns).entailment
    pairs = [
        ("a puppy on a table", "animal on furniture"),
        ("a puppy on a table", "a dog"),
        ("a puppy on a table", "two puppies"),
        ("a dog on a table", "a puppy"),
        ("a dog on a table", "a red dog"),
        ("a dog on a dining table", "table"),
    ]
    assert follows(pairs) == [1, 1, 1, 0, 0, 1]


def test_parts_can_be_replaced_and_are_checked(nouns):
    asked = []

    def entailment(pairs):
        asked.extend(pairs)
        return [0.2 if "wrong" in hypothesis else 0.9 for _, hypothesis in pairs]

    parts = Parts(
        generator=lambda caption: [
            "thing",
            "Thing",
            "a wrong thing",
            "",
            "small thing",
            "a => b",
            "a small thing",
            "X y",
        ],
        entailment=entailment,
        contradictor=lambda text, caption: [text, f"fine {text}", f"wrong {text}"],
    )
    chain = build_chain("x Y", parts, num_levels=3)
    # Repeats, empty ones, arrows and the caption itself are dropped, what does not follow too; the middle gives way.
    assert chain.captions == ("thing", "small thing", "x Y")
    assert chain.negatives == ("wrong thing", "wrong small thing", "wrong x Y")
    assert ("x Y", "a wrong thing") in asked
    assert build_chain("x Y", replace(parts, threshold=0.95), num_levels=2) is None
    assert build_chain("x Y", replace(parts, contradictor=lambda text, caption: []), num_levels=2) is None
    assert build_chain("x Y", parts, num_levels=2).captions == ("thing", "x Y")


def test_chains_go_through_a_file(nouns, tmp_path):
    captions = [("A dog on a table.", "1.jpg"), ("Nothing", "2.jpg"), ("A cat on an old table", "3.jpg")]
    captions += [("A cat on a table by a bus", "4.jpg")]
    built = [build_chain(caption, default_parts(nouns), image=image) for caption, image in captions]
    chains = [chain for chain in built if chain is not None]
    # The first and the third say no more than "dog on a table", "cat on an old table": three levels.
    assert [chain.image for chain in chains] == ["4.jpg"]
    chains.append(Chain(("a", "b", 'c, "d"', "e"), ("f", "g", "h", "i"), "4.jpg"))
    write_chains(tmp_path / "chains.csv", chains)
    assert read_hierarcaps(tmp_path / "chains.csv") == chains


def test_bad_captions_are_one_line(nouns):
    for caption, message in (("  ", "the caption is empty"), ("a => b", "holds '=>'")):
        with pytest.raises(UserError, match=message):
            build_chain(caption, default_parts(nouns))


def test_command(wordnet, tmp_path, capsys):
    source, out = tmp_path / "captions.csv", tmp_path / "chains.csv"
    source.write_text("caption,image_url\nA small cat on a table,http://x/y/7.jpg\nnothing,\n")
    command = ["vlm", "build-chains", str(source), "--wordnet", str(wordnet), "--out", str(out)]
    assert main(command) == 0
    assert "1 of 2 captions became chains" in capsys.readouterr().out
    (chain,) = read_hierarcaps(out)
    assert chain.captions[0] == "animal" and chain.image == "7.jpg"
    assert main(command) == 2
    assert "is there already" in capsys.readouterr().err
    lines = tmp_path / "captions.txt"
    for text, message in (
        ("A cat on a table\n\n", "line 2: the caption is empty"),
        ("nothing\n", "no caption of 1 has four levels"),
        ("", "no captions in it"),
    ):
        lines.write_text(text)
        assert main([*command[:2], str(lines), *command[3:], "--overwrite"]) == 2
        assert message in capsys.readouterr().err
    source.write_text("text\na\n")
    assert main([*command, "--overwrite"]) == 2
    assert "expected a column 'caption', found text" in capsys.readouterr().err
    assert main([*command[:4], str(tmp_path), "--out", str(out), "--overwrite"]) == 2
    assert main(["vlm", "build-chains", str(tmp_path / "none"), "--wordnet", str(wordnet)]) == 2


def test_wordnet_tables_are_checked(wordnet, tmp_path):
    with pytest.raises(UserError, match=r"has no noun_hypernyms\.tsv\.gz"):
        Nouns.read(tmp_path)
    (tmp_path / "noun_hypernyms.tsv").write_text("child\tparent\nn1\tn2\n")
    (tmp_path / "noun_synsets.tsv").write_text("a\tb\n")
    with pytest.raises(UserError, match="expected a table with the columns wnid, name, lemmas"):
        Nouns.read(tmp_path)
    (tmp_path / "noun_synsets.tsv").write_text("wnid\tname\tlemmas\nn1\ta.n.01\ta\n")
    with pytest.raises(UserError, match=r"n2 is not in noun_synsets\.tsv"):
        Nouns.read(tmp_path)


@pytest.mark.slow
def test_real_wordnet(shared_data):
    if not (shared_data / "wordnet").is_dir() or not (shared_data / "hierarcaps").is_dir():
        pytest.skip("no wordnet or hierarcaps here")
    nouns = Nouns.read(shared_data)
    assert len(nouns) == 82_115 and nouns.names[nouns.synset("table")] == "table.n.02"
    parts = default_parts(nouns)
    captions = [chain.captions[-1] for chain in read_hierarcaps(shared_data, "test")[:40]]
    chains = [build_chain(caption, parts) for caption in captions]
    assert sum(chain is not None for chain in chains) >= 34
    assert chains[1].captions[:2] == ("animal", "bird")


# ------------------------------------------------------------------------------------------------------ models


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture
def tokenizer(transformers):
    from tests.vlm.small_models import word_tokenizer

    return word_tokenizer()


def test_inference_models(transformers, tokenizer, tmp_path, seed):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    labels = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_labels=3, id2label=labels, **sizes)
    model = transformers.BertForSequenceClassification(config)
    pairs = [("a red car", "car"), ("truck on the road", "a vehicle"), ("car", "truck")]
    actual = InferenceEntailment(model, tokenizer, batch_size=2)(pairs)
    tokens = tokenizer(["truck on the road"], ["a vehicle"], return_tensors="pt")
    with torch.no_grad():
        expected = model.eval()(**tokens).logits.softmax(-1)[0, 2].item()
    assert len(actual) == 3 and actual[1] == pytest.approx(expected, abs=1e-5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert InferenceEntailment.load(tmp_path)(pairs) == pytest.approx(actual, abs=1e-5)
    model.config.id2label = {0: "POSITIVE", 1: "NEGATIVE", 2: "MIXED"}
    with pytest.raises(UserError, match="one label 'entailment', got positive, negative, mixed"):
        InferenceEntailment(model, tokenizer)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks 2 weights, e\.g\. classifier\.bias; it was made for another task"):
        InferenceEntailment.load(tmp_path)
    with pytest.raises(UserError, match="cannot read the model"):
        InferenceEntailment.load(tmp_path / "none" / "at" / "all")


def test_language_models(transformers, tokenizer, tmp_path, seed):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=3, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    generator = TextGenerator(model, tokenizer, prompt="a red {caption}", max_new_tokens=5)
    lines = generator("car")
    with torch.no_grad():
        tokens = tokenizer("a red car", return_tensors="pt")["input_ids"]
        answer = model.eval().generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, tokens.shape[1] :]
    assert lines == [text for text in [tokenizer.decode(answer, skip_special_tokens=True)] if text]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert TextGenerator.load(tmp_path, prompt="a red {caption}", max_new_tokens=5)("car") == lines
    assert TextContradictor.load(tmp_path, prompt="{text} {caption}", max_new_tokens=3)(
        "car", "road"
    ) == TextContradictor(model, tokenizer, prompt="{text} {caption}", max_new_tokens=3)("car", "road")


def test_answers_are_read_line_by_line(transformers, tokenizer):
    class Says:
        config = transformers.PretrainedConfig(is_encoder_decoder=True)
        device = torch.device("cpu")

        def eval(self):
            return self

        def generate(self, **options):
            assert options["do_sample"] is False
            return torch.tensor([[0]])

    tokenizer.decode = lambda *args, **options: '\n- animal\n2) "bird"\nblue bird\n\nCaption: something else'
    assert TextGenerator(Says(), tokenizer)("A blue bird") == ["animal", "bird", "blue bird"]
    assert TextGenerator(Says(), tokenizer, max_lines=2)("A blue bird") == ["animal", "bird"]
