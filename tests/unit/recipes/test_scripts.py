"""How the printed training loop reads its documents."""

from types import SimpleNamespace

import pytest

from seqpar.recipes.recipe import make_recipe
from seqpar.recipes.scripts import script

pytest.importorskip("transformers")
TEXT = 'abc\n{"text": "de"}\n\nfghijk\n'  # 4, 2, 1 and 7 bytes


@pytest.fixture(scope="module")
def defined():
    """The names that the script defines."""
    names = {"__name__": "train"}
    exec(script(make_recipe("qwen3-8b", "8xh100", [2**12]), "plain"), names)
    return names


@pytest.fixture(scope="module")
def next_batch(defined):
    """A function that reads the next 5 bytes of a file as a batch, and returns lists."""

    def read(file):
        batch = defined["next_batch"](file, tokenized, 5)
        return bytes(batch["input_ids"][0].tolist()), batch["position_ids"][0].tolist()

    return read


def tokenized(document):
    return SimpleNamespace(input_ids=list(document.strip(" ").encode()))


def test_batches_are_packed_and_the_last_document_is_cut(tmp_path, next_batch):
    file = tmp_path / "text"
    file.write_text(TEXT)
    with file.open() as text:
        found = [next_batch(text) for _ in range(3)]
    assert found == [
        (b"abc\nd", [0, 1, 2, 3, 0]),
        (b"\nfghi", [0, 0, 1, 2, 3]),
        (b"abc\nd", [0, 1, 2, 3, 0]),
    ]


def test_batches_continue_at_a_saved_position(tmp_path, next_batch):
    file = tmp_path / "text"
    file.write_text(TEXT)
    with file.open() as text, file.open() as again:
        next_batch(text)
        again.seek(text.tell())
        assert next_batch(again) == next_batch(text)


@pytest.mark.parametrize("content", ["", " ", '{"text": ""}\n'])
def test_a_text_without_words_is_refused(tmp_path, next_batch, content):
    file = tmp_path / "text"
    file.write_text(content)
    with file.open() as text, pytest.raises(SystemExit, match=r"--text: .* has no words"):
        next_batch(text)


def test_an_incomplete_checkpoint_is_not_resumed(tmp_path, defined):
    for name in ("step-9", "step-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "step-11").mkdir()
    assert defined["last_checkpoint"](tmp_path).name == "step-10"
    (tmp_path / "step-12-best").mkdir()
    (tmp_path / "step-12-best" / ".metadata").touch()  # a copy that a user has made
    assert defined["last_checkpoint"](tmp_path).name == "step-10"
    with pytest.raises(SystemExit, match=r"--resume: .* has no checkpoint"):
        defined["last_checkpoint"](tmp_path / "step-11")


def test_checkpoints_of_an_earlier_run_are_not_overwritten(tmp_path, defined):
    check, folder = defined["check"], tmp_path / "saved"
    options = SimpleNamespace(save=folder, save_every=1, resume=False, clip=1.0)
    check(options)
    (folder / "step-5").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"--save: .*saved has checkpoints; add --resume, or save"):
        check(options)
    options.resume = True
    check(options)
    options.save_every = 0
    with pytest.raises(SystemExit, match="--save-every must be at least 1, got 0"):
        check(options)
    options.save_every, options.clip = 1, 0.0
    with pytest.raises(SystemExit, match=r"--clip must be above 0 \(inf does not clip\), got 0.0"):
        check(options)
