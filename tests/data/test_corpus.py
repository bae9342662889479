import sys

import pytest

from mpishard.data import corpus as module
from mpishard.data.corpus import Document, build_corpus, ensure_default_corpus, standard_library, standard_library_text
from mpishard.data.tokens import TokenFile
from mpishard.errors import ConfigError, DataError

LIMIT = 400_000


def text(path) -> bytes:
    file = TokenFile(path)
    file.verify()
    assert file.vocabulary == 256
    return file.tokens.tobytes()


def tree(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>\n" * 3)
    return root


def test_the_standard_library_is_sorted_source_without_packages_and_tests():
    documents = standard_library()
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "collections/__init__.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not any(part in {"site-packages", "test", "tests"} for name in names for part in name.split("/"))
    assert sum(document.size for document in documents) > 5_000_000


def test_the_limit_keeps_whole_files_from_the_beginning():
    everything, some = standard_library(), standard_library(LIMIT)
    assert some == everything[: len(some)]
    size = sum(document.size for document in some)
    assert size <= LIMIT < size + everything[len(some)].size
    assert standard_library_text(LIMIT) == b"".join(document.path.read_bytes() for document in some)


def test_a_python_without_source_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"0 source files .* mpishard data build --source"):
        standard_library()


def test_the_two_sides_are_whole_files_that_share_nothing(tmp_path):
    root = tree(tmp_path / "src", [f"a{i}/f{i}.txt" for i in range(200)])
    corpus = build_corpus(tmp_path / "out", [root], heldout_fraction=0.25)
    train, heldout = text(corpus.train), text(corpus.heldout)
    in_train = {name for name in (f"a{i}/f{i}.txt" for i in range(200)) if f"<{name}>".encode() in train}
    in_heldout = {name for name in (f"a{i}/f{i}.txt" for i in range(200)) if f"<{name}>".encode() in heldout}
    assert len(in_train) + len(in_heldout) == 200
    assert not in_train & in_heldout
    assert 25 < len(in_heldout) < 80
    assert len(train) + len(heldout) == sum(path.stat().st_size for path in root.rglob("*.txt"))


def test_a_new_file_moves_no_other(tmp_path):
    root = tree(tmp_path / "src", [f"f{i}" for i in range(100)])
    before = text(build_corpus(tmp_path / "out", [root], 0.2).heldout)
    tree(root, [f"new{i}" for i in range(20)])
    after = text(build_corpus(tmp_path / "out", [root], 0.2).heldout)
    assert [line for line in after.splitlines() if b"new" not in line] == before.splitlines()


def test_the_same_source_gives_the_same_bytes(tmp_path):
    names = [f"{i % 7}/f{i}" for i in range(50)]
    one, two = tree(tmp_path / "1", names), tree(tmp_path / "2", reversed(names))
    built = [build_corpus(tmp_path / f"out{i}", [root]) for i, root in enumerate((one, two))]
    assert built[0].train.read_bytes() == built[1].train.read_bytes()
    assert built[0].heldout.read_bytes() == built[1].heldout.read_bytes()


@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_two_files_give_one_to_each_side(tmp_path, fraction):
    root = tree(tmp_path / "src", ["a", "b"])
    corpus = build_corpus(tmp_path / "out", [root], fraction)
    assert {len(text(corpus.train)), len(text(corpus.heldout))} == {12}


def test_the_tail_of_a_single_file_is_held_out(tmp_path):
    source = tmp_path / "book.txt"
    data = ("".join(chr(97 + i % 26) + "é∑😀"[i % 3] for i in range(1_000_000))).encode()[:3_000_000]
    data = data.decode(errors="ignore").encode().ljust(3_000_000, b".")  # longer than one chunk, cut inside characters
    source.write_bytes(data)
    corpus = build_corpus(tmp_path / "out", [source], 0.1)
    assert text(corpus.train) == data[:2_700_000]
    assert text(corpus.heldout) == data[2_700_000:]


@pytest.mark.parametrize(("data", "end"), [(b"\xff", 0), (b"ab\xc3", 2), (b"a" * (1 << 20) + b"\xe2\x28\xa1", 1 << 20)])
def test_a_file_that_is_no_text_is_refused(tmp_path, data, end):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DataError, match=f"x: is not UTF-8 text from byte {end} on"):
        build_corpus(tmp_path / "out", [tmp_path / "x"])
    (tmp_path / "y").write_bytes("∑".encode() * 1_000_000)  # a chunk ends inside a character
    assert build_corpus(tmp_path / "out", [tmp_path / "y"]).left_out == 0


