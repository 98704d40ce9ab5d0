"""A node of a pipeline gets the files of its layers, and its ranks find a whole model there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agents.contract.model_cut import ModelCut, Stage
from agents.contract.run import AttemptIntent, RankPlacement
from agents.errors import ExpectedError
from agents.trainer.checkpoint.fingerprint import hash_model
from agents.trainer.model.layer_holdings import LayerHoldings, ModelOutline
from agents.trainer.model.layer_loading import loading_layers
from agents.trainer.model_view import is_outline, open_parts
from agents.trainer.rank.attempt import RankAttempt
from app.library.bundles import Source, make_bundle
from app.library.model_parts import choose_parts
from app.storage.database import open_database
from app.storage.hashes import HashStore
from tests.agents.trainer.ranks import make_spec
from tests.draws import seed

NUM_LAYERS = 6
# Two stages on each of two nodes.
STAGES = (
    Stage(rank=0, first_layer=0, stop_layer=2, has_head=False),
    Stage(rank=1, first_layer=2, stop_layer=3, has_embedding=False, has_head=False),
    Stage(rank=2, first_layer=3, stop_layer=5, has_embedding=False, has_head=False),
    Stage(rank=3, first_layer=5, stop_layer=6, has_embedding=False),
)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A model in many files, which has a head of its own."""
    torch.manual_seed(seed(3))
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path / "whole"
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="180KB")
    return folder


@pytest.fixture
def source(whole: Path, tmp_path: Path) -> Source:
    hashes = HashStore(open_database(tmp_path / "rackless.sqlite3"))
    return make_bundle("models", "tiny", whole, whole.iterdir(), hashes)


def receive(source: Source, home: Path) -> str:
    """Store the files of a source as a node does, but for what is there; return the path."""
    assert source.destination is not None
    folder = home / source.destination
    folder.mkdir(parents=True, exist_ok=True)
    replaced = source.read_cleaned()
    for entry in source.files:
        target = folder / entry.path
        if entry.path in replaced:
            target.write_bytes(replaced[entry.path])
        elif not target.exists():
            shutil.copyfile(Path(source.root or "", entry.path), target)
        assert target.stat().st_size == entry.size_bytes
    return source.path_on_node(str(folder))


def make_attempt(home: Path, model_path: str, rank: int) -> RankAttempt:
    intent = AttemptIntent(
        run_id="r-1",
        attempt=1,
        node="a",
        spec=make_spec(parallel="auto"),
        python="python",
        ranks=tuple(
            RankPlacement(rank=n, local_rank=n % 2, node="ab"[n // 2], device="cpu")
            for n in range(4)
        ),
        master_address="127.0.0.1",
        master_port=1,
        address="127.0.0.1",
        model_path=model_path,
        train_path="t",
        cut=ModelCut(mode="pipeline", stages=STAGES),
    )
    folder = home / "runs" / "r-1" / "attempts" / "1"
    return RankAttempt(folder=folder, intent=intent, rank=rank)


def hold(stage: Stage) -> Callable[[ModelOutline], LayerHoldings]:
    def choose(outline: ModelOutline) -> LayerHoldings:
        own = range(stage.first_layer, stage.stop_layer)
        layers = tuple("resident" if n in own else "absent" for n in range(outline.num_layers))
        return LayerHoldings(layers=layers, embedding=stage.has_embedding, head=stage.has_head)

    return choose


def load(folder: Path, stage: Stage) -> dict[str, torch.Tensor]:
    with loading_layers(hold(stage)):
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return {name: value.detach() for name, value in model.named_parameters()}


def test_ranks_find_their_layers_in_the_files_that_a_node_gets(
    source: Source, whole: Path, tmp_path: Path
) -> None:
    sizes = {}
    for node, stages in (("a", STAGES[:2]), ("b", STAGES[2:])):
        parts = choose_parts(source, stages, NUM_LAYERS)
        assert parts is not source
        sizes[node] = sum(entry.size_bytes for entry in parts.files)
        home = tmp_path / node
        path = receive(parts, home)
        for stage in stages:
            attempt = open_parts(make_attempt(home, path, stage.rank))
            view = Path(attempt.intent.model_path)
            found, expected = load(view, stage), load(whole, stage)
            assert found.keys() == expected.keys()
            assert len(found) > 9
            assert all(torch.equal(found[name], expected[name]) for name in found)
            # What the checkpoint says of the model is what a node with all files says.
            assert hash_model(view, attempt.hashes_folder) == hash_model(whole, None)
        outlines = [one.name for one in view.glob("*.safetensors") if is_outline(one)]
        assert outlines
        assert not any((Path(path).parent / name).exists() for name in outlines)
    total = sum(entry.size_bytes for entry in source.files)
    assert max(sizes.values()) < 0.75 * total


def test_another_cut_sends_what_is_missing_to_the_same_folder(
    source: Source, whole: Path, tmp_path: Path
) -> None:
    first, second = (choose_parts(source, some, NUM_LAYERS) for some in (STAGES[:2], STAGES[1:3]))
    assert first.destination == second.destination
    home = tmp_path / "a"
    open_parts(make_attempt(home, receive(first, home), 0))
    missing = {one.path for one in second.files} - {one.path for one in first.files}
    assert missing
    assert len(missing) < len(second.files)
    attempt = open_parts(make_attempt(home, receive(second, home), 2))
    assert all(
        torch.equal(value, load(whole, STAGES[2])[name])
        for name, value in load(Path(attempt.intent.model_path), STAGES[2]).items()
    )


def test_a_rank_whose_layers_are_elsewhere_is_refused(source: Source, tmp_path: Path) -> None:
    home = tmp_path / "a"
    path = receive(choose_parts(source, STAGES[:2], NUM_LAYERS), home)
    with pytest.raises(ExpectedError, match="rank 3 needs others"):
        open_parts(make_attempt(home, path, 3))
    attempt = make_attempt(home, path, 0)
    without = replace(attempt.intent, cut=ModelCut(mode="pipeline"))
    with pytest.raises(ExpectedError, match="only some layers"):
        open_parts(replace(attempt, intent=without))


def test_models_that_cannot_be_told_apart_are_sent_as_a_whole(
    source: Source, whole: Path, tmp_path: Path
) -> None:
    assert choose_parts(source, STAGES, NUM_LAYERS) is source
    assert choose_parts(source, STAGES[:1], NUM_LAYERS + 1) is source
    assert choose_parts(Source(value="org/m"), STAGES[:1], NUM_LAYERS) == Source(value="org/m")
    (whole / "config.json").write_text("{")
    assert choose_parts(source, STAGES[:1], NUM_LAYERS) is source


def test_an_embedding_that_is_the_head_is_on_both_ends(
    source: Source, whole: Path, tmp_path: Path
) -> None:
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    parts = choose_parts(source, STAGES[3:], NUM_LAYERS)
    index = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    sent = {entry.path for entry in parts.files}
    assert index["model.embed_tokens.weight"] in sent
    assert index["model.layers.0.mlp.up_proj.weight"] not in sent
