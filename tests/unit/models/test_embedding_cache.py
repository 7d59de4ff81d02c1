"""The embedding cache: damaged files, the limit, several processes, and keys."""

import multiprocessing
import os
import time

import pytest
import torch

from gigamask.models.embedding_cache import (
    SUFFIX,
    EmbeddingCache,
    ImageEmbedder,
    digest_weights,
    embedding_key,
)
from gigamask.models.init import build_model
from tests.errors import error_line
from tests.little import SPEC

ENTRY_BYTES = 16 + 80 + 4 * 4 * 4 * 2
"""Of an embedding of two channels on 4 x 4 tokens: digest, safetensors' header, numbers."""


def embedding(number: int) -> torch.Tensor:
    return torch.full((1, 2, 4, 4), float(number))


def test_what_was_kept_comes_back(tmp_path):
    cache = EmbeddingCache(str(tmp_path / "deep" / "cache"))
    assert cache.get("a") is None
    cache.put("a", embedding(1))
    cache.put("b", embedding(2).to(torch.bfloat16))
    assert torch.equal(cache.get("a"), embedding(1))
    assert cache.get("b").dtype == torch.bfloat16
    assert sorted(path.name for path in (tmp_path / "deep" / "cache").iterdir()) == [
        f"a{SUFFIX}",
        f"b{SUFFIX}",
    ]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_entry_is_dropped(tmp_path, damage):
    cache = EmbeddingCache(tmp_path)
    cache.put("a", embedding(1))
    path = tmp_path / f"a{SUFFIX}"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes({"flip": bytes(raw), "cut": bytes(raw[:-1]), "empty": b""}[damage])
    assert cache.get("a") is None
    assert not path.exists()


def test_what_was_used_longest_ago_goes_first(tmp_path):
    cache = EmbeddingCache(tmp_path, 3 * ENTRY_BYTES + 20)
    for number, name in enumerate("abc"):
        cache.put(name, embedding(number))
        os.utime(tmp_path / f"{name}{SUFFIX}", (number, number))
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [ENTRY_BYTES] * 3
    assert cache.get("a") is not None  # used: now b is the oldest
    cache.put("d", embedding(3))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]
    EmbeddingCache(tmp_path, 10).put("e", embedding(4))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_is_being_written_stays(tmp_path):
    for name, age_s in (("old", 4000), ("new", 5)):
        path = tmp_path / f".{name}{SUFFIX}.01234567.partial"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    (tmp_path / "download.partial").write_text("not ours")
    os.utime(tmp_path / "download.partial", (0, 0))
    EmbeddingCache(tmp_path).put("a", embedding(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f".new{SUFFIX}.01234567.partial",
        f"a{SUFFIX}",
        "download.partial",
    ]


def write_many(folder, seed: int) -> None:
    cache = EmbeddingCache(folder, 4 * ENTRY_BYTES + 20)
    for number in range(60):
        name = str((number * 7 + seed) % 9)
        kept = cache.get(name)
        if kept is not None and not torch.equal(kept, embedding(int(name))):
            raise AssertionError(f"{name} came back as something else")
        cache.put(name, embedding(int(name)))


@pytest.mark.slow
def test_several_processes_share_a_folder(tmp_path):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=write_many, args=(tmp_path, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert all(path.suffix == SUFFIX for path in tmp_path.iterdir())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * ENTRY_BYTES + 20


def test_unwritable_folder_is_only_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=r"file: no embedding.*free space"):
        EmbeddingCache(tmp_path / "file").put("a", embedding(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.warns(UserWarning, match="No space left on device"):
            EmbeddingCache(tmp_path).put("a", embedding(1))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_limit_that_holds_nothing_is_refused(tmp_path):
    with error_line(r"0 bytes"):
        EmbeddingCache(tmp_path, 0)


def test_keys_differ_where_embeddings_differ():
    state = {"a": torch.arange(4.0), "b": torch.zeros(2, 2)}
    assert digest_weights(state, "x") == digest_weights(dict(reversed(state.items())), "x")
    others = [
        digest_weights(state, "y"),
        digest_weights({**state, "b": torch.zeros(4)}, "x"),
        digest_weights({**state, "a": torch.ones(4)}, "x"),
    ]
    assert len({digest_weights(state, "x"), *others}) == 4
    pixels = torch.zeros(1, 3, 2, 4, dtype=torch.uint8)
    assert (
        len(
            {
                embedding_key("w", pixels),
                embedding_key("v", pixels),
                embedding_key("w", pixels + 1),
                embedding_key("w", pixels.view(1, 3, 4, 2)),
            }
        )
        == 4
    )


@pytest.mark.long
@pytest.mark.slow
def test_the_key_changes_with_each_weight_that_the_embedding_depends_on():
    check_key(SPEC)


def check_key(spec, *joined):
    """Check that weights of the image encoder, and of other parts, change embedding and key."""
    model = build_model(spec, 0).eval()
    embedder = ImageEmbedder(model, None)
    pixels = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    seen = {}
    for name, parameter in model.named_parameters():
        before, kept = embedder.embed([pixels])[0], embedder.encoder_digest()
        saved = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.5 * torch.randn(parameter.shape))
        seen[name] = not torch.equal(before, embedder.embed([pixels])[0])
        assert (embedder.encoder_digest() != kept) >= seen[name], name
        with torch.no_grad():
            parameter.copy_(saved)
    moving = {name.split(".")[0] for name, moves in seen.items() if moves}
    assert moving == {"image_encoder", *joined}


def test_the_key_changes_with_weights_whose_data_a_program_changes():
    """As peft does when it merges an adapter, which counts in no version of the tensor."""
    embedder = ImageEmbedder(build_model(SPEC, seed=0), None)
    weight = embedder.model.image_encoder.blocks[0].attn.qkv.weight
    before, digest, version = weight.detach().clone(), embedder.encoder_digest(), weight._version
    weight.data += 0.5
    assert embedder.encoder_digest() != digest
    weight.data.copy_(before)
    assert (embedder.encoder_digest(), weight._version) == (digest, version)


def test_a_model_that_was_built_for_inference_alone_has_a_key():
    with torch.inference_mode():
        digest = ImageEmbedder(build_model(SPEC, seed=0), None).encoder_digest()
    assert digest == ImageEmbedder(build_model(SPEC, seed=0), None).encoder_digest()


def test_the_file_of_another_key_is_not_taken(tmp_path):
    cache = EmbeddingCache(tmp_path)
    cache.put("a", embedding(1))
    cache.put("b", embedding(2))
    os.replace(cache._path("a"), cache._path("b"))
    assert cache.get("b") is None


def test_a_pipe_in_the_cache_is_not_waited_for(tmp_path):
    cache = EmbeddingCache(tmp_path)
    os.mkfifo(cache._path("a"))
    assert cache.get("a") is None
    cache.put("a", embedding(1))
    assert torch.equal(cache.get("a"), embedding(1))