def test_a_file_named_twice_is_not_on_both_sides(tmp_path):
    root = tree(tmp_path / "src", ["only"])
    corpus = build_corpus(tmp_path / "out", [root, root / "only"], 0.5)
    assert text(corpus.train) + text(corpus.heldout) == (root / "only").read_bytes()


def test_folders_give_text_that_is_not_hidden(tmp_path):
    root = tree(tmp_path / "src", ["a", "b", ".hidden", ".git/c"])
    (root / "picture").write_bytes(b"\xff\xfe\x00")
    (root / "empty").touch()
    corpus = build_corpus(tmp_path / "out", [root])
    both = text(corpus.train) + text(corpus.heldout)
    assert sorted(set(both.split())) == [b"<a>", b"<b>"]


def test_links_are_not_followed(tmp_path):
    root = tree(tmp_path / "src", ["a", "b"])
    (root / "link").symlink_to(tree(tmp_path / "elsewhere", ["c"]) / "c")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    corpus = build_corpus(tmp_path / "out", [root])
    assert b"<c>" not in text(corpus.train) + text(corpus.heldout)


def test_empty_files_are_no_side_of_a_corpus(tmp_path):
    root = tree(tmp_path / "src", ["only"])
    for name in "abcdef":
        (root / name).touch()
    corpus = build_corpus(tmp_path / "out", [root], 0.5)
    assert text(corpus.train)
    assert text(corpus.train) + text(corpus.heldout) == (root / "only").read_bytes()


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_a_fraction_that_splits_nothing_is_refused(tmp_path, fraction):
    with pytest.raises(ConfigError, match="must lie between 0 and 1"):
        build_corpus(tmp_path, [tmp_path], fraction)


def test_sources_that_give_no_text_are_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere: there is no such file or folder"):
        build_corpus(tmp_path / "out", [tmp_path / "nowhere"])
    (tmp_path / "one").write_text("x")
    with pytest.raises(DataError, match="1 bytes of text were found"):
        build_corpus(tmp_path / "out", [tmp_path / "one"])
    assert not (tmp_path / "out").exists()


def test_a_file_that_shrinks_while_read_is_named(tmp_path):
    (tmp_path / "a").write_text("short")
    with pytest.raises(DataError, match="became shorter"):
        list(Document("a", tmp_path / "a", 0, 100).chunks())


def test_the_default_corpus_is_built_once(tmp_path):
    corpus = ensure_default_corpus(tmp_path, LIMIT)
    before = [path.stat().st_mtime_ns for path in (corpus.train, corpus.heldout)]
    assert len(text(corpus.train)) + len(text(corpus.heldout)) == len(standard_library_text(LIMIT))
    assert ensure_default_corpus(tmp_path, LIMIT) == corpus
    assert [path.stat().st_mtime_ns for path in (corpus.train, corpus.heldout)] == before


@pytest.mark.parametrize("damage", ["no train", "no heldout", "short train", "changed heldout"])
def test_a_default_corpus_that_was_left_half_way_is_built_again(tmp_path, damage):
    corpus = ensure_default_corpus(tmp_path, LIMIT)
    whole = corpus.train.read_bytes(), corpus.heldout.read_bytes()
    what, name = damage.split()
    path = getattr(corpus, name)
    data = path.read_bytes()
    path.unlink()
    if what == "short":
        path.write_bytes(data[:-10])
    elif what == "changed":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    ensure_default_corpus(tmp_path, LIMIT)
    assert (corpus.train.read_bytes(), corpus.heldout.read_bytes()) == whole


def test_killed_between_the_two_files_the_default_corpus_starts_anew(tmp_path, monkeypatch):
    written = []

    def killed(path, arrays, vocabulary):
        if written:
            sys.exit("killed")
        written.append(path)
        return real(path, arrays, vocabulary)

    real = module.write_tokens
    monkeypatch.setattr(module, "write_tokens", killed)
    with pytest.raises(SystemExit):
        ensure_default_corpus(tmp_path, LIMIT)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    corpus = ensure_default_corpus(tmp_path, LIMIT)
    assert len(text(corpus.train)) + len(text(corpus.heldout)) == len(standard_library_text(LIMIT))
